import klfast

controller = klfast.GroupedKLController(
    klfast.DualKLController, 0.1, {"chat": 6.0, "maths": 20.0}, lr=0.1
)
values = controller.update({"chat": 12.0, "maths": 10.0})
print({group: round(value, 4) for group, value in values.items()})
# {'chat': 0.1105, 'maths': 0.0951}
