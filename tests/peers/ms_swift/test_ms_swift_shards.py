"""klfast.compat.ms_swift over vocabulary shards against ms-swift's own functions, on two ranks."""

import importlib.util
import inspect
import sys
import types
from pathlib import Path

import swift
import torch
from ranks import here, on_ranks

from klfast.compat import ms_swift

FILE = Path(swift.__file__).parent / "megatron" / "trainers" / "vocab_parallel_utils.py"


def theirs(path):
    """ms-swift's module, over a Megatron that only has its tensor-parallel group."""
    state = types.ModuleType("megatron.core.parallel_state")
    state.get_tensor_model_parallel_group = lambda: torch.distributed.group.WORLD
    state.get_tensor_model_parallel_world_size = lambda: 2
    core = types.ModuleType("megatron.core")
    core.parallel_state = core.mpu = state
    core.tensor_parallel = types.ModuleType("megatron.core.tensor_parallel")
    sys.modules.update(
        {
            "megatron": types.ModuleType("megatron"),
            "megatron.core": core,
            "megatron.core.parallel_state": state,
        }
    )
    spec = importlib.util.spec_from_file_location("vocab_parallel_utils", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@on_ranks
def test_divergences_gradients_and_arguments_are_ms_swift_s():
    module = theirs(FILE)
    torch.manual_seed(0)
    whole = (torch.randn(2, 2, 5, 64, dtype=torch.float64) * 2).float()
    models, found = whole.chunk(2, -1)[here()[0]], []
    for function in (ms_swift.vocab_parallel_kl_div, module.vocab_parallel_kl_div):
        leaves = [model.clone().requires_grad_() for model in models]
        kl = function(*map(module.vocab_parallel_log_softmax, leaves))
        weights = torch.linspace(0.5, 1.5, kl.numel()).view(kl.shape)
        found.append((kl.detach(), *torch.autograd.grad((weights * kl).sum(), leaves)))
    for x, y in zip(*found, strict=True):
        assert (x.double() - y.double()).norm() <= 1e-5 * y.double().norm()
    own, other = (
        [*inspect.signature(m.vocab_parallel_kl_div).parameters] for m in (ms_swift, module)
    )
    assert own == other
