"""DTensors on real ranks have one process's numbers and gradients, sharded as promised."""

import itertools
import re

import pytest
import torch
from agreement import SCALAR_REDUCTIONS
from ranks import here, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

import klfast
from klfast.types.reduction import REDUCTIONS

B, T, V = 3, 6, 5  # three sequences on two ranks: uneven shards

LENGTHS = {"some": [6, 2, 0], "none": [0, 0, 0], "rank-without-a-token": [4, 6, 0]}


def make_batch(lengths="some"):
    """Name -> tensor, the same in every process."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    weights = torch.rand(B, T, generator=generator) + 0.1
    return {
        "logprobs": randn(B, T),
        "ref_logprobs": randn(B, T),
        "old_logprobs": randn(B, T),
        "logits": randn(B, T, V),
        "ref_logits": randn(B, T, V),
        "scores": randn(B),
        "token_ids": torch.randint(V, (B, T), generator=generator),
        "words": torch.rand(B, T, V, generator=generator).argsort(-1)[..., :2],
        "of_words": torch.where(
            torch.arange(B * T).reshape(B, T, 1) % 4 > 0, randn(B, T, 2) - 2, -torch.inf
        ),
        "temperature": torch.rand(B, T, generator=generator) + 0.5,
        "of_tokens": torch.rand(B, T, generator=generator),
        "of_sequences": torch.rand(B, generator=generator),
        "of_rows": torch.rand(B, 1, generator=generator),
        "mask": weights * (torch.arange(T) < torch.tensor(LENGTHS[lengths])[:, None]),
    }


class Case:
    """A call: its function, the names of its tensors, its options.

    A name is an argument's and a tensor's, or ``argument=tensor``.
    """

    def __init__(self, function, *names, lengths="some", **options):
        self.function = function
        self.names = names
        self.lengths = lengths
        self.options = options

    def run(self, place):
        """(outputs, gradients, type of the result) over tensors that ``place`` puts somewhere."""
        batch = make_batch(self.lengths)
        pairs = (name.partition("=") for name in self.names)
        tensors = {name: place(name, batch[of or name]) for name, _, of in pairs}
        models = [
            tensor.requires_grad_() for name, tensor in tensors.items() if name in DIFFERENTIATED
        ]
        result = getattr(klfast, self.function)(**tensors, **self.options)
        outputs = [part for part in tree_leaves(result) if part is not None]
        roots = [output for output in outputs if output.requires_grad]
        if roots:
            # The upstream gradients are the outputs' own values, not ones.
            sum((root * root.detach()).sum() for root in roots).backward()
        return outputs, [model.grad for model in models] if roots else [], type(result)


DIFFERENTIATED = ("logprobs", "ref_logprobs", "logits", "ref_logits")
PAIR = ("logprobs", "ref_logprobs")
MODELS = ("logits", "ref_logits")
ENTRIES = ("ref_token_ids=words", "ref_logprobs=of_words")
LIMITED = klfast.Estimator("k3", log_ratio_clip=1.0, importance_cap=2.0)

CASES = {
    **{
        f"kl_penalty-{reduction}-{mask}": Case(
            "kl_penalty", *PAIR, *(() if mask == "no-mask" else ("mask",)), reduction=reduction
        )
        for reduction, mask in itertools.product(REDUCTIONS, ["mask", "no-mask"])
    },
    **{
        f"kl_penalty-{reduction}-{lengths}": Case(
            "kl_penalty", *PAIR, "mask", reduction=reduction, lengths=lengths
        )
        for reduction, lengths in itertools.product(SCALAR_REDUCTIONS, [*LENGTHS][1:])
    },
    "kl_penalty-options": Case(
        *("kl_penalty", *PAIR, "mask", "old_logprobs"),
        estimator=LIMITED,
        reduction="token-mean",
        normalizer=7.0,
        coef=torch.tensor(0.3),
    ),
    **{
        f"{function}-weights-{reduction}-{of}": Case(
            function, *models, "mask", f"weights={of}", reduction=reduction
        )
        for function, models in (("kl_penalty", PAIR), ("kl_divergence", MODELS))
        for reduction in ("none", "seq-mean", "token-mean")
        for of in ("of_tokens", "of_sequences", "of_rows")
    },
    "kl_penalty-stats": Case(
        "kl_penalty", *PAIR, "mask", reduction="seq-mean-token-mean", return_stats=True
    ),
    "kl_rewards": Case("kl_rewards", "scores", *PAIR, "mask", kl_coef=0.1, return_stats=True),
    "token_logprobs": Case("token_logprobs", "logits", "token_ids", "mask", return_entropy=True),
    **{
        f"kl_divergence-{reduction}": Case(
            "kl_divergence", *MODELS, "mask", reduction=reduction, direction="jsd"
        )
        for reduction in REDUCTIONS
    },
    "kl_divergence-tokens": Case(
        "kl_divergence", *MODELS, "token_ids", "mask", reduction="token-mean", return_stats=True
    ),
    "kl_divergence-entropy": Case(
        "kl_divergence", *MODELS, "mask", reduction="token-mean", return_entropy=True
    ),
    **{
        f"kl_divergence-{direction}": Case(
            *("kl_divergence", *MODELS, "mask", "temperature"),
            reduction="seq-mean-token-mean",
            direction=direction,
            return_stats=True,
        )
        for direction in ("reverse", "forward")
    },
    **{
        f"topk_kl_divergence-{reduction}": Case(
            *("topk_kl_divergence", "logits", *ENTRIES, "mask", "temperature"),
            reduction=reduction,
            return_stats=reduction == "seq-mean",
        )
        for reduction in REDUCTIONS
    },
    "topk_kl_divergence-no-mask": Case(
        *("topk_kl_divergence", "logits", *ENTRIES),
        reduction="seq-mean-token-mean",
        return_stats=True,
    ),
    "token_logprobs-picks": Case(
        *("token_logprobs", "logits", "token_ids=words", "mask", "temperature"), return_entropy=True
    ),
}


def placed(mesh, kind):
    """place(name, tensor) -> a DTensor."""

    def place(name, tensor):
        of_tokens = tensor.dim() > 1
        if kind == "partial" and name in DIFFERENTIATED:
            share = tensor if mesh.get_local_rank() == 0 else torch.zeros_like(tensor)
            return DTensor.from_local(share, mesh, [Partial()])
        placement = {
            "sequences": Shard(0),
            "tokens": Shard(1) if of_tokens else Replicate(),
            "words": Shard(2) if tensor.dim() == 3 else Replicate(),
            "mixed": Replicate() if name in ("mask", "ref_logits", "scores") else Shard(0),
        }.get(kind, Replicate())
        return distribute_tensor(tensor, mesh, [placement])

    return place


def on_mesh():
    return init_device_mesh("cpu", (here()[1],))


def sharded():
    """The batch, with its sequences sharded over the ranks."""
    place = placed(on_mesh(), "sequences")
    return {name: place(name, tensor) for name, tensor in make_batch().items()}


def assert_those_of_one_process(name, place):
    """Compare a case with plain tensors, and return the placements of its outputs."""
    *found, kind = CASES[name].run(place)
    *expected, plain_kind = CASES[name].run(lambda _, tensor: tensor)
    assert kind is plain_kind or issubclass(kind, DTensor)
    for ours, plain in zip(found, expected, strict=True):
        whole = [tensor.full_tensor().detach() for tensor in ours]
        plain = [tensor.detach() for tensor in plain]
        torch.testing.assert_close(whole, plain, rtol=1e-12, atol=1e-14, equal_nan=True)
    return [str(output.placements[0]) for output in found[0]]


PLACEMENTS = ["replicate", "sequences", "tokens", "words", "partial", "mixed"]
STAY = {
    ("kl_penalty-none-mask", "replicate"): "R",
    ("kl_penalty-none-mask", "sequences"): "S(0)",
    ("kl_penalty-none-mask", "tokens"): "S(1)",
    ("kl_penalty-seq-sum-mask", "sequences"): "S(0)",
    ("kl_penalty-seq-sum-mask", "tokens"): "R",
    ("kl_penalty-token-mean-mask", "sequences"): "P(sum)",
    ("kl_penalty-token-mean-mask", "tokens"): "P(sum)",
    ("kl_penalty-token-mean-mask", "replicate"): "R",
    ("kl_penalty-stats", "tokens"): "R",
    ("kl_rewards", "sequences"): "S(0)",
    ("kl_rewards", "tokens"): "R",
    ("token_logprobs", "tokens"): "S(1)",
    ("token_logprobs", "words"): "R",
    ("kl_divergence-forward", "words"): "R",
    ("kl_divergence-token-mean", "sequences"): "P(sum)",
    ("kl_divergence-token-mean", "words"): "R",
    ("kl_divergence-token-mean", "partial"): "R",
}
"""The placements of first outputs. Statistics are on every rank."""


@pytest.mark.parametrize("name", CASES)
@on_ranks
def test_ranks_together_have_what_one_process_has(name):
    """Results stay where their tokens are."""
    mesh = on_mesh()
    for kind in PLACEMENTS:
        first, *others = assert_those_of_one_process(name, placed(mesh, kind))
        assert first == STAY.get((name, kind), first), kind
        if kind == "sequences" and name in ("kl_penalty-stats", "kl_rewards"):
            assert others == ["R"] * len(klfast.KLStats._fields)


OVER_LOGITS = [name for name in CASES if name.startswith(("token_logprobs", "kl_divergence"))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [4])
@pytest.mark.parametrize("name", OVER_LOGITS)
@on_ranks
def test_a_vocabulary_and_sequences_sharded_at_once(name, size):
    mesh = init_device_mesh("cpu", (2, 2))
    for dimensions in ((0, 2), (2, 0), (2, 2), (1, 2)):

        def place(_, tensor, dimensions=dimensions):
            placements = [Shard(d) if d < tensor.dim() else Replicate() for d in dimensions]
            return distribute_tensor(tensor, mesh, placements)

        assert_those_of_one_process(name, place)


@on_ranks
def test_logits_of_a_sharded_vocabulary_stay_where_they_are():
    """A collective sends five numbers a token for two ranks, or 32 about the call."""
    sent = []

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "c10d" in function.namespace:
                sent.extend(t.numel() for t in tree_leaves(args) if isinstance(t, torch.Tensor))
            return function(*args, **(kwargs or {}))

    place = placed(on_mesh(), "words")
    logits = [place(name, torch.randn(2, 3, 1000, requires_grad=True)) for name in MODELS]
    with Counted():
        klfast.kl_divergence(*logits, reduction="token-mean").to_local().backward()
    assert 0 < max(sent) <= 2 * 32


PLAIN = "must be a plain tensor, got DTensor"


@on_ranks
def test_what_is_refused_is_refused_on_every_rank():
    mesh, plain, batch = on_mesh(), make_batch(), sharded()
    pair, ids = [batch[name] for name in PAIR], batch["token_ids"]
    fewer = distribute_tensor(plain["ref_logprobs"][:2], mesh, [Shard(0)])
    wide, narrow = (
        distribute_tensor(plain["logits"][..., :n], mesh, [Shard(2)]) for n in (V, V - 1)
    )
    whole = "in its sharded dimensions"
    states, weight, head = batch["logits"], plain["logits"][0], batch["logits"][0]
    for function, arguments, options, message in (
        (
            *("kl_penalty", (*pair, plain["mask"]), {}),
            "mask must be a DTensor, like logprobs, got Tensor",
        ),
        (
            *("kl_penalty", (plain["logprobs"], pair[1]), {}),
            "logprobs must be a DTensor, like ref_logprobs, got Tensor",
        ),
        (
            *("kl_penalty", (pair[0], fewer), {}),
            f"ref_logprobs must have the shape of logprobs, [3, 6], {whole}, got [2, 6]",
        ),
        (
            *("kl_penalty", pair, {"weights": distribute_tensor(torch.ones(T), mesh, [Shard(0)])}),
            "weights must have the shape of logprobs, [3, 6], or one number for each sequence, got "
            "[6]",
        ),
        (
            *("kl_divergence", (wide, narrow), {}),
            f"ref_logits must have the shape of logits, [3, 6, 5], {whole}, got [3, 6, 4]",
        ),
        (
            *("token_logprobs", (batch["logits"], ids), {"inplace_backward": True}),
            "inplace_backward must be False for DTensors, got True",
        ),
        (
            *("token_logprobs", (batch["logits"], ids), {"group": mesh}),
            "group must be None for DTensors, whose placements say which shards there are, got "
            "DeviceMesh",
        ),
        ("rollout_correction", pair, {}, f"logprobs {PLAIN}"),
        ("data_parallel_normalizer", (batch["mask"], "token-mean"), {}, f"mask {PLAIN}"),
        ("linear_kl_divergence", (states, weight, states), {}, f"hidden {PLAIN}"),
        (
            *("linear_token_logprobs", (plain["logits"], head, plain["token_ids"])),
            *({"group": mesh}, "weight must be a plain tensor with group"),
        ),
    ):
        with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
            getattr(klfast, function)(*arguments, **options)
