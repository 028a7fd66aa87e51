"""Bit for bit: a sequence's numbers depend on its own tokens and on nothing else."""

import itertools
import math

import pytest
import torch
from agreement import random_inputs, same_bits
from targets import TARGETS

import klfast
from klfast import Estimator
from klfast.args.estimator import ESTIMATORS
from klfast.types.layout import Sequences
from klfast.types.reduction import REDUCTIONS

FORMS = {name: Estimator(name) for name in ESTIMATORS} | {
    "rich": Estimator("k3", importance_cap=1.2, log_ratio_clip=3.0, linear_tail=1.0, kl_clip=2.0),
    "k2-gradient": Estimator("k3", gradient="k2", importance="detached"),
}
IDLE = {
    "clips": {"log_ratio_clip": 20.0, "kl_clip": 10.0},
    "tail": {"linear_tail": 2.0},
    "k2-gradient": {"gradient": "k2"},
    "weighted": {"importance_cap": 5.0},
    "detached": {"importance": "detached", "gradient": "k2"},
    "weighted-clip": {"kl_clip": 10.0, "clip_weighted": True},
}
"""Options of which none acts on a token near 0."""

IDLE_FORMS = {
    f"{name} {what}": Estimator(name, **options)
    for name, (what, options) in itertools.product(ESTIMATORS, IDLE.items())
}
WEIGHED = (
    *("rich", "k2-gradient"),
    *(form for form in IDLE_FORMS if form.split()[1] in ("weighted", "detached", "weighted-clip")),
)
LENGTHS = (1, 63, 64, 65, 200, 1024, 1025)
LONG = (16_384, 16_385, 70_001)
PER_SEQUENCE = ("none", "seq-sum", "seq-mean")

every_form = pytest.mark.parametrize("form", FORMS)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)


COMPILED = [name for name, target in TARGETS.items() if target.backend != "reference"]
"""Backends with kernels of their own. The reference in fp64 gives torch's numbers, and those change
with a token's place in a vector register."""

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
every_compiled = pytest.mark.parametrize("backend", COMPILED, indirect=True)
slow_forms = pytest.mark.parametrize(
    ("backend", "form"),
    [*itertools.product(COMPILED, ["k3", "rich"]), ("reference", "k3")],
    indirect=["backend"],
)


class Sequence:
    """Inputs of one sequence, or of many side by side, of shape [..., T]."""

    def __init__(self, logprobs, ref_logprobs, old_logprobs, mask):
        self.tensors = (logprobs, ref_logprobs, old_logprobs, mask)

    @classmethod
    def random(cls, length, dtype=torch.float32):
        return cls(*random_inputs((length,), dtype), torch.rand(length) < 0.8)

    def map(self, function):
        return Sequence(*(function(t) for t in self.tensors))

    @classmethod
    def join(cls, sequences, function):
        columns = zip(*(s.tensors for s in sequences), strict=True)
        return cls(*(function(list(column)) for column in columns))

    def compute(self, backend, form, cu_seqlens=None):
        """{name: tensor}: values and both gradients [..., T], sums, means and statistics [S]."""
        found = {}
        for reduction in PER_SEQUENCE:
            logprobs, ref_logprobs = (t.detach().requires_grad_() for t in self.tensors[:2])
            result, stats = klfast.kl_penalty(
                logprobs,
                ref_logprobs,
                self.tensors[3],
                estimator=(FORMS | IDLE_FORMS)[form],
                reduction=reduction,
                old_logprobs=self.tensors[2] if form in WEIGHED else None,
                cu_seqlens=cu_seqlens,
                coef=0.3,
                return_stats=True,
                backend=backend,
            )
            upstream = torch.full_like(result, 0.7)
            inputs = [logprobs, ref_logprobs]
            both = torch.autograd.grad(result, inputs, upstream, retain_graph=True)
            found[reduction] = result.detach()
            found[f"{reduction} grad"], found[f"{reduction} grad_ref"] = both
            found |= {f"{reduction} {name}": value for name, value in stats._asdict().items()}
        return found


def is_per_token(name):
    return name == "none" or "grad" in name


def of_sequence(found, tokens, sequence):
    """One sequence's part of what a batch gave: ``tokens`` and ``sequence`` index it."""
    return {
        name: value[tokens] if is_per_token(name) else value[sequence].reshape(1)
        for name, value in found.items()
    }


