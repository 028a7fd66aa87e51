"""The public functions: make the arguments, choose a backend, compute."""
