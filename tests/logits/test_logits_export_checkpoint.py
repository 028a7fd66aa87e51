"""torch.export and activation checkpointing over logits."""

import pytest
import torch
from agreement import same_bits
from agreement_logits import (
    DIRECTIONS,
    FAST,
    NOT_EMULATED,
    leaves,
    random_ids,
    random_logits,
    tensors_of,
)
from torch.export import Dim, export
from torch.utils.checkpoint import checkpoint

import klfast

every_fast = pytest.mark.parametrize("backend", FAST, indirect=True)


class Divergence(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, logits, ref_logits, ids):
        outputs = klfast.kl_divergence(logits, ref_logits, token_ids=ids, **self.options)
        backend, reduction = self.options["backend"], self.options["reduction"]
        ref_logprobs, words = ref_logits.log_softmax(-1).topk(2)
        return (
            *outputs,
            *klfast.token_logprobs(logits, ids, return_entropy=True, backend=backend),
            klfast.token_logprobs(logits, words, ignore_index=3, backend=backend),
            klfast.topk_kl_divergence(
                logits, words, ref_logprobs, reduction=reduction, backend=backend
            ),
        )


def arguments(*shape):
    logits, ref_logits = random_logits(*shape)
    return logits, ref_logits, random_ids(logits)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("reduction", ["none", "token-mean"])
@pytest.mark.parametrize("backend", NOT_EMULATED, indirect=True)
def test_an_exported_program_takes_any_batch(backend, reduction, strict):
    module = Divergence(reduction=reduction, direction="jsd", backend=backend, return_stats=True)
    tokens = {0: Dim("batch"), 1: Dim("tokens")}
    words = {**tokens, 2: Dim("words")}
    shapes = (words, words, tokens)
    program = export(module, arguments(3, 7, 11), dynamic_shapes=shapes, strict=strict).module()
    for inputs in (arguments(3, 7, 11), arguments(5, 2, 70)):
        torch.testing.assert_close(program(*inputs), module(*inputs))


def test_an_exported_program_names_the_ops_and_survives_a_file(tmp_path):
    module = Divergence(reduction="token-mean", backend="native")
    program = export(module, arguments(3, 7, 11))
    ops = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.klfast.kl_divergence_fwd.default in ops
    assert torch.ops.klfast.token_logprobs_fwd.default in ops
    torch.export.save(program, tmp_path / "divergence.pt2")
    inputs = arguments(3, 7, 11)
    loaded = torch.export.load(tmp_path / "divergence.pt2").module()
    torch.testing.assert_close(loaded(*inputs), module(*inputs))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@every_fast
def test_a_checkpointed_divergence_has_the_bits_of_a_plain_one(backend, direction, use_reentrant):
    models = leaves(*random_logits(2, 3, 37))
    ids = random_ids(models[0])
    for reduction in ("none", "seq-mean", "token-mean"):

        def loss(logits, ref_logits, reduction=reduction):
            logits = logits - 0.25  # lives only within
            options = {"reduction": reduction, "direction": direction, "backend": backend}
            divergence = klfast.kl_divergence(logits, ref_logits, **options)
            return divergence.sum() + klfast.token_logprobs(logits, ids, backend=backend).sum()

        plain = loss(*models)
        expected = torch.autograd.grad(plain, models)
        inputs = leaves(*models)
        result = checkpoint(loss, *inputs, use_reentrant=use_reentrant)
        result.backward()
        assert same_bits(result.detach(), plain.detach())
        assert all(same_bits(t.grad, e) for t, e in zip(inputs, expected, strict=True))


@every_fast
def test_a_checkpoint_saves_no_logits(backend):
    """The point of it: what klfast keeps for its backward is not kept."""
    models = leaves(*random_logits(2, 3, 37))
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    def loss(logits, ref_logits):
        return klfast.kl_divergence(logits * 1.5, ref_logits * 1.5, backend=backend).sum()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        checkpoint(loss, *models, use_reentrant=False)
    large = [t for t in saved if t.numel() >= 2 * 3 * 37]
    assert not [t for t in large if not any(t is model for model in models)]


def test_nothing_of_the_logits_size_is_saved_but_the_logits():
    """By the compiled kernels, for the backward that reads them again."""
    models = [t * 1 for t in leaves(*random_logits(2, 3, 37))]
    ids = random_ids(models[0])
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        klfast.kl_divergence(*models, token_ids=ids, backend="native")
        klfast.token_logprobs(models[0], ids, return_entropy=True, backend="native")
    addresses = {t.data_ptr() for t in saved if t.numel() >= 2 * 3 * 37}
    assert addresses == {model.data_ptr() for model in models}


class Everything(torch.nn.Module):
    def forward(self, logits, ref_logits, ids):
        return (
            klfast.kl_divergence(logits, ref_logits, reduction="token-mean"),
            *tensors_of(klfast.kl_divergence(logits, ref_logits, direction="jsd", token_ids=ids)),
            *klfast.token_logprobs(logits, ids, return_entropy=True, temperature=0.7),
        )


# AOTInductor itself uses what torch deprecates.
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.* is deprecated")
def test_a_package_of_aot_inductor_has_eagers_bits(tmp_path):
    module = Everything()
    package = torch._inductor.aoti_compile_and_package(
        export(module, arguments(3, 7, 11)), package_path=str(tmp_path / "everything.pt2")
    )
    inputs = arguments(3, 7, 11)
    results = torch._inductor.aoti_load_package(package)(*inputs)
    for result, expected in zip(results, module(*inputs), strict=True):
        assert same_bits(result, expected)
