"""Threads that begin together, between which Python turns often."""

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch


@contextlib.contextmanager
def impatient():
    """Python turns to another thread every microsecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def in_threads(work, count):
    """What ``work(number)`` returns in so many threads."""
    start = threading.Barrier(count)

    def run(number):
        start.wait()
        return work(number)

    with impatient(), ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def gradients_in_threads(result, leaf, count):
    """The gradients of one graph, of which only one may be handed what the forward has stored."""

    def work(_):
        (grad,) = torch.autograd.grad(result, leaf, retain_graph=True)
        found = grad.clone()
        grad.fill_(torch.nan)
        return found

    return in_threads(work, count)