def assert_same(alone, other):
    different = [name for name in alone if not same_bits(alone[name], other[name])]
    assert not different


@pytest.mark.grid
@every_dtype
@every_form
@every_compiled
def test_a_sequence_is_the_same_alone_padded_packed_and_in_any_company(backend, form, dtype):
    check_company(backend, form, dtype, LENGTHS)


@pytest.mark.grid(meet=1)
@slow_forms
def test_a_long_sequence_is_the_same_in_any_company(backend, form):
    """And in fp64, where the order of additions shows in the last bit."""
    check_company(backend, form, torch.float32, LONG)
    if backend != "reference":
        check_company(backend, form, torch.float64, LONG)


@every_form
def test_the_reference_in_fp32_too(form):
    check_company("reference", form, torch.float32, LENGTHS)


def check_company(backend, form, dtype, lengths):
    """Each sequence alone against: in a right-padded batch, permuted, and packed (so shifted)."""
    sequences = [Sequence.random(length, dtype) for length in lengths]
    alone = [s.compute(backend, form) for s in sequences]

    width = max(lengths) + 37
    pad = [s.map(lambda t: torch.nn.functional.pad(t, (0, width - len(t)))) for s in sequences]
    order = torch.randperm(len(lengths)).tolist()
    padded = Sequence.join([pad[i] for i in order], torch.stack).compute(backend, form)
    for row, i in enumerate(order):
        part = of_sequence(padded, (row, slice(lengths[i])), row)
        assert_same(alone[i], part)

    packed_order = [*order, *order[::-1]]
    edges = torch.tensor([0] + [lengths[i] for i in packed_order]).cumsum(0)
    packed = Sequence.join([sequences[i] for i in packed_order], torch.cat)
    found = packed.compute(backend, form, edges)
    for s, i in enumerate(packed_order):
        assert_same(alone[i], of_sequence(found, slice(edges[s], edges[s + 1]), s))


@pytest.mark.parametrize("device", DEVICES)
def test_a_sum_of_the_reference_is_the_same_in_any_company(device, set_num_threads):
    """In fp64, to the last bit: none of its results is rounded before it is compared."""
    lengths = (0, 1, 31, 32, 33, 1024, 1025, 40_000, 0)
    values = [torch.randn(length, dtype=torch.float64, device=device) for length in lengths]
    set_num_threads(1)
    alone = torch.stack([Sequences(value, None).sum(value)[0] for value in values])
    exact = torch.tensor([math.fsum(value.tolist()) for value in values], dtype=torch.float64)
    torch.testing.assert_close(alone.cpu(), exact, rtol=1e-14, atol=1e-12)
    edges = torch.tensor([0, *lengths], device=device).cumsum(0)
    padded = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
    wide = torch.nn.functional.pad(padded, (0, 37))
    for threads in (1, 3):
        set_num_threads(threads)
        packed = Sequences(torch.cat(values), edges).sum(torch.cat(values))
        twice = Sequences(padded, None).sum(torch.stack([padded, -padded]).flatten(1))
        assert same_bits(packed, alone)
        assert same_bits(twice, torch.stack([alone, 0.0 - alone]))
        assert same_bits(Sequences(wide, None).sum(wide.flatten()), alone)


@pytest.mark.grid(each="backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", [*FORMS, *IDLE_FORMS])
@every_compiled
def test_a_token_does_not_depend_on_its_neighbours(backend, form, dtype):
    """Kernels may take a shorter way where all tokens of a group are near 0, to the same bits."""
    near = Sequence.random(256, dtype).map(lambda t: t if t.dtype == torch.bool else t / 8)
    far = near.map(torch.clone)
    far.tensors[1][::2] -= 30
    alone, beside = near.compute(backend, form), far.compute(backend, form)
    for name in ("none", "none grad", "none grad_ref"):
        assert same_bits(alone[name][1::2], beside[name][1::2])


@pytest.mark.parametrize("padding", [1, 27, 64, 1000, 20_000])
def test_right_padding_changes_nothing(backend, padding):
    sequence = Sequence.random(1000)
    alone = sequence.compute(backend, "k3")
    padded = sequence.map(lambda t: torch.nn.functional.pad(t, (0, padding)))
    assert_same(alone, of_sequence(padded.compute(backend, "k3"), slice(1000), 0))


