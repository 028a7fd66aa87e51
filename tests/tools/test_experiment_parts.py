"""The experiment's parts: text, model, reward, KL step, summaries, files."""

import statistics

import pytest
import torch
from made_up_run import rows

import klfast
from lab import train
from lab.model import GPT, continuation_logits, sample
from lab.reading import answer, reading, recipe
from lab.settings import ARMS, Settings, on_policy
from lab.summary import measure, summarise
from lab.text import load_corpus
from lab.train import SAMPLED, estimator, token_errors


@pytest.fixture(scope="module")
def corpus():
    return load_corpus()


@pytest.fixture
def model():
    gpt = GPT(vocabulary=20, context=12, layers=2, width=16, heads=2)
    gpt.initialise(torch.Generator().manual_seed(0))
    return gpt


def test_corpus_is_the_text_and_held_out_paragraphs_are_unseen(corpus):
    train_lines = set(corpus.decode(corpus.train).split("\n"))
    held_out_lines = set(corpus.decode(corpus.held_out).split("\n"))
    assert train_lines & held_out_lines == {""}
    assert len(corpus.train) > 8 * len(corpus.held_out) > 0


@pytest.mark.parametrize("group", [1, 4])
def test_cached_sampling_draws_from_the_model(model, group):
    """A prompt is read once for all its continuations, which changes no logits."""
    count = 400 // group
    prompts = torch.randint(20, (count, 4), generator=torch.Generator().manual_seed(1))
    drawn, again = (
        sample(model, prompts, 8, torch.Generator().manual_seed(2), group) for _ in range(2)
    )
    assert drawn.shape == (400, 8)
    assert torch.equal(drawn, again)

    caches = model.new_caches(400)
    ids = torch.cat([prompts.repeat_interleave(group, 0), drawn], 1)
    stepwise = [model(ids[:, :4], 0, caches)[:, -1]]
    stepwise += [model(ids[:, t : t + 1], t, caches)[:, 0] for t in range(4, 11)]
    chosen = torch.stack(stepwise, 1).log_softmax(-1).gather(-1, drawn[..., None])[..., 0]
    logprobs = klfast.token_logprobs(continuation_logits(model, prompts, drawn), drawn)
    torch.testing.assert_close(chosen, logprobs)


def test_models_are_compared_over_the_vocabulary_and_at_the_drawn_tokens(model):
    reference = GPT(vocabulary=20, context=12, layers=1, width=8, heads=2)
    reference.initialise(torch.Generator().manual_seed(3))
    ids = torch.randint(20, (6, 12), generator=torch.Generator().manual_seed(1))
    ids[1::2, :4] = ids[::2, :4]  # two continuations of each prompt
    mask = torch.arange(8) < torch.tensor([[8], [1], [5], [8], [2], [7]])
    both = train.compare_models(model, reference, train.Batch(ids[::2, :4], ids[:, 4:], mask))

    p, q = (m(ids[:, :-1])[:, 3:].double().log_softmax(-1) for m in (model, reference))
    exact = (p.exp() * (p - q)).sum(-1) * mask
    logprobs, ref_logprobs = (x.gather(-1, ids[:, 4:, None])[..., 0] * mask for x in (p, q))
    torch.testing.assert_close(both.exact.double(), exact, rtol=2e-6, atol=0)
    torch.testing.assert_close(both.stats.kl.double(), exact.sum(1), rtol=4e-6, atol=0)
    torch.testing.assert_close(both.logprobs.double(), logprobs)
    torch.testing.assert_close(both.ref_logprobs.double(), ref_logprobs)
    rounding = 16 * 2**-22  # of 16 log-probs between -4 and -2
    k1 = (logprobs - ref_logprobs).sum(1)
    torch.testing.assert_close(both.stats.k1.double(), k1, rtol=0, atol=rounding)
    weights = tuple(model.parameters())
    share = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    for gradient, expected in zip(
        torch.autograd.grad(both.logprobs, weights, share),
        torch.autograd.grad(logprobs, weights, share.double()),
        strict=True,
    ):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    assert not both.exact.requires_grad


