"""KLStats of several batches as one, and its numbers as floats."""

import json
import math

import pytest
import torch
from agreement import random_inputs, same_bits
from torch.utils._python_dispatch import TorchDispatchMode

import klfast
from klfast import KLStats

COUNTS = ("clipped", "nonfinite")


class AsOnADevice(TorchDispatchMode):
    """A mode under which a CPU's tensors count as a device's, and are not read on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def stats_of(tensors, mask=None, **options):
    return klfast.kl_penalty(*tensors, mask, return_stats=True, **options)[1]


def batch(dtype=torch.float32):
    """(logprobs, ref_logprobs), mask of 7 sequences. One keeps nothing, one has a NaN."""
    logprobs, ref_logprobs, _ = random_inputs((7, 33), dtype)
    mask = torch.arange(33) < torch.tensor([33, 1, 0, 20, 32, 7, 15])[:, None]
    logprobs[4, 3] = math.nan
    logprobs[5, 8] = math.nan  # masked
    return (logprobs, ref_logprobs), mask


def by_hand(fields):
    """The numbers of ``as_dict`` from lists of numbers by field."""
    present = sum(length > 0 for length in fields["length"])
    tokens = math.fsum(fields["length"])
    means = {name: math.fsum(fields[name]) / tokens for name in ("k1", "k2", "k3")}
    return {
        "kl/token_mean": math.fsum(fields["kl"]) / tokens,
        "kl/sequence_mean": math.fsum(fields["kl"]) / present,
        **{f"kl/{name}": mean for name, mean in means.items()},
        "kl/length": tokens / len(fields["length"]),
        "kl/max_abs_log_ratio": max(fields["max_abs_log_ratio"]),
        **{f"kl/{name}": sum(fields[name]) for name in COUNTS},
    }


def drawn(sequences, seed):
    """Fields by name as lists of numbers. Every third sequence keeps nothing."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(len(KLStats._fields), sequences, generator=generator, dtype=torch.float64)
    table[:, 2::3] = 0
    fields = dict(zip(KLStats._fields, table.tolist(), strict=True))
    return fields | {name: [float(round(9 * x)) for x in fields[name]] for name in COUNTS}


def as_stats(fields):
    tensors = {name: torch.tensor(row, dtype=torch.float64) for name, row in fields.items()}
    return KLStats(**tensors)


def test_merged_numbers_are_those_of_all_sequences():
    drafts = [drawn(sequences, seed) for seed, sequences in enumerate((4, 1, 0, 9))]
    together = {name: [x for d in drafts for x in d[name]] for name in KLStats._fields}
    merged = KLStats.cat([as_stats(draft) for draft in drafts])
    expected = by_hand(together)
    assert merged.to_floats() == pytest.approx(expected, rel=1e-14)
    assert merged.token_mean().item() == pytest.approx(expected["kl/token_mean"], rel=1e-14)
    assert merged.sequence_mean().item() == pytest.approx(expected["kl/sequence_mean"], rel=1e-14)


def test_nothing_and_others_are_refused():
    with pytest.raises(ValueError, match="stats must hold at least one KLStats, got none"):
        KLStats.cat([])
    with pytest.raises(TypeError, match="stats must hold KLStats alone, got Tensor"):
        KLStats.cat([as_stats(drawn(3, 1)), torch.zeros(3)])


def exact(ids=None):
    logits = torch.randn(2, 3, 11), torch.randn(2, 3, 11)
    return klfast.kl_divergence(*logits, token_ids=ids, return_stats=True).stats


@pytest.mark.parametrize("stats", [as_stats(drawn(5, 3)), exact(torch.ones(2, 3).long())])
def test_floats_are_those_of_the_dict(stats):
    numbers = stats.to_floats("a/")
    assert numbers == {name: value.item() for name, value in stats.as_dict("a/").items()}
    assert all(value.dim() == 0 for value in stats.as_dict().values())
    assert all(type(value) is float for value in numbers.values())
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers


def test_what_is_not_a_number_is_left_out_and_counted():
    tensors, mask = batch()
    numbers = stats_of(tensors, mask).to_floats()
    assert numbers["kl/nonfinite"] == 1
    assert "kl/token_mean" not in numbers
    assert json.dumps(numbers, allow_nan=False)


def test_floats_take_one_transfer(monkeypatch):
    read = []
    for name in ("tolist", "item", "cpu", "numpy", "__float__", "__bool__"):
        original = getattr(torch.Tensor, name)

        def counting(self, *args, name=name, original=original):
            read.append(name)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counting)
    stats = stats_of(*batch())
    corrected = klfast.rollout_correction(*batch()[0])
    read.clear()
    with AsOnADevice():
        stats.to_floats()
        assert read == ["tolist"]
        corrected.stats.to_floats()
        assert read == ["tolist"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_device_has_the_numbers_of_a_cpu(dtype):
    (logprobs, ref_logprobs), mask = batch(dtype)
    finite = logprobs.nan_to_num()
    for given in (
        ((logprobs, ref_logprobs), mask),
        ((finite, ref_logprobs), mask),
        ((finite, ref_logprobs), mask * torch.rand(7, 33)),
        ((1e30 * finite, -1e30 * ref_logprobs), mask),
        ((finite, ref_logprobs), torch.zeros_like(mask)),
        ((finite[:0], ref_logprobs[:0]), mask[:0]),
    ):
        stats = stats_of(*given)
        with AsOnADevice():
            expected = stats.as_dict()
        for name, value in stats.as_dict().items():
            same = value.isnan() if expected[name].isnan() else same_bits(value, expected[name])
            assert same, name
