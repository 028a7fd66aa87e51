"""``data_parallel_normalizer``, and the gradients of ranks, which DDP averages."""

import pytest
import readme
import torch
from agreement import same_bits
from frameworks import logprobs_of
from ranks import assert_same_on_ranks, counted_all_reduces, here, on_ranks
from torch.distributed.device_mesh import init_device_mesh

import klfast
from klfast.compat import trl, verl

SEQUENCES, TOKENS, WIDTH, WORDS = 4, 6, 5, 7
REDUCTIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


def make_batch(lengths):
    """(features, reference logits, token ids, mask) of the whole batch."""
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(SEQUENCES, TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    ref_logits = torch.randn(SEQUENCES, TOKENS, WORDS, dtype=torch.float64, generator=generator)
    token_ids = torch.randint(WORDS, (SEQUENCES, TOKENS), generator=generator)
    mask = torch.arange(TOKENS) < torch.tensor(lengths)[:, None]
    return features, ref_logits, token_ids, mask


def with_klfast(model, batch, function, reduction, estimator="k3", **options):
    features, ref_logits, token_ids, mask = batch
    pair = model(features), ref_logits
    if function == "kl_penalty":
        pair = [logprobs_of(logits, token_ids) for logits in pair]
        options["estimator"] = estimator
    return getattr(klfast, function)(*pair, mask, reduction=reduction, **options)


def run(name, model, batch, mesh):
    """Run an example of a page."""
    features, ref_logits, token_ids, mask = batch
    left = readme.run(
        name,
        torch=torch,
        klfast=klfast,
        mesh=mesh,
        logprobs=logprobs_of(model(features), token_ids),
        ref_logprobs=logprobs_of(ref_logits, token_ids),
        mask=mask,
    )
    return left["loss_kl"]


def with_verl(model, batch, reduction, total):
    """The count is of all ranks, because verl multiplies by the number of ranks."""
    features, ref_logits, token_ids, mask = batch
    pair = logprobs_of(model(features), token_ids), logprobs_of(ref_logits, token_ids)
    counts = {"batch_num_tokens": total, "global_batch_size": total, "dp_size": 2}
    return verl.kl_loss(*pair, "k3", mask, reduction, **counts)


def with_trl(model, batch, total):
    features, ref_logits, token_ids, mask = batch
    loss, _ = trl.kl_loss(
        logprobs_of(model(features), token_ids),
        logprobs_of(ref_logits, token_ids),
        mask,
        beta=1.0,
        loss_type="dapo",
        normalizer=total / 2,
        use_bias_correction_kl=False,
    )
    return loss


def losses(model, whole, rank, mesh):
    """(the loss of this rank's half of the batch, how klfast computes the whole batch's loss)."""
    half = slice(rank * SEQUENCES // 2, (rank + 1) * SEQUENCES // 2)
    batch = [tensor[half] for tensor in whole]
    mask = whole[-1]
    totals = {"token-mean": mask.sum(), "seq-mean-token-mean": mask.any(-1).sum()}
    for reduction, total in totals.items():
        normalizer = klfast.data_parallel_normalizer(batch[-1], reduction)
        for function in ("kl_penalty", "kl_divergence"):
            loss = with_klfast(model, batch, function, reduction, normalizer=normalizer)
            yield loss, (function, reduction)
        yield with_verl(model, batch, reduction, total), ("kl_penalty", reduction)
    yield with_trl(model, batch, totals["token-mean"]), ("kl_penalty", "token-mean")
    yield run("data-parallel", model, batch, mesh), ("kl_penalty", "token-mean", "k3+")
    how, half = ("kl_penalty", "seq-mean-token-mean", "k3+"), TOKENS // 2
    tokens = [tensor[:, rank * half : (rank + 1) * half] for tensor in whole]
    yield run("context-parallel", model, tokens, mesh), how
    yield run("context-parallel-plain", model, tokens, mesh), how


@pytest.mark.parametrize("lengths", [(6, 5, 2, 0), (6, 2, 0, 0)], ids=str)
@on_ranks
def test_the_gradient_under_ddp_is_that_of_one_process(lengths):
    """klfast, frameworks and the pages' examples have it. Rank 0 has the first two sequences."""
    rank, size, _ = here()
    torch.manual_seed(1)
    model, whole = torch.nn.Linear(WIDTH, WORDS, dtype=torch.float64), make_batch(lengths)
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = {"cp": init_device_mesh("cpu", (size,))}
    for loss, how in losses(parallel, whole, rank, mesh):
        parallel.zero_grad(set_to_none=False)
        loss.backward()
        expected = torch.autograd.grad(with_klfast(model, whole, *how), [*model.parameters()])
        found = [p.grad for p in model.parameters()]
        torch.testing.assert_close(found, [*expected], rtol=1e-6, atol=1e-8)
        assert max(part.norm() for part in expected) > 0.01


def assert_counts(own, size):
    """Compare the normalizers of own masks with the batch's denominator divided by the ranks."""
    generator = torch.Generator().manual_seed(5)
    kept = torch.arange(9) < torch.tensor([9, 4, 0, 7, 1, 8])[:, None]
    for mask in (kept, kept * (torch.rand(6, 9, generator=generator) + 0.1)):
        masks = [*mask[own].split(2)] if len(mask[own]) else []
        flat = [piece.flatten() for piece in masks]
        offsets = [torch.arange(len(piece) + 1) * 9 for piece in masks]
        for reduction in REDUCTIONS:
            count = mask.double().sum() if reduction == "token-mean" else kept.any(-1).sum()
            for found in (
                klfast.data_parallel_normalizer(masks, reduction),
                klfast.data_parallel_normalizer(mask[own], reduction),
                klfast.data_parallel_normalizer(flat, reduction, cu_seqlens=offsets),
            ):
                assert (found.dim(), found.dtype) == (0, torch.float64)
                torch.testing.assert_close(found, count.double() / size, rtol=1e-15, atol=0)
                yield found


@pytest.mark.parametrize("at", [3, 5, 6], ids=["even", "uneven", "rank-without-a-sequence"])
@on_ranks
def test_the_normalizer_is_the_denominator_over_the_ranks(at):
    """Rank 0 has the first ``at`` of the six sequences."""
    rank, size, _ = here()
    assert_same_on_ranks(*assert_counts(slice(at) if rank == 0 else slice(at, None), size))


@on_ranks
def test_one_all_reduce_and_nothing_to_divide_by():
    _, size, group = here()
    for nothing in ([], torch.zeros(2, 3)):
        assert klfast.data_parallel_normalizer(nothing, "token-mean").item() == 1 / size
    masks = [torch.ones(2, 3), torch.ones(1, 2)]
    calls = counted_all_reduces(lambda: klfast.data_parallel_normalizer(masks, "token-mean", group))
    assert [numbers for _, numbers in calls] == [size]


def test_without_ranks_it_is_the_denominator():
    assert len([*assert_counts(slice(None), 1)]) == 18
    many = torch.tensor([2.0**24, 1.0])  # fp32 cannot count this
    assert klfast.data_parallel_normalizer(many, "token-mean").item() == 2**24 + 1
    one = klfast.data_parallel_normalizer(torch.tensor([0.5, 0.25]), "seq-mean-token-mean")
    assert same_bits(one, torch.ones((), dtype=torch.float64))  # one sequence


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16], ids=str)
def test_of_any_mask(dtype):
    for shape in ((0, 3), (3, 0), (0,), (2, 3)):
        mask = torch.ones(shape, dtype=dtype)
        expected = max(1, mask.numel())
        assert klfast.data_parallel_normalizer(mask, "token-mean").item() == expected