@pytest.mark.parametrize("offset", [1, 3, 16])
def test_the_place_in_memory_changes_nothing(backend, offset):
    """Unaligned, and with a stride: other loads, the same numbers."""
    sequence = Sequence.random(1500)
    alone = sequence.compute(backend, "k3")
    moved = sequence.map(lambda t: torch.cat([t[:offset], t])[offset:])
    strided = sequence.map(lambda t: torch.stack([t] * 2, dim=1).flatten()[::2])
    assert not strided.tensors[0].is_contiguous()
    assert_same(alone, moved.compute(backend, "k3"))
    assert_same(alone, strided.compute(backend, "k3"))


@pytest.mark.grid(meet=1)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@slow_forms
def test_threads_and_runs_change_nothing(backend, form, reduction, set_num_threads):
    shapes = {"wide": (2, 70_001), "tall": (100, 400)}
    for shape in shapes.values():
        logprobs, ref_logprobs, old_logprobs = random_inputs(shape)
        mask = torch.rand(shape) < 0.8
        logprobs.requires_grad_()

        def run(tensors=(logprobs, ref_logprobs, mask), old_logprobs=old_logprobs):
            result, stats = klfast.kl_penalty(
                *tensors,
                estimator=FORMS[form],
                reduction=reduction,
                old_logprobs=old_logprobs if form in WEIGHED else None,
                return_stats=True,
                backend=backend,
            )
            (grad,) = torch.autograd.grad(result.sum(), tensors[0])
            return [result.detach(), grad, *stats]

        set_num_threads(1)
        one = run()
        for threads in (2, 3):
            set_num_threads(threads)
            assert all(same_bits(a, b) for a, b in zip(one, run(), strict=True))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_the_dtype_of_cu_seqlens_changes_nothing(backend, index_dtype):
    sequence = Sequence.random(500)
    edges = torch.tensor([0, 100, 100, 499, 500])
    one = sequence.compute(backend, "k3", edges)
    assert_same(one, sequence.compute(backend, "k3", edges.to(index_dtype)))


@every_form
def test_asking_for_statistics_changes_nothing(backend, form):
    logprobs, ref_logprobs, old_logprobs = random_inputs((3, 500))
    options = {"estimator": FORMS[form], "backend": backend}
    options["old_logprobs"] = old_logprobs if form in WEIGHED else None
    for reduction in REDUCTIONS:
        alone = klfast.kl_penalty(logprobs, ref_logprobs, reduction=reduction, **options)
        beside, _ = klfast.kl_penalty(
            logprobs, ref_logprobs, reduction=reduction, return_stats=True, **options
        )
        assert same_bits(alone, beside), reduction


@every_form
def test_asking_for_a_gradient_changes_no_value(backend, form):
    logprobs, ref_logprobs, old_logprobs = random_inputs((3, 500))
    options = {"estimator": FORMS[form], "backend": backend}
    options["old_logprobs"] = old_logprobs if form in WEIGHED else None
    for reduction in REDUCTIONS:
        without = klfast.kl_penalty(logprobs, ref_logprobs, reduction=reduction, **options)
        one, both = (
            klfast.kl_penalty(
                logprobs.clone().requires_grad_(),
                ref_logprobs.clone().requires_grad_(ref_too),
                reduction=reduction,
                **options,
            )
            for ref_too in (False, True)
        )
        assert same_bits(without, one.detach()), reduction
        assert same_bits(without, both.detach()), reduction


@every_compiled
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_sign_of_a_zero_does_not_depend_on_other_tokens(backend, estimator):
    """Equal models give zeros, which the formula for near tokens and that for any write alike."""

    def gradient(other):
        logprobs = torch.zeros(1, 4097)
        logprobs[0, 1] = other
        logprobs.requires_grad_()
        ref_logprobs = torch.zeros(1, 4097)
        options = {"estimator": estimator, "reduction": "none", "backend": backend}
        klfast.kl_penalty(logprobs, ref_logprobs, **options).sum().backward()
        return logprobs.grad[:, 2:]

    assert same_bits(gradient(-3.0), gradient(-0.5))
