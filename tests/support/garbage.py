"""Invalid cu_seqlens. On a GPU a kernel gets them unchecked."""

N = 40_000  # the number of tokens of a batch for ``GARBAGE``

GARBAGE = {
    "overlapping": [0, N, 8192, 8192],
    "decreasing": [0, 20_000, 10_000, N],
    "beyond": [0, 3 * N, 5 * N],
    "negative": [-N, -1, N],
    "all-the-same": [N, N, N],
    "no-sequence": [0],
    "not-from-zero": [9000, 9001, N],
}

BAD_EDGES = {
    "negative": [-(2**40), 3, 9],
    "beyond": [0, 2**40, 2**62],
    "falling": [0, 9, 2],
    "all-beyond": [2**33, 2**33, 2**33],
    "swapped": [9, 0, 9],
    "no-sequence": [0],
}
"""For batches of 9 tokens."""
