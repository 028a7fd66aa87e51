"""torch.compile(fullgraph=True) and vmap give what eager klfast gives."""

import pytest
import torch
from agreement_rollout import sampled
from torch.utils._pytree import tree_leaves

import klfast
from klfast import Rejection
from klfast.args.rollout import RolloutCall, RolloutSpec

RULES = (
    Rejection("ratio", low=0.6, high=1.6),
    Rejection("k3", "seq-mean", high=0.045),
    Rejection("binary_kl", "seq-max", high=0.3),
)
OPTIONS = {
    "token": {},
    "icepop": {"floor": 0.5, "cap": 5.0, "outside": "mask"},
    "sequence": {"weight": "sequence", "normalize": "sequence"},
    "geometric": {"weight": "geometric", "reject": RULES},
    "none": {"weight": None, "reject": RULES},
}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _forget_compilations():
    torch._dynamo.reset()


def inputs(packed):
    shape = (40,) if packed else (4, 10)
    cu_seqlens = torch.tensor([0, 3, 3, 30, 40]) if packed else None
    return *sampled(shape), torch.rand(shape) < 0.8, cu_seqlens


def assert_close(results, others):
    results, others = (
        [leaf for leaf in tree_leaves(each) if leaf is not None] for each in (results, others)
    )
    for actual, expected in zip(results, others, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.grid
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_compiles(backend, options, packed):
    def correct(logprobs, rollout_logprobs, mask, cu_seqlens):
        return klfast.rollout_correction(
            logprobs, rollout_logprobs, mask, cu_seqlens=cu_seqlens, backend=backend, **options
        )

    tensors = inputs(packed)
    compiled = torch.compile(correct, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*tensors), correct(*tensors))


def test_a_logged_dict_compiles(backend):
    def logged(logprobs, rollout_logprobs, mask, _):
        stats = klfast.rollout_correction(
            logprobs, rollout_logprobs, mask, reject=RULES, backend=backend
        ).stats
        return stats.as_dict()

    tensors = inputs(False)
    compiled = torch.compile(logged, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*tensors), logged(*tensors))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_vmap(backend, options):
    def correct(*tensors):
        return klfast.rollout_correction(*tensors, backend=backend, **options)

    batch = [torch.stack(each) for each in zip(*[inputs(False)[:3] for _ in range(3)], strict=True)]
    mapped = torch.func.vmap(correct)(*batch) if options.get("weight", "") is not None else None
    if mapped is None:  # vmap returns tensors alone
        mapped = torch.func.vmap(lambda *tensors: correct(*tensors)[1:])(*batch)
    for i in range(3):
        of_element = [t[i] for t in batch]
        expected = [leaf for leaf in tree_leaves(correct(*of_element)) if leaf is not None]
        assert_close([leaf[i] for leaf in tree_leaves(mapped)], expected)


@pytest.mark.parametrize("named", [RolloutSpec, RolloutCall])
def test_call_objects_have_no_property(named):
    """Dynamo of torch 2.10 follows the methods of a named tuple alone."""
    assert not [name for name, value in vars(named).items() if isinstance(value, property)]
