"""What the fuzzers of both levels draw from: dtypes, masks, edges of packed sequences."""

import torch
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MASKS = (
    None,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    *FLOATS,
)


@st.composite
def edges(draw):
    """cu_seqlens as a list, with empty sequences at any place."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 17]), max_size=5))
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]
