import klfast

controller = klfast.DualKLController(0.0, target=6.0, lr=0.1, ema=0.5, dead_band=0.1, floor=0.01)
print(controller.update(6.3))  # 0.0
print(round(controller.update(24.0), 4))  # 0.0116
