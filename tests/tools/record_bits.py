"""The bits of every public function, for a change that must not change any.

    export PYTHONPATH=.:tests/support
    python tests/tools/record_bits.py bits.json             # before
    python tests/tools/record_bits.py bits.json --compare   # after: lists the cases that differ

Values, gradients and statistics over all estimators, options, reductions, layouts and dtypes are
hashed, one hash a case. Each instruction set of the CPU has a process of its own, as have the
emulated CUDA kernels and Triton's interpreter.
"""

import argparse
import functools
import hashlib
import itertools
import json
import os
import subprocess
import sys

import torch
from agreement import INTEGERS, random_inputs
from targets import OF_ROLLOUT, TARGETS, serving
from torch.utils._pytree import tree_leaves

import klfast
from klfast import Estimator, Rejection
from klfast.args.estimator import ESTIMATORS
from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS

RUNS = {
    "native-avx512": {"KLFAST_CPU": "avx512"},
    "native-avx2": {"KLFAST_CPU": "avx2"},
    "native-baseline": {"KLFAST_CPU": "baseline"},
    "native-emulated": {},
    "reference": {},
    "triton": {"TRITON_INTERPRET": "1"},
}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OPTIONS = {
    "plain": {},
    "k2-gradient": {"gradient": "k2"},
    "no-gradient": {"gradient": "none"},
    "detached": {"importance": "detached", "importance_cap": 1.5},
    "clips": {"log_ratio_clip": (-0.8, 1.1), "kl_clip": 0.6},
    "weighted-clips": {"log_ratio_clip": 1.0, "kl_clip": 0.5, "clip_weighted": True},
    "tail": {"linear_tail": 0.7},
}
RULES = {
    "no-rule": (),
    "token": Rejection("ratio", low=0.6, high=1.5),
    "many": [
        Rejection("k1", low=-0.9, high=0.8),
        Rejection("k3", high=0.3),
        Rejection("ratio", "seq-mean", low=0.8, high=1.2),
        Rejection("ratio", "seq-min", low=1e-4),
        Rejection("binary_tv", "seq-max", high=0.5),
    ],
    "others": [
        Rejection("abs", high=0.7),
        Rejection("k2", "seq-mean", high=0.4),
        Rejection("k3", "seq-sum", high=90.0),
        Rejection("binary_kl", high=0.2),
        Rejection("binary_kl_reverse", "seq-max", high=2.0),
    ],
}


@functools.cache
def batch_of(layout, dtype):
    return Batch(layout, dtype)


class Batch:
    """The tensors of a layout in a dtype."""

    def __init__(self, layout, dtype):
        generator = torch.Generator().manual_seed(7)
        shape = {"padded": (5, 37), "long": (2, 16_500), "packed": (113,), "strided": (6, 50)}
        torch.manual_seed(11)
        logprobs, ref, old = random_inputs(shape[layout], dtype)
        mask = torch.rand(logprobs.shape, generator=generator)
        mask = torch.where(mask < 0.3, 0.0, mask)
        kept = mask > 0
        self.cu_seqlens = None
        if layout == "packed":
            self.cu_seqlens = torch.tensor([0, 0, 40, 41, 41, 113])
        if layout == "strided":
            logprobs, ref, old, mask, kept = (t[::2, ::3] for t in (logprobs, ref, old, mask, kept))
        self.logprobs, self.ref, self.old = logprobs, ref, old
        self.masks = {"none": None, "bools": kept, "weights": mask}
        self.sequences = 5 if layout == "packed" else logprobs.shape[0]


def hash_of(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.detach().contiguous()
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.view(INTEGERS[tensor.element_size()]).numpy().tobytes())
    return digest.hexdigest()[:16]


def outputs_of(function, *differentiable, **options):
    """Hash of results, statistics and gradients, of the first backward and of a second."""
    leaves = [tensor.detach().requires_grad_() for tensor in differentiable]
    results = function(*leaves, **options)
    flat = [part for part in tree_leaves(results) if part is not None]
    roots = [t for t in flat if t.requires_grad]
    grads = []
    if roots:
        weights = [torch.linspace(1, 2, root.numel()).view(root.shape) for root in roots]
        total = sum((root * weight).sum() for root, weight in zip(roots, weights, strict=True))
        for again in (True, False):
            grads += torch.autograd.grad(total, leaves, retain_graph=again)
    return hash_of([*flat, *grads])


def penalties(layouts):
    """(name, call) of every case of ``kl_penalty``; a call takes the backend."""
    for layout, dtype, estimator, (what, options), reduction, mask in itertools.product(
        layouts, FLOATS, ESTIMATORS, OPTIONS.items(), REDUCTIONS, ("none", "bools", "weights")
    ):
        batch = batch_of(layout, dtype)
        has_old = "importance" in options or "clip_weighted" in options
        has_normalizer = what == "clips" and reduction in NORMALIZED_REDUCTIONS
        call = functools.partial(
            outputs_of,
            klfast.kl_penalty,
            batch.logprobs,
            batch.ref,
            mask=batch.masks[mask],
            estimator=Estimator(estimator, **options),
            old_logprobs=batch.old if has_old else None,
            cu_seqlens=batch.cu_seqlens,
            reduction=reduction,
            coef=0.3,
            normalizer=7.0 if has_normalizer else None,
            return_stats=True,
        )
        yield f"kl_penalty {layout} {dtype} {estimator} {what} {reduction} {mask}", call


