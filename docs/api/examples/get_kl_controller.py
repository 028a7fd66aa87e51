import klfast

print(type(klfast.get_kl_controller(0.1)).__name__)  # FixedKLController
print(type(klfast.get_kl_controller(0.1, target=6.0)).__name__)  # AdaptiveKLController
