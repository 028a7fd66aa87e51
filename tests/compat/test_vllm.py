"""klfast.compat.vllm makes tensors of the lists that vLLM returns."""

import math
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import numpy
import pytest
import readme
import torch

import klfast
from klfast.compat.vllm import topk_logprobs
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
