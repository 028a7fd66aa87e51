"""The experiment's parts: text, model, reward, KL step, summaries, files."""

import dataclasses
import itertools
import math

import pytest
import torch

import klfast
from klfast.experiment import folder, summary, train
from klfast.experiment.model import GPT, perplexity, sample, token_logprobs
from klfast.experiment.plots import _spread
from klfast.experiment.settings import (
    ARM_NAMES,
    CompareError,
    Settings,
    check_settings,
    settings_from_json,
    settings_to_json,
)
from klfast.experiment.text import build_corpus, load_corpus, prose_paragraphs, random_prompts

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


def test_only_whole_prose_becomes_text():
    prose = "Sentences of this kind, made of words, are what the model learns from."
    topics = {"b": f"{prose}\n\n   x = [1, 2, 3]; y = {{4: 5}}", "a": f"Title\n\n{prose}"}
    assert prose_paragraphs(topics) == [prose]


def test_encoding_is_reversible_and_prefers_whole_words():
    corpus = build_corpus(PARAGRAPHS)
    assert corpus.decode(corpus.held_out) == "\n".join([*PARAGRAPHS[::10], ""])
    assert corpus.tokens.index(" kind") in corpus.train.tolist()


def test_prompts_stay_inside_a_paragraph_and_end_with_a_word(corpus):
    generator = torch.Generator().manual_seed(0)
    prompts = random_prompts(corpus, corpus.train, 50, 8, generator)
    text = corpus.decode(corpus.train)
    for prompt in prompts:
        words = corpus.decode(prompt)
        assert words.startswith(" ")
        assert "\n" not in words
        assert words + " " in text


def test_cached_sampling_draws_from_the_model(model):
    prompts = torch.randint(20, (400, 4), generator=torch.Generator().manual_seed(1))
    drawn = sample(model, prompts, 8, torch.Generator().manual_seed(2))
    assert drawn.shape == (400, 8)
    again = sample(model, prompts, 8, torch.Generator().manual_seed(2))
    assert torch.equal(drawn, again)

    caches = model.new_caches(400)
    ids = torch.cat([prompts, drawn], 1)
    stepwise = [model(ids[:, :4], 0, caches)[:, -1]]
    stepwise += [model(ids[:, t : t + 1], t, caches)[:, 0] for t in range(4, 11)]
    chosen = torch.stack(stepwise, 1).log_softmax(-1).gather(-1, drawn[..., None])[..., 0]
    torch.testing.assert_close(chosen, token_logprobs(model, prompts, drawn))


