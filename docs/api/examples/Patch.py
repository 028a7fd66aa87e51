import klfast

try:
    with klfast.compat.patch("openrlhf") as patch:  # undone at the end of the block
        print(patch.replaced[0])
except klfast.compat.PatchError as error:
    print(type(error).__name__)  # PatchError, where the framework is not installed
