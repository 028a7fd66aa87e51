"""``weights=`` of the divergences over a vocabulary: rows of logits, hidden states, a teacher's
entries. ``klfast.reduce`` of the divergences of the rows is the truth.
"""

import functools
import math

import pytest
import torch
from agreement import same_bits

import klfast

B, T, V, D, K = 3, 5, 37, 6, 4
EDGES = torch.tensor([0, 5, 5, 15])
SHAPES = {"[B, T]": (B, T), "[B, 1]": (B, 1), "[S]": (B,), "packed [S]": (3,)}
REDUCTIONS = ["none", "seq-mean", "token-mean", "seq-mean-token-mean"]


def from_logits(function, logits, ref_logits, head, dtype):
    return functools.partial(function, ref_logits=ref_logits.to(dtype)), {"logits": logits}


def from_entries(function, logits, ref_logits, head, dtype):
    entries, ids = ref_logits.log_softmax(-1).topk(K)
    call = functools.partial(function, ref_token_ids=ids, ref_logprobs=entries)
    return call, {"logits": logits}


def from_hidden(function, hidden, ref_hidden, head, dtype):
    call = functools.partial(function, ref_hidden=ref_hidden, ref_weight=head.clone())
    return call, {"hidden": hidden, "weight": head}


def entries_from_hidden(function, hidden, ref_hidden, head, dtype):
    call, _ = from_entries(function, None, ref_hidden @ head.T, head, dtype)
    return call, {"hidden": hidden, "weight": head}


FUNCTIONS = {
    "kl_divergence": (from_logits, V),
    "topk_kl_divergence": (from_entries, V),
    "linear_kl_divergence": (from_hidden, D),
    "linear_topk_kl_divergence": (entries_from_hidden, D),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


def case(function, form, dtype=torch.float32):
    """A call without its leaves, the leaves, the options, and weights of which some are 0."""
    make, width = FUNCTIONS[function]
    packed = form.startswith("packed")
    tokens = (B * T,) if packed else (B, T)
    first, second = torch.randn(2, *tokens, width)
    call, leaves = make(getattr(klfast, function), first, second, torch.randn(V, D), dtype)
    leaves = {name: t.to(dtype).requires_grad_() for name, t in leaves.items()}
    weights = torch.randint(0, 5, SHAPES[form]) / 4
    weights.view(-1)[0] = 0.0
    mask = torch.rand(tokens) < 0.8
    return call, leaves, {"mask": mask, "cu_seqlens": EDGES if packed else None}, weights


def results(call, leaves, **options):
    """The result, statistics, and gradients for an uneven incoming gradient."""
    outputs = call(**leaves, **options)
    kl, stats = (outputs.kl, outputs.stats) if options.get("return_stats") else (outputs, None)
    upstream = torch.linspace(1, 2, kl.numel(), dtype=kl.dtype).view(kl.shape)
    return kl, stats, torch.autograd.grad(kl, [*leaves.values()], upstream)


@pytest.mark.grid
@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("return_stats", [False, True])
@every_reduction
@every_function
def test_a_call_is_the_reduction_of_its_rows(backend, function, reduction, return_stats, form):
    call, leaves, options, weights = case(function, form, torch.float64)
    options |= {"backend": backend, "return_stats": return_stats}
    found = results(call, leaves, reduction=reduction, weights=weights, **options)
    rows = call(**leaves, backend=backend, mask=options["mask"], cu_seqlens=options["cu_seqlens"])
    of_rows = functools.partial(klfast.reduce, rows, options["mask"], reduction=reduction)
    expected = of_rows(weights=weights, cu_seqlens=options["cu_seqlens"])
    upstream = torch.linspace(1, 2, expected.numel(), dtype=expected.dtype).view(expected.shape)
    grads = torch.autograd.grad(expected, [*leaves.values()], upstream)
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[2], grads, rtol=1e-9, atol=1e-12)
    if return_stats:
        assert all(map(same_bits, found[1], call(**leaves, **options).stats))


@pytest.mark.grid
@pytest.mark.parametrize("form", ["[B, T]", "[S]", "packed [S]"])
@pytest.mark.parametrize("return_stats", [False, True])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@every_reduction
@every_function
def test_a_row_of_weight_0_may_hold_anything(
    backend, function, reduction, poison, return_stats, form
):
    call, leaves, options, weights = case(function, form)
    name, first = next(iter(leaves.items()))
    tokens = first.shape[:-1]
    lengths = EDGES.diff() if form.startswith("packed") else torch.full((B,), T)
    idle = (
        (weights == 0).expand(tokens)
        if weights.dim() == 2
        else ((weights == 0).repeat_interleave(lengths).view(tokens))
    )
    dirty = leaves | {name: torch.where(idle[..., None], poison, first.detach()).requires_grad_()}
    options |= {"backend": backend, "return_stats": return_stats, "weights": weights}
    (kl, _, grads), (dirty_kl, _, dirty_grads) = (
        results(call, given, reduction=reduction, **options) for given in (leaves, dirty)
    )
    torch.testing.assert_close(dirty_kl, kl)
    torch.testing.assert_close(dirty_grads, grads)
    assert (dirty_grads[0][idle] == 0).all()


@pytest.mark.parametrize("function", ["linear_kl_divergence", "linear_topk_kl_divergence"])
def test_a_head_gets_no_nan_from_hidden_states_of_weight_0(backend, function):
    """The statistics read the row, so it is in the chunk whose gradients a matmul sums."""
    call, leaves, options, weights = case(function, "[B, T]")
    options |= {"backend": backend, "return_stats": True, "weights": weights}
    dirty = leaves["hidden"].detach().clone()
    dirty[weights == 0] = math.nan
    for reduction in ("none", "token-mean"):
        clean, found = (
            results(
                call, leaves | {"hidden": hidden.requires_grad_()}, reduction=reduction, **options
            )
            for hidden in (leaves["hidden"], dirty)
        )
        torch.testing.assert_close(found[2], clean[2])


@pytest.mark.parametrize("return_stats", [False, True])
def test_log_probs_and_entropies_keep_rows_of_weight_0(backend, return_stats):
    call, leaves, options, weights = case("kl_divergence", "[B, T]")
    ids = torch.randint(V, (B, T))
    options |= {"token_ids": ids, "return_entropy": True, "return_stats": return_stats}
    options |= {"backend": backend, "reduction": "token-mean"}
    found, without = (call(**leaves, **options, weights=w) for w in (weights, None))
    for name in ("logprobs", "ref_logprobs", "entropy"):
        assert same_bits(getattr(found, name), getattr(without, name))
    grads = [
        torch.autograd.grad((each.logprobs + each.entropy).sum(), [*leaves.values()])
        for each in (found, without)
    ]
    torch.testing.assert_close(*grads)


@every_function
def test_a_negative_weight(backend, function):
    call, leaves, options, weights = case(function, "[B, T]")
    options["mask"][1, 2] = True
    weights[1, 2] = -1.0
    for reduction in REDUCTIONS:
        with pytest.raises(ValueError, match=r"weights must be >= 0 .*, got -1.0 at \[1, 2\]"):
            call(**leaves, **options, weights=weights, reduction=reduction, backend=backend)
