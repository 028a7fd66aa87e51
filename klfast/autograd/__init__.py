"""Autograd functions over the ops, for every compiled backend."""
