"""DTensors on two real ranks: the numbers and gradients of one process, sharded as promised.

All cases run in one pair of processes; the tests look at what these left behind.
"""

import itertools

import pytest
import torch
from agreement import SCALAR_REDUCTIONS
from ranks import WORLD_SIZE, results_of_ranks
from torch.utils._pytree import tree_leaves

import klfast
from klfast.types.reduction import REDUCTIONS

B, T, V = 3, 6, 5  # three sequences on two ranks: uneven shards

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)

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
        "mask": weights * (torch.arange(T) < torch.tensor(LENGTHS[lengths])[:, None]),
    }


class Case:
    """A call: its function, which tensors it takes, its options. A name is an argument's and a
    tensor's, or ``argument=tensor``.
    """

    def __init__(self, function, *names, lengths="some", **options):
        self.function = function
        self.names = names
        self.lengths = lengths
        self.options = options

    def run(self, place):
        """(outputs, gradients): the function over tensors that ``place`` puts somewhere."""
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
            # Other gradients than ones: the outputs' own values.
            sum((root * root.detach()).sum() for root in roots).backward()
        return outputs, [model.grad for model in models] if roots else []


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
PLACEMENTS = ["replicate", "sequences", "tokens", "words", "partial", "mixed"]


# What the ranks do


def placed(mesh, kind):
    """place(name, tensor) -> a DTensor."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

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


def travelled(mesh):
    """The most numbers that a call over a sharded vocabulary has sent in one collective."""
    place, sent = placed(mesh, "words"), []

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "c10d" in function.namespace:
                sent.extend(t.numel() for t in tree_leaves(args) if isinstance(t, torch.Tensor))
            return function(*args, **(kwargs or {}))

    logits, ref_logits = (
        place(name, torch.randn(2, 3, 1000, requires_grad=True)) for name in MODELS
    )
    with Counted():
        klfast.kl_divergence(logits, ref_logits, reduction="token-mean").to_local().backward()
    return max(sent)


def refusals(mesh):
    """Name -> the error of a call that no placement serves."""
    from torch.distributed.tensor import Shard, distribute_tensor

    batch = make_batch()
    dtensors = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in batch.items()}
    calls = {
        "plain-mask": lambda: klfast.kl_penalty(
            dtensors["logprobs"], dtensors["ref_logprobs"], batch["mask"]
        ),
        "plain-logprobs": lambda: klfast.kl_penalty(batch["logprobs"], dtensors["ref_logprobs"]),
        "shape": lambda: klfast.kl_penalty(
            dtensors["logprobs"], distribute_tensor(batch["ref_logprobs"][:2], mesh, [Shard(0)])
        ),
        "inplace": lambda: klfast.token_logprobs(
            dtensors["logits"], dtensors["token_ids"], inplace_backward=True
        ),
        "group": lambda: klfast.token_logprobs(
            dtensors["logits"], dtensors["token_ids"], group=mesh
        ),
        "words": lambda: klfast.kl_divergence(
            *(distribute_tensor(batch["logits"][..., :v], mesh, [Shard(2)]) for v in (V, V - 1))
        ),
    }
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            yield name, f"{type(error).__name__}: {error}"


def fields(mesh):
    """Class and field names of what each function returns over logits, but for those of None."""
    place = placed(mesh, "sequences")
    batch = {name: place(name, tensor) for name, tensor in make_batch().items()}
    logits, ref_logits, ids = (batch[name] for name in (*MODELS, "token_ids"))
    for result in (
        klfast.token_logprobs(logits, ids, return_entropy=True),
        klfast.kl_divergence(logits, ref_logits, return_entropy=True),
        klfast.kl_divergence(logits, ref_logits, token_ids=ids, return_stats=True),
    ):
        found = result._asdict().items()
        yield type(result).__name__, [name for name, part in found if part is not None]


def controlled(mesh):
    """An adaptive controller after an update with the statistics of all ranks."""
    controller = klfast.AdaptiveKLController(0.1, 6.0)
    place = placed(mesh, "sequences")
    batch = {name: place(name, tensor) for name, tensor in make_batch().items()}
    _, stats = klfast.kl_penalty(
        *(batch[name] for name in (*PAIR, "mask")), reduction="token-mean", return_stats=True
    )
    controller.update(stats)
    return controller.value


def work(rank):
    """The results of every case on a rank, whole, and their placements."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD_SIZE,))
    left = {}
    for (name, case), kind in itertools.product(CASES.items(), PLACEMENTS):
        outputs, gradients = case.run(placed(mesh, kind))
        left[name, kind] = (
            [output.full_tensor().detach() for output in outputs],
            [gradient.full_tensor() for gradient in gradients],
            [str(output.placements[0]) for output in outputs],
        )
    left["fields"] = list(fields(mesh))
    left["refusals"] = dict(refusals(mesh))
    left["controller"] = controlled(mesh)
    left["travelled"] = travelled(mesh)
    return left


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """What each of the ranks left."""
    return results_of_ranks(work, tmp_path_factory.mktemp("ranks"))


