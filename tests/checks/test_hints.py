"""Hints name a likely mistake once, at the user's line. Correct calls get no hint."""

import functools
import inspect
import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import klfast
from klfast import Estimator, Rejection
from klfast.backends import BACKENDS
from klfast.compat import openrlhf, trlx, verl
from klfast.functional import hints
from klfast.types.reduction import REDUCTIONS, TOKENWISE_REDUCTIONS

pytestmark = [
    pytest.mark.filterwarnings(r"error:klfast\.\w+:UserWarning"),  # which others ignore
    pytest.mark.usefixtures("values_are_checked"),
]


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """The process forgets the hints that it has given."""
    monkeypatch.setattr(hints, "_given", set())
    monkeypatch.setattr(hints, "_calls", {name: itertools.count() for name in hints._calls})


def logprobs(*shape, dtype=torch.float32):
    return -torch.rand(*shape, dtype=torch.float64).to(dtype) - 0.1


def penalty(tensor, ref=None, **options):
    return klfast.kl_penalty(tensor, tensor - 0.2 if ref is None else ref, **options)


def rewards(tensor, ref=None, **options):
    scores = torch.ones(len(tensor), device=tensor.device)
    return klfast.kl_rewards(
        scores, tensor, tensor - 0.2 if ref is None else ref, kl_coef=0.1, **options
    )


def rollout(tensor, ref=None, backend="auto", **options):
    if backend != "auto" and BACKENDS[backend].lacks("rollout_correction", tensor.device):
        backend = "auto"
    options["backend"] = backend
    return klfast.rollout_correction(tensor, tensor - 0.2 if ref is None else ref, **options)


OF_LOGPROBS = {"kl_penalty": penalty, "kl_rewards": rewards, "rollout_correction": rollout}


def token_logprobs(logits, mask=None, **options):
    ids = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return klfast.token_logprobs(logits, ids, mask, **options)


def divergence(logits, mask=None, **options):
    return klfast.kl_divergence(logits, logits.roll(1, -1), mask, **options)


OF_LOGITS = {"token_logprobs": token_logprobs, "kl_divergence": divergence}


def messages(call, *args, **options):
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args, **options)
    return [str(warning.message) for warning in caught]


CANCEL = "klfast.{}: the mask has one weight for all kept tokens of each sequence.*weights="
OF_MEANS = {
    "kl_penalty": lambda mask, **o: klfast.kl_penalty(logprobs(2, 3), logprobs(2, 3), mask, **o),
    "reduce": lambda mask, **o: klfast.reduce(logprobs(2, 3), mask, **o),
    "kl_divergence": lambda mask, **o: klfast.kl_divergence(*torch.randn(2, 2, 3, 7), mask, **o),
    "linear_kl_divergence": lambda mask, **o: klfast.linear_kl_divergence(
        torch.randn(2, 3, 4), torch.randn(7, 4), torch.randn(2, 3, 4), None, mask, **o
    ),
}
OF_SEQUENCES = torch.tensor([[0.5, 0.0, 0.5], [2.0, 2.0, 0.0]])


