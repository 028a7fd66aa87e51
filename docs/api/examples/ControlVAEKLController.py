import klfast

controller = klfast.ControlVAEKLController(0.1, target=6.0)
print([round(controller.update(kl), 4) for kl in (3.0, 9.0, 12.0)])
# [0.0828, 0.1122, 0.1331]
