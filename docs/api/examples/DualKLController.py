import klfast

controller = klfast.DualKLController(0.1, target=6.0, lr=0.1)
print([round(controller.update(kl), 4) for kl in (3.0, 9.0, 12.0)])
# [0.0951, 0.1, 0.1105]
