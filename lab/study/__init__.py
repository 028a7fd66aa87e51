"""A study of the controllers on a simulated plant, which is fitted to recorded runs."""
