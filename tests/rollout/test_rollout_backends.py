"""Who computes ``rollout_correction``: kernels where the extension has them, else the reference."""

import warnings

import pytest
import torch
from agreement_rollout import sampled
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import klfast
from klfast import Rejection, backends

LACKS = "backend 'triton' cannot run on {}: it has no kernels for rollout_correction; 'auto' takes"
RULES = (
    Rejection("ratio", low=0.6, high=1.6, outward_only=True),
    Rejection("k3", "seq-mean", high=0.045),
    Rejection("abs", "seq-max", high=1.0),
    Rejection("binary_kl", "seq-min", high=0.3),
    Rejection("k1", "seq-sum", low=-3.0),
)
READING = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim"}
"""Names of torch's ops that read a tensor's values on the host, or make a shape of them."""


@pytest.fixture
def triton_serves(monkeypatch):
    """As on a GPU: the extension has no kernels for the device, and Triton has some."""

    def replace(name, **changes):
        monkeypatch.setitem(
            backends.BACKENDS, name, backends.BACKENDS[name]._replace(direct=None, **changes)
        )

    monkeypatch.setattr(backends, "_told", set())
    replace("native", why_not=lambda device: "the extension was built without CUDA")
    replace("triton", why_not=lambda device: None)
    return replace


class RefusesReads(TorchDispatchMode):
    """Raises for an op that would wait for a device."""

    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._schema.name.removeprefix("aten::")
        self.ops.add(name)
        assert name not in READING, f"{name} reads a value"
        if name.startswith("repeat_interleave"):
            assert (kwargs or {}).get("output_size") is not None, "its shape depends on values"
        if name.startswith("index"):
            indices = [leaf for leaf in tree_leaves(args[1:]) if isinstance(leaf, torch.Tensor)]
            assert all(index.dtype != torch.bool for index in indices[:1]), "bools are read"
        return op(*args, **(kwargs or {}))


def test_triton_by_name_says_who_serves(triton_serves):
    with pytest.raises(RuntimeError, match=LACKS.format("cpu")):
        klfast.rollout_correction(*sampled((2, 3)), backend="triton")


def test_auto_takes_the_reference_beside_triton_without_a_word(triton_serves):
    tensors = sampled((3, 50))
    expected = klfast.rollout_correction(*tensors, backend="reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = klfast.rollout_correction(*tensors)
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert one.equal(other)


def test_kernels_that_are_refused_are_told_of_beside_triton(triton_serves):
    class Wrong:
        def problem(self, call):
            return "its kernels compute wrong numbers"

        def results(self, device):
            return {}

    triton_serves("native", why_not=lambda device: None, first_use=Wrong())
    with pytest.warns(RuntimeWarning, match="uses its reference backend on cpu .*wrong numbers"):
        klfast.rollout_correction(*sampled((2, 3)))


def test_one_op_is_not_defined_for_triton():
    assert not hasattr(torch.ops.klfast_triton, "rollout_correction")
    assert hasattr(torch.ops.klfast_triton, "kl_penalty_fwd")


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("weight", [None, "token", "sequence", "geometric"])
@pytest.mark.parametrize("outside", ["truncate", "mask"])
def test_the_reference_reads_no_value(weight, outside, packed):
    """Tensors without values, and no op that would wait for those of a GPU."""
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
    assert {"index_add", "scatter_reduce"} <= {name.partition(".")[0] for name in mode.ops}
    assert mask.shape == shape
    assert (weights is None) == (weight is None)
    assert stats.k3.shape == (3 if packed else 4,)
