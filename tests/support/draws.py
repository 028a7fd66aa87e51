"""What the fuzzers of both levels draw from: dtypes, masks, edges of packed sequences."""

from hypothesis import strategies as st
from masked import MASK_DTYPES

MASKS = (None, *MASK_DTYPES)


@st.composite
def edges(draw):
    """cu_seqlens as a list, with empty sequences at any place."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 17]), max_size=5))
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]
