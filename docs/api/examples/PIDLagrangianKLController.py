import klfast

controller = klfast.PIDLagrangianKLController(0.1, target=6.0)
print([round(controller.update(kl), 4) for kl in (3.0, 9.0, 12.0)])
# [0.0965, 0.1011, 0.1096]
