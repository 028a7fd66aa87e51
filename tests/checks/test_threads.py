"""Threads that call at once, err and change the number of threads; pools of processes."""

import copy
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from agreement import same_bits
from every_function import KEPT, computed, every_function
from threads import in_threads

import klfast

WORKERS = 8


def large():
    """Calls whose kernels share the work among torch's threads."""
    a, b = -torch.rand(2, 4, 16_500)
    z, r = torch.randn(2, 2, 3, 5001)
    for reduction in ("none", "seq-mean", "token-mean"):
        options = {"reduction": reduction, "return_stats": True}
        yield klfast.kl_penalty, {"logprobs": a.requires_grad_(), "ref_logprobs": b, **options}
    for direction in ("reverse", "jsd"):
        options = {"direction": direction, "reduction": "token-mean"}
        yield klfast.kl_divergence, {"logits": z.requires_grad_(), "ref_logits": r, **options}


def test_a_pool_gets_the_bits_of_one_thread(set_num_threads):
    """The number of torch's threads changes in the meantime."""
    set_num_threads(1)
    calls = [(f, {**arguments, "mask": KEPT}) for f, arguments in every_function().values()]
    known = [(call, computed(*call)) for call in (*calls, *large())]
    stop = threading.Event()

    def meddle():
        while not stop.is_set():
            torch.set_num_threads(random.choice((1, 2, 3, 4)))
            stop.wait(0.001)

    meddler = threading.Thread(target=meddle)
    meddler.start()
    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            chosen = [random.choice(known) for _ in range(400)]
            futures = [(expected, pool.submit(computed, *call)) for call, expected in chosen]
            for expected, future in futures:
                assert all(map(same_bits, future.result(), expected))
    finally:
        stop.set()
        meddler.join()


class Recorded(klfast.FixedKLController):
    """A fixed coefficient that records the statistics of each step."""

    def __init__(self):
        super().__init__(1.0)
        self.seen = []

    def update(self, current, n_steps=None, *, kl="kl"):
        self.seen.append(current)
        return super().update(current, n_steps, kl=kl)


@pytest.mark.parametrize("meanwhile", ["steps", "states", "copies"])
def test_a_penalty_keeps_every_call_of_threads_once(meanwhile):
    """Every call has its own number. One thread does something else between its calls."""
    calls = 40
    a = torch.zeros(1, 1)
    for _ in range(15):
        penalty = klfast.KLPenalty("k1", "token-sum", controller=Recorded())
        beside = {
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
        assert sorted(seen.tolist()) == [*range(calls * WORKERS + 1)]


POOLS = """
import multiprocessing, torch, klfast

def work(number):
    a = torch.full((2, 3), -float(number))
    z = torch.zeros(2, 3, 5, requires_grad=True)
    klfast.kl_divergence(z, z.detach().sin() + number, reduction="token-mean").backward()
    assert z.grad.isfinite().all()
    return klfast.kl_penalty(a, a - 1, estimator="k1", reduction="token-sum").item()

if __name__ == "__main__":
    for method in ("forkserver", "spawn", "fork"):
        torch.set_num_threads(1)
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(*pool.map(work, range(4)))
"""


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_processes_of_a_pool_compute(tmp_path):
    script = tmp_path / "pool.py"
    script.write_text(POOLS)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    process = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, env=environment
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["6.0"] * 12
