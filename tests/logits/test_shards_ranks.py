"""A vocabulary in shards on real ranks, against one process.

All cases of a number of ranks run in one set of processes; the tests look at what these left
behind.
"""

import itertools
import os

import gpu
import pytest
import torch
from agreement import same_bits
from agreement_logits import leaves, random_logits, tensors_of, uneven
from ranks import OnRanks, results_of_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import klfast
from klfast.types.reduction import REDUCTIONS

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)

WORDS = 97
EDGES = {2: (0, 30, WORDS), 3: (0, 30, 30, WORDS), 4: (0, 1, 30, 96, WORDS)}
"""Where shards begin and end, by the number of ranks."""
exhaustive = pytest.mark.exhaustive


def batch(dtype=torch.float32):
    """(logits, ref_logits, token_ids, mask), the same in every process."""
    torch.manual_seed(3)
    logits = random_logits(3, 5, WORDS, dtype=torch.float64)
    ids = torch.randint(WORDS, (3, 5))
    mask = (torch.arange(5) < torch.tensor([5, 2, 4])[:, None]).float()
    return *(model.to(dtype) for model in logits), ids, mask


def own_shard(model, rank, world_size):
    edges = EDGES[world_size]
    return model[..., edges[rank] : edges[rank + 1]].clone()


def differentiated(function, models, others, options):
    """(outputs, gradients) of a function over leaves."""
    inputs = leaves(*models)
    found = getattr(klfast, function)(*inputs, *others, **options)
    outputs = tensors_of(found)
    sum((uneven(x) * x).sum() for x in outputs).backward()
    stats = getattr(found, "stats", None)
    return [x.detach() for x in outputs], [x.grad for x in inputs], stats and [*stats]


def case(function, *names, **options):
    return function, names, options


CASES = {
    "tokens": case("token_logprobs", "ids"),
    "tokens-and-entropy": case("token_logprobs", "ids", "mask", return_entropy=True),
    "k-ids": case("token_logprobs", "k_ids", "mask", temperature=0.7),
    **{
        f"{direction}-{reduction}": case(
            "kl_divergence", "mask", direction=direction, reduction=reduction, coef=0.2
        )
        for direction, reduction in [
            *(("reverse", reduction) for reduction in REDUCTIONS),
            ("forward", "none"),
            ("forward", "token-mean"),
        ]
    },
    "everything-reverse": case("kl_divergence", "mask", with_ids=True, return_entropy=True),
    "everything-forward": case(
        "kl_divergence",
        "mask",
        with_ids=True,
        return_entropy=True,
        return_stats=True,
        direction="forward",
        reduction="seq-mean-token-mean",
    ),
    "temperature-per-token": case("kl_divergence", temperature=torch.tensor([[0.5], [1.0], [2.0]])),
    "packed": case("kl_divergence", packed=True, reduction="seq-mean", return_entropy=True),
    "reference": case("kl_divergence", with_ids=True, return_entropy=True, backend="reference"),
}


def arguments_of(name, dtype, device="cpu"):
    """(function, models, other arguments, options) of a case."""
    function, names, options = CASES[name]
    logits, ref_logits, ids, mask = (tensor.to(device) for tensor in batch(dtype))
    options = {
        name: option.to(device) if isinstance(option, torch.Tensor) else option
        for name, option in options.items()
    }
    tensors = {"ids": ids, "k_ids": torch.stack([ids, ids.flip(0), ids], -1), "mask": mask}
    if options.pop("with_ids", False):
        options["token_ids"] = ids
    models = [logits] if function == "token_logprobs" else [logits, ref_logits]
    if options.pop("packed", False):
        models = [model.flatten(0, 1) for model in models]
        options["cu_seqlens"] = torch.tensor([0, 4, 4, 15], device=device)
    return function, models, [tensors[name] for name in names], options


def whole(name):
    """A case in one process, in fp64."""
    function, models, others, options = arguments_of(name, torch.float64)
    return differentiated(function, models, others, options)


def of_case(rank, world_size, name, group, device):
    function, models, others, options = arguments_of(name, torch.float32, device)
    models = [own_shard(model, rank, world_size) for model in models]
    outputs, grads, stats = differentiated(function, models, others, options | {"group": group})
    return [x.cpu() for x in outputs], [x.cpu() for x in grads], stats and [x.cpu() for x in stats]


