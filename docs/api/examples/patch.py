import klfast

try:
    print(klfast.compat.patch("verl"))  # what was replaced, and what was left alone and why
except klfast.compat.PatchError as error:
    print(type(error).__name__)  # PatchError, where the framework is not installed
