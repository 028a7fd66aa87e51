"""Loads a kernel, an older one and its own copy beside klfast: `hub_beside.py FOLDER ...`.

Prints how many tensors agreed bit for bit on the reference, and in Triton's interpreter.
"""

import collections
import sys
from pathlib import Path

import kernels
import torch
import triton_interpreter  # noqa: F401 # for its effect
from agreement import same_bits

import klfast as package


def results(klfast, backend):
    """Results, statistics and gradients of every function."""
    torch.manual_seed(0)
    options = {"reduction": "token-mean", "return_stats": True, "backend": backend}
    a, b = (-3 - torch.rand(3, 8, requires_grad=True) for _ in range(2))
    for estimator in ("k3+", "k2", klfast.Estimator("r_log_r", linear_tail=1.0)):
        value, stats = klfast.kl_penalty(a, b, estimator=estimator, **options)
        yield from (value, *stats, *torch.autograd.grad(value, (a, b)))
    yield klfast.kl_rewards(torch.ones(3), a, b, kl_coef=0.1, backend=backend)
    rule = klfast.Rejection("k3", "seq-mean", high=0.1)
    corrected = klfast.rollout_correction(a, b, reject=rule, backend="reference")
    yield from (corrected.weights, corrected.mask.to(torch.uint8), corrected.stats.k3)

    logits, ref_logits = (torch.randn(2, 3, 37, requires_grad=True) for _ in range(2))
    ids, mask = torch.randint(37, (2, 3)), torch.tensor([[1, 1, 0], [0, 1, 1]])
    values = klfast.token_logprobs(logits, ids, mask, return_entropy=True, backend=backend)
    yield from (*values, *torch.autograd.grad(sum(value.sum() for value in values), logits))
    for direction in ("reverse", "forward", "jsd"):
        found = klfast.kl_divergence(logits, ref_logits, mask, direction=direction, **options)
        yield from (found.kl, *found.stats)
        yield from torch.autograd.grad(found.kl, (logits, ref_logits))


def agreeing(modules, backend):
    """The number of results, which all modules must have with the same bits."""
    rows = [[*results(klfast, backend)] for klfast in modules]
    for first, *others in zip(*rows, strict=True):
        assert all(same_bits(first.detach(), other.detach()) for other in others)
    return len(rows[0])


def ops():
    """The names of klfast's ops by their namespaces."""
    found = collections.defaultdict(set)
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, op = name.partition("::")
        if "klfast" in namespace:
            found[namespace].add(op)
    return found


kernel, older, copy = (kernels.get_local_kernel(Path(path)) for path in sys.argv[1:])
assert (kernel.__version__, older.__version__) == (package.__version__, "0.0.9")
assert copy.kl_penalty is kernel.kl_penalty is not older.kl_penalty
assert ops().keys() == {"klfast", "klfast_triton", kernel.__name__, older.__name__}
alone = ops().pop("klfast") - {"rollout_correction"}  # of which Triton has no kernels
assert all(names == alone for name, names in ops().items() if name != "klfast")
print(*(agreeing((package, kernel, older), backend) for backend in ("reference", "triton")))
