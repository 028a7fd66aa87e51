"""torch.export and activation checkpointing: programs that run klfast again, elsewhere or later."""

import pytest
import torch
from agreement import random_inputs, same_bits
from torch.export import Dim, export
from torch.utils.checkpoint import checkpoint

import klfast
from klfast import Estimator
from klfast.types.reduction import REDUCTIONS

every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


class Penalty(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, logprobs, ref_logprobs, mask):
        return klfast.kl_penalty(logprobs, ref_logprobs, mask, **self.options)


def arguments(rows, columns):
    logprobs, ref_logprobs, _ = random_inputs((rows, columns))
    mask = torch.rand(rows, columns) < 0.7
    return logprobs, ref_logprobs, mask


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("reduction", ["none", "seq-mean", "token-mean"])
def test_an_exported_program_takes_any_batch(backend, reduction):
    module = Penalty(
        reduction=reduction,
        backend=backend,
        return_stats=True,
        estimator=Estimator("k3", log_ratio_clip=1.0),
    )
    shape = {0: Dim("batch"), 1: Dim("tokens")}
    program = export(module, arguments(3, 7), dynamic_shapes=(shape,) * 3).module()
    for inputs in (arguments(3, 7), arguments(5, 70)):
        torch.testing.assert_close(program(*inputs), module(*inputs))


def test_an_exported_program_names_one_op():
    """Which a runtime that has the extension's library can run without Python."""
    program = export(Penalty(reduction="token-mean", backend="native"), arguments(3, 7))
    ops = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.klfast.kl_penalty_fwd.default in ops


def test_an_exported_program_survives_a_file(backend, tmp_path):
    module = Penalty(reduction="token-mean", backend=backend)
    torch.export.save(export(module, arguments(3, 7)), tmp_path / "penalty.pt2")
    inputs = arguments(3, 7)
    loaded = torch.export.load(tmp_path / "penalty.pt2").module()
    torch.testing.assert_close(loaded(*inputs), module(*inputs))


@pytest.mark.grid
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@every_reduction
def test_a_checkpointed_penalty_has_the_bits_of_a_plain_one(backend, reduction, use_reentrant):
    logprobs, ref_logprobs, mask = arguments(3, 70)
    inputs = logprobs.requires_grad_(), ref_logprobs.requires_grad_()

    def penalty(logprobs, ref_logprobs):
        logprobs = logprobs - 0.25  # lives only within
        return klfast.kl_penalty(
            logprobs, ref_logprobs, mask, reduction=reduction, coef=0.3, backend=backend
        )

    plain = penalty(*inputs)
    expected = torch.autograd.grad(plain.sum(), inputs)
    result = checkpoint(penalty, *inputs, use_reentrant=use_reentrant)
    result.sum().backward()
    assert same_bits(result, plain)
    assert same_bits(logprobs.grad, expected[0])
    assert same_bits(ref_logprobs.grad, expected[1])


def test_statistics_leave_a_checkpoint(backend):
    logprobs, ref_logprobs, mask = arguments(3, 70)
    logprobs.requires_grad_()

    def penalty(logprobs):
        return klfast.kl_penalty(
            logprobs,
            ref_logprobs,
            mask,
            reduction="token-mean",
            return_stats=True,
            backend=backend,
        )

    result, stats = checkpoint(penalty, logprobs, use_reentrant=False)
    result.backward()
    expected, expected_stats = penalty(logprobs)
    assert same_bits(logprobs.grad, torch.autograd.grad(expected, logprobs)[0])
    assert all(same_bits(a, b) for a, b in zip(stats, expected_stats, strict=True))


def test_a_checkpoint_saves_no_log_probs(backend):
    """The point of it: what klfast keeps for its backward is not kept."""
    logprobs, ref_logprobs, mask = arguments(3, 70)
    logprobs.requires_grad_()
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    def penalty(logprobs):
        return klfast.kl_penalty(logprobs * 1.5, ref_logprobs, mask, backend=backend)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        checkpoint(penalty, logprobs, use_reentrant=False)
    assert not [tensor for tensor in saved if tensor.numel() >= 210 and tensor is not logprobs]


class Penalties(torch.nn.Module):
    """With no limit (which is infinite), and with every one."""

    def forward(self, logprobs, ref_logprobs, old_logprobs, mask):
        limited = Estimator(
            "k3", log_ratio_clip=(-1.0, 2.0), kl_clip=0.5, importance_cap=1.5, linear_tail=0.8
        )
        pair = logprobs, ref_logprobs
        return (
            klfast.kl_penalty(*pair, mask, reduction="token-mean"),
            klfast.kl_penalty(*pair, mask, reduction="seq-mean", old_logprobs=old_logprobs),
            klfast.kl_penalty(*pair, mask, estimator=limited, old_logprobs=old_logprobs),
        )


# AOTInductor itself uses what torch deprecates.
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.* is deprecated")
def test_a_package_of_aot_inductor_has_eagers_bits(tmp_path):
    def inputs():
        logprobs, ref_logprobs, mask = arguments(3, 70)
        return logprobs, ref_logprobs, logprobs + 0.7 * torch.randn(3, 70), mask

    module = Penalties()
    package = torch._inductor.aoti_compile_and_package(
        export(module, inputs()), package_path=str(tmp_path / "penalties.pt2")
    )
    fresh = inputs()
    results = torch._inductor.aoti_load_package(package)(*fresh)
    for result, expected in zip(results, module(*fresh), strict=True):
        assert same_bits(result, expected)