def work(rank, world_size, device):
    """What a rank of each case found, by a group and by a mesh."""
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    world = torch.distributed.group.WORLD
    mesh = init_device_mesh(device, (world_size,))
    found = {name: of_case(rank, world_size, name, world, device) for name in CASES}
    found["by-mesh"] = of_case(rank, world_size, "everything-reverse", mesh, device)
    return found


def where(device, transport, size, *marks):
    return pytest.param((device, transport, size), id=f"{device}-{transport}-{size}", marks=marks)


RANKS = [
    where("cpu", "gloo", 2),
    where("cpu", "gloo", 3, exhaustive),
    where("cpu", "gloo", 4, exhaustive),
    where("cuda", "gloo", 2, *gpu.marks),  # of one GPU too
    where(
        *("cuda", "nccl", 2),
        pytest.mark.cuda,
        pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU of its own"),
    ),
]


@pytest.fixture(scope="module", params=RANKS)
def ranks(request, tmp_path_factory):
    device, transport, size = request.param
    folder = tmp_path_factory.mktemp(f"shards-{device}-{transport}-{size}")
    return results_of_ranks(OnRanks(work, size, device), folder, size, 120, transport)


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_gradients_of_one_process(ranks, name):
    """Results to 2e-6 of themselves or of 1, gradients to 1e-5, and the same bits on every rank."""
    outputs, grads, stats = whole(name)
    for of_rank in ranks:
        for own, other, exact in zip(of_rank[name][0], ranks[0][name][0], outputs, strict=True):
            assert same_bits(own, other)
            torch.testing.assert_close(own.double(), exact, rtol=2e-6, atol=2e-6)
    for place, exact in enumerate(grads):
        together = torch.cat([of_rank[name][1][place] for of_rank in ranks], -1).double()
        assert together.shape == exact.shape
        assert (together - exact).norm() <= 1e-5 * exact.norm()
    for of_rank in ranks:
        for own, exact in zip(of_rank[name][2] or [], stats or [], strict=True):
            torch.testing.assert_close(own.double(), exact.double(), rtol=1e-5, atol=1e-5)


def test_a_mesh_is_its_group(ranks):
    for of_rank in ranks:
        by_group, by_mesh = (of_rank[name] for name in ("everything-reverse", "by-mesh"))
        for one, other in zip(by_group[0] + by_group[1], by_mesh[0] + by_mesh[1], strict=True):
            assert same_bits(one, other)


# What is refused


def call_of(rank, **changes):
    """A call, or what two ranks change of it."""
    logits, ref_logits, ids, mask = (own_shard(x, rank, 2) if x.dim() == 3 else x for x in batch())
    options = {"direction": "reverse", "token_ids": ids, "reduction": "token-mean"}
    arguments = {"logits": logits, "ref_logits": ref_logits, "mask": mask, **options, **changes}
    return klfast.kl_divergence(**arguments, group=torch.distributed.group.WORLD)


def hidden_call_of(rank, **changes):
    """The same from hidden states, whose backward has a collective too."""
    _, _, ids, mask = batch()
    hidden, weight = torch.randn(3, 5, 4), torch.randn(WORDS, 4)
    own = weight[slice(*EDGES[2][rank : rank + 2])]
    group = torch.distributed.group.WORLD
    return klfast.linear_token_logprobs(hidden, own, ids, mask, group=group, **changes)


def changed(value, at, to):
    value = value.clone()
    value[at] = to
    return value


def _apart(name, make):
    """A rank's arguments: those of rank 1 are other ones."""

    def run(rank):
        logits, ref_logits, ids, mask = batch()
        own = {"logits": logits, "ref_logits": ref_logits, "token_ids": ids, "mask": mask}
        own = {k: own_shard(v, rank, 2) if v.dim() == 3 else v for k, v in own.items()}
        return call_of(rank, **(make(own) if rank == 1 else {}))

    return name, run


