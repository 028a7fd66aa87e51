"""Recording what a trainer's method returns while TRL's own code calls it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def recorded(owner: Any, name: str) -> Iterator[list[Any]]:
    """Everything that ``owner.name`` returns until the end of the block goes into the list."""
    method, own = getattr(owner, name), name in vars(owner)
    seen: list[Any] = []

    @functools.wraps(method)
    def recording(*args: Any, **kwargs: Any) -> Any:
        returned = method(*args, **kwargs)
        seen.append(returned)
        return returned

    setattr(owner, name, recording)
    try:
        yield seen
    finally:
        if own:
            setattr(owner, name, method)
        else:  # the class's shows again
            delattr(owner, name)
