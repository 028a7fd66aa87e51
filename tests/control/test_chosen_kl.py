"""``update(stats, kl=...)``: which sums of the statistics are gone by."""

import math

import pytest
import torch
from kinds import STEERING, make

import klfast

NAMES = ("kl", "k1", "k2", "k3")
WHAT = "kl must be 'kl' when current is not a KLStats, got 'k1'"


def batch(estimator="k3", old=False):
    generator = torch.Generator().manual_seed(0)
    logprobs, ref_logprobs, old_logprobs = -2 * torch.rand(3, 4, 6, generator=generator)
    mask = torch.arange(6) < torch.tensor([[6], [3], [1], [0]])
    options = {"old_logprobs": old_logprobs} if old else {}
    return klfast.kl_penalty(
        logprobs, ref_logprobs, mask, estimator=estimator, return_stats=True, **options
    )[1]


def exact(token_ids=None):
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 3, 5, 11, generator=generator)
    return klfast.kl_divergence(logits, ref_logits, token_ids=token_ids, return_stats=True).stats


def rate_of(optimizer):
    return optimizer.param_groups[0]["lr"]


def learning_rate():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    return klfast.KLAdaptiveLR(optimizer, 0.5, unit="sequence")


OTHERS = {
    "monitor": lambda: klfast.KLMonitor(0.5, window=3, low=0.0, high=1e6),
    "drift": lambda: klfast.KLDriftAlarm(1e6, window=3),
    "early-stop": lambda: klfast.KLEarlyStop(0.5, unit="sequence"),
    "reset": lambda: klfast.ReferenceReset(budget=0.5),
    "learning-rate": learning_rate,
}


def update_of(reader):
    return reader.step if isinstance(reader, klfast.KLAdaptiveLR) else reader.update


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", [None, "cpu"], ids=["host", "device"])
@pytest.mark.parametrize("kind", [*STEERING, "fixed"])
def test_the_sums_that_are_named_steer(kind, device, name):
    stats = batch(klfast.Estimator("k3", importance_cap=1.5, kl_clip=0.2), old=True)

    def made():
        if kind == "fixed":
            return klfast.FixedKLController(0.5, device=device)
        return make(kind, 0.5, 0.5, device=device)

    controller, expected = made(), made()
    for _ in range(3):
        controller.update(stats, kl=name)
        expected.update(stats._replace(kl=getattr(stats, name)))
    assert controller.state_dict() == expected.state_dict()
    if kind == "dual":
        others = [other for other in NAMES if other != name]
        for other in others:
            another = made()
            for _ in range(3):
                another.update(stats, kl=other)
            assert float(another.value) != float(controller.value)


def test_the_chosen_estimator_steers_by_default():
    stats = batch("k2")
    assert klfast.DualKLController(0.5, 0.5).update(stats) == klfast.DualKLController(
        0.5, 0.5
    ).update(stats, kl="k2")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", OTHERS)
def test_monitors_and_triggers_go_by_them_too(kind, name):
    stats = batch()
    reader, expected = OTHERS[kind](), OTHERS[kind]()
    got = update_of(reader)(stats, kl=name)
    assert got == update_of(expected)(stats._replace(kl=getattr(stats, name)))
    assert reader.state_dict() == expected.state_dict()


def test_groups_go_by_them_too():
    stats = batch()
    grouped = klfast.GroupedKLController(klfast.DualKLController, 0.5, {"a": 0.5, "b": 0.5})
    value = klfast.DualKLController(0.5, 0.5).update(stats, kl="k1")
    assert grouped.update({"a": stats}, kl="k1") == {"a": value, "b": 0.5}
    with pytest.raises(ValueError, match=WHAT):
        grouped.update({"a": stats, "b": 9.0}, kl="k1")
    assert grouped.value == {"a": value, "b": 0.5}


def test_verls_words_have_it_too():
    stats = batch()
    controller = klfast.compat.verl.AdaptiveKLController(0.5, 0.5, 100)
    expected = klfast.AdaptiveKLController(0.5, 0.5, 100, unit="token")
    assert controller.update(stats, kl="k1") == expected.update(stats, kl="k1") != 0.5


ALL = {**{kind: lambda kind=kind: make(kind, 0.5, 0.5) for kind in STEERING}, **OTHERS}
every_reader = pytest.mark.parametrize("kind", ALL)


@every_reader
@pytest.mark.parametrize("current", [9.0, torch.tensor(9.0), math.nan], ids=str)
def test_a_plain_number_is_no_k1(kind, current):
    reader = ALL[kind]()
    before = reader.state_dict()
    with pytest.raises(ValueError, match=WHAT):
        update_of(reader)(current, 8, kl="k1")
    assert reader.state_dict() == before


@every_reader
@pytest.mark.parametrize(
    ("bad", "error"), [("k4", ValueError), ("length", ValueError), (None, TypeError)]
)
def test_an_unknown_name_lists_the_right_ones(kind, bad, error):
    reader = ALL[kind]()
    with pytest.raises(error, match=r"unknown kl .*'kl', 'k1', 'k2', 'k3'"):
        update_of(reader)(batch(), kl=bad)


@every_reader
def test_divergences_without_tokens_have_no_k1(kind):
    reader = ALL[kind]()
    before = reader.state_dict()
    with pytest.raises(ValueError, match="kl must be 'kl' for statistics of divergences without t"):
        update_of(reader)(exact(), kl="k1")
    assert reader.state_dict() == before
    update_of(reader)(exact(torch.zeros(3, 5, dtype=torch.int64)), kl="k1")
    assert reader.skipped == 0


def test_on_a_device_divergences_without_tokens_are_skipped():
    """Nothing is read there that could tell."""
    controller = klfast.DualKLController(0.5, 0.5, device="cpu")
    controller.update(exact(), kl="k1")
    assert (controller.value.item(), controller.skipped.item()) == (0.5, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_a_finite_k1_is_skipped_not_refused(name):
    logprobs = torch.full((2, 3), math.nan)
    _, stats = klfast.kl_penalty(logprobs, torch.zeros(2, 3), return_stats=True)
    controller = klfast.DualKLController(0.5, 0.5)
    with pytest.warns(RuntimeWarning, match="skipped a KL of nan"):
        controller.update(stats, kl=name)
    assert (controller.value, controller.skipped) == (0.5, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sequences", [0, 2])
def test_a_batch_that_keeps_no_token_is_skipped_not_refused(name, sequences):
    logprobs = torch.zeros(sequences, 3)
    _, stats = klfast.kl_penalty(
        logprobs, logprobs, torch.zeros(sequences, 3, dtype=torch.bool), return_stats=True
    )
    controller = klfast.DualKLController(0.5, 0.5)
    with pytest.warns(RuntimeWarning, match="skipped a KL of nan"):
        controller.update(stats, kl=name)
    assert (controller.value, controller.skipped) == (0.5, 1)
