"""The examples of the README, of pages and of docstrings run as they are written.

Other files run some examples: tests/peers (frameworks, the Hub's kernel), ``test_data_parallel``
and ``test_rollout_docs`` (docs/rollout.md). ``test_code_blocks`` fails if no test runs a block.
"""

import json
import math
import pkgutil
import re
import sys
from dataclasses import asdict

import packages
import pytest
import readme
import torch
from fresh import run_fresh

import klfast
from klfast.args.estimator import as_estimator
from klfast.compat import FRAMEWORKS, PatchError, presets
from klfast.compat.patching.fingerprints import fingerprint
from klfast.compat.patching.sites import Site
from klfast.compat.targets import TARGETS
from lab.study.plant import Plant, Policy

PAGES = [
    readme.README,
    *(readme.ROOT / name for name in ("CONTRIBUTING.md", "DESIGN.md")),
    *readme.ROOT.glob("docs/**/*.md"),
]
LINK = re.compile(r"\]\((?!http)([^)#]*)#?([^)]*)\)")
PATH = re.compile(r"`((?:benchmarks|csrc|docs|examples|klfast|tests)/[\w./*-]+)`")


def anchors(page):
    """The anchors of a page's headings, as Markdown renderers make them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_path_of_a_page_is_there(page):
    text = page.read_text()
    for name, anchor in LINK.findall(text):
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"
    for path in PATH.findall(text):
        assert any(readme.ROOT.glob(path)), path


def test_the_first_example_of_the_site(capsys):
    left = readme.run("home")
    assert capsys.readouterr().out == f"{left['kl'].item():.4f} nats per token\n"
    assert "# 0.0169" in readme.examples()["home"]
    assert left["kl"].item() == pytest.approx(0.0169, abs=5e-5)
    assert left["logprobs"].grad.isfinite().all()


def test_the_first_example_runs_before_anything_is_compiled():
    """A checkout without the extension cannot import it either."""
    without = "import sys\nsys.modules['klfast._C'] = None\n"
    assert run_fresh(without + readme.code("home")) == "0.0169 nats per token"


def test_what_klfast_replaces_and_what_replaces_it():
    logprobs = -torch.rand(4, 9)
    given = {
        "logprobs": logprobs.requires_grad_(),
        "ref_logprobs": logprobs.detach() + 0.1 * torch.randn(4, 9),
        "mask": torch.arange(9) < torch.tensor([[9], [4], [1], [6]]),
    }
    before = readme.run("before", torch=torch, beta=0.05, **given)
    instead = readme.run("instead", **given)
    torch.testing.assert_close(instead["loss_kl"], before["loss_kl"], rtol=1e-4, atol=1e-8)
    assert isinstance(instead["controller"], klfast.NuPIKLController)
    assert instead["controller"].value != 0.05
    instead["loss_kl"].backward()
    assert logprobs.grad.isfinite().all()


def test_the_error_of_the_usual_formula_near_on_policy():
    """``exp(d) - 1 - d`` at every fp32 number near 1e-3 and 1e-4, with a correctly rounded exp."""

    def near(size):
        first, last = (
            torch.tensor(share * size).view(torch.int32).item() for share in (0.99, 1.01)
        )
        d = torch.arange(first, last + 1, dtype=torch.int32).view(torch.float32)
        return torch.cat([d, -d])

    def usual(d):
        value = (d.double().exp().float() - 1 - d).double()
        d = d.double()
        return value, (value / (d**2 / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5)))) - 1).abs()

    _, error = usual(near(1e-3))
    value, noise = usual(near(1e-4))
    shares = error.median(), error.max(), noise.median(), (value < 0).double().mean()
    median, most, noise, negative = (f"{share.item():.0%}".replace("%", " %") for share in shares)
    page = " ".join((readme.ROOT / "docs" / "measured.md").read_text().split())
    assert f"off by {median} in the median and by up to {most}" in page
    assert f"off by {noise} in the median, and {negative} of its values are negative" in page
    first = " ".join(readme.README.read_text().split())
    assert f"`exp(d) - 1 - d` is up to {most} off at d = 1e-3" in first


def test_accumulated_gradients_are_those_of_the_batch():
    policy = torch.nn.Linear(3, 1, dtype=torch.float64)
    features = torch.randn(6, 5, 3, dtype=torch.float64)
    ref_logprobs = torch.randn(6, 5, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 1, 0, 3, 2, 4])[:, None]

    logprobs = policy(features).squeeze(-1)
    klfast.kl_penalty(
        *(logprobs, ref_logprobs, mask), estimator="k3+", reduction="token-mean", coef=0.05
    ).backward()
    expected = policy.weight.grad.clone()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    optimizer.zero_grad()
    before = policy.weight.detach().clone()
    parts = zip(*(t.split([1, 3, 2]) for t in (features, ref_logprobs, mask)), strict=True)
    pieces = ((policy(part).squeeze(-1), *others) for part, *others in parts)
    left = readme.run(
        "one-object",
        klfast=klfast,
        batches=[[*pieces]],
        policy_loss=lambda logprobs, mask, normalizer: torch.zeros(()),
        optimizer=optimizer,
    )
    torch.testing.assert_close(before - policy.weight, expected, rtol=1e-13, atol=1e-15)
    assert left["numbers"]["kl/coef"] == left["controller"].value != 0.05


def test_a_loop_across_ranks(tmp_path):
    batches = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        logprobs = -torch.rand(4, 9, generator=generator)
        mask = torch.rand(4, 9, generator=generator) < 0.8
        batches.append((logprobs.requires_grad_(), logprobs.detach() - 1.0, mask))
    distributed = torch.distributed
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        left = readme.run("at-scale", torch=torch, klfast=klfast, folder=tmp_path, batches=batches)
    finally:
        distributed.destroy_process_group()
    rows = [json.loads(line) for line in (tmp_path / "kl.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert left["checkpoint"]["controller"]["value"] == left["controller"].value
    assert left["controller"].value == rows[-1]["kl/coef"] != 0.1
    expected = klfast.NuPIKLController(0.1, 6.0)
    for logprobs, ref_logprobs, mask in batches:
        expected.update(
            klfast.kl_penalty(
                logprobs, ref_logprobs, mask, reduction="token-sum", return_stats=True
            )[1]
        )
        assert logprobs.grad.isfinite().all()
    assert left["controller"].value == pytest.approx(expected.value, rel=1e-6)


def test_a_policy_loss_is_averaged_as_the_kl_is():
    logprobs = -torch.rand(3, 7, dtype=torch.float64)
    mask = torch.rand(3, 7) < 0.7
    advantages = torch.randn(3, 7, dtype=torch.float64)
    left = readme.run(
        "reduce",
        torch=torch,
        klfast=klfast,
        logprobs=logprobs,
        old_logprobs=logprobs + 0.3 * torch.randn(3, 7, dtype=torch.float64),
        advantages=advantages,
        mask=mask,
        normalizer=8.0,
    )
    torch.testing.assert_close(left["policy_loss"], left["surrogate"][mask].sum() / 8)


def test_everything_from_logits():
    logits = torch.randn(2, 5, 11, requires_grad=True)
    left = readme.run(
        "logits",
        klfast=klfast,
        controller=klfast.AdaptiveKLController(0.05, target=6.0),
        logits=logits,
        ref_logits=logits.detach() + 0.1 * torch.randn(2, 5, 11),
        token_ids=torch.randint(11, (2, 5)),
        mask=torch.ones(2, 5, dtype=torch.bool),
        advantages=torch.randn(2, 5),
    )
    found = left["found"]
    torch.testing.assert_close(left["loss_kl"], 0.05 * found.kl.mean())
    assert left["controller"].value != 0.05
    assert found.entropy.shape == found.ref_logprobs.shape == (2, 5)
    (left["loss_kl"] + left["policy_loss"]).backward()
    assert logits.grad.isfinite().all()


def test_verl_s_words_without_verl():
    log_prob = -torch.rand(3, 7)
    left = readme.run(
        "verl",
        log_prob=log_prob,
        ref_log_prob=log_prob + 0.1,
        response_mask=torch.ones(3, 7, dtype=torch.int64),
    )
    expected = 0.001 * (torch.expm1(torch.tensor(0.1)) - 0.1)
    torch.testing.assert_close(left["loss"], expected, rtol=1e-4, atol=0)
    assert left["kl_ctrl"].value < 0.001


def test_the_patch_needs_the_framework():
    with pytest.raises(PatchError, match="verl is not installed"):
        readme.run("patch")


@pytest.fixture
def stand_in(package, monkeypatch):
    """A framework of one function, in the module that ``patch`` asks for; tests/peers has more."""

    def make(framework, module="core"):
        where = f"{FRAMEWORKS[framework].package}.{module}"
        (core,) = package({where: "def penalty(x):\n    return x\n"})
        site = Site(f"{where}:penalty", {fingerprint(core.penalty): "0"}, torch.neg)
        monkeypatch.setitem(TARGETS, framework, (((site,),),))
        return site.where

    return make


HOOK = re.compile(r"worker_process_setup_hook[=\":]+(klfast\.compat\.(\w+)\.setup_worker)\b")


@pytest.mark.usefixtures("nothing_stays_patched")
@pytest.mark.parametrize(
    ("framework", "watched"),
    [(name, module) for name, row in FRAMEWORKS.items() for module in row.kl_modules],
)
def test_the_hook_on_a_page_waits_for_its_framework(
    framework, watched, stand_in, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    page = (readme.ROOT / "docs" / "frameworks" / f"{framework}.md").read_text()
    ((hook, named),) = HOOK.findall(page)
    assert named == framework
    assert any(site.where.startswith(f"{watched}:") for site in sites_of(framework))
    where = stand_in(framework, watched.partition(".")[2])
    packages.forget({FRAMEWORKS[framework].package})
    if framework == "roll":
        readme.run("roll-driver")
    for _ in range(2):
        pkgutil.resolve_name(hook)()
    assert capsys.readouterr().out == ""
    (module,) = packages.load([watched])
    assert capsys.readouterr().out.count(where) == 1
    assert module.penalty(torch.tensor(1.0)) == -1
    pkgutil.resolve_name(hook)()
    assert capsys.readouterr().out == ""
    klfast.compat.unpatch(framework)


@pytest.mark.usefixtures("nothing_stays_patched")
def test_the_plugin_on_a_page_patches_ms_swift(stand_in, capsys):
    where = stand_in("ms_swift")
    readme.run("ms-swift-plugin")
    assert where in capsys.readouterr().out
    klfast.compat.unpatch("ms_swift")


@pytest.mark.usefixtures("nothing_stays_patched")
def test_the_script_on_a_page_patches_trlx_and_trains(stand_in, package, capsys):
    where = stand_in("trlx")
    package({"trlx.data.default_configs": "default_ppo_config = dict"})
    trained = {}
    sys.modules["trlx"].train = lambda model, **given: trained.update(given)
    readme.run("trlx-patch")
    assert where in capsys.readouterr().out
    assert trained.pop("reward_fn")(["good", "bad"], prompts=[]) == [1.0, 0.0]
    assert sorted(trained) == ["config", "prompts"]
    klfast.compat.unpatch("trlx")


def sites_of(framework):
    return [site for target in TARGETS[framework] for group in target for site in group]


def test_the_options_of_an_estimator():
    made = [eval(line, {"klfast": klfast}) for line in readme.code("options").splitlines()]
    assert made[0] == presets.VERL["low_var_kl"]
    assert made[1] == as_estimator("k3+")
    assert [estimator.linear_tail for estimator in made] == [None, None, 5.0, None, None]
    assert [estimator.importance_cap for estimator in made] == [None, None, None, 10.0, None]
    assert [estimator.clip_weighted for estimator in made] == [False] * 4 + [True]


def test_the_example_of_klpenalty():
    batch = torch.nn.Parameter(-torch.rand(4, 5))
    left = readme.run(
        "klfast.training.penalty.KLPenalty",
        klfast=klfast,
        batches=[batch] * 3,
        micro_batches=lambda batch: [
            (part, part.detach() - 1.0, torch.ones(2, 5, dtype=torch.bool))
            for part in batch.split(2)
        ],
        policy_loss=lambda logprobs, mask: (logprobs * mask).sum(),
        optimizer=torch.optim.SGD([batch], lr=0.0),
    )
    assert left["numbers"]["kl/k1"] == pytest.approx(1.0)
    assert left["penalty"].controller.value == left["numbers"]["kl/coef"] != 0.1


def test_the_examples_of_controllers(tmp_path):
    logprobs = -torch.rand(4, 5).requires_grad_()
    batch = {"logprobs": logprobs, "ref_logprobs": logprobs.detach() - 1.0, "mask": None}
    left = readme.run("klfast.controllers", klfast=klfast, **batch)
    assert left["controller"].value < 0.1
    left = readme.run("controllers", klfast=klfast, batches=[(*batch.values(),)])
    assert left["controller"].value > 0.05  # the KL is 1 nat per token
    given = {"controller": left["controller"], "file": tmp_path / "kl.json", "json": json}
    save, load = readme.code("controller-checkpoint").split("# in the resumed run")
    readme.run("controller-checkpoint", save, **given)
    given["controller"] = klfast.NuPIKLController(0.05, target=0.02, unit="token")
    readme.run("controller-checkpoint", load.partition("\n")[2], **given)
    assert given["controller"].state_dict() == left["controller"].state_dict()


def test_the_example_of_an_early_stop():
    seen = []

    def train_on(batch):
        seen.append(batch)
        return 0.1 * len(seen)

    readme.run(
        "klfast.controllers.watchers.KLEarlyStop",
        stop=klfast.KLEarlyStop(0.2),
        epochs=10,
        batch="batch",
        train_on=train_on,
    )
    assert len(seen) == 4  # 0.4 is the first KL above 1.5 * 0.2


@pytest.mark.parametrize(
    "source",
    [readme.code("plant"), readme.code("lab.study.plant")],
    ids=["docs/controllers.md", "lab/study/plant.py"],
)
def test_the_plant_moves_as_it_is_written(source):
    plant = Plant(-2.6, 1.3, 0.003, 0.1, 0.03, 0, -0.006, first=2.7, noise=0.3, wander=0.0)
    policy = Policy(plant, (1,))
    policy.update(torch.tensor([0.1], dtype=torch.float64))
    for t, value in enumerate((0.1, 1.0, 0.01), 1):
        left = readme.run(
            "plant",
            source=source,
            **asdict(plant),
            exp=math.exp,
            log=math.log,
            value=value,
            t=t,
            w=0.0,
            n=0.5,
            log_kl=math.log(policy.kl.item()),
        )
        policy.update(torch.tensor([value], dtype=torch.float64))
        assert policy.kl.item() == pytest.approx(math.exp(left["log_kl"]), rel=1e-12)
        noisy = policy.measured(torch.tensor(0.5, dtype=torch.float64)).item()
        assert noisy == pytest.approx(left["current"], rel=1e-12)


def test_the_folders_of_design_are_those_of_the_repository():
    folder = None
    for line in readme.code("tree").splitlines():
        if not line.startswith(" "):
            folder = readme.ROOT / line.split("/")[0]
            assert folder.is_dir(), line
        for name in re.findall(r"[\w/]+(?:\.(?:py|h|cpp|cu)\b|/(?=\s))", line):
            assert any([*folder.rglob(name), *readme.ROOT.glob(name)]), f"{folder.name}: {name}"


def test_the_entry_for_citing_is_that_of_the_citation_file():
    citation = (readme.ROOT / "CITATION.cff").read_text()
    entry = readme.code("bibtex")
    assert f"version = {{{klfast.__version__}}}" in entry
    assert f"version: {klfast.__version__}\n" in citation
    assert re.search(r'title: "(.*)"', citation)[1] in entry
