"""The pages on frameworks have the names, functions and releases that the code has."""

import importlib
import itertools
import re
from typing import NamedTuple

import frameworks
import pytest
import torch
from readme import README, ROOT

import klfast
from klfast import compat
from klfast.compat.frameworks import FRAMEWORKS
from klfast.compat.targets import TARGETS

CALLS = "| framework | its function | the klfast call |"
HEADER = "| releases | their line | your line | what differs |"
IMPORT = re.compile(r"`from (\S+) import ([^`]+)`")
OF_KLFAST = re.compile(r"`klfast\.compat\.(\w+)\.(?:\{([^}]+)\}|(\w+))`")


def table(page, header):
    """The cells of the rows of a table in docs/."""
    lines = (ROOT / "docs" / page).read_text().partition(header)[2].splitlines()[2:]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows]


class Releases(NamedTuple):
    """The first release, major and minor number of the last, and whether main is known too."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    main: bool


class Row(NamedTuple):
    framework: str
    notes: list[tuple[int, ...]]
    """The releases from which one of several functions is known."""
    releases: Releases
    theirs: str
    mine: str


def numbers(text):
    """The releases in a text, without zeros at their ends (0.7.0 is 0.7)."""
    found = [tuple(map(int, each.split("."))) for each in re.findall(r"\d+(?:\.\d+)+", text)]
    return [each[:-1] if len(each) > 2 and each[-1] == 0 else each for each in found]


def releases(text):
    return Releases(min(numbers(text)), max(numbers(text))[:2], "main" in text)


def rows():
    for framework in FRAMEWORKS:
        for released, theirs, mine, _ in table(f"frameworks/{framework}.md", HEADER):
            plain, _, notes = released.partition("(")
            yield Row(framework, numbers(notes), releases(plain), theirs, mine)


ROWS = list(rows())
IDS = [f"{row.framework}: {row.theirs}" for row in ROWS]

WITHOUT_SITES = {
    ("roll", "`full`, of log-probs [..., V]"),
    ("trl", "`full`, of log-probs [..., V]"),
    (
        "verl",
        "`from verl.utils.megatron.tensor_parallel import vocab_parallel_log_probs_from_logits, "
        "vocab_parallel_entropy, vocab_parallel_entropy_with_chunking`",
    ),
    (
        "ms_swift",
        "`from swift.megatron.trainers.vocab_parallel_utils import vocab_parallel_kl_div`",
    ),
    (
        "skyrl",
        "`from skyrl.backends.skyrl_train.mtp.soft_ce import draft_soft_ce, draft_soft_ce_topk`",
    ),
}
"""Rows whose functions ``patch`` does not replace under that name."""


def sites_of(framework):
    return [site for target in TARGETS[framework] for group in target for site in group]


def sites(row):
    """The releases of every site that the row names, by function or class."""
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", row.theirs))))
    public = {name.lstrip("_") for name in named}
    places = {}
    for site in sites_of(row.framework):
        if public & {part.lstrip("_") for part in site.where.partition(":")[2].split(".")}:
            places.setdefault(site.where, []).extend(site.codes.values())
    return [releases(", ".join(codes)) for codes in places.values()]


def test_every_framework_has_a_row():
    assert {row.framework for row in ROWS} == set(FRAMEWORKS)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_has_its_files(name):
    """A framework has what its recipe asks for: functions, presets, formulas, targets."""
    assert getattr(compat, name) is importlib.import_module(f"klfast.compat.{name}")
    assert name in compat.__all__
    assert any(each.startswith(name.upper()) for each in vars(compat.presets))
    assert any(each.startswith(name) for each in vars(frameworks))
    assert name in TARGETS
    lines = re.findall(r"^\| the KL of ([^|]*) \|", README.read_text(), re.MULTILINE)
    assert FRAMEWORKS[name].title in lines[0].split(", ")


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_what_their_line_imports_klfast_has(row):
    here = importlib.import_module(f"klfast.compat.{row.framework}")
    for module, names in IMPORT.findall(row.theirs):
        assert module.partition(".")[0] == FRAMEWORKS[row.framework].package
        for name in names.split(", "):
            assert hasattr(here, name)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_what_your_line_names_there_is(row):
    for framework, many, one in OF_KLFAST.findall(row.mine):
        assert framework == row.framework
        for name in (many or one).split(", "):
            assert hasattr(importlib.import_module(f"klfast.compat.{framework}"), name)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_your_line_says_whether_a_patch_replaces_it(row):
    assert bool(sites(row)) == bool(re.search(r"(?<!by )`patch`", row.mine)) or "above" in row.mine


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_the_releases_are_those_whose_code_is_known(row):
    known = sites(row)
    assert bool(known) == ((row.framework, row.theirs) not in WITHOUT_SITES)
    for first, last, main in known:
        assert first <= row.releases.first or first in row.notes
        assert (last, main) == (row.releases.last, row.releases.main)
    assert not known or row.releases.first in [each.first for each in known]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_framework_s_releases_are_those_of_its_sites(name):
    """The word in brackets is left out."""
    codes = [each for site in sites_of(name) for each in site.codes.values()]
    assert releases(", ".join(codes)) == releases(FRAMEWORKS[name].releases)


@pytest.mark.parametrize(
    "call",
    [cells[2] for cells in table("drop_in.md", CALLS)],
    ids=[cells[1] for cells in table("drop_in.md", CALLS)],
)
def test_the_calls_for_other_frameworks_run(call):
    """Every result is finite, and a gradient reaches a leaf."""
    logits, hidden, weight = (
        torch.randn(shape).requires_grad_() for shape in ((2, 5, 11), (2, 5, 4), (11, 4))
    )
    logprobs = torch.randn(2, 5).sub(3).requires_grad_()
    top = torch.randn(2, 5, 11).log_softmax(-1).topk(3)
    given = {
        "klfast": klfast,
        "torch": torch,
        "presets": compat.presets,
        "logits": logits,
        "token_ids": torch.randint(11, (2, 5)),
        "topk_ids": top.indices,
        "topk_logits": top.values,
        "topk_logprobs": top.values.index_fill(-1, torch.tensor(2), -1000),
        "logprobs": logprobs,
        "ref_logprobs": logprobs.detach() + 0.1,
        "old_logprobs": logprobs.detach() + 0.2,
        "packed": logprobs.flatten(),
        "ref_packed": logprobs.detach().flatten() + 0.1,
        "hidden": hidden,
        "weight": weight,
        "ref_hidden": hidden.detach() + 0.1,
        "ref_weight": weight.detach(),
        "labels": torch.tensor([[1, -100, 3, 4, 5]] * 2),
        "cu_seqlens": torch.tensor([0, 4, 10]),
        "scores": torch.randn(2),
        "mask": torch.ones(2, 5),
        "beta": 0.1,
        "temperature": 0.7,
        "group": None,
    }
    result = eval(re.match("`([^`]+)`", call)[1], given)
    for found in result if isinstance(result, tuple) else (result,):
        assert found.isfinite().all()
        if "kl_rewards" not in call:
            leaf = next((given[name] for name in ("hidden", "logits") if name in call), logprobs)
            assert torch.autograd.grad(found.sum(), leaf, retain_graph=True)[0].count_nonzero()
