"""Names of choices, dtypes, reductions and layouts: plain data that imports nothing of klfast."""