def test_a_seed_names_one_model():
    def weights(seed):
        gpt = GPT(vocabulary=20, context=12, layers=1, width=16, heads=2)
        gpt.initialise(torch.Generator().manual_seed(seed))
        return torch.cat([parameter.flatten() for parameter in gpt.parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_perplexity_of_an_untrained_model_is_about_the_vocabulary(model):
    windows = torch.randint(20, (8, 12), generator=torch.Generator().manual_seed(1))
    assert perplexity(model, windows) == pytest.approx(20, rel=0.05)


def test_continuation_ends_with_the_first_end_token():
    drawn = torch.tensor([[5, 0, 3, 0], [1, 2, 3, 4], [0, 1, 1, 1]])
    expected = [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert train.kept(drawn, end=0).int().tolist() == expected


def test_reward_is_the_share_of_the_letter_and_unused_places_count():
    world = train.World(
        corpus=build_corpus(PARAGRAPHS),
        reference=None,
        held_out=None,
        letters=torch.tensor([0.0, 1.0, 2.0]),
        characters=torch.tensor([1.0, 1.0, 4.0]),
    )
    drawn = torch.tensor([[1, 1, 1], [2, 1, 1], [1, 0, 0]])
    batch = train.Batch(None, drawn, train.kept(drawn, end=0))
    assert train.letter_share(batch, world).tolist() == pytest.approx([1, 4 / 6, 1 / 3])


def test_advantage_has_no_mean_within_a_group():
    advantage = train.group_advantage(torch.tensor([1.0, 3.0, 10.0, 10.0]), group=2)
    assert advantage.tolist() == [-1, 1, 0, 0]


def test_kl_step_gives_the_reverse_kl_gradient_and_unbiased_values():
    logprobs = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    ref_logprobs = -torch.rand(3, 5, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]).bool()
    gradient, stats, seconds = train.kl_step(logprobs.clone(), ref_logprobs, mask, 0.5)
    x = (logprobs - ref_logprobs) * mask
    torch.testing.assert_close(gradient, 0.5 * x / 3)
    torch.testing.assert_close(stats.kl, (torch.expm1(-x) + x).sum(1))
    assert seconds > 0

    record = train.kl_record(stats)
    assert record["kl_per_sequence_k1"] == pytest.approx(float(x.sum(1).mean()))
    assert record["kl_per_token_k1"] == pytest.approx(float(x.sum() / 11))
    assert record["kl_per_sequence_k2"] == pytest.approx(float(x.square().sum() / 6))
    assert record["kl_per_sequence_k3"] == pytest.approx(float(stats.sequence_mean()))
    assert record["kl_per_token_k3"] == pytest.approx(float(stats.token_mean()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be a whole number >= 1, got 0"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"target": math.nan}, "target must be a finite number > 0, got nan"),
        ({"target": 0.0}, "target must be a finite number > 0, got 0.0"),
        ({"high_coef": math.inf}, "high_coef must be a finite number > 0, got inf"),
        ({"horizon": 0.0}, "horizon must be a finite number > 0, got 0.0"),
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


def test_settings_survive_json():
    settings = Settings(arms=("none", "adaptive"), target=3.5)
    assert settings_from_json(settings_to_json(settings)) == settings
    with pytest.raises(ValueError, match="incomplete"):
        settings_from_json({"seed": 1})


def rows(name, kl, coefficient=0.1, perplexity=20.0, reward=0.1):
    return [
        {
            "arm": name,
            "step": i + 1,
            "reward": reward,
            "coefficient": coefficient,
            "kl_per_sequence_k3": value,
            "kl_per_token_k3": value / 32,
            "held_out_perplexity": perplexity,
            "kl_step_seconds": 0.001,
            "step_seconds": 0.1,
        }
        for i, value in enumerate(kl)
    ]


def test_summary_is_over_the_last_third():
    settings = Settings(steps=6, arms=("adaptive",), target=6.0)
    (s,) = summary.summarise(rows("adaptive", [0, 5, 20, 20, 6, 7]), settings)
    assert (s.steps, s.window, s.kl, s.settled) == (6, 2, 6.5, 2)
    assert s.miss(6.0) == pytest.approx(0.5 / 6)
    assert s.held(6.0)


def reading(records, **changes):
    settings = Settings(**{"steps": 3, "arms": ARM_NAMES, "target": 6.0, **changes})
    return " ".join(summary.reading(summary.summarise(records, settings), settings))


def test_reading_follows_the_numbers():
    arms = ("none", "fixed-low", "adaptive")
    records = rows("none", [0, 50, 60], coefficient=0.0, perplexity=900.0, reward=0.9)
    records += rows("fixed-low", [0, 3, 3])
    held = reading(records + rows("adaptive", [0, 5, 5.7], reward=0.2), arms=arms)
    assert "Adaptive (Ziegler) held the target" in held
    assert "5% below the target of 6" in held
    assert "first came that close at step 2" in held
    assert "10 times the target" in held
    assert "50% below the target" in held
    assert "highest in the arm “no penalty” (900)" in held
    assert "not finished" not in held

    missed = reading(records + rows("adaptive", [0, 9, 9]), arms=arms)
    assert "Adaptive (Ziegler) did not hold the target" in missed
    assert "50% above the target of 6" in missed
    assert "No step of it came within 20%" in missed


def test_reading_of_a_run_cut_short_says_so():
    text = reading(rows("none", [0, 1]), arms=("none", "adaptive"))
    assert "not finished: no penalty made 2 of 3 steps; adaptive (Ziegler) made 0 of 3" in text
    assert "nothing to read" in reading([], arms=("none",))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (6.0, "6"), (0.01234, "0.0123"), (1234.5, "1,234"), (1e9, "1.00e+09")],
)
def test_numbers_are_for_people(value, text):
    assert summary.number(value) == text


def test_labels_are_moved_apart_and_stay_in_the_panel():
    placed = _spread([(0.99, "a"), (1.0, "b"), (0.5, "c"), (0.98, "d")])
    heights = [height for height, _ in placed]
    assert [name for _, name in placed] == ["c", "d", "a", "b"]
    assert max(heights) <= 1
    assert all(b - a > 0.05 for a, b in itertools.pairwise(heights))


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    folder.write_atomic(path, b"old")

    def fail(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(folder.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        folder.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_with_one_flipped_bit_is_refused(tmp_path):
    path = tmp_path / "checkpoints" / "arm.pt"
    folder.save_checkpoint(path, {"weights": torch.arange(1000.0)})
    assert torch.equal(folder.load_checkpoint(path)["weights"], torch.arange(1000.0))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        folder.load_checkpoint(path)


def test_arms_use_the_controllers_of_klfast():
    settings = Settings(target=3.0)
    kinds = {name: type(train.ARMS[name].controller(settings)) for name in ARM_NAMES}
    assert list(kinds.values()) == [
        *[klfast.FixedKLController] * 3,
        klfast.AdaptiveKLController,
        klfast.ExponentialKLController,
    ]
    assert train.ARMS["exponential"].controller(settings).unit == "sequence"