def test_kl_step_gives_the_reverse_kl_gradient_and_unbiased_values():
    logprobs = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    ref_logprobs = -torch.rand(3, 5, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]).bool()
    gradient, stats, seconds = train.kl_step(logprobs.clone(), ref_logprobs, mask, 0.5)
    x = (logprobs - ref_logprobs) * mask
    torch.testing.assert_close(gradient, 0.5 * x / 3)
    torch.testing.assert_close(stats.kl, (torch.expm1(-x) + x).sum(1))
    assert seconds > 0

    exact = torch.tensor([3.0, 1.5, 2.0])
    record = train.kl_record(stats._replace(kl=exact))
    assert record["kl_per_sequence_exact"] == pytest.approx(6.5 / 3)
    assert record["kl_per_token_exact"] == pytest.approx(6.5 / 11)
    errors = (x.sum(1) - exact).tolist()
    assert record["kl_per_sequence_k1_error_std"] == pytest.approx(statistics.stdev(errors))
    assert record["kl_per_sequence_k1"] == pytest.approx(float(x.sum(1).mean()))
    assert record["kl_per_token_k1"] == pytest.approx(float(x.sum() / 11))
    assert record["kl_per_sequence_k2"] == pytest.approx(float(x.square().sum() / 6))
    assert record["kl_per_sequence_k3"] == pytest.approx(float(stats.sequence_mean()))
    assert record["kl_per_token_k3"] == pytest.approx(float(stats.token_mean()))


def test_errors_are_summed_over_tokens_alike_in_exact_kl():
    exact = torch.tensor([[0.03, 0.3, 0.04], [0.0, 0.035, 7.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]]).bool()
    logprobs = -torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    ref_logprobs = -torch.rand(2, 3, generator=torch.Generator().manual_seed(1))
    errors = token_errors(exact, logprobs, ref_logprobs, mask)
    assert errors["low"] == [0.02, 0.2, 5.0]
    assert errors["tokens"] == [2, 1, 1]
    assert errors["exact"] == pytest.approx([0.07, 0.3, 7.0])
    x = logprobs - ref_logprobs
    for name, estimate in (("k1", x), ("k2", x * x / 2), ("k3", torch.expm1(-x) + x)):
        error = (estimate - exact).tolist()
        in_bins = [[error[0][0], error[0][2]], [error[0][1]], [error[1][2]]]
        assert errors[name] == pytest.approx([sum(e) for e in in_bins], rel=1e-5)
        squares = [sum(e * e for e in own) for own in in_bins]
        assert errors[f"{name}_squared"] == pytest.approx(squares, rel=1e-5)


def test_measured_bias_and_noise_are_those_of_the_distributions():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 30, generator=generator, dtype=torch.float64).softmax(-1)
    x = (p / q).log()
    exact = float((p * x).sum())
    drawn = torch.multinomial(p, 40_000, replacement=True, generator=generator).view(100, 400)
    steps = [
        {"step": i, "token_errors": token_errors(torch.full((400,), exact), own, ref, own < 0)}
        for i, (own, ref) in enumerate(zip(p.log()[drawn], q.log()[drawn], strict=True))
    ]
    (measured,) = measure(steps)
    k2 = measured.estimators["k2"]
    assert abs(k2.bias) > k2.margin
    assert measured.low < exact < measured.high
    assert (measured.tokens, measured.steps) == (40_000, 100)
    assert measured.exact == pytest.approx(exact)
    for name, value in (("k1", x), ("k2", x * x / 2), ("k3", torch.expm1(-x) + x)):
        accuracy = measured.estimators[name]
        mean = float((p * value).sum())
        std = float((p * (value - mean).square()).sum().sqrt())
        # Two margins are 3.9 standard errors: chance alone oversteps them once in 10,000 seeds.
        assert accuracy.bias == pytest.approx(mean / exact - 1, abs=2 * accuracy.margin)
        # The spread between 100 steps is known to 7 %.
        assert accuracy.margin == pytest.approx(1.96 * std / 200 / exact, rel=0.2)
        assert accuracy.std == pytest.approx(std / exact, rel=0.1)

    (twice,) = measure(steps + steps)  # as two arms with one policy, which draw the same tokens
    assert twice.tokens == 80_000
    for name in SAMPLED:
        assert twice.estimators[name].margin == pytest.approx(measured.estimators[name].margin)
    assert measure(steps[:9]) == measure(steps[:2] * 10) == []