@pytest.mark.parametrize("reduction", ["seq-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", OF_MEANS)
def test_weights_of_sequences_that_cancel_are_named_once(name, reduction):
    call = functools.partial(OF_MEANS[name], reduction=reduction)
    for right in (
        OF_SEQUENCES != 0,
        (OF_SEQUENCES != 0).float(),
        torch.tensor([[0.5, 0.0, 0.25], [2.0, 2.0, 0.0]]),
        torch.tensor([[0, 3, 3], [1, 0, 1]]),  # counts
    ):
        assert not messages(call, right)
    for other in ("token-mean", "seq-mean-token-sum", "seq-sum"):
        assert not messages(OF_MEANS[name], OF_SEQUENCES, reduction=other)
    with pytest.warns(UserWarning, match=CANCEL.format(name)) as caught:
        call(OF_SEQUENCES)
    assert len(caught) == 1
    assert f"reduction {reduction!r}" in str(caught[0].message)
    assert not messages(call, OF_SEQUENCES)
    assert not messages(call, (OF_SEQUENCES != 0), weights=OF_SEQUENCES)


def test_weights_of_packed_sequences_that_cancel_are_named():
    edges = torch.tensor([0, 2, 2, 5])
    values = {"values": logprobs(5), "reduction": "seq-mean", "cu_seqlens": edges}
    assert not messages(klfast.reduce, mask=torch.tensor([0.5, 0.5, 1, 2, 1.0]), **values)
    said = messages(klfast.reduce, mask=torch.tensor([0.5, 0.5, 2, 0, 2.0]), **values)
    assert len(said) == 1


@pytest.mark.parametrize("name", OF_LOGPROBS)
def test_logits_in_place_of_logprobs_are_named_once(backend, name):
    call, logits = OF_LOGPROBS[name], logprobs(3, 5)
    logits[1, 2] = 7.25
    said = f"klfast.{name}: logprobs must hold log-probs.* got 7.25 .*klfast.token_logprobs makes"
    with pytest.warns(UserWarning, match=said) as caught:
        call(logits, backend=backend)
    assert len(caught) == 1
    call(logits, backend=backend)
    call(logits + 1, logits, backend=backend)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("name", [*OF_LOGPROBS, "topk_kl_divergence"])
def test_probabilities_in_place_of_logprobs_are_named(name, masked):
    p = torch.rand(2, 50).clamp(0.01, 0.99)
    p[0, 3], p[0, 4], p[1, 0] = 0.0, 1.0, torch.nan
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[1, 0] = not masked
    if masked:
        p[1, 0] = -3.0
    argument = "logprobs"
    if name == "topk_kl_divergence":
        argument = "ref_logprobs"
        teacher, ids = torch.randn(2, 50, 9).softmax(-1).topk(4)
        said = messages(klfast.topk_kl_divergence, torch.randn(2, 50, 9), ids, teacher, mask)
    else:
        said = messages(OF_LOGPROBS[name], p, p, mask=mask)
    assert len(said) == 1
    assert f"are these probabilities? All lie in [0, 1]; {argument}.log() has their" in said[0]


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (klfast.kl_penalty, "ref_logprobs"),
        (klfast.kl_penalty, "old_logprobs"),
        (klfast.rollout_correction, "rollout_logprobs"),
    ],
)
def test_every_argument_is_looked_at(function, argument):
    given = {argument: torch.full((2, 3), 0.5)}
    if argument == "old_logprobs":
        given["ref_logprobs"] = logprobs(2, 3)
    with pytest.warns(UserWarning, match=f"{argument} must hold log-probs.* got 0.5 at"):
        function(logprobs(2, 3), **given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_mistake(backend, dtype):
    tensor = torch.zeros(2, 3, dtype=dtype)
    tensor[0, 1] = 0.0009
    penalty(tensor, backend=backend)
    tensor[0, 1] = 0.0011
    assert len(messages(penalty, tensor, backend=backend)) == 1


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool),
        torch.tensor([[1, 2, 0], [3, 0, 0]]),
        torch.tensor([[0.5, 1, 0], [1, 0, 0]]),
    ],
    ids=["bool", "int", "weights"],
)
@pytest.mark.parametrize("name", OF_LOGPROBS)
def test_padding_may_hold_anything(backend, name, mask):
    padding = torch.tensor([[0, 0, 1.0], [0, torch.inf, torch.nan]])
    tensor = torch.where(mask != 0, logprobs(2, 3), padding.to(mask.device))
    OF_LOGPROBS[name](tensor, mask=mask, backend=backend)
    tensor[0, 1] = 1.5
    assert "got 1.5" in messages(OF_LOGPROBS[name], tensor, mask=mask, backend=backend)[0]


def test_a_late_mistake_is_found():
    for _ in range(100):
        penalty(logprobs(2, 3))
    logits = torch.ones(2, 3)
    assert sum(len(messages(penalty, logits)) for _ in range(hints.EVERY)) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OF_LOGITS)
