"""Everything that autograd can do to a call, held to the same formulas in eager float64."""

import functools
import itertools
import warnings

import pytest
import torch
from controls import REDUCTIONS
from torch.utils.checkpoint import checkpoint

import klfast

CATEGORY = "autograd"
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
SHAPE, WORDS = (3, 5), 9
MASK = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]])
IDS = torch.tensor([[0, 3, 8, 1, 2], [4, 4, 4, 4, 4], [7, 6, 5, 0, 1]])


def reduce(tokens, reduction):
    """In eager operations that autograd follows any number of times."""
    tokens = torch.where(MASK != 0, tokens, 0.0)
    length = MASK.sum(-1)
    kept = length.clamp(min=1)
    return {
        "none": lambda: tokens,
        "seq-sum": lambda: tokens.sum(-1),
        "seq-mean": lambda: tokens.sum(-1) / kept,
        "token-sum": lambda: tokens.sum(),
        "token-mean": lambda: tokens.sum() / MASK.sum(),
        "seq-mean-token-sum": lambda: tokens.sum() / (length > 0).sum(),
        "seq-mean-token-mean": lambda: (tokens.sum(-1) / kept).sum() / (length > 0).sum(),
    }[reduction]()


def eager_penalty(a, b, reduction):
    x = a.double() - b.double()
    return reduce(torch.expm1(-x) + x, reduction)


def eager_divergence(z, r, reduction, direction):
    p, q = (t.double().log_softmax(-1) for t in (z, r))
    if direction == "forward":
        p, q = q, p
    if direction == "jsd":
        m = ((p.exp() + q.exp()) / 2).log()
        rows = ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)) / 2
    else:
        rows = (p.exp() * (p - q)).sum(-1)
    return reduce(rows, reduction)


def eager_tokens(z, _, part):
    p = z.double().log_softmax(-1)
    taken = p.gather(-1, IDS[..., None])[..., 0] if part == 0 else -(p.exp() * p).sum(-1)
    return torch.where(MASK != 0, taken, 0.0)


def klfast_tokens(z, _, part):
    return klfast.token_logprobs(z, IDS, mask=MASK, return_entropy=True)[part]


def variants():
    """Name -> (klfast's function of two tensors, the eager one, the tensors' shape)."""
    found = {}
    for name in REDUCTIONS:
        found[f"penalty {name}"] = (
            functools.partial(lambda a, b, n: klfast.kl_penalty(a, b, MASK, reduction=n), n=name),
            functools.partial(eager_penalty, reduction=name),
            SHAPE,
        )
    for direction, name in itertools.product(("reverse", "forward", "jsd"), REDUCTIONS[::2]):
        options = {"direction": direction, "reduction": name}
        found[f"divergence {direction} {name}"] = (
            functools.partial(lambda z, r, o: klfast.kl_divergence(z, r, MASK, **o), o=options),
            functools.partial(eager_divergence, **options),
            (*SHAPE, WORDS),
        )
    for part, name in enumerate(("log-probs", "entropies")):
        found[f"tokens' {name}"] = (
            functools.partial(klfast_tokens, part=part),
            functools.partial(eager_tokens, part=part),
            (*SHAPE, WORDS),
        )
    return found


VARIANTS = variants()
DTYPES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}


def every_case(hunt, one_in=4):
    """(case, klfast's function, the eager one, two fresh leaves, tolerance)."""
    for name, dtype in hunt.some(itertools.product(VARIANTS, DTYPES), one_in):
        fast, eager, shape = VARIANTS[name]
        a = torch.randn(shape).to(dtype)
        b = (a + 0.5 * torch.randn(shape)).to(dtype)
        leaves = [t.requires_grad_() for t in (a, b)]
        yield (name, dtype), fast, eager, leaves, DTYPES[dtype]


def gradients(function, leaves, grad_out=None, **options):
    found = function(*leaves)
    grad_out = torch.ones_like(found) if grad_out is None else grad_out.to(found.dtype)
    return torch.autograd.grad(found, leaves, grad_out, allow_unused=True, **options)


def same(hunt, found, expected, tolerance, *case):
    for got, wanted in zip(found, expected, strict=True):
        if got is None or wanted is None:
            hunt.check(got is None and not (wanted is not None and wanted.any()), *case, got=got)
            continue
        scale = wanted.abs().max().item()
        hunt.close(got, wanted.double(), tolerance * scale + 1e-15, *case)


GRAD_OUTPUTS = {
    "ones": torch.ones_like,
    "zeros": torch.zeros_like,
    "minus": lambda t: -torch.ones_like(t),
    "random": torch.randn_like,
    "tiny": lambda t: torch.full_like(t, 1e-20),
    "huge": lambda t: torch.full_like(t, 1e20),
    "expanded": lambda t: torch.full((), 0.7, dtype=t.dtype).expand(t.shape),
    "stepped": lambda t: torch.randn(*t.shape, 2, dtype=t.dtype)[..., 0],
    "backwards": lambda t: (
        torch.randn_like(t).movedim(0, -1).contiguous().movedim(-1, 0)
        if t.dim()
        else torch.randn_like(t)
    ),
}


