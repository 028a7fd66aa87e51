"""The backends of this package, in the order that ``auto`` tries them.

A file of its own, as the kernel for the Hugging Face Hub (``hub/``) has no ``native``.
"""

from __future__ import annotations

from klfast.backends.native import NATIVE
from klfast.backends.reference import REFERENCE
from klfast.backends.triton import TRITON

ORDER = (NATIVE, TRITON, REFERENCE)  # the last serves every device
