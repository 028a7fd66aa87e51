"""Experiments with KL control, as programs over the library: ``python -m lab compare``, ``study``.

They are run from a checkout; a wheel of klfast has none of them.
"""
