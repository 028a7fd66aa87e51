"""Names of choices, dtypes, reductions and formulas: plain data that imports nothing of klfast."""
