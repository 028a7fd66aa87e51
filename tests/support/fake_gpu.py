"""A device that replaces a GPU in tests of the benchmark. It has the host's clock, no graphs."""

import time

from benchmarks.timing import Cuda


class FakeGpu:
    """Runs queued calls at once, in order."""

    def __init__(self, place=None, free=1 << 40):
        self.place, self.free = place, free

    def queue(self, call, *, cold, head_start):
        begin = time.perf_counter()
        call()
        seconds = time.perf_counter() - begin
        return lambda: seconds

    def capture(self, call, calls):
        return lambda: [call() for _ in range(calls)]

    def synchronize(self):
        pass

    def peak_bytes(self, call):
        call()
        return 4096

    def free_bytes(self):
        return self.free


assert {name for name in vars(Cuda) if not name.startswith("_")} <= set(vars(FakeGpu))