def test_logprobs_in_place_of_logits_are_named_once(backend, name, dtype):
    call, taken = OF_LOGITS[name], logprobs(4, 48, dtype=dtype)
    with pytest.warns(UserWarning, match=f"klfast.{name}: logits of shape .4, 48. must") as caught:
        call(taken, backend=backend)
    assert len(caught) == 1
    call(taken, backend=backend)


@pytest.mark.parametrize("name", OF_LOGITS)
def test_logprobs_of_random_tokens_are_found_too(name):
    """Their probabilities sum to less than 1."""
    whole = torch.randn(4, 48, 200).log_softmax(-1)
    taken = whole.gather(-1, torch.randint(200, (4, 48, 1)))[..., 0]
    assert taken.exp().sum(-1).max() < 1
    assert len(messages(OF_LOGITS[name], taken)) == 1


LOGITS = {
    "normal": lambda v: torch.randn(8, v),
    "log-softmax": lambda v: torch.randn(8, v).log_softmax(-1),
    "log-softmax-peaked": lambda v: (20 * torch.randn(8, v)).log_softmax(-1),
    "log-softmax-bf16": lambda v: torch.randn(8, v).log_softmax(-1).bfloat16(),
    "log-softmax-fp16": lambda v: torch.randn(8, v).log_softmax(-1).half(),
    "log-softmax-3-dim": lambda v: torch.randn(2, 8, v).log_softmax(-1),
    "maximum-subtracted": lambda v: (t := torch.randn(8, v)) - t.amax(-1, keepdim=True),
    "far-below-0": lambda v: torch.randn(8, v) - 100,  # GPT-2's
    "top-k": lambda v: (t := torch.randn(8, v)).masked_fill(
        t < t.amax(-1, keepdim=True) - 1, -torch.inf
    ),
    "zeros": lambda v: torch.zeros(8, v),
    "all-masked": lambda v: torch.full((8, v), -torch.inf),
    "nan": lambda v: torch.full((8, v), torch.nan),
    "no-rows": lambda v: torch.zeros(0, v),
    "all-below-0-3-dim": lambda v: logprobs(2, 4, v),
    "few-classes-a-little-below-0": lambda v: torch.randn(16, min(v, 32)) - 5,
    "one-row": lambda v: logprobs(1, min(v, 32)),
}


@pytest.mark.parametrize("kind", LOGITS)
def test_logits_are_not_taken_for_logprobs(kind):
    for call, words in itertools.product(OF_LOGITS.values(), (1, 2, 7, 48, 1000)):
        call(LOGITS[kind](words))


TOP = {
    "falling": lambda top: top,
    "rising": lambda top: top.flip(1),
    "bf16": lambda top: top.bfloat16(),
    # The log-prob of the sampled token comes first, as in inference engines.
    "taken-first": lambda top: torch.cat([top[:, 7:8], top], 1),
}


@pytest.mark.parametrize("order", TOP)
def test_a_teacher_s_top_words_are_not_taken_for_tokens(order):
    """Their probabilities sum to less than 1, and they are renormalised on purpose."""
    for spread, kept in itertools.product((1.0, 3.0), (20, 33, 128, 500)):
        whole = (torch.randn(64, 10_000) * spread).log_softmax(-1)
        for call in OF_LOGITS.values():
            call(TOP[order](whole.topk(kept, -1).values))


@pytest.mark.parametrize("tokens", [33, 129, 5000])
@pytest.mark.parametrize("sequences", [1, 2, 64])
def test_logprobs_of_tokens_are_in_no_order(sequences, tokens):
    likely = -torch.empty(sequences, tokens).exponential_(2)
    likely[::2, 27:30] = 0.0  # padding
    assert len(messages(divergence, likely)) == 1


def loss(estimator="k1", differentiable=True, **options):
    tensor = logprobs(2, 3).requires_grad_(differentiable)
    return penalty(tensor, estimator=estimator, reduction="token-mean", **options)


