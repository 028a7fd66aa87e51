"""Calls over a vocabulary in shards in one process: ranks are threads, of which one runs at a time.

So every backend is tested, those that are no process's to share too, and a gradient is taken of
whole logits. ``ranks.py`` has real processes.
"""

import contextlib
import contextvars
import itertools
import threading

import oracle
import pytest
import torch
from agreement import same_bits

import klfast
from klfast.functional import rank_check


class _Meeting:
    """Where threads wait for each other."""

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
    """In place of ``klfast.distributed.ranks.Ranks``."""

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
    """Those of a group whose collectives serve no CPU, as NCCL's."""

    kinds = ("cuda",)


def on_threads(work, size, kind=ThreadRanks):
    """The results of ``work(ranks)`` on threads, each as a rank; the first error is raised."""
    meeting, results, errors = _Meeting(size), [None] * size, []
    grad = torch.is_grad_enabled()

    def run(rank):
        with meeting.alone, torch.set_grad_enabled(grad):
            try:
                results[rank] = work(kind(rank, size, meeting))
            except Exception as error:
                errors.append(error)
                meeting.barrier.abort()

    # What the caller has set of numpy's warnings, which Triton's interpreter makes, goes along.
    contexts = [contextvars.copy_context() for _ in range(size)]
    threads = [threading.Thread(target=contexts[r].run, args=(run, r)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return results


class _Same(torch.autograd.Function):
    """What all ranks have; the gradient goes to each, as of a loss that each computes."""

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


def sharded(function, edges, tables=None, kind=ThreadRanks, of_rank=lambda rank, options: options):
    """A function over whole logits by ranks that have a shard each.

    ``tables`` gets the shapes of the tables that each rank has gathered; ``of_rank(rank, options)``
    are the options of a rank.
    """
    number = 2 if function.__name__ == "kl_divergence" else 1

    def call(*arguments, **options):
        shards = [shards_of(model, edges) for model in arguments[:number]]

        def work(ranks):
            own = [of_model[ranks.rank] for of_model in shards]
            own_options = of_rank(ranks.rank, options)
            others = arguments[number:]
            if ranks.rank > 0:  # a gradient that all ranks have is one
                others = [x.detach() if isinstance(x, torch.Tensor) else x for x in others]
            found = function(*own, *others, group=ranks, **own_options)
            if tables is not None:
                tables.append(ranks.gathered)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_check, "ranks_of_shards", lambda group: group)
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
    """The functions over whole logits, by shards.

    The oracle then allows half as much again: a gradient is the sum of two, each rounded.
    """
    within = oracle.assert_within
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            oracle,
            "assert_within",
            lambda found, truth, tolerance, what: within(found, truth, 1.5 * tolerance, what),
        )
        for name in ("token_logprobs", "kl_divergence", "topk_kl_divergence"):
            patch.setattr(klfast, name, sharded(getattr(klfast, name), edges))
        yield
