import klfast

controller = klfast.AdaptiveKLController(0.1, target=6.0, horizon=1000)
print(controller.update(12.0, n_steps=100))  # 0.10200000000000001
