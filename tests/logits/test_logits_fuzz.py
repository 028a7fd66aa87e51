"""Any shape, stride, dtype, mask, packing and option: backends give the truth over logits."""

import agreement_logits
import torch
from agreement_logits import DIRECTIONS, FLOATS, assert_divergence_agrees, assert_tokens_agree
from draws import MASKS, edges
from hypothesis import given
from hypothesis import strategies as st

from klfast.types.reduction import NORMALIZED_REDUCTIONS, REDUCTIONS

WORDS = (1, 2, 5, 16, 33, 70)


def contiguous(values):
    return values.contiguous()


def words_first(values):
    return values.transpose(0, -1).contiguous().transpose(0, -1)


def stepped(values):
    """Every third word of a wider tensor, from the second on."""
    size = values.shape[-1]
    wide = values.new_full((*values.shape[:-1], 3 * size + 2), torch.nan)
    wide[..., 1 : 3 * size + 1 : 3] = values
    return wide[..., 1 : 3 * size + 1 : 3]


def sliced(values):
    """A window of a larger tensor: rows far apart, nothing aligned."""
    frame = values.new_full([size + 3 for size in values.shape], torch.nan)
    window = tuple(slice(1, size + 1) for size in values.shape)
    frame[window] = values
    return frame[window]


def expanded(values):
    """The first sequence (or token) over and over, without memory of its own."""
    return values[:1].contiguous().expand(values.shape)


STRIDES = (contiguous, words_first, stepped, sliced, expanded)
HEIGHTS = (0.0, 0.0, 25.0, -300.0, 1e4)
"""What all logits of a model are shifted by."""


@st.composite
def models(draw):
    """(logits, ref_logits, cu_seqlens or None, a function that makes random numbers per token)."""
    cu_seqlens = None
    kind = draw(st.sampled_from(["padded", "one sequence", "packed"]))
    if kind == "padded":
        shape = (draw(st.integers(0, 3)), draw(st.integers(0, 5)))
    elif kind == "one sequence":
        shape = (draw(st.sampled_from([0, 1, 2, 7])),)
    else:
        packing = draw(edges())
        shape = (packing[-1],)
        cu_seqlens = torch.tensor(packing, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*size):
        values = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
        return values.to(torch.get_default_device())

    def place(values):
        dtype = draw(st.sampled_from(FLOATS))
        height = draw(st.sampled_from(HEIGHTS))
        if dtype in (torch.float16, torch.bfloat16):
            height = 0.0  # of a shift as large a coarse grid leaves no differences
        values = (values + height).to(dtype)
        values = values.masked_fill(normal(values.shape[-1]) < draw(excluded), -torch.inf)
        values[..., :1] = values[..., :1].clamp(min=height - 9)  # nobody excludes the first word
        return draw(st.sampled_from(STRIDES if values.numel() else (contiguous,)))(values)

    excluded = st.sampled_from([-9.0, -9.0, 0.3])
    spread = draw(st.sampled_from([0.1, 2.0, 12.0]))
    logits = spread * normal(*shape, draw(st.sampled_from(WORDS)))
    ref_logits = logits + draw(st.sampled_from([1e-3, 0.5, 9.0])) * normal(*logits.shape)
    return place(logits), place(ref_logits), cu_seqlens, lambda: normal(*shape)


def same_support(logits, ref_logits):
    """Logits whose divergence is finite: what one model excludes, the other does."""
    excluded = (logits == -torch.inf) | (ref_logits == -torch.inf)
    return [torch.where(excluded, -torch.inf, t) for t in (logits, ref_logits)]


@st.composite
def calls(draw):
    """(logits, ref_logits, mask, options of kl_divergence)."""
    logits, ref_logits, cu_seqlens, normal = draw(models())
    if draw(st.booleans()) or logits.isinf().any() or ref_logits.isinf().any():
        logits, ref_logits = same_support(logits, ref_logits)
    mask = draw(st.sampled_from(MASKS))
    if mask is not None:
        kept = normal() < draw(st.sampled_from([-9.0, 0.0, 1.0]))
        weight = normal().abs() + 0.1 if mask in FLOATS else normal().abs().ceil()
        mask = torch.where(kept, weight, 0).to(mask)
    options = {
        "direction": draw(st.sampled_from(DIRECTIONS)),
        "jsd_beta": draw(st.sampled_from([0.5, 0.05, 0.9])),
        "temperature": draw(st.sampled_from([1.0, 0.6, 2.0])),
        "reduction": draw(st.sampled_from(list(REDUCTIONS))),
        "cu_seqlens": cu_seqlens,
        "coef": draw(st.sampled_from([1.0, 0.04, -3.0])),
    }
    if options["reduction"] in NORMALIZED_REDUCTIONS:
        options["normalizer"] = draw(st.sampled_from([None, 0.5, 1000.0]))
    return logits, ref_logits, mask, options


@given(call=calls())
def test_every_divergence_agrees_with_the_oracle(backend, one_thread, call):
    logits, ref_logits, mask, options = call
    if mask is not None and logits.is_contiguous():
        logits = torch.where((mask == 0)[..., None], torch.nan, logits)
    assert_divergence_agrees(backend, logits, ref_logits, mask, **options)


@given(made=models(), kept=st.sampled_from([-9.0, 0.5, 9.0]), temperature=st.floats(0.3, 3.0))
def test_every_log_prob_agrees_with_the_oracle(backend, one_thread, made, kept, temperature):
    logits, _, _, normal = made
    keep = normal() < kept
    ids = agreement_logits.random_ids(logits)
    ids = torch.where(logits.gather(-1, ids[..., None])[..., 0] == -torch.inf, 0, ids)
    options = {"mask": keep, "temperature": temperature}
    if logits.is_contiguous():
        logits = torch.where(keep[..., None], logits, torch.nan)
    assert_tokens_agree(backend, logits, ids, keep, **options)
