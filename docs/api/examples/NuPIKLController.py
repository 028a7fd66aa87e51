import klfast

controller = klfast.NuPIKLController(0.1, target=6.0)
print([round(controller.update(kl), 4) for kl in (3.0, 9.0, 12.0)])
# [0.0951, 0.2718, 0.4953]
