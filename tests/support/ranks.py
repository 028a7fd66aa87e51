"""Runs tests on ranks. The processes start once and serve every test of a session."""

import datetime
import functools
import importlib
import sys
import traceback
from multiprocessing import connection

import pytest
import torch
from agreement import same_bits

SECONDS = 180  # a collective that takes longer raises, and a test that takes longer fails
_POOLS = {}


def on_ranks(test):
    """Make a test run in every process of a group. It fails if an assertion fails on a rank.

    The arguments of the test are pickled. ``size`` among them is the number of ranks (2 by
    default), and ``transport`` is the backend of the group (gloo by default). After a failure the
    next test gets new processes.
    """

    @functools.wraps(test)
    def run(**arguments):
        key = arguments.get("size", 2), arguments.get("transport", "gloo")
        pool = _POOLS.pop(key, None) or _Pool(*key)
        try:
            pool.run(sys.path, test.__module__, test.__name__, arguments)
        except BaseException:
            pool.end()
            raise
        _POOLS[key] = pool

    has_gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    run = pytest.mark.skipif(not has_gloo, reason="this torch has no gloo")(run)
    return pytest.mark.long(run)  # together, these tests share the processes of one pytest worker


def here():
    """(rank, number of ranks, group) of this process."""
    distributed = torch.distributed
    return distributed.get_rank(), distributed.get_world_size(), distributed.group.WORLD


def of_ranks(value):
    """Every rank's value, in the order of ranks."""
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def counted_all_reduces(function):
    """The (dtype, number of elements) of each all-reduce of ``function``."""
    calls, original = [], torch.distributed.all_reduce

    def counting(tensor, *args, **kwargs):
        calls.append((tensor.dtype, tensor.numel()))
        return original(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", counting)
        function()
    return calls


def assert_same_on_ranks(*tensors):
    """Every rank has the same bits."""
    for other in of_ranks(tensors):
        assert all(same_bits(a, b) for a, b in zip(tensors, other, strict=True))


class _Pool:
    def __init__(self, size, transport):
        self.store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self.processes, self.pipes = [], []
        spawn = torch.multiprocessing.get_context("spawn")
        for rank in range(size):
            own, other = spawn.Pipe()
            arguments = rank, size, transport, self.store.port, other
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            other.close()
            self.processes.append(process)
            self.pipes.append(own)

    def run(self, *job):
        """Raise the first error of a rank. The others may wait for that rank in a collective."""
        for pipe in self.pipes:
            pipe.send(job)
        waiting = [*self.pipes]
        while waiting:
            ready = connection.wait(waiting, SECONDS)
            if not ready:
                pytest.fail(f"{len(waiting)} ranks did not answer in {SECONDS} s", pytrace=False)
            for pipe in ready:
                waiting.remove(pipe)
                rank = self.pipes.index(pipe)
                try:
                    error = pipe.recv()
                except EOFError:
                    error = "the process ended"
                if error is not None:
                    pytest.fail(f"on rank {rank}: {error}", pytrace=False)

    def end(self):
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()


def _serve(rank, size, transport, port, pipe):
    """A rank, until the process of pytest ends."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        transport,
        store=torch.distributed.TCPStore("127.0.0.1", port),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    while True:
        path, module, name, arguments = pipe.recv()
        sys.path[:] = path
        torch.manual_seed(0)
        try:
            getattr(importlib.import_module(module), name).__wrapped__(**arguments)
        except BaseException:  # pytest's own, too
            pipe.send(traceback.format_exc())
        else:
            pipe.send(None)
