import klfast

controller = klfast.DoublingKLController(0.1, target=6.0, every=1)
print([controller.update(kl) for kl in (3.0, 9.0, 12.0)])  # [0.05, 0.05, 0.1]
