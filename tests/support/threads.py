"""Threads that begin together. Python switches between them often."""

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor


@contextlib.contextmanager
def impatient():
    """Python switches to another thread every microsecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def in_threads(work, count):
    """The results of ``work(number)`` in ``count`` threads."""
    start = threading.Barrier(count)

    def run(number):
        start.wait()
        return work(number)

    with impatient(), ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
