"""A grid of all special cases of the kernels over logits, compared with the CPU's kernels.

The grid has every dtype, layout, divergence, entropy and kind of row, on chips with and without
rows in shared memory. Only the numbers are random.
"""

import itertools

import emulated
import pytest
import torch
from ptx_against import FLOATS, check, compare, flat, gradients, laid_out, named

import klfast
from klfast.args.rows import ENTROPIES
from klfast.autograd import context
from klfast.formulas.divergences import DIVERGENCES
from klfast.types import names
from klfast.types.dtypes import arithmetic_dtype

# The dtypes of the models. Each has a kernel, and mixed dtypes have kernels in fp32 and fp64.
DTYPES = (
    *((dtype, dtype) for dtype in FLOATS),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.float64),
)
LAYOUTS = ("dense", "shifted", "strided")
# A chip that splits rows among blocks, one that does not, and one without clusters.
CHIPS = ("h200", "mig", "ampere")
INFINITY = float("inf")


def rows_of(words):
    """Rows of two models [1, 10, V]. A comment says what each row tests."""
    generator = torch.Generator().manual_seed(words)
    first = 2 * torch.randn(10, words, generator=generator)
    second = first + 0.02 * torch.randn(10, words, generator=generator)  # near models
    second[1] = 2 * torch.randn(words, generator=generator)  # far models
    second[2, ::3] = -INFINITY  # ids that one model excludes
    first[3, ::3] = second[3, ::3] = -INFINITY  # and both
    first[4, words // 2] = float("nan")
    first[5] = second[5] = -INFINITY
    second[6] += 20  # a ratio that is an offset of its logits
    first[7] += 3000  # an origin
    for row, more in ((8, 200), (9, 30)):  # a useless or poor sum: a sample misses an entry
        first[row, -1] += more
        second[row, -1] += more
    return first[None], second[None]


@pytest.fixture
def gradients_of_fp16(monkeypatch):
    """A forward may write gradients in fp16, which is an option of the ops."""
    monkeypatch.setattr(context, "holds_unit_gradient", lambda _: True)


def divergence(pair, mask=None, wanted=(True, True), **options):
    """A call of kl_divergence for ``check``. ``wanted`` says which models get a gradient."""
    pair = [each.detach().requires_grad_(want) for each, want in zip(pair, wanted, strict=True)]
    leaves = [each for each in pair if each.requires_grad]

    def call():
        made = klfast.kl_divergence(*pair, mask, backend="native", **options)
        return flat(made) + (gradients(made, leaves) if leaves else [])

    return call


def mask_of_rows():
    """A mask that leaves out one row."""
    return torch.arange(10)[None] != 1


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("direction", names.DIRECTIONS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=named)
@pytest.mark.usefixtures("gradients_of_fp16")
def test_divergences(dtypes, direction, chip, monkeypatch):
    """For per-token results the backward reads the logits again. For scalars the forward writes the
    gradient.
    """
    wanted = itertools.cycle([(True, True), (True, False), (False, True), (False, False)])
    for words, layout in itertools.product((5, 704), LAYOUTS):
        pair = [
            laid_out(each.to(dtype), layout)
            for each, dtype in zip(rows_of(words), dtypes, strict=True)
        ]
        tokens = {"token_ids": torch.arange(10)[None] % words}
        for options, mask in itertools.product(
            ({"reduction": "token-sum"}, {}, tokens, {"return_entropy": True, **tokens}),
            (None, mask_of_rows()),
        ):
            options = {"direction": direction, **options}
            check(divergence(pair, mask, next(wanted), **options), monkeypatch, chip=chip)
            next(wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chip", ["h200", "ampere"])
@pytest.mark.parametrize("direction", names.DIRECTIONS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=named)
@pytest.mark.usefixtures("gradients_of_fp16")
def test_long_rows(dtypes, direction, chip, layout, monkeypatch):
    """Rows take several rounds of a block, or have far entries between near ones."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(1, 2, 12_000, generator=generator)
    second = first + 0.02 * torch.randn(1, 2, 12_000, generator=generator)
    second[..., 5000:5100] += 5
    first[0, 1, -1] += 30  # then the row is summed again
    second[0, 1, -1] += 30
    models = zip((first, second), dtypes, strict=True)
    pair = [laid_out(each.to(dtype), layout) for each, dtype in models]
    for options in ({"reduction": "token-sum"}, {"return_entropy": True}):
        check(divergence(pair, direction=direction, **options), monkeypatch, chip=chip)


@pytest.mark.parametrize("direction", ["reverse", "jsd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=named)
def test_rows_of_more_rounds_than_a_word_has_bits(dtype, direction, monkeypatch):
    """A row has 16 parts, and a block of 128 threads reads 16 bytes per thread in a round."""
    words = 16 * 33 * 128 * 16 // dtype.itemsize + 1
    pair = [torch.linspace(-end, end, words).to(dtype)[None, None] for end in (2.0, 2.1)]
    check(divergence(pair, direction=direction), monkeypatch, chip="ampere")


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=named)
def test_tokens(dtype, return_entropy, chip, monkeypatch):
    for words, layout, model in itertools.product((5, 704), LAYOUTS, (0, 1)):
        leaf = laid_out(rows_of(words)[model].to(dtype), layout).requires_grad_()
        one = torch.arange(10)[None] % words
        two = torch.stack((one, one.flip(1)), -1)
        for ids, mask in ((one, None), (one, mask_of_rows()), (two, None)):

            def call(leaf=leaf, ids=ids, mask=mask):
                made = klfast.token_logprobs(
                    leaf, ids, mask, return_entropy=return_entropy, backend="native"
                )
                return flat(made) + gradients(made, [leaf])

            check(call, monkeypatch, chip=chip)


def uneven(models):
    """The rows in two batches with uneven strides, which cannot be joined."""
    made = []
    for each in models:
        wide = each.new_zeros(2, 6, each.shape[-1])
        wide[:, :5] = each.view(2, 5, -1)
        made.append(wide[:, :5])
    return made


@pytest.mark.parametrize("entropy", range(len(ENTROPIES)), ids=ENTROPIES)
@pytest.mark.parametrize("divergence", range(len(DIVERGENCES)), ids=DIVERGENCES)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=named)
def test_ops_over_two_models(dtypes, chip, divergence, entropy, monkeypatch):
    """The temperature is on the device, and batches have gaps. Gradients may take the place of
    logits without gaps.
    """
    if DIVERGENCES[divergence] in ("jsd", "tv") and ENTROPIES[entropy] == "second":
        return
    monkeypatch.setenv("KLFAST_EMULATED_CHIP", chip)
    first, second = uneven(each.to(dtype) for each, dtype in zip(rows_of(300), dtypes, strict=True))
    ids = torch.arange(10)
    acc = arithmetic_dtype(first, second)
    inverse = torch.tensor(0.8, dtype=torch.float64)
    own = torch.linspace(0, 1, 10, dtype=acc)
    for keep, beta in ((None, 0.5), (ids != 1, 0.7)):
        options = (keep, divergence, beta, 1.0, entropy)
        results = []
        for ops in (torch.ops.klfast, emulated.ops()):
            without = ops.kl_divergence_fwd(
                first, second, ids, *options, None, False, False, inverse
            )
            rows, _, _, saved, _, _, entropies = without
            has_entropy = ENTROPIES[entropy] != "none"
            others = (entropies, own, own, own, own) if has_entropy else (None, own, own, own, None)
            made = [
                *without,
                *ops.kl_divergence_bwd(
                    first, second, ids, *options, rows, saved, *others, True, True, inverse
                ),
            ]
            if not has_entropy:
                made += ops.kl_divergence_fwd(
                    first, second, ids, *options, own, True, True, inverse
                )
                over = [
                    each.clone(memory_format=torch.contiguous_format) for each in (first, second)
                ]
                numbers = (rows, saved, own, True, True, inverse)
                ops.kl_divergence_bwd_(*over, *options[:-1], *numbers)
                made += over
            results.append([each for each in made if each.dim() != 2])  # saved differs on devices
        compare(*results)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=named)
def test_ops_over_one_model(dtype, chip, monkeypatch):
    monkeypatch.setenv("KLFAST_EMULATED_CHIP", chip)
    (logits,) = uneven([rows_of(300)[0].to(dtype)])
    ids = torch.arange(10)
    inverse = torch.tensor(0.8, dtype=torch.float64)
    own = torch.linspace(0, 1, 10, dtype=arithmetic_dtype(logits))
    for keep, wants in itertools.product((None, ids != 1), (False, True)):
        results = []
        for ops in (torch.ops.klfast, emulated.ops()):
            logprobs, entropy, saved = ops.token_logprobs_fwd(
                logits, ids, keep, 1.0, wants, inverse
            )
            grad = ops.token_logprobs_bwd(
                logits,
                ids,
                keep,
                saved,
                logprobs,
                entropy,
                1.0,
                own,
                own if wants else None,
                inverse,
            )
            results.append([logprobs, entropy, grad])
        compare(*results)
