"""AReaL, 0.5.1 to 1.0.4 and its main branch of May 2026.

Its functions over logits stay: they cut the logits into chunks, or go to the ranks of tensor
parallelism, and call what is replaced for each chunk.
"""

from __future__ import annotations

from types import ModuleType

from klfast.compat import areal
from klfast.compat.patching.sites import Site, Target, compiled, known, known_compiled

_FROM_LOGITS = "areal.utils.functional.vocab_parallel"
_ALL = "0.5.1 to 1.0.4, main"


def _compiled(module: ModuleType) -> str | None:
    return compiled(module) if module._should_use_torch_compile() else None


def _of_chunks(name: str, new: object, code: str) -> tuple[Site]:
    return (known_compiled(f"{_FROM_LOGITS}:{name}", code, new, _ALL, fused=_compiled),)


TARGETS = (
    Target(
        ("areal",),
        _ALL,
        (
            (known("areal.utils.data:KLEstimator", "da9f134eb7e3ae33", areal.KLEstimator, _ALL),),
            _of_chunks("_gather_logprobs", areal.gather_logprobs, "9c4adeb9455f0d62"),
            _of_chunks(
                "_gather_logprobs_entropy", areal.gather_logprobs_entropy, "610a435d6ee6a7c8"
            ),
        ),
    ),
)
