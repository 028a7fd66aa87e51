"""``normalizer`` under data parallelism, on two real ranks: DDP averages gradients.

Each rank has half of the batch. With the count of all ranks divided by the world size, the gradient
that DDP leaves on every rank is that of one process with the whole batch. All cases run in one pair
of processes; the tests look at the gradients that these left behind.
"""

import pytest
import readme
import torch
from ranks import WORLD_SIZE, results_of_ranks
from torch.distributed.device_mesh import init_device_mesh

import klfast
from klfast.compat import trl, verl

SEQUENCES, TOKENS, WIDTH, WORDS = 4, 6, 5, 7
SPLITS = {  # lengths of the sequences: the first two are rank 0's, the others rank 1's
    "uneven": [6, 5, 2, 0],
    "rank-without-a-token": [6, 2, 0, 0],
}
REDUCTIONS = ["token-mean", "seq-mean-token-mean"]
FUNCTIONS = ["kl_penalty", "kl_divergence"]

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)


def make_model():
    """The policy, logits from features: the same in every process."""
    torch.manual_seed(1)
    return torch.nn.Linear(WIDTH, WORDS, dtype=torch.float64)


def make_batch(split):
    """(features, reference logits, token ids, mask) of the whole batch."""
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(SEQUENCES, TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    ref_logits = torch.randn(SEQUENCES, TOKENS, WORDS, dtype=torch.float64, generator=generator)
    token_ids = torch.randint(WORDS, (SEQUENCES, TOKENS), generator=generator)
    mask = torch.arange(TOKENS) < torch.tensor(SPLITS[split])[:, None]
    return features, ref_logits, token_ids, mask


def picked(logits, token_ids):
    return logits.log_softmax(-1).gather(-1, token_ids[..., None]).squeeze(-1)


def count(mask, reduction):
    """What a mean divides by: kept tokens, or sequences that keep one."""
    return mask.sum() if reduction == "token-mean" else mask.any(-1).sum()


# What the ranks do


def with_klfast(model, batch, function, reduction, normalizer):
    features, ref_logits, token_ids, mask = batch
    pair = model(features), ref_logits
    if function == "kl_penalty":
        pair = [picked(logits, token_ids) for logits in pair]
    return getattr(klfast, function)(*pair, mask, reduction=reduction, normalizer=normalizer)


def with_readme(model, batch):
    features, ref_logits, token_ids, mask = batch
    left = readme.run(
        "data-parallel",
        torch=torch,
        klfast=klfast,
        logprobs=picked(model(features), token_ids),
        ref_logprobs=picked(ref_logits, token_ids),
        mask=mask,
    )
    return left["loss_kl"]


def with_context_parallelism(model, whole, rank, mesh):
    """Each rank has half of the tokens of every sequence."""
    half = slice(rank * TOKENS // WORLD_SIZE, (rank + 1) * TOKENS // WORLD_SIZE)
    features, ref_logits, token_ids, mask = (tensor[:, half] for tensor in whole)
    left = readme.run(
        "context-parallel",
        klfast=klfast,
        mesh=mesh,
        logprobs=picked(model(features), token_ids),
        ref_logprobs=picked(ref_logits, token_ids),
        mask=mask,
    )
    return left["loss_kl"]


def with_verl(model, batch, reduction, total):
    """The count of all ranks as it is: verl multiplies by the number of ranks."""
    features, ref_logits, token_ids, mask = batch
    pair = picked(model(features), token_ids), picked(ref_logits, token_ids)
    counts = {"batch_num_tokens": total, "global_batch_size": total, "dp_size": WORLD_SIZE}
    return verl.kl_loss(*pair, "k3", mask, reduction, **counts)


def with_trl(model, batch, total):
    features, ref_logits, token_ids, mask = batch
    loss, _ = trl.kl_loss(
        picked(model(features), token_ids),
        picked(ref_logits, token_ids),
        mask,
        beta=1.0,
        loss_type="dapo",
        normalizer=total / WORLD_SIZE,
        use_bias_correction_kl=False,
    )
    return loss


def losses(model, whole, rank, mesh):
    """Name -> loss of this rank's half of the batch."""
    half = slice(rank * SEQUENCES // WORLD_SIZE, (rank + 1) * SEQUENCES // WORLD_SIZE)
    batch = [tensor[half] for tensor in whole]
    for reduction in REDUCTIONS:
        total = count(whole[-1], reduction)
        for function in FUNCTIONS:
            loss = with_klfast(model, batch, function, reduction, total / WORLD_SIZE)
            yield (function, reduction), loss
        yield ("verl", reduction), with_verl(model, batch, reduction, total)
    yield ("trl",), with_trl(model, batch, count(whole[-1], "token-mean"))
    yield ("readme",), with_readme(model, batch)
    yield ("context-parallel",), with_context_parallelism(model, whole, rank, mesh)


def work(rank):
    """The gradients that DDP leaves a rank with, by case."""
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    mesh = {"cp": init_device_mesh("cpu", (WORLD_SIZE,))}
    gradients = {}
    for split in SPLITS:
        for case, loss in losses(model, make_batch(split), rank, mesh):
            model.zero_grad()
            loss.backward()
            gradients[(split, *case)] = [p.grad.clone() for p in model.parameters()]
    return gradients


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """Case -> what DDP left; the same on both ranks."""
    ranks = results_of_ranks(work, tmp_path_factory.mktemp("ranks"))
    assert ranks[0].keys() == ranks[1].keys()
    for case, gradient in ranks[0].items():
        torch.testing.assert_close(ranks[1][case], gradient, rtol=0, atol=0)
    return ranks[0]


# What one process does


def textbook(logits, ref_logits, token_ids, function):
    """Per token, in float64 and by autograd: k3, k2 (whose gradient k3+ has), or the reverse KL."""
    if function == "kl_divergence":
        log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    x = picked(logits, token_ids) - picked(ref_logits, token_ids)
    return x.square() / 2 if function == "k3+" else torch.exp(-x) - 1 + x


def single_process(split, function, reduction):
    """The gradient of the mean over the sequences."""
    model = make_model()
    features, ref_logits, token_ids, mask = make_batch(split)
    kl = textbook(model(features), ref_logits, token_ids, function) * mask
    if reduction == "token-mean":
        loss = kl.sum() / max(1, mask.sum())
    else:
        means = kl.sum(-1) / mask.sum(-1).clamp(min=1)
        loss = means.sum() / max(1, mask.any(-1).sum())
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_same(gradient, expected):
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


every_split = pytest.mark.parametrize("split", SPLITS)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
every_function = pytest.mark.parametrize("function", FUNCTIONS)


@every_function
@every_reduction
@every_split
def test_count_of_all_ranks_over_world_size_is_the_whole_batch(
    gradients, split, reduction, function
):
    expected = single_process(split, function, reduction)
    assert max(part.norm() for part in expected) > 0.01
    assert_same(gradients[split, function, reduction], expected)


@pytest.mark.parametrize(
    ("example", "reduction"),
    [("readme", "token-mean"), ("context-parallel", "seq-mean-token-mean")],
)
@every_split
def test_the_pages_examples_are_the_whole_batch(gradients, split, example, reduction):
    expected = single_process(split, "k3+", reduction)
    torch.testing.assert_close(gradients[split, example], expected, rtol=1e-6, atol=1e-8)


@every_split
def test_frameworks_take_the_count_of_all_ranks(gradients, split):
    """And verl the number of ranks, TRL the count over it."""
    for reduction in REDUCTIONS:
        expected = single_process(split, "kl_penalty", reduction)
        assert_same(gradients[split, "verl", reduction], expected)
    assert_same(gradients[split, "trl"], single_process(split, "kl_penalty", "token-mean"))
