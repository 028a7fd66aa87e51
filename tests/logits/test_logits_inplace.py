"""With inplace_backward=True the gradient takes the logits' memory, or an error says why not.

KL's ops write gradients over the logits. The bits are the same as in new memory.
"""

import emulated
import pytest
import torch
from agreement import same_bits
from agreement_logits import COMPILED, FLOATS, leaves, random_ids, random_logits
from around import Passed
from targets import TARGETS
from torch.func import grad, vmap

import klfast
from klfast.args.rows import ENTROPIES
from klfast.formulas.divergences import DIVERGENCES

pytestmark = pytest.mark.usefixtures("one_thread")


def computed(dtype=torch.float32, shape=(2, 3, 37)):
    """(leaf, logits that a model has computed from it, token ids)."""
    (leaf,) = leaves(random_logits(*shape, dtype=dtype)[0])
    return leaf, leaf * 1, random_ids(leaf)


def call(logits, ids, backend, **options):
    return klfast.token_logprobs(logits, ids, inplace_backward=True, backend=backend, **options)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("return_entropy", [False, True])
def test_the_gradient_is_the_usual_one_in_the_memory_of_the_logits(backend, dtype, return_entropy):
    leaf, logits, ids = computed(dtype)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    options = {"return_entropy": return_entropy, "mask": mask, "temperature": 0.7}
    expected = klfast.token_logprobs(leaf, ids, backend=backend, **options)
    expected = expected if return_entropy else (expected,)
    upstream = [torch.randn(2, 3, dtype=output.dtype) for output in expected]
    (expected_grad,) = torch.autograd.grad(expected, leaf, upstream)

    address, version, given = logits.data_ptr(), logits._version, []
    logits.register_hook(given.append)
    found = call(logits, ids, backend, **options)
    found = found if return_entropy else (found,)
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(found, expected, strict=True))
    assert logits._version == version
    torch.autograd.backward(found, upstream)
    assert same_bits(leaf.grad, expected_grad)
    assert given[0].data_ptr() == address
    assert same_bits(logits.detach(), expected_grad)
    assert logits._version > version
    assert not leaf.grad[0, 2].any()


def test_without_a_gradient_nothing_is_changed(backend):
    _, logits, ids = computed()
    before = logits.detach().clone()
    call(logits.detach(), ids, backend)
    with torch.no_grad():
        call(logits, ids, backend)
    assert same_bits(logits.detach(), before)
    assert logits._version == 0


class PassedBeside(Passed):
    @staticmethod
    def forward(ctx, other, logits):
        return logits.detach()

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


COMPUTED = "inplace_backward=True needs logits that a model has"
CONTIGUOUS = "inplace_backward=True needs contiguous logits, got str"
REFUSED = {
    "leaf": (lambda t: t, COMPUTED),
    "slice": (lambda t: t[:1], COMPUTED),
    "view": (lambda t: t.view(3, 2, 37), COMPUTED),
    "passed-twice": (lambda t: Passed.apply(Passed.apply(t)), COMPUTED),
    "passed-and-viewed": (lambda t: Passed.apply(t).view(3, 2, 37), COMPUTED),
    "passed-slice": (lambda t: Passed.apply(t[:1]), COMPUTED),
    "passed-beside-another": (
        lambda t: PassedBeside.apply(torch.ones(3, requires_grad=True) * 2, t),
        COMPUTED,
    ),
    "negated": (lambda t: torch._neg_view(t * 1), "needs logits whose memory holds their values"),
    "transposed": (lambda t: (t * 1).transpose(0, 1), CONTIGUOUS),
    "sliced": (lambda t: (t * 1)[:, :-1], CONTIGUOUS),
    "stepped": (lambda t: (t * 1)[..., ::2], CONTIGUOUS),
}
"""Functions that make logits of a leaf, and the error. Some return the memory of their input."""


@pytest.mark.parametrize(("made_of", "message"), REFUSED.values(), ids=REFUSED)
def test_logits_that_the_gradient_cannot_replace_are_refused(backend, made_of, message):
    logits = made_of(computed()[0])
    with pytest.raises(ValueError, match=message):
        call(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64), backend)


def test_a_second_backward_and_create_graph_raise(backend):
    """The latter changes nothing."""
    leaf, logits, ids = computed()
    before = logits.detach().clone()
    found = call(logits, ids, backend).sum()
    with pytest.raises(RuntimeError, match="must be False for a second backward"):
        torch.autograd.grad(found, leaf, create_graph=True, retain_graph=True)
    assert same_bits(logits.detach(), before)
    found.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r"must be False for a second backward|modified by an inplace operation"
    ):
        found.backward()


