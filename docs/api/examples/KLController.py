import klfast


class Fixed:
    value = 0.1

    def update(self, stats):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


print(isinstance(Fixed(), klfast.KLController))  # True
print(klfast.KLPenalty(controller=Fixed()).coef)  # 0.1