def test_grad_outputs_of_one_graph(hunt):
    for case, fast, eager, leaves, tolerance in every_case(hunt):
        found, exact = fast(*leaves), eager(*leaves)
        for what, make in GRAD_OUTPUTS.items():
            upstream = make(found.detach())
            got = torch.autograd.grad(found, leaves, upstream, True, allow_unused=True)
            wanted = torch.autograd.grad(exact, leaves, upstream.double(), True, allow_unused=True)
            same(hunt, got, wanted, tolerance, *case, what)


def test_gradients_that_are_kept_changed_and_added_up(hunt):
    for case, fast, eager, leaves, tolerance in every_case(hunt):
        wanted = gradients(eager, leaves)
        found = fast(*leaves).sum()
        first = torch.autograd.grad(found, leaves, retain_graph=True, allow_unused=True)
        same(hunt, first, wanted, tolerance, *case, "first")
        for grad in first:
            if grad is not None:
                grad.fill_(torch.nan)
        found.backward(retain_graph=True)
        same(hunt, [t.grad for t in leaves], wanted, tolerance, *case, "second")
        found.backward()
        fast(*leaves).sum().backward()
        three = [None if w is None else 3 * w.double() for w in wanted]
        same(hunt, [t.grad for t in leaves], three, 2 * tolerance, *case, "added up")
        hunt.raises(found.backward, *case, "a freed graph")


def test_inputs_that_change_after_the_forward(hunt):
    """An error, or the gradient of what was read."""
    for case, fast, eager, leaves, tolerance in every_case(hunt):
        wanted = gradients(eager, leaves)
        for changed in (0, 1):
            computed = [t * 1 for t in leaves]
            found = fast(*computed)
            with torch.no_grad():
                computed[changed].add_(5)
            try:
                got = torch.autograd.grad(found.sum(), leaves, allow_unused=True)
            except RuntimeError as error:
                hunt.check("modified by an inplace operation" in str(error), *case, got=error)
            else:
                same(hunt, got, wanted, tolerance, *case, "changed", changed)


def test_hooks(hunt):
    for case, fast, eager, leaves, tolerance in every_case(hunt):
        wanted = gradients(eager, leaves)
        twice = [None if w is None else 2 * w.double() for w in wanted]
        computed = [t * 1 for t in leaves]
        for tensor in computed:
            tensor.register_hook(lambda grad: 2 * grad)
        got = torch.autograd.grad(fast(*computed).sum(), leaves, allow_unused=True)
        same(hunt, got, twice, tolerance, *case, "hooks of tensors")
        found = fast(*leaves)
        found.grad_fn.register_prehook(lambda grads: (2 * grads[0], *grads[1:]))
        got = torch.autograd.grad(found, leaves, torch.ones_like(found), allow_unused=True)
        same(hunt, got, twice, tolerance, *case, "prehook")
        found, seen = fast(*leaves), []
        found.grad_fn.register_hook(lambda grads, _, seen=seen: seen.append(len(grads)))
        found.register_hook(lambda grad: 2 * grad)
        got = torch.autograd.grad(found.sum(), leaves, allow_unused=True)
        same(hunt, got, twice, tolerance, *case, "hook of the result")
        hunt.equal(len(seen), 1, *case)