def of(*arms, **changes):
    """The answer, and the summaries that it is of."""
    records = [row for arm in arms for row in arm]
    names = tuple(dict.fromkeys(row["arm"] for row in records))
    settings = Settings(**{"steps": 6, "arms": names, "target": 6.0, **changes})
    summaries = summarise(records, settings)
    return answer(summaries, settings), summaries, " ".join(reading(summaries, settings))


GOOD = rows("adaptive", [0, 5, 7, 6, 6.1, 6.3], reward=[0.1, 0.1, 0.2, 0.3, 0.3, 0.32])
HIGH = rows("fixed-high", [0, 1, 2, 3, 3.1, 2.9], coefficient=0.05, reward=0.2)


def test_the_answer_is_the_arm_that_held_best_over_the_last_third():
    low = rows("fixed-low", [0, 4, 8, 10, 11, 13], coefficient=0.012, reward=0.5)
    worse = rows("exponential", [0, 5, 7, 6, 6.9, 7.0], reward=0.35)
    found, summaries, _ = of(low, HIGH, worse, GOOD)
    assert found.line == (
        "Adaptive (Ziegler) held the target best: a KL of 6.2 ± 0.141 nats per sequence "
        "(3% above the target of 6) with a reward of 31.0%; the fixed coefficient 0.05 got 20.0% "
        "at 3 nats (50% below the target of 6)."
    )
    assert (found.arm, found.held) == ("adaptive", True)
    ours = next(s for s in summaries if s.name == "adaptive")
    assert (ours.steps, ours.window, ours.nonfinite) == (6, 2, 15)
    assert ours.exact_kl == pytest.approx(1.1 * 6.2)
    assert ours.clipped == pytest.approx(24 / (40 * 20))


def test_an_answer_says_what_is_level_or_missing():
    noisy = rows("nupi", [0, 5, 7, 6, 5.5, 7.1], reward=0.4)
    assert "held the target best, level within the noise with nuPI: a KL" in of(GOOD, noisy)[0].line
    far, _, _ = of(rows("adaptive", [0, 20, 19, 18, 17, 16]), HIGH)
    assert "came closest, and did not hold it: a KL of 16" in far.line
    assert not far.held
    assert of(HIGH)[0].line.startswith("No arm of this run steers. The fixed coefficient 0.05")
    assert of(rows("none", [0] * 6, coefficient=0.0))[0].arm is None
    unfinished, _, text = of(GOOD, HIGH[:4])
    assert unfinished.line.startswith("No answer yet")
    assert "fixed, high made 4 of 6 steps" in text


# What to copy

UNUSUAL = Settings(target=3.5, init_coef=0.07, horizon=123.0, gain=0.3, low_coef=0.02, clip=2.5)
of_an_arm = pytest.mark.parametrize("name", on_policy(ARMS))


@of_an_arm
@pytest.mark.parametrize("settings", [Settings(), UNUSUAL], ids=["defaults", "unusual"])
def test_what_to_copy_runs_and_takes_the_runs_step(name, settings):
    logprobs = -torch.rand(4, 9, dtype=torch.float64)
    given = {
        "logprobs": logprobs.clone().requires_grad_(),
        "ref_logprobs": logprobs - 0.3 * torch.randn(4, 9, dtype=torch.float64),
        "mask": torch.arange(9) < torch.tensor([[9], [4], [1], [6]]),
        "policy_loss": 0.0,
    }
    exec(recipe(name, settings), given)
    ran = ARMS[name].controller(settings)
    expected, stats = klfast.kl_penalty(
        given["logprobs"],
        given["ref_logprobs"],
        given["mask"],
        estimator=estimator(settings),
        reduction="seq-mean-token-sum",
        coef=ran.value,
        return_stats=True,
    )
    ran.update(stats)
    assert given["loss"] == expected
    assert given["estimator"] == estimator(settings)
    assert type(given["controller"]) is type(ran)
    for kl in (0.1, 5.0, 50.0, 6.0):
        ran.update(kl, settings.batch)
        given["controller"].update(kl, settings.batch)
    assert given["controller"].state_dict() == ran.state_dict()
