"""log_ratio_profile and worst_tokens against plain Python."""

import math

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from klfast import WorstToken, log_ratio_profile, worst_tokens


def draw(shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logprobs, ref_logprobs = -torch.rand(2, *shape, generator=generator, dtype=dtype) * 3
    return logprobs, ref_logprobs, torch.rand(shape, generator=generator) < 0.7


def bucket(place):
    return 0 if place == 0 else 1 + int(math.log2(place))


def by_place(x, weight, sequences):
    """{bucket: (tokens, mean x, mean k3)} of a flat x whose sequences are ranges."""
    sums = {}
    for sequence in sequences:
        for place, i in enumerate(sequence):
            if weight[i] and math.isfinite(x[i]):
                total = sums.setdefault(bucket(place), [0.0, 0.0, 0.0])
                terms = (1.0, x[i], math.expm1(-x[i]) + x[i])
                sums[bucket(place)] = [
                    t + weight[i] * term for t, term in zip(total, terms, strict=True)
                ]
    return {b: (t, k1 / t, k3 / t) for b, (t, k1, k3) in sums.items()}


LAYOUTS = {
    "padded": ((5, 13), None, [range(i * 13, (i + 1) * 13) for i in range(5)]),
    "packed": ((29,), [0, 3, 3, 20, 29], [range(3), range(3, 3), range(3, 20), range(20, 29)]),
    "one": ((16,), None, [range(16)]),
}


@pytest.mark.parametrize("weights", ["none", "bool", "floats"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_means_by_place_and_quantiles_are_those_of_plain_python(layout, weights):
    shape, bounds, sequences = LAYOUTS[layout]
    logprobs, ref_logprobs, mask = draw(shape, torch.float64)
    mask = {"none": None, "bool": mask, "floats": mask * torch.rand(shape)}[weights]
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    profile = log_ratio_profile(logprobs, ref_logprobs, mask, cu_seqlens=cu_seqlens)
    x = (logprobs - ref_logprobs).flatten().tolist()
    weight = [1.0] * len(x) if mask is None else mask.double().flatten().tolist()
    assert profile.first == (0, 1, 2, 4, 8, 16)[: len(profile.first)]
    expected = by_place(x, weight, sequences)
    for b in range(len(profile.first)):
        tokens, k1, k3 = expected.get(b, (0, 0, 0))
        assert profile.tokens[b].item() == pytest.approx(tokens)
        assert profile.k1[b].item() == pytest.approx(k1)
        assert profile.k3[b].item() == pytest.approx(k3)
    kept = [value for value, w in zip(x, weight, strict=True) if w]
    wanted = np.quantile(kept, profile.levels)
    assert profile.quantiles.tolist() == pytest.approx(wanted.tolist(), rel=1e-12)


def test_what_is_masked_or_not_finite_is_left_out():
    logprobs, ref_logprobs, _ = draw((2, 6))
    mask = torch.ones(2, 6, dtype=torch.bool)
    expected_mask = mask.clone()
    expected_mask[0, 2] = expected_mask[1, 4] = mask[1, 4] = False
    clean = log_ratio_profile(logprobs, ref_logprobs, expected_mask)
    logprobs[0, 2], logprobs[1, 4] = -math.inf, math.nan
    dirty = log_ratio_profile(logprobs, ref_logprobs, mask)
    for a, b in zip(clean[1:], dirty[1:], strict=True):
        assert a == b if isinstance(a, tuple) else torch.equal(a, b)


def test_far_numbers_and_nothing_kept():
    logprobs = torch.tensor([[3e38, -3e38, 0.0]])
    profile = log_ratio_profile(logprobs, torch.zeros(1, 3), quantiles=(0.0, 0.25, 0.75, 1.0))
    assert profile.quantiles.tolist() == pytest.approx([-3e38, -1.5e38, 1.5e38, 3e38])
    for shape in ((0, 4), (3, 0), (2, 4)):
        zeros = torch.zeros(shape)
        profile = log_ratio_profile(zeros, zeros, zeros.bool())
        assert profile.quantiles.isnan().all()
        assert not profile.tokens.any()
        assert not profile.k3.any()


@pytest.mark.parametrize("levels", [(), [], np.zeros(0)], ids=["tuple", "list", "array"])
def test_no_levels_give_no_quantiles_and_sort_nothing(monkeypatch, levels):
    logprobs, ref_logprobs, mask = draw((3, 9))
    full = log_ratio_profile(logprobs, ref_logprobs, mask)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    profile = log_ratio_profile(logprobs, ref_logprobs, mask, quantiles=levels)
    assert profile.levels == ()
    assert profile.quantiles.shape == (0,)
    assert [*profile.as_dict()] == [name for name in full.as_dict() if "x_q" not in name]
    for name in ("tokens", "k1", "k3"):
        assert torch.equal(getattr(profile, name), getattr(full, name))


@pytest.mark.parametrize(
    "levels", [[1.5], [-0.1], ["x"], [math.nan], 0.5, None, "0.5", torch.tensor(0.5)], ids=str
)
def test_bad_levels_are_named(levels):
    logprobs = torch.zeros(2, 3)
    with pytest.raises((ValueError, TypeError), match=r"quantiles must be .* got"):
        log_ratio_profile(logprobs, logprobs, quantiles=levels)


@pytest.mark.parametrize(
    "packed", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["padded", "packed"]
)
def test_widths_of_as_many_buckets_share_a_graph(packed):
    """Dynamo takes the first width for a constant, so there are two graphs."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(log_ratio_profile, fullgraph=True, backend=counter)
    for width in (70, 66, 128):
        logprobs, ref_logprobs, _ = draw((width,) if packed else (3, width))
        options = {"cu_seqlens": torch.tensor([0, width // 3, width])} if packed else {}
        found = compiled(logprobs, ref_logprobs, **options)
        expected = log_ratio_profile(logprobs, ref_logprobs, **options)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_worst_tokens(layout, dtype):
    """Tokens that are not finite come first. Equals keep their order."""
    shape, edges, sequences = LAYOUTS[layout]
    first, second, mask = draw(shape)
    first, second = first.to(dtype), second.to(dtype)
    flat = [t.view(-1) for t in (first, second, mask)]
    flat[2][[1, 4, 6, 8, 9]] = True
    for at, values in {4: (-1, -math.inf), 8: (math.nan, 0), 1: (-3, 0), 6: (0, -3)}.items():
        flat[0][at], flat[1][at] = values
    flat[0][9], flat[2][9] = math.nan, False
    ids = torch.arange(first.numel()).view(shape)
    rows = []
    for number, sequence in enumerate(sequences):
        for position, at in enumerate(sequence):
            one, two = (float(t[at]) for t in flat[:2])
            if flat[2][at]:
                rows.append((number, position, at, one, two, one - two))
    rows.sort(key=lambda row: -abs(row[-1]) if math.isfinite(row[-1]) else -math.inf)
    cu_seqlens = None if edges is None else torch.tensor(edges, dtype=torch.int32)
    found = worst_tokens(first, second, mask, 10**6, token_ids=ids, cu_seqlens=cu_seqlens)
    assert [token.token_id for token in found[:4]] == [4, 8, 1, 6]
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    for token, row in zip(found, rows, strict=True):
        assert token[:5] == row[:5] or math.isnan(row[3])
        assert token.log_ratio == pytest.approx(row[5], rel=torch.finfo(exact).eps, nan_ok=True)
    fewer = worst_tokens(first, second, mask, 2, cu_seqlens=cu_seqlens)
    assert [(token.token_id, *token[:2]) for token in fewer] == [(None, *t[:2]) for t in found[:2]]


def test_a_line_for_a_log():
    line = "sequence 3, position 17, id 42: log-ratio +9.5 = -0.5 - (-10)"
    assert str(WorstToken(3, 17, 42, -0.5, -10.0, 9.5)) == line
    assert "position 17: log-ratio +nan" in str(
        WorstToken(3, 17, None, -math.inf, -math.inf, math.nan)
    )


def test_no_worst_tokens():
    nothing = torch.zeros(0)
    for shape in ((0,), (2, 0), (0, 3)):
        assert worst_tokens(nothing.view(shape), nothing.view(shape)) == []
    assert worst_tokens(nothing, nothing, cu_seqlens=torch.tensor([0])) == []
    assert worst_tokens(torch.ones(2, 2), torch.zeros(2, 2), torch.zeros(2, 2)) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 0}, ValueError, "k must be an integer >= 1, got 0"),
        ({"k": 2.0}, TypeError, "k must be an integer >= 1, got 2.0"),
        ({"token_ids": torch.ones(2, 3)}, TypeError, "token_ids must have one of the dtypes"),
        (
            {"token_ids": torch.ones(2, 2).long()},
            ValueError,
            "token_ids must have the shape of log",
        ),
        ({"mask": -torch.ones(2, 3)}, ValueError, "mask must hold finite weights >= 0, got -1.0"),
        ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, "logprobs must be packed"),
    ],
)
def test_refused_arguments_of_worst_tokens(arguments, error, message):
    with pytest.raises(error, match=message):
        worst_tokens(torch.zeros(2, 3), torch.zeros(2, 3), **arguments)
