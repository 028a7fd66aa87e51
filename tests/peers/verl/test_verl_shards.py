"""klfast.compat.verl over vocabulary shards against verl's own entropy, on two ranks.

verl's log-probs call Megatron's cross entropy. ``tests/compat`` has their formula.
"""

import inspect
import sys
import types

import stand_ins
import torch
from ranks import here, on_ranks

from klfast.compat import verl

NAMES = (
    "vocab_parallel_entropy",
    "vocab_parallel_entropy_with_chunking",
    "vocab_parallel_log_probs_from_logits",
)


def theirs():
    """Verl's module, over a Megatron that only has its tensor-parallel group."""
    stand_ins.install(*stand_ins.OF_OPENRLHF)
    state = types.ModuleType("megatron.core.parallel_state")
    state.get_tensor_model_parallel_group = lambda: torch.distributed.group.WORLD
    core = types.ModuleType("megatron.core")
    core.parallel_state = state
    for name, module in (("megatron", types.ModuleType("megatron")), ("megatron.core", core)):
        sys.modules[name] = module
    sys.modules["megatron.core.parallel_state"] = state
    torch.compile = lambda **options: lambda function: function  # verl compiles at import
    from verl.utils.megatron import tensor_parallel

    return tensor_parallel


def logits_of(rank, dtype):
    torch.manual_seed(0)
    whole = torch.randn(2, 6, 64, dtype=torch.float64) * 2
    return whole.chunk(2, -1)[rank].to(dtype)


def differentiated(function, logits):
    leaf = logits.clone().requires_grad_()
    found = function(leaf)
    weights = torch.linspace(0.5, 1.5, found.numel()).view(found.shape).to(found.dtype)
    return found.detach(), torch.autograd.grad((weights * found).sum(), leaf)[0]


@on_ranks
def test_entropies_gradients_and_arguments_are_verl_s():
    of_verl = theirs()
    for name in NAMES:
        own, other = ([*inspect.signature(getattr(m, name)).parameters] for m in (verl, of_verl))
        assert own == other
    for name in NAMES[:2]:
        for dtype, relative in ((torch.float32, 1e-5), (torch.bfloat16, 4e-2)):
            own, other = (
                differentiated(getattr(module, name), logits_of(here()[0], dtype))
                for module in (verl, of_verl)
            )
            for x, y in zip(own, other, strict=True):
                difference = (x.double() - y.double()).norm()
                assert difference <= relative * y.double().norm()
