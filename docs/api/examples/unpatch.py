import klfast

try:
    klfast.compat.unpatch("trl")
except klfast.compat.PatchError as error:
    print(error)  # trl is not patched
