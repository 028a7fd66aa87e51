"""Calls over vocabulary shards in one process. Ranks are threads, and one runs at a time.

So every backend is tested, also backends that processes cannot share, and the gradient belongs to
whole logits. ``ranks.py`` has real processes.
"""

import contextlib
import contextvars
import dataclasses
import inspect
import itertools
import threading
from unittest import mock

import torch
from agreement import same_bits

import klfast
from klfast.cli.check.compare import found_by
from klfast.functional import rank_check


class _Meeting:
    """A barrier where threads exchange their tables."""

    def __init__(self, size):
        self.tables = [None] * size
        self.barrier = threading.Barrier(size)
        self.alone = threading.Lock()

    def exchange(self, rank, table):
        self.tables[rank] = table
        self.alone.release()
        try:
            self.barrier.wait()
        finally:
            self.alone.acquire()
        together = torch.stack(self.tables)
        self.alone.release()
        try:
            self.barrier.wait()  # before the next table comes
        finally:
            self.alone.acquire()
        return together


class ThreadRanks:
    """Replaces ``klfast.distributed.ranks.Ranks``."""

    kinds = ("cpu",)
    device = torch.device("cpu")

    def __init__(self, rank, size, meeting):
        self.rank, self.size, self.meeting = rank, size, meeting
        self.gathered = []

    def all_gather(self, table):
        self.gathered.append(tuple(table.shape))
        return self.meeting.exchange(self.rank, table.detach())

    def add_up(self, tensor):
        tensor.copy_(self.all_gather(tensor).sum(0))


class OnDevicesAlone(ThreadRanks):
    """Ranks of a group whose collectives serve no CPU, as with NCCL."""

    kinds = ("cuda",)


def on_threads(work, size, kind=ThreadRanks):
    """The results of ``work(ranks)`` on a thread per rank. The first error is raised."""
    meeting, results, errors = _Meeting(size), [None] * size, []
    grad = torch.is_grad_enabled()

    def run(rank):
        with meeting.alone, torch.set_grad_enabled(grad):
            try:
                results[rank] = work(kind(rank, size, meeting))
            except Exception as error:
                errors.append(error)
                meeting.barrier.abort()

    # The threads inherit the caller's settings of numpy's warnings, which Triton's interpreter
    # gives.
    contexts = [contextvars.copy_context() for _ in range(size)]
    threads = [threading.Thread(target=contexts[r].run, args=(run, r)) for r in range(size)]
    with mock.patch.object(rank_check, "ranks_of_shards", lambda group: group):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return results


class _Same(torch.autograd.Function):
    """A tensor that all ranks have. Each rank gets the gradient, as each computes the loss."""

    @staticmethod
    def forward(ctx, *of_ranks):
        ctx.set_materialize_grads(False)
        return of_ranks[0].clone()

    @staticmethod
    def backward(ctx, grad):
        return (grad,) * len(ctx.needs_input_grad)


def _same(of_ranks):
    if of_ranks[0] is None:
        return None
    for other in of_ranks[1:]:
        assert same_bits(other, of_ranks[0])
    return _Same.apply(*of_ranks)


def shards_of(logits, edges):
    """Slices of the vocabulary between edges."""
    bounds = (0, *edges, logits.shape[-1])
    return [logits[..., a:b] for a, b in itertools.pairwise(bounds)]


OVER_WORDS = ("logits", "ref_logits")
OF_HEADS = ("weight", "bias", "ref_weight", "ref_bias")


def found_over_shards(call, backend, edges):
    """Run a ``klfast check`` call, with its backward, on ranks with a shard each.

    All ranks must have the same results. The gradients of shards are joined.
    """
    dims = dict.fromkeys(OVER_WORDS, -1) | dict.fromkeys(OF_HEADS, 0)
    here = torch.get_default_device()  # which threads do not share

    def own(name, tensor, rank):
        if name not in dims:
            return tensor
        return shards_of(tensor.movedim(dims[name], -1), edges)[rank].movedim(-1, dims[name])

    def work(ranks):
        tensors = {name: own(name, tensor, ranks.rank) for name, tensor in call.tensors.items()}
        options = call.options | {"group": ranks}
        return found_by(dataclasses.replace(call, tensors=tensors, options=options), backend, here)

    of_ranks = on_threads(work, len(edges) + 1)
    found = of_ranks[0]
    for name in found.values:
        parts = [of_rank.values[name] for of_rank in of_ranks]
        of = name.removeprefix("gradient of ")
        if of in dims:
            found.values[name] = torch.cat(parts, dims[of])
        else:
            assert all(same_bits(part, parts[0]) for part in parts), name
    return found


def sharded(function, edges, tables=None, kind=ThreadRanks, of_rank=lambda rank, options: options):
    """A function over whole logits, computed by ranks with a shard each.

    ``tables`` gets the shapes of the tables that each rank has gathered. ``of_rank(rank, options)``
    returns the options of a rank.
    """
    signature = inspect.signature(function)

    def call(*arguments, **options):
        given = signature.bind_partial(*arguments, **options).arguments
        given |= given.pop("options", {})

        def own(name, value, rank):
            if name in OVER_WORDS:
                return shards_of(value, edges)[rank]
            # All ranks have this gradient, and it counts once.
            return value.detach() if rank and isinstance(value, torch.Tensor) else value

        def work(ranks):
            of_this = {name: own(name, value, ranks.rank) for name, value in given.items()}
            found = function(**of_rank(ranks.rank, of_this), group=ranks)
            if tables is not None:
                tables.append(ranks.gathered)
            return found

        found = on_threads(work, len(edges) + 1, kind)
        if isinstance(found[0], torch.Tensor):
            return _same(found)
        fields = found[0]._fields
        parts = zip(*found, strict=True)
        return type(found[0])(
            *(
                of_ranks[0] if name == "stats" else _same(of_ranks)
                for name, of_ranks in zip(fields, parts, strict=True)
            )
        )

    return call


@contextlib.contextmanager
def over_shards(edges):
    """The functions over whole logits are computed by shards."""
    names = ("token_logprobs", "kl_divergence", "topk_kl_divergence")
    with mock.patch.multiple(klfast, **{n: sharded(getattr(klfast, n), edges) for n in names}):
        yield
