import klfast

try:
    klfast.compat.patch("verl", strict=True)
except klfast.compat.PatchError as error:
    print(type(error).__name__)  # PatchError, where the framework is not installed