REFUSED = dict(
    [
        _apart("the number of tokens", lambda own: {k: v[:2] for k, v in own.items()}),
        _apart(
            "the shape of the tokens",
            lambda own: {k: v.reshape(5, 3, *v.shape[2:]) for k, v in own.items()},
        ),
        _apart("the dtype of logits", lambda own: {"logits": own["logits"].double()}),
        _apart("the dtype of ref_logits", lambda own: {"ref_logits": own["ref_logits"].half()}),
        _apart("direction", lambda own: {"direction": "forward"}),
        _apart("reduction", lambda own: {"reduction": "token-sum"}),
        _apart("temperature", lambda own: {"temperature": 0.7}),
        _apart("coef", lambda own: {"coef": torch.tensor(0.5)}),
        _apart("normalizer", lambda own: {"normalizer": 3.0}),
        _apart("return_entropy", lambda own: {"return_entropy": True}),
        _apart("token_ids", lambda own: {"token_ids": changed(own["token_ids"], (0, 0), 1)}),
        _apart("mask", lambda own: {"mask": changed(own["mask"], (2, 3), 0)}),
    ]
)
"""The name of what differs -> a call on either rank."""


def _bad_ids(rank):
    return call_of(rank, token_ids=changed(batch()[2], (0, 1), WORDS))


def _bad_k_ids(rank):
    ids = changed(batch()[2], (0, 1), -100)[..., None]
    logits = own_shard(batch()[0], rank, 2)
    return klfast.token_logprobs(logits, ids, group=torch.distributed.group.WORLD)


def _bad_temperature(rank):
    return call_of(rank, temperature=torch.tensor([[1.0], [0.0], [1.0]]))


def _no_word(rank):
    nothing = torch.zeros(2, 3, 0)
    return klfast.kl_divergence(nothing, nothing, group=torch.distributed.group.WORLD)


def _jsd(rank):
    return call_of(rank, direction="jsd")


VALUES = {
    "token_ids must be in [0, 97)": _bad_ids,
    "token_ids must be in [0, 97) where tokens are kept, got -100": _bad_k_ids,
    "temperature must be > 0": _bad_temperature,
    "group must have a rank with at least one word, got none": _no_word,
    "direction must be 'reverse' or 'forward' with group, got 'jsd'": _jsd,
}
"""The beginning of the same ValueError on both ranks -> the call."""


def _functions_apart(rank):
    if rank == 0:
        return call_of(rank)
    logits, _, ids, _ = batch()
    return klfast.token_logprobs(
        own_shard(logits, rank, 2), ids, group=torch.distributed.group.WORLD
    )


def _one_refuses(rank):
    return call_of(rank, **({"mask": torch.ones(2)} if rank == 0 else {}))


def message_of(call, rank):
    try:
        call(rank)
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error).__name__, str(error)
    return "no error", ""


def refuse(rank):
    found = {name: message_of(call, rank) for name, call in (REFUSED | VALUES).items()}
    found["the function"] = message_of(_functions_apart, rank)
    found["one refuses"] = message_of(_one_refuses, rank)
    for name, call in (("logits", call_of), ("hidden", hidden_call_of)):
        backend = ("native", "reference")[rank]
        found[f"backends-{name}"] = message_of(lambda r, c=call, b=backend: c(r, backend=b), rank)
    found["after all"] = call_of(rank)
    own = torch.distributed.new_group([rank], use_local_synchronization=True)
    logits, ref_logits, _, mask = batch()
    found["one rank"] = klfast.kl_divergence(logits, ref_logits, mask, group=own)
    mesh = init_device_mesh("cpu", (2, 1))
    outside = torch.distributed.new_group([1])
    for group in (mesh, "tp", 3, *([outside] if rank == 0 else [])):
        kind = type(group).__name__
        found[kind] = message_of(
            lambda _, g=group: klfast.kl_divergence(logits, ref_logits, group=g), rank
        )
    return found


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    return results_of_ranks(refuse, tmp_path_factory.mktemp("refused"), timeout=60)


@pytest.mark.parametrize("name", [*REFUSED, "the function"])
def test_ranks_that_do_not_agree(refused, name):
    of_both = [found[name] for found in refused]
    assert of_both[0] == of_both[1]
    kind, message = of_both[0]
    assert kind == "RuntimeError"
    assert message.startswith(f"{name} must be the same on every rank of group")


@pytest.mark.parametrize("of", ["logits", "hidden"])
def test_ranks_with_different_backends(refused, of):
    """As "auto" takes on a node without the extension."""
    text = (
        "backend must be the same on every rank of group, got 'native' on rank 0 and 'reference' "
        "on rank 1"
    )
    assert [found[f"backends-{of}"] for found in refused] == [("RuntimeError", text)] * 2


