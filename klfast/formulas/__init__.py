"""The textbook formulas, and sums over sequences: pure functions of tensors."""
