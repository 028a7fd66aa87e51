"""The backends of the kernel, in the order that ``auto`` tries them."""

from .reference import REFERENCE
from .triton import TRITON

ORDER = (TRITON, REFERENCE)
"""The last backend serves every device."""
