"""A vocabulary in shards on real ranks, against one process."""

import gpu
import pytest
import torch
from agreement import same_bits
from agreement_logits import leaves, random_logits, tensors_of, uneven
from ranks import assert_same_on_ranks, here, of_ranks, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

import klfast

WORDS = 97
EDGES = {2: (0, 30, WORDS), 3: (0, 30, 30, WORDS), 4: (0, 1, 30, 96, WORDS)}
"""Where shards begin and end, by the number of ranks."""
exhaustive = pytest.mark.exhaustive


def batch(dtype=torch.float32, device="cpu"):
    """The same arguments in every process, by name."""
    torch.manual_seed(3)
    logits, ref_logits = (m.to(device, dtype) for m in random_logits(3, 5, WORDS, dtype=WIDE))
    ids = torch.randint(WORDS, (3, 5)).to(device)
    mask = (torch.arange(5) < torch.tensor([5, 2, 4])[:, None]).float().to(device)
    return {"logits": logits, "ref_logits": ref_logits, "token_ids": ids, "mask": mask}


WIDE = torch.float64


def own_rows():
    """This rank's entries of the vocabulary."""
    rank, size, _ = here()
    return slice(*EDGES[size][rank : rank + 2])


def shards(arguments):
    """A rank's arguments, of whole ones."""
    own = own_rows()
    return {
        name: value[..., own].clone() if name in ("logits", "ref_logits") else value
        for name, value in arguments.items()
    }


def differentiated(function, arguments):
    """(outputs, gradients) of a call, the models its leaves."""
    models = [name for name in ("logits", "ref_logits") if name in arguments]
    inputs = leaves(*(arguments[name] for name in models))
    found = getattr(klfast, function)(**arguments | dict(zip(models, inputs, strict=True)))
    outputs = tensors_of(found)
    sum((uneven(x) * x).sum() for x in outputs).backward()
    stats = getattr(found, "stats", None) or ()
    return [x.detach() for x in (*outputs, *stats)], [x.grad for x in inputs]


EVERYTHING = {"return_entropy": True, "return_stats": True}
PACKED = {"reduction": "seq-mean", "cu_seqlens": torch.tensor([0, 4, 4, 15])}
CASES = {
    "k-ids": ("token_logprobs", {"temperature": 0.7, "return_entropy": True}),
    "reverse": ("kl_divergence", EVERYTHING | {"coef": 0.2}),
    "forward": ("kl_divergence", EVERYTHING | {"direction": "forward", "reduction": "token-mean"}),
    "per-token": ("kl_divergence", {"temperature": torch.tensor([[0.5], [1.0], [2.0]])}),
    "packed": ("kl_divergence", PACKED),
    "reference": ("kl_divergence", EVERYTHING | {"backend": "reference"}),
}
"""Functions and options; ``test_shards`` has all options, with threads as ranks."""


def case(name, dtype, device):
    function, options = CASES[name]
    arguments = batch(dtype, device)
    if name == "packed":
        arguments = {name: value.flatten(0, 1) for name, value in arguments.items()}
    if name == "k-ids":
        del arguments["ref_logits"]
        ids = arguments["token_ids"]
        arguments["token_ids"] = torch.stack([ids, ids.flip(0), ids], -1)
    for option, value in options.items():
        arguments[option] = value.to(device) if isinstance(value, torch.Tensor) else value
    return function, arguments


def where(device, transport, size, *marks):
    return pytest.param(device, transport, size, id=f"{device}-{transport}-{size}", marks=marks)


