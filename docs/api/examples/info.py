import klfast

report = klfast.info()
print("klfast" in str(report))  # True
