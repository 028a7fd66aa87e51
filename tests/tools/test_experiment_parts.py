"""The experiment's parts: text, model, reward, KL step, summaries, files."""

import dataclasses
import math
import statistics

import pytest
import torch
from made_up_run import FAR, NEAR, bins, rows
from refusals import POSITIVE

import klfast
from klfast.controllers import CONTROLLERS
from lab import summary, train
from lab.drawing import STYLES
from lab.model import GPT, continuation_logits, sample
from lab.reading import read_accuracy, reading
from lab.settings import ARMS, DEFAULT_ARMS, CompareError, Settings, check_settings
from lab.summary import measure, number
from lab.text import build_corpus, load_corpus, prompt_starts, random_prompts
from lab.train import SAMPLED, token_errors

PARAGRAPHS = [f"the {word} is a kind of thing that one sees" for word in "abcdefghijklmnopqrst"]


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


def test_encoding_is_reversible_and_prefers_whole_words():
    corpus = build_corpus(PARAGRAPHS)
    assert corpus.decode(corpus.held_out) == "\n".join([*PARAGRAPHS[::10], ""])
    assert corpus.tokens.index(" kind") in corpus.train.tolist()


def test_prompts_stay_inside_a_paragraph_and_end_with_a_word(corpus):
    generator = torch.Generator().manual_seed(0)
    starts = prompt_starts(corpus, corpus.train, 8)
    prompts = random_prompts(corpus.train, starts, 50, 8, generator)
    text = corpus.decode(corpus.train)
    for prompt in prompts:
        words = corpus.decode(prompt)
        assert words.startswith(" ")
        assert "\n" not in words
        assert words + " " in text


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


def test_continuation_ends_with_the_first_end_token():
    drawn = torch.tensor([[5, 0, 3, 0], [1, 2, 3, 4], [0, 1, 1, 1]])
    expected = [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert train.kept(drawn, end=0).int().tolist() == expected


def test_reward_is_the_share_of_the_letter_and_unused_places_count():
    world = train.World(
        corpus=build_corpus(PARAGRAPHS),
        reference=None,
        held_out=None,
        starts=None,
        letters=torch.tensor([0.0, 1.0, 2.0]),
        characters=torch.tensor([1.0, 1.0, 4.0]),
    )
    drawn = torch.tensor([[1, 1, 1], [2, 1, 1], [1, 0, 0]])
    batch = train.Batch(None, drawn, train.kept(drawn, end=0))
    assert train.letter_share(batch, world).tolist() == pytest.approx([1, 4 / 6, 1 / 3])


def test_advantage_has_no_mean_within_a_group():
    advantage = train.group_advantage(torch.tensor([1.0, 3.0, 10.0, 10.0]), group=2)
    assert advantage.tolist() == [-1, 1, 0, 0]


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


def test_no_token_far_enough_from_the_reference_is_no_bin():
    nothing = token_errors(*torch.zeros(3, 2, 4), torch.ones(2, 4).bool())
    assert nothing["low"] == nothing["k1"] == []
    assert measure([{"step": 1, "token_errors": nothing}]) == []
    assert "too few to tell bias from noise" in " ".join(read_accuracy([]))


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
    assert measured.estimators["k2"].is_biased
    assert measured.low < exact < measured.high
    assert (measured.tokens, measured.steps) == (40_000, 100)
    assert measured.exact == pytest.approx(exact)
    assert measured.ratio == pytest.approx(1, abs=0.03)
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


def test_reading_of_the_estimators_follows_the_numbers():
    text = " ".join(read_accuracy(bins(NEAR, FAR)))
    assert "4,000 tokens had an exact KL between 0.02 and 5 nats, in 2 bins" in text
    assert "k1: no bias can be told from noise" in text
    assert "scatters by 900% of the exact KL at 0.03 nats and 30% of the exact KL at 3" in text
    assert "k2: its mean is off the exact KL by more than the 95% band in 1 of 2 bins" in text
    assert "most at 3 nats: by +125.0% ± 2.0%" in text
    assert "by -10.0% ± 2.0%" in text
    assert "k3 was less noisy than k1 up to 0.05 nats per token, and noisier beyond" in text
    assert "reference / policy" not in text

    assert "k3 was less noisy than k1 everywhere" in " ".join(read_accuracy(bins(NEAR)))
    far = " ".join(read_accuracy(bins(FAR, ratio=0.4)))
    assert "k3 was nowhere less noisy than k1" in far
    assert "was 0.4: " in far
    assert "left it 0.6 nats below k1" in far
    turned = read_accuracy(bins((0.01, *FAR[1:]), NEAR))
    assert "k3 was less noisy than k1 in 1 of 2 bins." in turned


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be a whole number >= 1, got 0"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"seed": 2**63}, "seed must be a whole number <= 9223372036854775807, got 92233720368547"),
        ({"target": math.nan}, f"target {POSITIVE}, got nan"),
        ({"target": 0.0}, f"target {POSITIVE}, got 0.0"),
        ({"high_coef": math.inf}, f"high_coef {POSITIVE}, got inf"),
        ({"horizon": 0.0}, f"horizon {POSITIVE}, got 0.0"),
        ({"arms": ()}, "no arm given; expected some of 'none', 'fixed-low'"),
        ({"arms": ("adaptve",)}, "unknown arm 'adaptve'; expected one of 'none', 'fixed-low'"),
        ({"arms": ("none", "none")}, "arm 'none' is given more than once"),
        ({"letter": "ee"}, "letter must be one of 'a' to 'z', got 'ee'"),
        ({"group": 1}, "group must be a whole number >= 2, got 1"),
        ({"heads": 5}, "width must be a multiple of heads=5, got 96"),
    ],
)
def test_settings_that_make_no_sense_are_named(change, message):
    with pytest.raises(CompareError, match=message):
        check_settings(dataclasses.replace(Settings(), **change))


