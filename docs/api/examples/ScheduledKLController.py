import klfast

controller = klfast.ScheduledKLController(0.1, shape="linear", steps=4, final=0.0)
print([round(controller.update(3.0), 3) for _ in range(5)])
# [0.075, 0.05, 0.025, 0.0, 0.0]
