"""Names of choices, dtypes and reductions: plain data that imports nothing of klfast."""
