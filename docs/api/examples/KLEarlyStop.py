import klfast

stop = klfast.KLEarlyStop(target=0.02)  # nats per token
print([stop.update(kl) for kl in (0.01, 0.02, 0.04)])  # [False, False, True]
