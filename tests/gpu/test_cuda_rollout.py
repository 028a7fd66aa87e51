"""``rollout_correction`` on a GPU, served by the reference: graphs and syncs."""

import gpu
import pytest
import torch
from agreement_rollout import sampled
from torch.utils._pytree import tree_leaves

import klfast
from klfast import Rejection

pytestmark = gpu.marks

RULES = (Rejection("ratio", low=0.6, high=1.6), Rejection("k3", "seq-mean", high=0.05))
SHAPES = {"short": (33, 1000), "long": (3, 30_000)}


def inputs_of(shape, dtype, packed):
    tensors = [*sampled(shape, dtype), torch.rand(shape) < 0.8]
    tensors[0].view(-1)[::97] -= 3  # far from the others
    cu_seqlens = None
    if packed:
        tensors = [t.flatten() for t in tensors]
        n = tensors[0].numel()
        cu_seqlens = torch.tensor([0, 0, 9, n // 3 + 1, n], dtype=torch.int32, device="cuda")
    return *(t.cuda() for t in tensors), cu_seqlens


def call_of(inputs, weight, rules):
    *tensors, cu_seqlens = inputs

    def call():
        result = klfast.rollout_correction(
            *tensors, weight=weight, reject=rules, cu_seqlens=cu_seqlens
        )
        return [leaf for leaf in tree_leaves(result) if leaf is not None]

    return call


def over_calls(test):
    for name, values in {
        "shape": SHAPES,
        "packed": {"padded": False, "packed": True},
        "weight": {str(w): w for w in (None, "token", "sequence")},
        "rules": {"no-rules": (), "rules": RULES},
        "dtype": {"fp32": torch.float32, "bf16": torch.bfloat16},
    }.items():
        test = pytest.mark.parametrize(name, list(values.values()), ids=list(values))(test)
    return test


@over_calls
def test_replays_give_the_bits_of_eager_calls(shape, packed, weight, rules, dtype):
    inputs = inputs_of(shape, dtype, packed)
    call = call_of(inputs, weight, rules)
    gpu.assert_replays(inputs, lambda: inputs_of(shape, dtype, packed), call)


@over_calls
def test_no_call_waits_for_the_device(shape, packed, weight, rules, dtype):
    gpu.assert_no_sync(call_of(inputs_of(shape, dtype, packed), weight, rules))
