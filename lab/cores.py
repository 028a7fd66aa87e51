"""Work on all cores, with results that do not depend on the number of cores.

Each worker is a Python thread with one torch thread. Torch's kernels release Python's lock, so the
workers run in parallel. Unlike processes, they share the models and the corpus.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def side_by_side(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results of ``work`` for the items, each in its own thread. Raises the first error."""
    with ThreadPoolExecutor(len(items), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(work, items))


@contextmanager
def one_thread() -> Iterator[None]:
    """Gives torch one thread. The model is too small for more threads to help."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