def same(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_together_have_what_one_process_has(left, name, kind):
    outputs, gradients = CASES[name].run(lambda _, tensor: tensor)
    for rank in left:
        ours, our_gradients, _ = rank[name, kind]
        assert len(ours) == len(outputs)
        same(ours, [output.detach() for output in outputs])
        same(our_gradients, gradients)


def test_named_tuples_come_back(left):
    for rank in left:
        assert rank["fields"] == [
            ("TokenLogprobs", ["logprobs", "entropy"]),
            ("KLDivergence", ["kl", "entropy"]),
            ("KLDivergence", ["kl", "logprobs", "ref_logprobs", "stats"]),
        ]


@pytest.mark.parametrize(
    ("name", "kind", "placement"),
    [
        ("kl_penalty-none-mask", "replicate", "R"),
        ("kl_penalty-none-mask", "sequences", "S(0)"),
        ("kl_penalty-none-mask", "tokens", "S(1)"),
        ("kl_penalty-seq-sum-mask", "sequences", "S(0)"),
        ("kl_penalty-seq-sum-mask", "tokens", "R"),
        ("kl_penalty-token-mean-mask", "sequences", "P(sum)"),
        ("kl_penalty-token-mean-mask", "tokens", "P(sum)"),
        ("kl_penalty-token-mean-mask", "replicate", "R"),
        ("kl_penalty-stats", "tokens", "R"),
        ("kl_rewards", "sequences", "S(0)"),
        ("kl_rewards", "tokens", "R"),
        ("token_logprobs", "tokens", "S(1)"),
        ("token_logprobs", "words", "R"),
        ("kl_divergence-forward", "words", "R"),
        ("kl_divergence-token-mean", "sequences", "P(sum)"),
        ("kl_divergence-token-mean", "words", "R"),
        ("kl_divergence-token-mean", "partial", "R"),
    ],
)
def test_results_stay_where_their_tokens_are(left, name, kind, placement):
    assert left[0][name, kind][-1][0] == placement


def test_logits_of_a_sharded_vocabulary_stay_where_they_are(left):
    """Two ranks' five numbers a token, or 32 about the call."""
    for rank in left:
        assert 0 < rank["travelled"] <= WORLD_SIZE * 32


def over_two_dimensions(rank):
    """The results of cases over logits, sharded along both dimensions of a mesh."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2))
    left = {}
    for name, dimensions in itertools.product(OVER_LOGITS, [(0, 2), (2, 0), (2, 2), (1, 2)]):

        def place(_, tensor, dimensions=dimensions):
            placements = [Shard(d) if d < tensor.dim() else Replicate() for d in dimensions]
            return distribute_tensor(tensor, mesh, placements)

        outputs, gradients = CASES[name].run(place)
        left[name, dimensions] = [t.full_tensor().detach() for t in (*outputs, *gradients)]
    return left


OVER_LOGITS = [name for name in CASES if name.startswith(("token_logprobs", "kl_divergence"))]


@pytest.mark.exhaustive
def test_a_vocabulary_and_sequences_sharded_at_once(tmp_path):
    found = results_of_ranks(over_two_dimensions, tmp_path, 4, timeout=120)
    for name in OVER_LOGITS:
        outputs, gradients = CASES[name].run(lambda _, tensor: tensor)
        expected = [t.detach() for t in (*outputs, *gradients)]
        for rank in found:
            for key in rank:
                if key[0] == name:
                    same(rank[key], expected)


@pytest.mark.parametrize("name", ["kl_penalty-stats", "kl_rewards"])
def test_statistics_are_on_every_rank(left, name):
    assert left[0][name, "sequences"][-1][1:] == ["R"] * len(klfast.KLStats._fields)


def test_statistics_of_all_ranks_steer_a_controller(left):
    controller = klfast.AdaptiveKLController(0.1, 6.0)
    batch = make_batch()
    _, stats = klfast.kl_penalty(*(batch[n] for n in (*PAIR, "mask")), return_stats=True)
    controller.update(stats)
    assert controller.value != 0.1
    for rank in left:
        assert rank["controller"] == pytest.approx(controller.value, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain-mask", "TypeError: mask must be a DTensor as logprobs is, got Tensor"),
        ("plain-logprobs", "TypeError: logprobs must be a DTensor as ref_logprobs is, got Tensor"),
        (
            "shape",
            "ValueError: ref_logprobs must have the shape of logprobs, [3, 6], where that is "
            "sharded, got [2, 6]",
        ),
        ("inplace", "ValueError: inplace_backward must be False for DTensors, got True"),
        (
            "group",
            "ValueError: group must be None for DTensors, whose placements say which shards there "
            "are, got DeviceMesh",
        ),
        (
            "words",
            "ValueError: ref_logits must have the shape of logits, [3, 6, 5], where that is "
            "sharded, got [3, 6, 4]",
        ),
    ],
)
def test_what_is_refused_is_refused_on_every_rank(left, name, message):
    assert [rank["refusals"].get(name) for rank in left] == [message] * WORLD_SIZE
