"""Checks: of ``arguments`` (types, shapes, choices) and of ``values`` (what tensors hold)."""