@pytest.mark.parametrize("beginning", VALUES)
def test_bad_values_are_the_same_error_on_every_rank(refused, beginning):
    for found in refused:
        kind, message = found[beginning]
        assert kind == "ValueError"
        assert message.startswith(beginning)
    assert refused[0][beginning] == refused[1][beginning]


def test_a_rank_that_refuses_its_arguments_tells_the_others(refused):
    kind, message = refused[0]["one refuses"]
    assert kind == "ValueError"
    assert message.startswith("mask must have the shape")
    kind, message = refused[1]["one refuses"]
    assert kind == "RuntimeError"
    assert "rank 0 of 2 has refused its arguments" in message


def test_the_group_serves_after_every_error(refused):
    logits, ref_logits, ids, mask = batch()
    options = {"token_ids": ids, "reduction": "token-mean"}
    exact = klfast.kl_divergence(logits, ref_logits, mask, **options)
    for found in refused:
        for own, of_one in zip(tensors_of(found["after all"]), tensors_of(exact), strict=True):
            torch.testing.assert_close(own, of_one, rtol=1e-5, atol=1e-6)


def test_a_group_of_one_rank_is_no_group(refused):
    logits, ref_logits, _, mask = batch()
    for found in refused:
        assert same_bits(found["one rank"], klfast.kl_divergence(logits, ref_logits, mask))


@pytest.mark.parametrize(
    ("kind", "error"), [("DeviceMesh", "ValueError"), ("str", "TypeError"), ("int", "TypeError")]
)
def test_what_is_no_group(refused, kind, error):
    for found in refused:
        assert found[kind][0] == error
        assert found[kind][1].startswith("group must be a ")


def _die(rank):
    own = [own_shard(model, rank, 2) for model in batch()[:2]]
    call_of(rank)
    if rank == 1:
        torch.save(None, os.environ["KLFAST_TEST_FOLDER"] + "/1.pt")
        os._exit(0)
    return message_of(lambda _: klfast.kl_divergence(*own, group=torch.distributed.group.WORLD), 0)


def test_a_rank_that_dies_ends_the_others_call(tmp_path, monkeypatch):
    """With torch.distributed's own error, at once or after the group's timeout."""
    monkeypatch.setenv("KLFAST_TEST_FOLDER", str(tmp_path))
    found = results_of_ranks(_die, tmp_path, timeout=10)
    assert found[0][0] == "RuntimeError"


# Composition


class Model(torch.nn.Module):
    """A trunk that all ranks have, and this rank's rows of the head."""

    def __init__(self, rows):
        super().__init__()
        torch.manual_seed(7)
        self.trunk = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8))
        head = torch.randn(WORDS, 8)
        self.head = torch.nn.Parameter(head[rows].clone())

    def hidden(self, tokens):
        return torch.nn.functional.gelu(self.trunk(tokens))


class _ToShards(torch.autograd.Function):
    """The hidden states as they are; their gradients are added up over the shards."""

    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


def sequences(of):
    """(tokens, ids, mask) of some of the four sequences, the same in every process."""
    torch.manual_seed(11)
    tokens, ids = torch.randint(11, (4, 6)), torch.randint(WORDS, (4, 6))
    mask = torch.arange(6) < torch.tensor([6, 3, 1, 5])[:, None]
    return tokens[of], ids[of], mask[of]


def loss_of(model, of, normalizer, *, group=None, checkpoints=False):
    """A KL to a reference and a penalty of the taken tokens, of some sequences."""
    tokens, ids, mask = sequences(of)
    hidden = model.hidden(tokens)
    if group is not None:
        hidden = _ToShards.apply(hidden, group)
    torch.manual_seed(13)
    reference = torch.randn(8, 8) @ model.head.detach().T.to(hidden.dtype)[:8]
    penalty = klfast.KLPenalty("k3", "token-mean")

    def numbers(hidden, head):
        logits = hidden @ head.T
        ref_logits = logits.detach() + 0.3 * hidden.detach() @ reference
        options = {"group": group, "normalizer": normalizer, "reduction": "token-mean"}
        found = klfast.kl_divergence(logits, ref_logits, mask, token_ids=ids, **options)
        logprobs = klfast.token_logprobs(logits, ids, mask, group=group)
        return found.kl, logprobs, found.ref_logprobs.detach()

    if checkpoints:
        kl, logprobs, ref_logprobs = checkpoint(numbers, hidden, model.head, use_reentrant=False)
    else:
        kl, logprobs, ref_logprobs = numbers(hidden, model.head)
    return kl + 0.1 * penalty(logprobs, ref_logprobs, mask, normalizer=normalizer)