def test_k1_in_a_loss_is_named_once(backend):
    with pytest.warns(UserWarning, match=r"klfast.kl_penalty: the gradient of .*'k1'.* 'k1\+'"):
        loss(backend=backend)
    loss(backend=backend)
    loss(Estimator("k1", kl_clip=2.0), backend=backend)


@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "k1+"},
        {"estimator": "k2"},
        {"estimator": "k3"},
        {"estimator": Estimator("k1", gradient="none")},
        {"old_logprobs": -torch.ones(2, 3)},
        {"differentiable": False},
        {"coef": 0.0, "return_stats": True},
        {"coef": torch.tensor(0.0)},
        {"coef": klfast.FixedKLController(0.0)},
        {"coef": klfast.FixedKLController(0.0, device="cpu")},
    ],
    ids=[
        *("k1+", "k2", "k3", "no-gradient", "weights", "constant", "measured"),
        *("measured-tensor", "measured-controller", "measured-device"),
    ],
)
def test_no_hint_of_k1_where_there_is_no_such_loss(backend, options):
    loss(**options, backend=backend)


def test_a_differentiable_weight_beside_the_gradient_of_k2_is_named_once(backend):
    old = {"old_logprobs": logprobs(2, 3), "backend": backend}
    for estimator in ("k3+", Estimator("k3", gradient="k2", importance="detached"), "k2", "k3"):
        loss(estimator, **old)
    mixed = Estimator("k3", gradient="k2")
    loss(mixed, backend=backend)
    loss(mixed, coef=0.0, **old)
    loss(mixed, differentiable=False, **old)
    with pytest.warns(UserWarning, match=r"differentiable weight .* importance='detached'"):
        loss(mixed, **old)
    loss(mixed, **old)
    loss(Estimator("k1", gradient="k2", importance="differentiable"), **old)


def test_an_estimator_of_a_reward_is_named_once(backend):
    for right in ("k1", Estimator("k1", kl_clip=2.0), "k1+"):
        rewards(logprobs(2, 3), estimator=right, backend=backend)
    zero = {"kl_coef": 0.0, "estimator": "k3", "return_stats": True}  # it is only measured
    klfast.kl_rewards(torch.ones(2), logprobs(2, 3), logprobs(2, 3), **zero)
    said = r"klfast.kl_rewards: only estimator 'k1' has the gradient of a KL in a reward, got 'k3'"
    with pytest.warns(UserWarning, match=said) as caught:
        rewards(logprobs(2, 3), estimator="low_var_kl", backend=backend)
    assert len(caught) == 1
    rewards(logprobs(2, 3), estimator="abs", backend=backend)


@pytest.mark.parametrize(
    "negative",
    [-1.0, torch.tensor(-1.0), SimpleNamespace(value=-1.0)],
    ids=["number", "tensor", "controller"],
)
@pytest.mark.parametrize("name", ["kl_penalty", "kl_rewards", "kl_divergence"])
def test_a_negative_coefficient_is_named_once(name, negative):
    calls = {
        "kl_rewards": lambda coef: klfast.kl_rewards(
            torch.ones(2), logprobs(2, 3), logprobs(2, 3), kl_coef=coef
        ),
        "kl_divergence": lambda coef: divergence(torch.randn(2, 3, 9), coef=coef),
        "kl_penalty": lambda coef: penalty(logprobs(2, 3), coef=coef),
    }
    for right in (1.0, 0.0, torch.tensor(0.5), torch.tensor(0.5, requires_grad=True)):
        calls[name](right)
    argument = "kl_coef" if name == "kl_rewards" else "coef"
    [text] = messages(calls[name], negative)
    assert text.startswith(f"klfast.{name}: {argument} should be positive for a penalty, got -1, ")
    calls[name](negative)


def test_a_negative_factor_of_other_values_is_no_mistake():
    klfast.reduce(logprobs(2, 3), reduction="token-mean", coef=-1.0)


