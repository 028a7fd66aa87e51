"""Experiments with KL control, as programs over the library: ``python -m lab compare``, ``study``.

They run from a checkout. A wheel of klfast does not contain them.
"""
