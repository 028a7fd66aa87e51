"""How fast klfast is here: ``python -m klfast bench``, and the table that ends ``compare``."""

from klfast.bench.kl_step import time_kl_step

__all__ = ["time_kl_step"]