def gradients_of_one():
    """Loss and gradients of all sequences, in one process."""
    model = Model(slice(None))
    mask = sequences(slice(None))[2]
    loss = loss_of(model, slice(None), float(mask.sum()))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def two_by_two(rank):
    """Data parallel over pairs of ranks that have a shard each; two micro-batches a step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    at, shard = mesh.get_coordinate()
    rows = slice(*EDGES[2][shard : shard + 2])
    found = {}
    for checkpoints in (False, True):
        model = Model(rows)
        own = torch.nn.parallel.DistributedDataParallel(model.trunk, process_group=dp)
        model.trunk = own
        micro = [slice(2 * at, 2 * at + 1), slice(2 * at + 1, 2 * at + 2)]
        masks = [sequences(of)[2] for of in micro]
        normalizer = klfast.data_parallel_normalizer(masks, "token-mean", dp)
        total = 0.0
        for i, of in enumerate(micro):
            with own.no_sync() if i == 0 else torch.enable_grad():
                loss = loss_of(model, of, normalizer, group=tp, checkpoints=checkpoints)
                loss.backward()
                total += loss.detach()
        torch.distributed.all_reduce(model.head.grad, group=dp)
        model.head.grad /= 2
        torch.distributed.all_reduce(total, group=dp)
        grads = {n.replace("module.", ""): p.grad for n, p in model.named_parameters()}
        found[checkpoints] = total / 2, grads
    return found


@exhaustive
def test_gradients_under_data_parallel_groups(tmp_path):
    """No gradient is as many times too large as there are ranks."""
    loss, grads = gradients_of_one()
    found = results_of_ranks(two_by_two, tmp_path, 4, timeout=120)
    for checkpoints, (rank, of_rank) in itertools.product((False, True), enumerate(found)):
        own_loss, own = of_rank[checkpoints]
        torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=0)
        shard = slice(*EDGES[2][rank % 2 : rank % 2 + 2])
        for name, exact in grads.items():
            expected = exact[shard] if name == "head" else exact
            assert (own[name] - expected).norm() <= 1e-5 * expected.norm(), name


def one_by_two(rank):
    model = Model(slice(*EDGES[2][rank : rank + 2]))
    group = torch.distributed.group.WORLD
    mask = sequences(slice(None))[2]
    found = []
    for checkpoints in (False, True):
        model.zero_grad()
        loss = loss_of(model, slice(None), float(mask.sum()), group=group, checkpoints=checkpoints)
        loss.backward()
        found.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    return found


def test_gradients_of_a_model_with_a_column_parallel_head(tmp_path):
    """With checkpointing, whose backward makes the collectives once more, and without."""
    loss, grads = gradients_of_one()
    for rank, of_rank in enumerate(results_of_ranks(one_by_two, tmp_path)):
        for own_loss, own in of_rank:
            torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=0)
            shard = slice(*EDGES[2][rank : rank + 2])
            for name, exact in grads.items():
                expected = exact[shard] if name == "head" else exact
                assert (own[name] - expected).norm() <= 1e-5 * expected.norm(), name


def compiled(rank):
    logits, ref_logits, ids, mask = batch()
    own = [own_shard(model, rank, 2).requires_grad_() for model in (logits, ref_logits)]
    group = torch.distributed.group.WORLD

    def call(x, y):
        scaled = x * 1.5
        kl = klfast.kl_divergence(scaled, y, mask, group=group, reduction="token-mean")
        return kl + klfast.token_logprobs(scaled, ids, mask, group=group).sum()

    found = []
    for function in (call, torch.compile(call, backend="aot_eager")):
        grads = torch.autograd.grad(function(*own), own)
        found.append([function(*own).detach(), *grads])
    return found, message_of(lambda _: torch.compile(call, fullgraph=True)(*own), rank)


@exhaustive
def test_a_compiled_graph_breaks_at_a_group(tmp_path):
    for (eager, broken), whole_graph in results_of_ranks(compiled, tmp_path, timeout=120):
        for one, other in zip(eager, broken, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert whole_graph[0] != "no error"
