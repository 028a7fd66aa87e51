import klfast

alarm = klfast.KLDriftAlarm(limit=20.0)
print([alarm.update(kl) for kl in (5.0, 6.0)])  # ['ok', 'ok']
