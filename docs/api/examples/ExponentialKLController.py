import klfast

controller = klfast.ExponentialKLController(0.1, target=0.1, gain=0.5)
print(f"{controller.update(0.3):.4f}")  # 0.1105