def rewards(layouts):
    """(name, call) of every case of ``kl_rewards``."""
    for layout, dtype, estimator in itertools.product(layouts, FLOATS, ESTIMATORS):
        batch = batch_of(layout, dtype)
        call = functools.partial(
            outputs_of,
            functools.partial(klfast.kl_rewards, torch.linspace(-1, 1, batch.sequences)),
            batch.logprobs,
            batch.ref,
            mask=batch.masks["weights"],
            kl_coef=0.2,
            estimator=estimator,
            cu_seqlens=batch.cu_seqlens,
            return_stats=True,
        )
        yield f"kl_rewards {layout} {dtype} {estimator}", call


def hash_of_correction(*args, **options):
    weights, mask, stats = klfast.rollout_correction(*args, **options)
    return hash_of([t for t in (weights, mask, stats.table()) if t is not None])


def corrections(layouts):
    """(name, call) of every case of ``rollout_correction``, near on-policy and far from it."""
    choices = [(None, "truncate")]
    choices += itertools.product(("token", "sequence", "geometric"), ("truncate", "mask"))
    for layout, dtype, mask, (weight, outside), (rules, reject), scale in itertools.product(
        layouts, FLOATS, ("none", "bools", "weights"), choices, RULES.items(), (0.01, 1, 30)
    ):
        batch = batch_of(layout, dtype)
        call = functools.partial(
            hash_of_correction,
            batch.ref + scale * (batch.logprobs - batch.ref),
            batch.ref,
            batch.masks[mask],
            weight=weight,
            outside=outside,
            floor=0.5 if weight else None,
            cap=1.6,
            reject=reject,
            cu_seqlens=batch.cu_seqlens,
        )
        yield f"rollout {layout} {dtype} {mask} {weight} {outside} {rules} {scale}", call


def over_logits(vocabularies):
    """(name, call) of every case over logits."""
    for vocabulary, dtype in itertools.product(vocabularies, FLOATS):
        torch.manual_seed(3)
        logits = (3 * torch.randn(2, 5, vocabulary, dtype=torch.float64)).to(dtype)
        noise = 0.2 * torch.randn(2, 5, vocabulary, dtype=torch.float64)
        ref_logits = (logits.double() + noise).to(dtype)
        ids = torch.randint(vocabulary, (2, 5))
        mask = torch.tensor([[1, 1, 0, 0.5, 1], [0, 1, 1, 1, 2.0]])
        for entropy in (False, True):
            call = functools.partial(
                outputs_of,
                klfast.token_logprobs,
                logits,
                token_ids=ids,
                mask=mask,
                return_entropy=entropy,
                temperature=0.8,
            )
            yield f"token_logprobs {vocabulary} {dtype} {entropy}", call
        for direction, reduction, taken, entropy in itertools.product(
            ("reverse", "forward", "jsd"),
            ("none", "seq-mean", "token-mean"),
            (False, True),
            (False, True),
        ):
            call = functools.partial(
                outputs_of,
                klfast.kl_divergence,
                logits,
                ref_logits,
                mask=mask,
                direction=direction,
                jsd_beta=0.3,
                temperature=1.3,
                reduction=reduction,
                token_ids=ids if taken else None,
                return_stats=True,
                return_entropy=entropy,
            )
            name = f"kl_divergence {vocabulary} {dtype} {direction} {reduction} {taken} {entropy}"
            yield name, call


def record(run, every=1, function=""):
    """Case -> hash, of one run in this process and of each ``every``-th case whose name begins with
    ``function``.
    """
    target = TARGETS[run if run in TARGETS else "native"]
    is_slow = run == "triton"
    layouts = ("padded", "packed") if is_slow else ("padded", "packed", "strided", "long")
    cases = [
        *penalties(layouts),
        *rewards(layouts),
        *corrections(layouts),
        *over_logits((37,) if is_slow else (1, 37, 4_099)),
    ]
    if target not in OF_ROLLOUT.values():
        cases = [case for case in cases if not case[0].startswith("rollout")]
    cases = [case for case in cases if case[0].startswith(function)]
    with serving(target):
        kept = cases[:: 97 if is_slow else every]
        return {f"{run} {name}": call(backend=target.backend) for name, call in kept}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument(
        "--only", help="one of the runs, in this process; prints JSON", choices=RUNS
    )
    parser.add_argument("--every", type=int, default=1, help="of the cases: 37 takes each 37th")
    parser.add_argument(
        "--function", default="", help='the first word of cases: "rollout", "kl_penalty"'
    )
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=RUNS)
    options = parser.parse_args()
    if options.only:
        json.dump(record(options.only, options.every, options.function), sys.stdout)
        return
    hashes = {}
    for run in options.runs:
        command = [sys.executable, __file__, options.file, "--only", run]
        command += ["--every", str(options.every), "--function", options.function]
        done = subprocess.run(
            command, env=os.environ | RUNS[run], check=True, stdout=subprocess.PIPE
        )
        hashes |= json.loads(done.stdout)
    if not options.compare:
        with open(options.file, "w") as file:
            json.dump(hashes, file, indent=0)
        print(f"{len(hashes)} cases")
        return
    with open(options.file) as file:
        before = json.load(file)
    before = {n: h for n, h in before.items() if n.split(" ")[0] in options.runs}
    differ = [name for name in before | hashes if before.get(name) != hashes.get(name)]
    print(*differ[:50], f"{len(differ)} of {len(hashes)} cases differ", sep="\n")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
