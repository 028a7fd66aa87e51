"""Programs that torch.jit.trace and torch.export make of a call, from memory and from a file."""

import warnings

import pytest
import torch
from agreement import same_bits
from every_function import every_function
from torch.export import Dim, export
from torch.utils._pytree import tree_leaves

NAMES = [name for name in every_function() if name not in ("KLPenalty", "data_parallel_normalizer")]

EXPORTED = (
    *("kl_penalty(old)", "kl_rewards", "reduce", "token_logprobs", "kl_divergence"),
    "log_ratio_profile",
)
"""Those that keep the batch's size dynamic and survive a file. Functions from hidden states have as
many chunks as the example, and of those of no gradient torch saves none but the profile.
"""


class Module(torch.nn.Module):
    """A call of tensors by position."""

    def __init__(self, name):
        super().__init__()
        self.function, arguments = every_function()[name]
        self.names = [key for key, value in arguments.items() if isinstance(value, torch.Tensor)]
        self.others = {key: arguments[key] for key in arguments if key not in self.names}

    def forward(self, *tensors):
        found = self.function(**dict(zip(self.names, tensors, strict=True)), **self.others)
        return tuple(leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))


def tensors(name):
    _, arguments = every_function()[name]
    return [value.detach() for value in arguments.values() if isinstance(value, torch.Tensor)]


def batch_of(given, rows):
    """The same tensors with so many sequences. A head [V, D] has none."""
    return tuple(t[:1].expand(rows, *t.shape[1:]).clone() if len(t) == 2 else t for t in given)


def dynamic(given):
    return (tuple({0: Dim("rows")} if len(t) == 3 else {} for t in given),)


def assert_runs_as(program, module, *batches):
    for given in batches:
        found, expected = program(*given), module(*given)
        assert len(tree_leaves(found)) == len(expected) > 0
        assert all(map(same_bits, tree_leaves(found), expected))


@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_programs(name, tmp_path):
    module = Module(name)
    example = batch_of(tensors(name), 3)
    batches = [example, *(batch_of(tensors(name), rows) for rows in (2, 17))]
    program = export(module, example, dynamic_shapes=dynamic(example))
    torch.export.save(program, tmp_path / "program.pt2")
    assert_runs_as(program.module(), module, *batches)
    assert_runs_as(program.run_decompositions().module(), module, *batches)
    assert_runs_as(torch.export.load(tmp_path / "program.pt2").module(), module, *batches)


@pytest.mark.parametrize("name", NAMES)
def test_traced_programs(name, tmp_path):
    module = Module(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of tracing
        traced = torch.jit.trace(module, tuple(tensors(name)), check_trace=False)
        traced.save(str(tmp_path / "traced.pt"))
        loaded = torch.jit.load(str(tmp_path / "traced.pt"))
        assert_runs_as(traced, module, tensors(name), tensors(name))
        assert_runs_as(loaded, module, tensors(name), tensors(name))