def contexts():
    saved = torch.autograd.graph
    return {
        "copied": lambda: saved.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
        "as numpy": lambda: saved.saved_tensors_hooks(
            lambda t: (t.double().numpy().copy(), t.dtype),
            lambda kept: torch.from_numpy(kept[0]).to(kept[1]),
        ),
        "on the cpu": saved.save_on_cpu,
        "mutable": saved.allow_mutation_on_saved_tensors,
        "anomaly": torch.autograd.detect_anomaly,
        "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    }


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", contexts())
def test_contexts(hunt, name):
    for case, fast, eager, leaves, tolerance in every_case(hunt):
        wanted = gradients(eager, leaves)
        for again in range(2):
            with contexts()[name]():
                got = gradients(fast, leaves, retain_graph=bool(again))
            same(hunt, got, wanted, tolerance, *case, name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(hunt, reentrant):
    for case, fast, eager, leaves, tolerance in every_case(hunt):
        wanted = gradients(eager, leaves)
        for leaf in leaves:
            leaf.grad = None
        checkpoint(fast, *leaves, use_reentrant=reentrant).sum().backward()
        same(hunt, [t.grad for t in leaves], wanted, tolerance, *case, "checkpoint")


def test_inference_mode_and_no_grad(hunt):
    for case, fast, _, leaves, _ in every_case(hunt):
        expected = fast(*leaves).detach()
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                found = fast(*leaves)
                hunt.bits(found, expected, *case, mode.__name__)
                hunt.check(not found.requires_grad, *case, mode.__name__)
        with torch.inference_mode():
            made = leaves[1].detach().clone()
        found = fast(leaves[0], made)
        hunt.bits(found.detach(), expected, *case, "inference tensor")
        with torch.enable_grad(), torch.inference_mode(False):
            got = torch.autograd.grad(found.sum(), leaves[0])
        wanted = torch.autograd.grad(fast(*leaves).sum(), leaves[0])
        hunt.bits(got[0], wanted[0], *case, "gradient beside an inference tensor")


def test_second_derivatives_raise(hunt):
    for case, fast, _, leaves, _ in every_case(hunt):
        squares = [leaf * leaf for leaf in leaves]
        first = torch.autograd.grad(
            fast(*squares).sum(), squares, create_graph=True, allow_unused=True
        )
        for grad in first:
            if grad is not None:
                hunt.raises(functools.partial(torch.autograd.grad, grad.sum(), leaves), *case)


def test_many_grad_outputs_at_once(hunt):
    for case, fast, eager, leaves, tolerance in every_case(hunt):
        found, exact = fast(*leaves), eager(*leaves)
        many = torch.randn(4, *found.shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the vmap of an op is a loop
            got, wanted = (
                torch.autograd.grad(
                    y, leaves, many.to(y.dtype), is_grads_batched=True, allow_unused=True
                )
                for y in (found, exact)
            )
        same(hunt, got, wanted, tolerance, *case, "batched")


def test_function_transforms(hunt):
    func = torch.func
    one = torch.ones((), dtype=torch.float64)
    for case, fast, eager, leaves, tolerance in every_case(hunt):
        a, b = (leaf.detach() for leaf in leaves)

        def loss(x, y, function):
            return function(x, y).double().sum()

        fast_loss, eager_loss = (functools.partial(loss, function=f) for f in (fast, eager))
        arguments = (0,) if "tokens" in case[0] else (0, 1)
        got, wanted = (func.grad(f, arguments)(a, b) for f in (fast_loss, eager_loss))
        same(hunt, got, wanted, tolerance, *case, "grad")
        got, wanted = (func.vjp(f, a, b)[1](one)[:1] for f in (fast_loss, eager_loss))
        same(hunt, got, wanted, tolerance, *case, "vjp")
        stacked = torch.stack([a, b, a])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got, wanted = (
                func.vmap(func.grad(f), (0, None))(stacked, b) for f in (fast_loss, eager_loss)
            )
        same(hunt, [got], [wanted], tolerance, *case, "vmap of grad")
        forward = functools.partial(func.jvp, fast_loss, (a, b), (a, b))
        hunt.raises(forward, *case, "jvp")


def test_what_is_not_asked_for_is_not_given(hunt):
    for case, fast, eager, leaves, tolerance in every_case(hunt):
        for needs in itertools.product((True, False), repeat=2):
            given = [t.detach().requires_grad_(n) for t, n in zip(leaves, needs, strict=True)]
            asked = [t for t, n in zip(given, needs, strict=True) if n]
            if "tokens" in case[0]:
                hunt.equal(fast(*given).requires_grad, needs[0], *case)
                continue
            hunt.equal(fast(*given).requires_grad, any(needs), *case)
            if asked:
                got = torch.autograd.grad(fast(*given).sum(), asked)
                wanted = torch.autograd.grad(eager(*given).sum(), asked)
                same(hunt, got, wanted, tolerance, *case, needs)


def test_autocast_changes_nothing(hunt):
    for case, fast, _, leaves, _ in every_case(hunt):
        expected = fast(*leaves)
        wanted = torch.autograd.grad(expected.sum(), leaves, allow_unused=True)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                found = fast(*leaves)
            got = torch.autograd.grad(found.sum(), leaves, allow_unused=True)
            hunt.bits(found.detach(), expected.detach(), *case, dtype)
            for one, other in zip(got, wanted, strict=True):
                if other is not None:
                    hunt.bits(one, other, *case, dtype)


def test_results_that_are_used_twice_and_changed(hunt):
    """Log-probs and entropies of logits are saved for the backward, whose changes autograd refuses,
    as it does those of an exp.
    """
    for case, fast, eager, leaves, tolerance in every_case(hunt):
        found, exact = fast(*leaves), eager(*leaves)
        got = torch.autograd.grad((3 * found + found * found).sum(), leaves, allow_unused=True)
        wanted = torch.autograd.grad((3 * exact + exact * exact).sum(), leaves, allow_unused=True)
        same(hunt, got, wanted, 4 * tolerance, *case, "used twice")
        changed = fast(*leaves)
        changed.mul_(4)
        backward = functools.partial(torch.autograd.grad, changed.sum(), leaves, allow_unused=True)
        if "entropies" in case[0] or "log-probs" in case[0]:
            hunt.raises(backward, *case, "changed in place")
            continue
        four = [None if w is None else 4 * w.double() for w in gradients(eager, leaves)]
        same(hunt, backward(), four, tolerance, *case, "changed in place")
