import klfast


def copy_policy(reason):
    print(reason)  # interval


reset = klfast.ReferenceReset(copy_policy, interval=2)
for _ in range(2):
    reset.update(6.0)