@pytest.mark.parametrize("argument", [0, 1])
@pytest.mark.parametrize("name", ["kl_penalty", "kl_rewards", "topk_kl_divergence"])
def test_nan_without_a_mask_is_named_once(name, argument):
    wrong = [logprobs(2, 3), logprobs(2, 3)]
    wrong[argument][1, 2] = torch.nan
    if name == "topk_kl_divergence":
        of_teacher = wrong[argument][..., None] - torch.tensor([1.0, 2.0])
        ids = torch.arange(2).expand(2, 3, 2)
        call = functools.partial(klfast.topk_kl_divergence, torch.randn(2, 3, 9), ids, of_teacher)
        argument = 1
    else:
        call = functools.partial(OF_LOGPROBS[name], *wrong)
    call(mask=torch.ones(2, 3))
    weights = torch.ones(2, 3)
    weights[1, 2] = 0
    if name != "kl_rewards":  # it has no weights
        call(weights=weights)
    [text] = messages(call)
    named = ("logprobs", "ref_logprobs")[argument]
    assert text.startswith(f"klfast.{name}: {named} holds NaN and there is no mask, ")
    call()


def test_nan_of_a_sampler_is_left_out_and_no_mistake():
    wrong = logprobs(2, 3)
    wrong[1, 2] = torch.nan
    rollout(wrong)
    rollout(logprobs(2, 3), wrong)


# -log p in place of log p


def test_negated_logprobs_are_named():
    [text] = messages(penalty, -logprobs(2, 3) - 0.1)
    assert "or -logprobs if they are -log p" in text
    hints._given.clear()
    [text] = messages(penalty, 5 - logprobs(2, 3))
    assert (
        "are these -log p? None is below 0; -logprobs has the log-probs. Are they logits?" in text
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(9,), (4, 48), (2, 3, 1000), (2, 5, 2)], ids=str)
@pytest.mark.parametrize("name", [*OF_LOGITS, "topk_kl_divergence"])
def test_probabilities_in_place_of_logits_are_named_once(name, shape, dtype):
    if len(shape) == 1 and name != "token_logprobs":
        return
    p = torch.randn(shape).softmax(-1).to(dtype)
    call = OF_LOGITS.get(name, of_teacher)
    with pytest.warns(
        UserWarning, match=f"klfast.{name}: logits of .* probabilities: rows in .0, 1"
    ):
        call(p)
    call(p)


def of_teacher(logits, mask=None):
    top, ids = torch.randn(logits.shape).log_softmax(-1).topk(2)
    return klfast.topk_kl_divergence(logits, ids, top, mask)


def test_what_is_no_distribution_is_not_taken_for_probabilities():
    p = torch.randn(2, 3, 9).softmax(-1)
    for logits in (2 * p, p - 0.01, p[..., :8], torch.where(p == p.amax(), 1.01, p)):
        for call in OF_LOGITS.values():
            call(logits)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    for call in OF_LOGITS.values():
        call(torch.where(mask[..., None] != 0, torch.randn(2, 3, 9), p), mask)
        call(p, torch.zeros(2, 3))


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
def test_entries_with_a_mass_above_1_are_named_once(linear):
    ids = torch.arange(4).expand(2, 3, 4)

    def call(teacher, mask=None):
        if linear:
            inputs = torch.randn(2, 3, 5), torch.randn(9, 5)
            return klfast.linear_topk_kl_divergence(*inputs, ids, teacher, mask)
        return klfast.topk_kl_divergence(torch.randn(2, 3, 9), ids, teacher, mask)

    right = torch.randn(2, 3, 4).log_softmax(-1)
    for teacher in (right, right.bfloat16().float(), right - 1, torch.full_like(right, -torch.inf)):
        call(teacher)
    wrong = torch.where(torch.arange(3)[:, None] == 1, torch.tensor(-1.0), right)
    call(wrong, torch.tensor([[1, 0, 1], [1, 0, 1]]))
    [text] = messages(call, wrong)
    name = "linear_topk_kl_divergence" if linear else "topk_kl_divergence"
    assert text.startswith(f"klfast.{name}: ref_logprobs must hold log-probs of one distribution")
    assert "probabilities sum to 1.472" in text
    call(wrong)
    hints._given.clear()
    [text] = messages(call, -right)  # one mistake
    assert "must hold log-probs, which are at most 0" in text
    assert not messages(call, -right)


