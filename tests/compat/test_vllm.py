"""klfast.compat.vllm makes tensors of the lists that vLLM returns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import numpy
import pytest
import readme
import torch

import klfast
from klfast.compat.vllm import sample_logprobs, topk_logprobs
from klfast.types.names import DIRECTIONS, TAILS


@dataclass
class Logprob:
    """The fields of vLLM's Logprob (vllm/logprobs.py, 0.6 to 0.12)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def served(logits, token_ids, k, entry=Logprob):
    """A server's answer: the prompt's own token first, then the K most likely tokens."""
    positions = [None]
    for row, token in zip(logits.log_softmax(-1)[:-1], token_ids[1:].tolist(), strict=True):
        best = row.topk(k)
        ids = dict.fromkeys([token, *best.indices.tolist()])
        ranks = row.argsort(descending=True).argsort() + 1
        positions.append({id_: entry(row[id_].item(), ranks[id_].item()) for id_ in ids})
    return positions


def models(lengths=(7, 4, 1), vocabulary=11):
    torch.manual_seed(0)
    for length in lengths:
        yield 3 * torch.randn(length, vocabulary), torch.randint(vocabulary, (length,))


ENTRIES = {
    "Logprob": Logprob,
    "JSON": lambda logprob, rank: {"logprob": logprob, "rank": rank, "decoded_token": None},
    "number": lambda logprob, rank: logprob,
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_entries_belong_to_the_logits_that_predict_them(entry):
    lists = [served(*model, 3, entry) for model in models()]
    sizes = {len(position) for positions in lists for position in positions if position}
    assert sizes == {3, 4}
    ids, logprobs, mask = topk_logprobs(lists, 3)
    assert (ids.shape, ids.dtype) == ((3, 7, 3), torch.int64)
    assert (logprobs.shape, logprobs.dtype) == ((3, 7, 3), torch.float32)
    assert mask.tolist() == [[t < length - 1 for t in range(7)] for length in (7, 4, 1)]
    for b, (logits, _) in enumerate(models()):
        best = logits.log_softmax(-1)[:-1].topk(3)
        assert torch.equal(ids[b, : len(best.indices)], best.indices)
        assert torch.equal(logprobs[b, : len(best.values)], best.values)
        same = klfast.topk_kl_divergence(
            logits, ids[b, : len(logits)], logprobs[b, : len(logits)], mask[b, : len(logits)]
        )
        assert same.abs().max() < 1e-6


def test_missing_entries_do_not_exist():
    ids, logprobs, mask = topk_logprobs([[None, {"5": -0.1}, {2: -0.7, 3: -0.7}], [None]], 3)
    assert logprobs[0, 0].tolist() == [pytest.approx(-0.1), -math.inf, -math.inf]
    assert ids[0, 0, 0] == 5
    assert ids[0, 1, :2].tolist() == [2, 3]
    assert mask.tolist() == [[True, True, False], [False] * 3]
    divergence = klfast.topk_kl_divergence(torch.zeros(2, 3, 6), ids, logprobs, mask)
    assert divergence.isfinite().all()
    assert topk_logprobs([[], [None, {1: -1.0}]], 1)[2].tolist() == [[False] * 2, [True, False]]
    assert [each.shape for each in topk_logprobs([], 2)] == [(0, 0, 2), (0, 0, 2), (0, 0)]
    assert topk_logprobs([[None, {1: -1.0}]], 1, device="meta")[1].device.type == "meta"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_minus_infinity_of_a_server(direction, tail):
    """JSON has no infinity, so vLLM's ``clamp_prompt_logprobs`` writes -9999.0."""
    one, logits = {1: -0.2, 2: -2.0}, torch.randn(1, 2, 6)

    def found(number):
        ids, logprobs, mask = topk_logprobs([[None, {**one, 3: number}]], 3)
        return klfast.topk_kl_divergence(
            logits, ids, logprobs, mask, direction=direction, tail=tail
        )

    assert torch.equal(found(-9999.0), found(-math.inf))
    assert torch.equal(found(-10_000), found(-math.inf))
    assert topk_logprobs([[None, {3: -9998.0}]], 1)[1][0, 0] == -9998.0


def test_the_example():
    lists = [served(*model, 20) for model in models(vocabulary=50)]

    class LLM:
        def generate(self, prompts, params):
            assert (prompts, params) == (["a", "b", "c"], {"max_tokens": 1, "prompt_logprobs": 20})
            return [SimpleNamespace(prompt_logprobs=positions) for positions in lists]

    def model(tokens):
        return SimpleNamespace(logits=torch.randn(3, 7, 50))

    left = readme.run(
        "klfast.compat.vllm.topk_logprobs",
        klfast=klfast,
        llm=LLM(),
        SamplingParams=dict,
        prompts=["a", "b", "c"],
        model=model,
        tokens=None,
        completion_mask=torch.ones(3, 7, dtype=torch.bool),
    )
    assert left["ref_logprobs"].shape == (3, 7, 20)


class Stored(Sequence):
    """vLLM's containers without an access to single positions, which would be a loop."""

    def __init__(self, **fields):
        vars(self).update(fields)

    def __len__(self):
        raise AssertionError("a loop over positions")

    def __getitem__(self, at):
        raise AssertionError("a loop over positions")


class Irregular(Stored):
    """An ``ArrayLogprobs`` whose rows have several widths, which it returns as dicts."""

    is_regular = False

    def __len__(self):
        return len(self.positions)

    def __getitem__(self, at):
        return self.positions[at]

    def arrays(self):
        raise ValueError("Sample logprobs are not stored as regular rows")


def flat(rows):
    """The fields of ``FlatLogprobs`` (vllm/logprobs.py, 0.11 to 0.33), from [(id, log-prob)]."""
    ends = numpy.cumsum([len(row) for row in rows]).tolist()
    every = [entry for row in rows for entry in row]
    return Stored(
        start_indices=[0, *ends][: len(rows)],
        end_indices=ends,
        token_ids=[entry[0] for entry in every],
        logprobs=[entry[1] for entry in every],
    )


def arrays(rows):
    """``arrays()`` of ``ArrayLogprobs`` (0.33): token ids, log-probs and sampled tokens' ranks."""
    shape = len(rows), len(rows[0]) if rows else 0
    ids = numpy.array([[e[0] for e in row] for row in rows], "<i4").reshape(shape)
    logprobs = numpy.array([[e[1] for e in row] for row in rows], "<f4").reshape(shape)
    ranks = numpy.zeros(len(rows), "<i4")
    return Stored(is_regular=True, arrays=lambda: (ids, logprobs, ranks))


def nested(rows):
    """Dicts: a sampled token among the most likely ones is there once."""
    return [{id_: Logprob(logprob) for id_, logprob in row} for row in rows]


def engine_rows(logits, token_ids, k):
    """The engine's rows: the sampled token, and then the K most likely ones, it may be among."""
    for row, token in zip(logits.log_softmax(-1), token_ids.tolist(), strict=True):
        best = row.topk(k)
        places = [token, *best.indices.tolist()]
        yield [(place, row[place].item()) for place in places]


KINDS = {
    "dicts": nested,
    "flat": flat,
    "arrays": arrays,
    "irregular": lambda rows: Irregular(positions=nested(rows)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_sampled_tokens(kind, k):
    """Five numbers are asked for where there are three or four."""
    rows = [[*engine_rows(*model, 3)] for model in models()]
    completions = [
        SimpleNamespace(token_ids=tuple(ids.tolist()), logprobs=KINDS[kind](each))
        for each, (_, ids) in zip(rows, models(), strict=True)
    ]
    requests = [SimpleNamespace(outputs=completions[:2]), SimpleNamespace(outputs=completions[2:])]
    found = sample_logprobs(requests, k)
    for given in (completions, [each.logprobs for each in completions]):
        assert all(map(torch.equal, sample_logprobs(given, k), found))
    ids, logprobs, top_ids, top_logprobs, mask = found
    assert [t.dtype for t in found] == [torch.int64, torch.float32] * 2 + [torch.bool]
    assert top_ids.shape == top_logprobs.shape == (3, 7, k)
    assert mask.tolist() == [[t < length for t in range(7)] for length in (7, 4, 1)]
    assert not ids[~mask].any()
    for b, (logits, own) in enumerate(models()):
        every = logits.log_softmax(-1)
        assert torch.equal(ids[b, : len(own)], own)
        assert torch.equal(logprobs[b, : len(own)], every.gather(1, own[:, None])[:, 0])
        best = every.topk(min(k, 3))
        assert torch.equal(top_ids[b, : len(own), :3], best.indices)
        assert torch.equal(top_logprobs[b, : len(own), :3], best.values)
        is_best = (own[:, None] == every.topk(3).indices).any(1)
        if k == 5:  # the sampled token, where it is not among the three
            fourth = torch.where(is_best, -torch.inf, logprobs[b, : len(own)])
            assert torch.equal(top_logprobs[b, : len(own), 3], fourth)


@pytest.mark.parametrize("kind", ["flat", "irregular"])
def test_prompts_in_other_containers(kind):
    """The first position has no entry."""
    rows = [[[], *engine_rows(logits[:-1], ids[1:], 3)] for logits, ids in models()]
    wanted = topk_logprobs([[None, *nested(each[1:])] for each in rows], 3)
    assert all(map(torch.equal, topk_logprobs([KINDS[kind](each) for each in rows], 3), wanted))


def test_a_sampled_token_need_not_come_first():
    each = SimpleNamespace(token_ids=[7, 1], logprobs=[{5: -0.1, 7: -2.0}, {1: -0.5}])
    ids, logprobs, top_ids, top_logprobs, _ = sample_logprobs([each], 2)
    assert ids.tolist() == [[7, 1]]
    assert torch.equal(logprobs, torch.tensor([[-2.0, -0.5]]))
    assert top_ids[0, 0].tolist() == [5, 7]
    assert torch.equal(top_logprobs[0, 0], torch.tensor([-0.1, -2.0]))


def test_no_sampled_tokens():
    for outputs in ([], [[]], [flat([])], [arrays([])]):
        found = sample_logprobs(outputs, 2)
        assert [t.shape[1] for t in found] == [0] * 5
        assert found[2].shape == (len(outputs), 0, 2)
    assert sample_logprobs([flat([[(1, -1e4)]])], device="meta")[1].device.type == "meta"
    assert sample_logprobs([flat([[(1, -1e4)]])])[1][0, 0] == -math.inf


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([[(1, -1.0)], []], r"logprobs\[0\]\[1\] must have an entry, got none"),
        ([[(-1, -1.0)]], r"logprobs\[0\]\[0\] must have token ids >= 0"),
        ([[(1, -1.0)], [(1, math.nan)]], r"logprobs\[0\]\[1\] must have log-probs below inf"),
    ],
)
def test_errors_of_stored_log_probs(rows, text):
    with pytest.raises(ValueError, match=text):
        sample_logprobs([flat(rows)])


def test_refused_outputs():
    other = SimpleNamespace(token_ids=[5, 0], logprobs=[{5: -1.0}, {4: -1.0}])
    with pytest.raises(
        ValueError, match=r"outputs\[0\] must .* got none of token id 0 at position 1"
    ):
        sample_logprobs([SimpleNamespace(outputs=[other])])
    other.token_ids = [5]
    with pytest.raises(
        ValueError, match=r"outputs\[0\] must .* its 1 token_ids, .* of 2 positions"
    ):
        sample_logprobs([SimpleNamespace(outputs=[other])])
    other.logprobs = None
    with pytest.raises(
        TypeError, match=r"logprobs\[0\] must be a list .*SamplingParams\(logprobs=k"
    ):
        sample_logprobs([other])
    with pytest.raises(TypeError, match="outputs must be a list of requests, got SimpleNamespace"):
        sample_logprobs(other)
    with pytest.raises(ValueError, match="k must be an integer >= 0, got -1"):
        sample_logprobs([], -1)


def test_the_example_of_sampled_tokens():
    class LLM:
        def generate(self, prompts, params):
            assert params == {"n": 4, "logprobs": 0}
            each = SimpleNamespace(token_ids=[5], logprobs=[{5: -1.0}])
            return [SimpleNamespace(outputs=[each] * 4) for _ in prompts]

    given = {"klfast": klfast, "llm": LLM(), "SamplingParams": dict, "prompts": ["a", "b"]}
    left = readme.run("klfast.compat.vllm.sample_logprobs", **given)
    assert left["rollout_logprobs"].tolist() == [[-1.0]] * 8


PLACE = r"prompt_logprobs\[0\]\[1\]"


@pytest.mark.parametrize(
    ("lists", "k", "error", "text"),
    [
        ([[None]], 0, ValueError, "k must be an integer >= 1, got 0"),
        ([None], 1, TypeError, r"prompt_logprobs\[0\] must be a list of positions, got NoneType"),
        ([[None, None]], 1, TypeError, r"prompt_logprobs\[0\]\[1\] must be a dict from token id"),
        ([[None, {}]], 1, ValueError, r"prompt_logprobs\[0\]\[1\] must have an entry"),
        ([[{}, {4: "a"}]], 1, TypeError, rf"{PLACE}\[4\] must be a Logprob or a number, got 'a'"),
        ([[{}, {4: True}]], 1, TypeError, rf"{PLACE}\[4\] must be a Logprob .*, got True"),
        (iter([[None]]), 1, TypeError, "prompt_logprobs must be a list of requests, got list_iter"),
        *(
            ([[None, {key: -1.0}]], 1, error, f"a key of {PLACE} must be {text}, got ")
            for key, error, text in (
                (" the", TypeError, "a token id >= 0, .*return_tokens_as_token_ids"),
                ("token_id:x", TypeError, "a token id >= 0, .*"),
                ("9" * 5000, TypeError, "a token id >= 0, .*"),
                (5.7, TypeError, "a token id >= 0"),
                (None, TypeError, "a token id >= 0"),
                (-1, ValueError, "a token id >= 0"),
                (2**63, ValueError, "within int64"),
                (str(2**63), ValueError, "within int64"),
            )
        ),
        *(
            ([[None, {7: -1.0, "5": {"logprob": bad}}]], 2, ValueError, text)
            for bad in (math.nan, math.inf)
            for text in (rf"{PLACE}\['5'\] must be a log-prob, below inf, got {bad}",)
        ),
        ([[None, {5: -1.0, "token_id:5": -2.0}]], 1, ValueError, f"{PLACE} .*each token id once"),
    ],
)
def test_errors_name_the_place(lists, k, error, text):
    with pytest.raises(error, match=text):
        topk_logprobs(lists, k)


@pytest.mark.parametrize("number", [float, numpy.float32, numpy.float64, Fraction, int])
def test_ids_and_numbers_of_other_types(number):
    entries = {"5": number(-1), "token_id:70": number(-2), numpy.int64(6): number(-3)}
    ids, logprobs, _ = topk_logprobs([[None, entries]], 3)
    assert (ids[0, 0].tolist(), logprobs[0, 0].tolist()) == ([5, 70, 6], [-1.0, -2.0, -3.0])
