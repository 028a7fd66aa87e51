"""Threads that call at once, share graphs, err and change the number of threads; forks; ranks."""

import copy
import itertools
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from controls import REDUCTIONS
from fresh import run_fresh
from ranks import OnRanks, results_of_ranks
from threads import impatient, in_threads

import klfast

CATEGORY = "concurrency"
WORKERS = 8


def inputs(rows, columns):
    logprobs = -torch.rand(rows, columns)
    return logprobs, logprobs + 0.3 * torch.randn(rows, columns), torch.rand(rows, columns) < 0.8


def penalty(a, b, mask, reduction):
    leaf = a.clone().requires_grad_()
    value, stats = klfast.kl_penalty(leaf, b, mask, reduction=reduction, return_stats=True)
    return (value.detach(), *torch.autograd.grad(value.sum(), leaf), *stats)


def divergence(z, r, direction, reduction):
    leaf = z.clone().requires_grad_()
    value = klfast.kl_divergence(leaf, r, direction=direction, reduction=reduction)
    return (value.detach(), *torch.autograd.grad(value.sum(), leaf))


def tokens(z, ids):
    leaf = z.clone().requires_grad_()
    value, entropy = klfast.token_logprobs(leaf, ids, return_entropy=True)
    grads = torch.autograd.grad(value.sum() + entropy.sum(), leaf)
    return (value.detach(), entropy.detach(), *grads)


def jobs():
    """(what, work) whose result one thread alone has as well."""
    for (rows, columns), reduction in itertools.product(
        ((1, 1), (3, 70), (4, 16500), (64, 1000)), REDUCTIONS
    ):
        a, b, mask = inputs(rows, columns)
        yield (
            ("penalty", rows, reduction),
            lambda a=a, b=b, m=mask, n=reduction: penalty(a, b, m, n),
        )
    for words, direction in itertools.product((5, 1000, 5001), ("reverse", "forward", "jsd")):
        z, r, _ = (torch.randn(2, 3, words) for _ in range(3))
        for reduction in ("none", "token-mean"):
            yield (
                ("divergence", words, direction, reduction),
                lambda z=z, r=r, d=direction, n=reduction: divergence(z, r, d, n),
            )
    for words in (5, 5001):
        z, ids = torch.randn(2, 3, words), torch.randint(words, (2, 3))
        yield ("tokens", words), lambda z=z, i=ids: tokens(z, i)


def test_a_pool_gets_the_bits_of_one_thread(hunt, set_num_threads):
    """However many threads torch has in the meantime."""
    known = [(what, work, work()) for what, work in jobs()]
    stop = threading.Event()

    def meddle():
        while not stop.is_set():
            torch.set_num_threads(random.choice((1, 2, 3, 4)))
            stop.wait(0.001)

    meddler = threading.Thread(target=meddle)
    meddler.start()
    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            chosen = [hunt.random.choice(known) for _ in range(3000 if hunt.whole else 200)]
            for (what, _, expected), future in [(job, pool.submit(job[1])) for job in chosen]:
                for got, wanted in zip(future.result(), expected, strict=True):
                    hunt.bits(got, wanted, *what)
    finally:
        stop.set()
        meddler.join()


def test_errors_in_threads_are_that_thread_s_own(hunt):
    a, b, mask = inputs(3, 70)
    expected = penalty(a, b, mask, "token-mean")
    bad = mask.float()
    bad[1, 7] = torch.nan

    def err():
        return klfast.kl_penalty(a, b, bad, reduction="token-mean")

    with ThreadPoolExecutor(WORKERS) as pool:
        submitted = []
        for _ in range(500 if hunt.whole else 50):
            submitted.append((True, pool.submit(err)))
            submitted.append((False, pool.submit(penalty, a, b, mask, "token-mean")))
        for index, (fails, future) in enumerate(submitted):
            if fails:
                hunt.refuses(future.result, "mask", index)
                continue
            for got, wanted in zip(future.result(), expected, strict=True):
                hunt.bits(got, wanted, index)


@pytest.mark.parametrize("name", ["penalty", "divergence"])
def test_threads_share_a_graph(hunt, name):
    """Each has its own gradient, at a switch between threads every microsecond."""
    with impatient():
        z = torch.randn(8, 8, 5)
        r = z + torch.randn(8, 8, 5)
        if name == "penalty":
            z, r = z[..., 0], r[..., 0]
        for round_ in range(1500 if hunt.whole else 100):
            leaf = z.clone().requires_grad_()
            function = klfast.kl_penalty if name == "penalty" else klfast.kl_divergence
            found = function(leaf, r, reduction="token-mean")
            got, start = {}, threading.Barrier(3)

            def work(factor, found=found, leaf=leaf, got=got, start=start):
                start.wait()
                upstream = torch.tensor(float(factor))
                got[factor] = torch.autograd.grad(found, leaf, upstream, retain_graph=True)[0]

            threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            (once,) = torch.autograd.grad(found, leaf)
            for factor, grad in got.items():
                exact = factor * once.double()
                hunt.close(grad, exact, 1e-6 * exact.abs().max(), name, round_, factor)


class Recorded(klfast.FixedKLController):
    """A coefficient that stays, and the statistics of each step."""

    def __init__(self):
        super().__init__(1.0)
        self.seen = []

    def update(self, current, n_steps=None, *, kl="kl"):
        self.seen.append(current)
        return super().update(current, n_steps, kl=kl)


