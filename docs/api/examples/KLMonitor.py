import klfast

monitor = klfast.KLMonitor(target=6.0, min_updates=2)
print([monitor.update(kl) for kl in (6.0, 6.5)])  # ['ok', 'ok']
