"""A study of the controllers on a simulated policy that is fitted to recorded runs."""