IDS = torch.arange(4).expand(2, 3, 4)
ROWS = {
    "kl_divergence": (torch.randn(2, 3, 9), torch.randn(2, 3, 9)),
    "topk_kl_divergence": (torch.randn(2, 3, 9), IDS, torch.full((2, 3, 4), -2.0)),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_sequence_is_said_where_sequences_matter(reduction):
    expected = int(reduction not in TOKENWISE_REDUCTIONS)
    for given in (expected, 0):
        caught = messages(penalty, logprobs(6), reduction=reduction)
        assert len(caught) == given
        assert all(
            text.startswith("klfast.kl_penalty: logprobs has shape [6] and no cu_seqlens, so that")
            and reduction in text
            for text in caught
        )
    for call, rows in ROWS.items():
        given = (x.view(6, *x.shape[2:]) for x in rows)
        function = getattr(klfast, call)
        assert len(messages(function, *given, reduction=reduction)) == expected, call


def test_sequences_with_boundaries_are_as_they_are():
    cu_seqlens = torch.tensor([0, 2, 6])
    penalty(logprobs(6), reduction="seq-sum", cu_seqlens=cu_seqlens)
    penalty(logprobs(1, 6), reduction="seq-sum")
    divergence(torch.randn(6, 9), reduction="seq-sum", cu_seqlens=cu_seqlens)
    rollout(logprobs(6), weight="sequence", cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"weight": "sequence"}, "weight 'sequence'"),
        ({"weight": "geometric"}, "weight 'geometric'"),
        ({"reject": Rejection("k1", "seq-mean", high=1.0)}, "a Rejection over 'seq-mean'"),
        ({"reject": Rejection("k1", high=1.0)}, None),
        ({}, None),
    ],
)
def test_one_sequence_between_sampler_and_trainer(options, named):
    caught = messages(rollout, logprobs(6), **options)
    assert len(caught) == (named is not None)
    assert all(f"{named} takes it for one sequence;" in text for text in caught)


# The line of a hint, and callers without hints