OFFSETS = torch.tensor([0, 3])
WRONG = {
    "sum": (torch.ones(3), {"reduction": "token-sum"}, ValueError, "must be one of 'token-mean"),
    "dapo": (torch.ones(3), {"reduction": "dapo"}, ValueError, "'dapo' is reduction='token-"),
    "number": (3, {}, TypeError, r"mask must be a torch\.Tensor, got int"),
    "complex": (torch.ones(3) * 1j, {}, TypeError, "mask must have one of"),
    "3-d": (torch.ones(1, 2, 3), {}, ValueError, r"shape \[B, T\] or \[N\]"),
    "padded": (torch.ones(1, 3), {"cu_seqlens": OFFSETS}, ValueError, "be packed"),
    "negative": (-torch.ones(3), {}, ValueError, "mask must hold finite weights"),
    "offsets": (torch.ones(4), {"cu_seqlens": OFFSETS}, ValueError, "must end at"),
    "list": ([torch.ones(3)], {"cu_seqlens": OFFSETS}, ValueError, "a list of as many"),
    "fewer": ([torch.ones(3)] * 2, {"cu_seqlens": [OFFSETS]}, ValueError, "got 1 for 2"),
    "group": (torch.ones(3), {"group": "all"}, TypeError, "group must be a torch"),
    "gradient": (torch.ones(3, requires_grad=True), {}, ValueError, "mask must be a constant"),
}


@pytest.mark.parametrize(("mask", "options", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(mask, options, error, text):
    with pytest.raises(error, match=text):
        klfast.data_parallel_normalizer(mask, **{"reduction": "token-mean", **options})