def test_summary_is_over_the_last_third():
    settings = Settings(steps=6, arms=("adaptive",), target=6.0)
    (s,) = summary.summarise(rows("adaptive", [0, 5, 20, 20, 6, 7]), settings)
    assert (s.steps, s.window, s.kl, s.settled) == (6, 2, 6.5, 2)
    assert s.exact_kl == pytest.approx(7.15)
    k2 = s.estimates["k2"]
    assert (k2.kl, k2.bias) == (6.5, pytest.approx(-0.65))
    assert k2.error_std == pytest.approx(math.sqrt((3**2 + 3.5**2) / 2))
    assert s.miss(6.0) == pytest.approx(0.5 / 6)
    assert s.held(6.0)


def test_clips_and_bad_tokens_are_summed():
    """24 of 40 x 20 tokens a step."""
    settings = Settings(steps=6, arms=("adaptive",), clip=0.5)
    (s,) = summary.summarise(rows("adaptive", [0, 5, 20, 20, 6, 8]), settings)
    assert s.clipped == pytest.approx(0.03)
    assert s.nonfinite == 15
    text = " ".join(reading([s], settings))
    assert "The clip at 0.5 nats acted most in the arm “adaptive (Ziegler)”, on 3.00%" in text
    assert "NaN or infinite: 15 in the arm" in text
    assert "The clip" not in " ".join(reading([s], dataclasses.replace(settings, clip=0.0)))


def read(records, **changes):
    settings = Settings(**{"steps": 3, "arms": DEFAULT_ARMS, "target": 6.0, **changes})
    return " ".join(reading(summary.summarise(records, settings), settings))


def test_reading_follows_the_numbers():
    arms = ("none", "fixed-low", "adaptive")
    records = rows("none", [0, 50, 60], coefficient=0.0, perplexity=900.0, reward=0.9)
    records += rows("fixed-low", [0, 3, 3])
    held = read(records + rows("adaptive", [0, 5, 5.7], reward=0.2), arms=arms)
    assert "Adaptive (Ziegler) held the target" in held
    assert "5% below the target of 6" in held
    assert "first came that close at step 2" in held
    assert "not finished" not in held

    missed = read(records + rows("adaptive", [0, 9, 9]), arms=arms)
    assert "Adaptive (Ziegler) did not hold the target" in missed
    assert "50% above the target of 6" in missed
    assert "No step of it came within 20%" in missed


def test_reading_of_a_run_cut_short_says_so():
    text = read(rows("none", [0, 1]), arms=("none", "adaptive"))
    assert "not finished: no penalty made 2 of 3 steps; adaptive (Ziegler) made 0 of 3" in text
    assert "nothing to read" in read([], arms=("none",))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (6.0, "6"), (0.01234, "0.0123"), (1234.5, "1,234"), (1e9, "1.00e+09")],
)
def test_numbers_are_for_people(value, text):
    assert number(value) == text


def test_arms_use_the_controllers_of_klfast():
    settings = Settings(target=3.0)
    for name, arm in ARMS.items():
        controller = arm.controller(settings)
        if arm.steers:
            assert type(controller) is CONTROLLERS[name]
            assert (controller.unit, controller.target) == ("sequence", 3.0)
            assert controller.value == settings.init_coef
        else:
            assert isinstance(controller, klfast.FixedKLController)
    assert STYLES.keys() == ARMS.keys()