LINES = {
    "kl_penalty": lambda: klfast.kl_penalty(torch.ones(2, 3), torch.ones(2, 3)),
    "kl_rewards": lambda: klfast.kl_rewards(
        torch.ones(2), torch.ones(2, 3), torch.ones(2, 3), kl_coef=1.0
    ),
    "rollout_correction": lambda: klfast.rollout_correction(torch.ones(2, 3), torch.ones(2, 3)),
    "token_logprobs": lambda: klfast.token_logprobs(logprobs(4, 48), torch.zeros(4).long()),
    "kl_divergence": lambda: klfast.kl_divergence(logprobs(4, 48), logprobs(4, 48)),
    "k1": lambda: klfast.kl_penalty(
        logprobs(2, 3).requires_grad_(), logprobs(2, 3), estimator="k1"
    ),
    "profile": lambda: klfast.log_ratio_profile(torch.ones(2, 3), torch.ones(2, 3)),
    "checkpoint": lambda: torch.utils.checkpoint.checkpoint(
        klfast.kl_penalty, torch.ones(2, 3), torch.ones(2, 3), use_reentrant=False
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_hint_points_at_the_user_s_line(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LINES[name]()
    [warning] = caught
    assert warning.filename == __file__
    source, first = inspect.getsourcelines(LINES[name])
    assert first <= warning.lineno < first + len(source)


def test_frameworks_get_no_hints(monkeypatch):
    logits = torch.ones(2, 3, requires_grad=True)
    verl.kl_penalty(logits, logits.detach(), "kl")
    verl.kl_penalty(logits, logits.detach(), "low_var_kl")
    verl.agg_loss(logits, torch.ones(2, 3), "token-mean")
    openrlhf.compute_approx_kl(logits, logits.detach(), kl_estimator="k1")
    monkeypatch.setattr(trlx, "TRLX", {"reward": Estimator("k3")})
    inputs = logprobs(2, 3), logprobs(2, 3), torch.ones(2, 4)
    trlx.kl_rewards(torch.ones(2), *inputs, kl_coef=-0.1)
    assert not hints._given
    assert len(messages(penalty, logits.detach())) == 1


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


@pytest.fixture
def no_looks(monkeypatch):
    def look(*_):
        raise AssertionError("values are looked at")

    monkeypatch.setattr(hints, "_SIGNS", dict.fromkeys(hints._SIGNS, look))


@pytest.mark.usefixtures("no_looks")
@pytest.mark.parametrize("name", ["kl_penalty", "rollout_correction", *OF_LOGITS])
def test_nothing_is_read_where_it_must_not(name):
    call = {**OF_LOGPROBS, **OF_LOGITS}[name]
    tensor = torch.ones(2, 3)
    with pytest.raises(AssertionError, match="looked at"):
        call(tensor)
    with DispatchMode():
        call(tensor)
    with FakeTensorMode() as mode:
        call(mode.from_tensor(tensor))
    call(tensor.as_subclass(Subclass))
    call(torch._to_functional_tensor(tensor))
    torch.func.vmap(call)(torch.ones(2, 2, 3)) if name == "kl_penalty" else None


@pytest.mark.usefixtures("no_looks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nothing_is_read_or_said_under_torch_compile():
    tensor = torch.ones(6, requires_grad=True)

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(tensor, logits):
        penalty = klfast.kl_penalty(
            tensor, tensor.detach() - 1, estimator="k1", reduction="seq-sum"
        )
        taken = klfast.token_logprobs(logits, torch.zeros(logits.shape[0], dtype=torch.long))
        return penalty.sum() + taken.sum()

    torch._dynamo.reset()
    compiled(tensor, logprobs(6, 9))
    assert not hints._given
    assert all(next(count) == 0 for count in hints._calls.values())
    torch._dynamo.reset()


@pytest.mark.filterwarnings("error")
def test_a_right_program_is_told_nothing():
    logits = torch.randn(2, 6, 50, requires_grad=True)
    ids = torch.randint(50, (2, 6))
    taken = klfast.token_logprobs(logits, ids)
    ref = klfast.token_logprobs(logits.detach() + 0.1, ids)
    klfast.kl_penalty(taken, ref, estimator="k3+", reduction="token-mean").backward()
    klfast.kl_rewards(torch.ones(2), taken, ref, kl_coef=0.1)
    klfast.kl_divergence(logits[0], logits[1])
    klfast.rollout_correction(taken, ref, weight="sequence")
    klfast.log_ratio_profile(taken, ref)
    penalty(logprobs(0, 3))


SWAPPED = {
    "kl_penalty": lambda p, q, **o: klfast.kl_penalty(p[..., 0], q[..., 0], **o),
    "kl_divergence": klfast.kl_divergence,
    "topk_kl_divergence": lambda p, q, **o: klfast.topk_kl_divergence(p, IDS, q[..., :4], **o),
    "linear_kl_divergence": lambda p, q, **o: klfast.linear_kl_divergence(
        p, torch.ones(7, 5), q, **o
    ),
    "linear_topk_kl_divergence": lambda p, q, **o: klfast.linear_topk_kl_divergence(
        p, torch.ones(7, 5), IDS, q[..., :4], **o
    ),
}


@pytest.mark.parametrize("function", SWAPPED)
def test_a_policy_in_the_place_of_its_reference_is_named_once(function):
    policy, reference = (logprobs(2, 3, 5) - 2 for _ in range(2))
    policy.requires_grad_()
    call = functools.partial(SWAPPED[function], reduction="token-mean")
    call(policy, reference)
    call(policy, policy)
    with torch.no_grad():
        call(reference, policy)
    call(reference, policy, reduction="none")
    with pytest.warns(UserWarning, match=f"{function}: ref_.* requires grad and .* swapped"):
        call(reference, policy)
    call(reference, policy)
