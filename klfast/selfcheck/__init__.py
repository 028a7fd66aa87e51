"""Known answers and promises, checked on the machine that klfast runs on."""