ON = [
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


@pytest.mark.parametrize(("device", "transport", "size"), ON)
@pytest.mark.parametrize("name", CASES)
@on_ranks
def test_numbers_and_gradients_of_one_process(name, device, transport, size):
    """Results to 2e-6 of themselves or of 1, statistics and gradients to 1e-5, and the same bits on
    every rank, by a group and by a mesh.
    """
    rank, _, group = here()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    function, arguments = case(name, torch.float32, device)
    found = differentiated(function, shards(arguments) | {"group": group})
    mesh = init_device_mesh(device, (size,))
    of_mesh = differentiated(function, shards(arguments) | {"group": mesh})
    for one, other in zip(tree_leaves(found), tree_leaves(of_mesh), strict=True):
        assert same_bits(one, other)
    outputs, grads = ([x.cpu() for x in tensors] for tensors in found)
    assert_same_on_ranks(*outputs)
    exact, exact_grads = differentiated(*case(name, torch.float64, "cpu"))
    for place, (own, whole) in enumerate(zip(outputs, exact, strict=True)):
        bar = 2e-6 if place < 4 else 1e-5
        torch.testing.assert_close(own.double(), whole.double(), rtol=bar, atol=bar)
    for own, whole in zip(grads, exact_grads, strict=True):
        expected = whole[..., own_rows()]
        assert own.shape == expected.shape
        assert (own - expected).norm() <= 1e-5 * whole.norm()


def call(**changes):
    return klfast.kl_divergence(
        **shards(batch()) | {"reduction": "token-mean", "group": here()[2]} | changes
    )


def hidden_arguments():
    hidden, weight = torch.ones(3, 5, 4), torch.ones(WORDS, 4)[own_rows()]
    return {"hidden": hidden, "weight": weight, "token_ids": batch()["token_ids"]}


def hidden_call(**changes):
    """The same from hidden states, whose backward has a collective too."""
    return klfast.linear_token_logprobs(**hidden_arguments() | {"group": here()[2]} | changes)


def loss_call(*factors):
    """A loss of three sequences, of which the last is masked."""
    given = {"loss": torch.mul, "inputs": (torch.tensor(factors)[:, None],), "group": here()[2]}
    mask = torch.tensor([True, True, False])[:, None].expand(3, 5)
    return klfast.linear_token_loss(**hidden_arguments(), **given, mask=mask)


def changed(name, at, to):
    value = batch()[name].clone()
    value[at] = to
    return {name: value}


def reshaped(change):
    return {name: change(value) for name, value in shards(batch()).items()}


OTHER = {
    "the number of tokens": lambda: reshaped(lambda v: v[:2]),
    "the shape of the tokens": lambda: reshaped(lambda v: v.reshape(5, 3, *v.shape[2:])),
    "the dtype of logits": lambda: {"logits": shards(batch())["logits"].double()},
    "the dtype of ref_logits": lambda: {"ref_logits": shards(batch())["ref_logits"].half()},
    "token_ids": lambda: changed("token_ids", (0, 0), 1),
    "mask": lambda: changed("mask", (2, 3), 0),
    **{
        name: lambda name=name, value=value: {name: value}
        for name, value in {
            "direction": "forward",
            "reduction": "token-sum",
            "temperature": 0.7,
            "coef": torch.tensor(0.5),
            "normalizer": 3.0,
            "weights": torch.ones(3),
            "return_entropy": True,
        }.items()
    },
}
"""What differs -> how rank 1 calls."""


def refused(function, error, beginning):
    """All ranks raise the same error; the group serves after it."""
    with pytest.raises(error) as raised:
        function()
    assert str(raised.value).startswith(beginning)
    said = {*of_ranks(str(raised.value))}
    assert len(said) == 1, said
    torch.testing.assert_close(
        call(), klfast.kl_divergence(**batch(), reduction="token-mean"), rtol=1e-5, atol=1e-6
    )


@on_ranks
def test_ranks_that_do_not_agree():
    """And ranks of which "auto" chooses different backends, as on a node without the extension."""
    is_first = here()[0] == 0
    for name, make in OTHER.items():
        changes = {} if is_first else make()
        refused(lambda c=changes: call(**c), RuntimeError, f"{name} must be the same on every rank")
    text = "chunk must be the same on every rank of group, got another on rank 1 than on rank 0"
    refused(lambda: hidden_call(chunk="auto" if is_first else 2), RuntimeError, text)
    hidden = torch.ones(3, 5, 4, requires_grad=is_first)
    refused(lambda: hidden_call(hidden=hidden), RuntimeError, "requires_grad must be the same on e")
    other = 1.0 if is_first else 2.0
    loss_call(1.0, 1.0, other)
    refused(lambda: loss_call(1.0, other, 1.0), RuntimeError, "inputs must be the same on every ra")
    refused(call if is_first else hidden_call, RuntimeError, "the function must be the same on ev")
    got = "backend must be the same on every rank of group, got 'native' on rank 0 and 'reference'"
    backend = "native" if is_first else "reference"
    for function in (call, hidden_call):
        refused(lambda f=function: f(backend=backend), RuntimeError, got + " on rank 1")


@on_ranks
def test_values_that_all_ranks_refuse():
    nothing = torch.zeros(2, 3, 0)
    k_ids = changed("token_ids", (0, 1), -100)["token_ids"][..., None]
    for changes, beginning in (
        (changed("token_ids", (0, 1), WORDS), "token_ids must be in [0, 97)"),
        ({"temperature": torch.tensor([[1.0], [0.0], [1.0]])}, "temperature must be > 0"),
        ({"direction": "jsd"}, "direction must be 'reverse' or 'forward' with group, got 'jsd'"),
        (
            {"logits": nothing, "ref_logits": nothing, "token_ids": None, "mask": None},
            "the shards of group must have at least one token id, got none",
        ),
    ):
        refused(lambda c=changes: call(**c), ValueError, beginning)
    refused(
        lambda: klfast.token_logprobs(shards(batch())["logits"], k_ids, group=here()[2]),
        ValueError,
        "token_ids must be in [0, 97) where tokens are kept, got -100",
    )


@on_ranks
def test_a_rank_that_refuses_its_arguments_tells_the_others():
    if here()[0] == 0:
        with pytest.raises(ValueError, match="mask must have the shape"):
            call(mask=torch.ones(2))
    else:
        with pytest.raises(RuntimeError, match="rank 0 of the 2 in group refused its arguments"):
            call()


@on_ranks
def test_what_is_a_group():
    """A group of one rank has the bits of no group."""
    rank, _, _ = here()
    own = torch.distributed.new_group([rank], use_local_synchronization=True)
    whole = batch()
    assert same_bits(klfast.kl_divergence(**whole, group=own).kl, klfast.kl_divergence(**whole).kl)
    outside, mesh = torch.distributed.new_group([1]), init_device_mesh("cpu", (2, 1))
    for group, error in (
        *((mesh, ValueError), ("tp", TypeError), (3, TypeError)),
        *([(outside, TypeError)] if rank == 0 else []),
    ):
        with pytest.raises(error, match="group must be a "):
            klfast.kl_divergence(**whole, group=group)


@exhaustive
@on_ranks
def test_a_compiled_graph_breaks_at_a_group():
    _, _, group = here()
    given = shards(batch())
    own = leaves(given["logits"], given["ref_logits"])
    ids, mask = given["token_ids"], given["mask"]

    def call(x, y):
        scaled = x * 1.5
        kl = klfast.kl_divergence(scaled, y, mask, group=group, reduction="token-mean")
        return kl + klfast.token_logprobs(scaled, ids, mask, group=group).sum()

    eager, broken = (
        [function(*own).detach(), *torch.autograd.grad(function(*own), own)]
        for function in (call, torch.compile(call, backend="aot_eager"))
    )
    torch.testing.assert_close(broken, eager, rtol=0, atol=0)
    with pytest.raises(RuntimeError):
        torch.compile(call, fullgraph=True)(*own)
