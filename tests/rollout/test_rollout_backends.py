"""The backend of ``rollout_correction``: kernels on a CPU, the reference elsewhere."""

import warnings

import pytest
import torch
from agreement_rollout import sampled
from around import RefusesReads
from garbage import GARBAGE, N
from torch.utils._pytree import tree_leaves

import klfast
from klfast import Rejection, backends
from klfast.args.rollout import RolloutSpec, rollout_call

LACKS = "backend '{}' cannot run on cpu: it has no kernels for rollout_correction; 'auto' takes"
RULES = (
    Rejection("ratio", low=0.6, high=1.6, outward_only=True),
    Rejection("k3", "seq-mean", high=0.045),
    Rejection("abs", "seq-max", high=1.0),
    Rejection("binary_kl", "seq-min", high=0.3),
    Rejection("k1", "seq-sum", low=-3.0),
)
GPUS = {
    "native-and-triton": {},
    "native": {"triton": "triton is not installed"},
    "triton": {"native": "the extension was built without CUDA kernels"},
    "neither": {
        "native": "the extension was built without CUDA kernels",
        "triton": "triton is not installed",
    },
}
"""The backends that do not serve a GPU, and why."""


@pytest.fixture(params=GPUS.values(), ids=GPUS)
def as_on_a_gpu(request, monkeypatch):
    """Make the backends see a GPU without kernels for the function. Return those that serve it."""
    monkeypatch.setattr(backends, "_told", set())
    for name in ("native", "triton"):
        reason = request.param.get(name)
        gpus = backends.BACKENDS[name]._replace(
            why_not=lambda device, reason=reason: reason, rollout_devices=frozenset({"xpu"})
        )
        monkeypatch.setitem(backends.BACKENDS, name, gpus)
    return [name for name in ("native", "triton") if name not in request.param]


def test_a_name_says_who_serves(as_on_a_gpu):
    for name in as_on_a_gpu:
        with pytest.raises(RuntimeError, match=LACKS.format(name)):
            klfast.rollout_correction(*sampled((2, 3)), backend=name)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_auto_takes_the_reference_without_a_word():
    tensors = sampled((3, 50))
    expected = klfast.rollout_correction(*tensors, backend="reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = klfast.rollout_correction(*tensors)
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("weight", [None, "token", "sequence", "geometric"])
@pytest.mark.parametrize("outside", ["truncate", "mask"])
def test_the_reference_reads_no_value(weight, outside, packed):
    """The tensors have no values, and no op waits for values on a GPU."""
    shape = (40,) if packed else (4, 10)
    pair = [torch.empty(shape, device="meta") for _ in range(2)]
    given = torch.empty(shape, device="meta", dtype=torch.bool)
    edges = torch.empty(4, device="meta", dtype=torch.int32) if packed else None
    normalize = None if weight is None else "sequence"
    with RefusesReads() as mode:
        weights, mask, stats = klfast.rollout_correction(
            *pair,
            given,
            weight=weight,
            outside=outside,
            reject=RULES,
            normalize=normalize,
            cu_seqlens=edges,
            advantages=pair[0],
            backend="reference",
        )
        stats.as_dict()
    assert {"index_select", "scatter_reduce"} <= {name.partition(".")[0] for name in mode.ops}
    assert mask.shape == shape
    assert (weights is None) == (weight is None)
    assert stats.k3.shape == (3 if packed else 4,)


@pytest.mark.parametrize("weight", ["token", "sequence"])
@pytest.mark.parametrize("cu_seqlens", GARBAGE.values(), ids=GARBAGE)
def test_the_reference_stays_inside_its_bounds_whatever_cu_seqlens_holds(cu_seqlens, weight):
    """On a GPU nothing checks cu_seqlens."""
    pair = sampled((N,))
    spec = RolloutSpec.of(weight, None, 2.0, "truncate", RULES[1:])
    call = rollout_call(*pair[:2], None, spec, cu_seqlens=torch.tensor(cu_seqlens))
    weights, mask, stats = backends.BACKENDS["reference"].rollout_correction(call)
    assert weights.shape == mask.shape == (N,)
    assert stats.k3.shape == (len(cu_seqlens) - 1,)