@pytest.mark.parametrize("meanwhile", ["nothing", "steps", "states", "copies"])
def test_a_penalty_keeps_every_call_of_threads_once(hunt, meanwhile):
    """Every call has a number of its own, whatever one thread does beside its calls."""
    calls = 40
    a = torch.zeros(1, 1)
    for round_ in range(30 if hunt.whole else 3):
        penalty = klfast.KLPenalty("k1", "token-sum", controller=Recorded())
        beside = {
            "nothing": lambda: None,
            "steps": penalty.step,
            "states": penalty.state_dict,
            "copies": lambda p=penalty: (copy.copy(p), repr(p)),
        }[meanwhile]

        def work(thread, penalty=penalty, beside=beside):
            for call in range(calls):
                penalty(a, a - (1 + calls * thread + call))
                if thread == 0 and call % 4 == 0:
                    beside()

        in_threads(work, WORKERS)
        penalty(a, a)
        penalty.step()
        seen = torch.cat([stats.kl for stats in penalty.controller.seen])
        hunt.equal(sorted(seen.tolist()), [*range(calls * WORKERS + 1)], meanwhile, round_)


FORK = """
import os, sys, signal, torch, klfast
torch.set_num_threads(2)
a = torch.full((4, 50), -1.0)
want = klfast.kl_penalty(a, a - 1, reduction="token-sum").item()
klfast.kl_penalty(torch.zeros(2**20), torch.zeros(2**20), reduction="token-sum")
torch.set_num_threads(1)
right = 0
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        z = torch.randn(2, 3, 100, requires_grad=True)
        klfast.kl_divergence(z, z.detach() + 1, reduction="token-mean").backward()
        got = klfast.kl_penalty(a, a - 1, reduction="token-sum").item()
        os._exit(0 if got == want and z.grad.isfinite().all() else 1)
    right += os.waitpid(child, 0)[1] == 0
print(right)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_forked_children_compute(hunt):
    children = 20 if hunt.whole else 3
    right = int(run_fresh(FORK, "-W", "ignore", arguments=(str(children),), timeout=300))
    for child in range(children):
        hunt.check(child < right, "child", child, got=f"{right} of {children} were right")


SPAWN = """
import multiprocessing, torch, klfast

def work(number):
    a = torch.full((2, 3), -float(number))
    return klfast.kl_penalty(a, a - 1, estimator="k1", reduction="token-sum").item()

if __name__ == "__main__":
    for method in ("forkserver", "spawn", "fork"):
        torch.set_num_threads(1)
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(*pool.map(work, range(4)))
"""


def test_processes_of_a_pool_compute(hunt, tmp_path):
    script = tmp_path / "pool.py"
    script.write_text(SPAWN)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    printed = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, env=environment
    )
    hunt.equal(printed.returncode, 0, printed.stderr)
    lines = printed.stdout.splitlines()
    hunt.equal(len(lines), 3, printed.stdout)
    for line in lines:
        for number in line.split():
            hunt.equal(float(number), 6.0, line)


# Ranks


def calls_of_ranks():
    """(class, what must be the same on every rank, sequences, dtype) of statistics to reduce."""
    dtypes = (torch.float32, torch.float64)
    for sequences, dtype in itertools.product((0, 1, 3), dtypes):
        yield klfast.KLStats, ("sharded", sequences), sequences, dtype
        yield klfast.KLStats, (), sequences, dtype
        for rules in range(3):
            yield klfast.RolloutStats, rules, sequences, dtype


def table_of(call, rank):
    """The numbers that a rank brings."""
    kind, like, sequences, dtype = call
    rows = 8 if kind is klfast.KLStats else 23 + 7 * like
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(rows, sequences, generator=generator, dtype=dtype)


def reduced(call, rank):
    """All ranks' numbers, or what the error says."""
    kind, like, *_ = call
    table, world = table_of(call, rank), torch.distributed.group.WORLD
    try:
        if kind is klfast.RolloutStats:
            return kind.of_table(table).all_reduce(world).table()
        return torch.stack(kind(*table).all_reduce(world, sharded=bool(like)))
    except RuntimeError as error:
        return str(error)


def reduce_pairs(rank, pairs):
    return [reduced(pair[rank], rank) for pair in pairs]


def reduced_here(first, second):
    """What two ranks that call alike get."""
    a, b = table_of(first, 0), table_of(second, 1)
    if first[0] is klfast.KLStats and first[1]:
        whole = a.double() + b.double()
        whole[5] = torch.maximum(a[5].double(), b[5].double())
        return whole.to(torch.promote_types(a.dtype, b.dtype))
    doubles = [t for t in (a, b) if t.numel() and t.dtype == torch.float64]
    return torch.cat([a.double(), b.double()], 1).to(torch.float64 if doubles else torch.float32)


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
def test_ranks_that_call_alike_get_all_and_others_an_error_on_each(hunt, tmp_path):
    pairs = hunt.some(itertools.product(calls_of_ranks(), repeat=2))
    found = results_of_ranks(OnRanks(reduce_pairs, pairs), tmp_path)
    for (first, second), *results in zip(pairs, *found, strict=True):
        for rank, result in enumerate(results):
            alike, failed = first[:2] == second[:2], isinstance(result, str)
            if alike and not failed:
                hunt.bits(result, reduced_here(first, second), first, second, rank)
                continue
            names = ("sharded", "reject") if first[0] is second[0] else ("must be the same",)
            said = failed and any(name in result for name in names)
            hunt.check(said and not alike, first, second, rank, got=result)