def test_it_is_refused_under_transforms(backend):
    leaf, _, ids = computed()

    def loss(logits, ids):
        return call(logits * 1, ids, backend).sum()

    with pytest.raises(ValueError, match=r"cannot be used under torch.compile or torch.func"):
        grad(loss)(leaf.detach(), ids)
    with pytest.raises(ValueError, match=r"cannot be used under torch.compile or torch.func"):
        vmap(loss)(leaf.detach(), ids)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"cannot be used under torch.compile or torch.func"):
        torch.compile(loss, fullgraph=True, backend="eager")(leaf, ids)


assert klfast.info()  # loads the extension
KEEP = torch.tensor([True, False, True, True, False, True])
NONE = ENTROPIES.index("none")
WANTS = [(True, False), (False, True), (True, True)]


@pytest.fixture(params=COMPILED)
def ops(request):
    target = TARGETS[request.param]
    if target.is_emulated:
        emulated.ops()
        return torch.ops.klfast_emulated
    return {"native": torch.ops.klfast, "triton": torch.ops.klfast_triton}[target.backend]


@pytest.mark.grid(each="ops")
@pytest.mark.parametrize("wants", WANTS, ids=str)
@pytest.mark.parametrize("words", [7, 301, 1100, 5000])
@pytest.mark.parametrize(
    ("divergence", "beta"),
    [("kl", 0.5), ("jsd", 0.3), ("jsd", 0.8), ("tv", 0.5), ("skew", 0.1), ("skew", 0.7)],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_are_those_of_gradients_apart(ops, dtype, divergence, beta, words, wants):
    logits, ref_logits = random_logits(1, 6, words, dtype=dtype)
    logits[0, 2, 5] += 30  # one id has nearly all the probability
    options = (KEEP, DIVERGENCES.index(divergence), beta, 0.7)
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.linspace(0.5, 2, 6, dtype=arithmetic)
    rows, _, _, saved, *grads, _ = ops.kl_divergence_fwd(
        logits, ref_logits, None, *options, NONE, weights, *wants, None
    )
    models = [logits.clone(), ref_logits.clone()]
    own_rows, own_saved = ops.kl_divergence_fwd_(*models, *options, weights, *wants, None)
    assert same_bits(own_rows, rows)
    assert same_bits(own_saved, saved)
    for model, before, own, want in zip(models, (logits, ref_logits), grads, wants, strict=True):
        assert same_bits(model, own if want else before)
    again = [logits.clone(), ref_logits.clone()]
    ops.kl_divergence_bwd_(*again, *options, rows, saved, weights, *wants, None)
    apart = ops.kl_divergence_bwd(
        logits, ref_logits, None, *options, NONE, rows, saved, None, weights, None, None, None,
        *wants, None,
    )  # fmt: skip
    for model, before, own, want in zip(again, (logits, ref_logits), apart, wants, strict=True):
        assert same_bits(model, own if want else before)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_gradient_stays_in_its_place(ops, offset):
    """Rows may begin at any address and share a 32-bit word."""
    logits, ref_logits = random_logits(1, 3, 301, dtype=torch.bfloat16)
    weights, options = torch.ones(3), (None, 0, 0.5, 1.0)
    wanted = [logits.clone(), ref_logits.clone()]
    ops.kl_divergence_fwd_(*wanted, *options, weights, True, True, None)
    memory = torch.full((2, logits.numel() + 16), 7.0, dtype=torch.bfloat16)
    end = offset + logits.numel()
    models = [
        own[offset:end].view_as(logits).copy_(t)
        for own, t in zip(memory, (logits, ref_logits), strict=True)
    ]
    ops.kl_divergence_fwd_(*models, *options, weights, True, True, None)
    assert all(same_bits(a, b) for a, b in zip(models, wanted, strict=True))
    assert (memory[:, :offset] == 7).all()
    assert (memory[:, end:] == 7).all()


def test_what_cannot_be_written_over_is_refused():
    logits, ref_logits = random_logits(1, 3, 8)
    strided = random_logits(1, 3, 16)[0][..., ::2]
    rest = (None, 0, 0.5, 1.0, torch.ones(3))
    op = torch.ops.klfast.kl_divergence_fwd_
    with pytest.raises(RuntimeError, match="logits must be contiguous to be written over"):
        op(strided, ref_logits, *rest, True, False, None)
    with pytest.raises(RuntimeError, match="ref_logits must be contiguous to be written over"):
        op(logits, strided, *rest, False, True, None)
    with pytest.raises(RuntimeError, match="logits must not be ref_logits"):
        op(logits, logits, *rest, True, False, None)
