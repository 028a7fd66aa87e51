import klfast

controller = klfast.FixedKLController(0.1)
print(controller.update(12.0))  # 0.1
