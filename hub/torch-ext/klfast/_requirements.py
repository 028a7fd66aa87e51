"""The torch that the kernel needs, checked when it is loaded: no package manager has checked it."""

import torch

OLDEST = (2, 10)

_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
if _version < OLDEST:
    raise ImportError(f"klfast needs torch 2.10 or later, got {torch.__version__}")
