"""patch(): recognises code, replaces it wherever it is held, changes nothing otherwise, undoes.

The frameworks here are made up, as small packages in a folder; tests/peers has the real ones.
"""

import functools
import importlib
import pickle
import sys
import traceback
from importlib import metadata

import pytest
import torch
from fresh import run_fresh

import klfast
from klfast.compat import PatchError, patch, patching, trlx, unpatch
from klfast.compat.patching import (
    Site,
    Target,
    fingerprint,
    replacement,
    replacement_of_compiled,
    rewriting,
)
from klfast.compat.targets import TARGETS

CORE = '''
"""A framework's core."""


def penalty(logprobs, ref_logprobs, *, scale=1.0):
    """What it says."""
    # how it does it
    return scale * (logprobs - ref_logprobs)


def helper(x):
    return x


class Controller:
    """Steers."""

    def __init__(self, coef):
        self.value = coef

    def update(self, current, n_steps):
        pass


class Trainer:
    def step(self, x):
        return "base"


class KLTrainer(Trainer):
    def step(self, x):
        """Inline."""
        log_ratio = x - 1
        kl = log_ratio * 2
        return super().step(x), kl
'''
USER = "from {name}.core import penalty, Controller\nfrom {name}.core import penalty as renamed\n"


@pytest.fixture
def framework(tmp_path, monkeypatch):
    """Makes the package ``name`` with a core and a module that imports from it by name."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(name="made_up", core=CORE):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "core.py").write_text(core)
        for user in ("user", "late"):
            (tmp_path / name / f"{user}.py").write_text(USER.format(name=name))
        made.append(name)
        importlib.import_module(f"{name}.user")
        return importlib.import_module(f"{name}.core")

    yield make
    for name in [*sys.modules]:
        if name.partition(".")[0] in made:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _nothing_stays_patched():
    yield
    assert not patching._ACTIVE
    patching._ACTIVE.clear()


def doubled(logprobs, ref_logprobs, *, scale=1.0, exact=False):
    return ("exact" if exact else "klfast", scale)


class Fixed(klfast.FixedKLController):
    """klfast's."""


def target(core, **changes):
    """What to replace in the made-up framework."""
    module = core.__name__
    sites = {
        "penalty": Site(f"{module}:penalty", fingerprint(core.penalty), replacement(doubled)),
        "helper": Site(f"{module}:helper", fingerprint(core.helper)),
        "Controller": Site(
            f"{module}:Controller", fingerprint(core.Controller), replacement(Fixed)
        ),
        "step": Site(
            f"{module}:KLTrainer.step",
            None,
            rewriting({"kl = log_ratio*2": "kl = klfast.triple(log_ratio)"}, Inline),
        ),
    }
    return Target(None, (), tuple({**sites, **changes}.values()), exact=True)


class Inline:
    """What a rewritten statement calls."""

    @staticmethod
    def triple(log_ratio):
        return log_ratio * 3


def apply(core, *, exact=False, **changes):
    return patching.apply("made_up", [target(core, **changes)], exact)


def undo():
    patching.undo("made_up")


def test_replaces_in_every_module_that_holds_it_under_whatever_name(framework):
    core = framework()
    user = sys.modules["made_up.user"]
    before = (core.penalty, core.Controller, user.renamed)
    apply(core)
    assert core.penalty(1, 2) == user.penalty(1, 2) == user.renamed(1, 2) == ("klfast", 1.0)
    assert user.Controller(0.5).state_dict()["value"] == 0.5
    late = importlib.import_module("made_up.late")
    assert late.penalty is core.penalty
    undo()
    assert (core.penalty, core.Controller, user.renamed) == before
    assert (late.penalty, late.renamed, late.Controller) == (before[0], before[0], before[1])


def test_what_replaces_looks_like_what_was_there(framework):
    core = framework()
    apply(core)
    assert (core.penalty.__name__, core.penalty.__module__) == ("penalty", "made_up.core")
    assert core.penalty.__doc__ == "What it says."
    assert (core.Controller.__name__, core.Controller.__module__) == ("Controller", "made_up.core")
    assert issubclass(core.Controller, klfast.FixedKLController)
    pickled = pickle.dumps(core.Controller(0.5))
    assert core.KLTrainer.step.__qualname__ == "KLTrainer.step"
    undo()
    there = pickle.loads(pickled)  # in a process that has not been patched
    assert type(there) is Fixed
    assert there.value == 0.5


def test_only_what_is_replaced_changes(framework):
    core = framework()
    before = dict(vars(core))
    apply(core)
    changed = {name for name, value in vars(core).items() if value is not before.get(name)}
    assert changed == {"penalty", "Controller"}
    assert core.Trainer().step(4) == "base"
    undo()
    assert vars(core) == before


def test_klfast_keeps_its_own_functions_when_a_patch_is_undone(framework):
    core = framework()
    apply(core)
    undo()
    assert doubled(1, 2) == ("klfast", 1.0)
    assert Fixed.__module__ == __name__


def test_statements_are_rewritten_where_code_is_inline(framework):
    core = framework()
    apply(core)
    assert core.KLTrainer().step(torch.tensor(5)) == ("base", 12)
    undo()
    assert core.KLTrainer().step(torch.tensor(5)) == ("base", 8)


def test_a_rewritten_method_keeps_its_lines(framework):
    core = framework()
    code = core.KLTrainer.step.__code__
    line = CORE.splitlines().index("        kl = log_ratio * 2") + 1
    apply(core)
    new = core.KLTrainer.step.__code__
    assert (new.co_filename, new.co_firstlineno) == (code.co_filename, code.co_firstlineno)
    with pytest.raises(TypeError) as caught:
        core.KLTrainer().step(_Unmultipliable())
    lines = {frame.lineno for frame in traceback.extract_tb(caught.value.__traceback__)}
    undo()
    assert line in lines


class _Unmultipliable:
    def __sub__(self, other):
        return self


def test_a_function_that_is_replaced_and_rewritten_code_both_hear_of_exact(framework):
    core = framework()
    apply(core, exact=True)
    assert core.penalty(1, 2, scale=3.0) == ("exact", 3.0)
    undo()


def test_as_a_context_manager_it_undoes_also_after_an_error(framework):
    core = framework()
    before = core.penalty
    made = apply(core)
    assert "made_up.core.penalty" in repr(made)
    with pytest.raises(ZeroDivisionError), made:
        1 / (core.penalty is before)
    assert core.penalty is before
    made.undo()  # once more does nothing
    assert core.penalty is before


def test_an_inner_unpatch_ends_it_for_the_block_too(framework):
    core = framework()
    with apply(core):
        undo()
        before = core.penalty
    assert core.penalty is before


def test_twice_is_an_error_and_so_is_undoing_nothing(framework):
    core = framework()
    known = [target(core)]
    with apply(core), pytest.raises(PatchError, match="already patched; unpatch"):
        patching.apply("made_up", known, False)
    with pytest.raises(PatchError, match="made_up is not patched"):
        undo()


def unchanged_but_refused(core, match, **changes):
    before = dict(vars(core))
    with pytest.raises(PatchError, match=match):
        apply(core, **changes)
    assert vars(core) == before


@pytest.mark.parametrize("site", ["penalty", "helper", "Controller"])
def test_other_code_is_refused_and_nothing_is_replaced(framework, site):
    core = framework()
    known = target(core).sites
    wrong = next(s for s in known if s.where.endswith(site))._replace(code="0" * 16)
    match = f"made_up.core:{site} is not known to klfast: its code is another"
    unchanged_but_refused(core, match, **{site: wrong})


def test_comments_docstrings_and_annotations_make_no_other_code(framework):
    core = framework()
    same = framework(
        "same",
        CORE.replace('    """What it says."""\n    # how it does it\n', "    # otherwise\n")
        .replace("(logprobs, ref_logprobs, *, scale=1.0)", "(logprobs: int, ref_logprobs, *, "
                 "scale: float = 1.0) -> str")
        .replace('    """Steers."""\n\n', ""),
    )  # fmt: skip
    other = framework("other", CORE.replace("scale * (", "-scale * ("))
    assert fingerprint(same.penalty) == fingerprint(core.penalty)
    assert fingerprint(same.Controller) == fingerprint(core.Controller)
    assert fingerprint(other.penalty) != fingerprint(core.penalty)
    assert fingerprint(core.helper) != fingerprint(core.penalty)


@pytest.mark.parametrize(
    ("of", "into"),
    [
        ("a * (b + c)", "a * b + c"),
        ("a if b else None", "a if b else 0"),
        ("f(a, b)", "f(b, a)"),
        ("f(a=1)", "f(b=1)"),
        ("a < b", "a <= b"),
        ("-10", "10"),
        ("'x'", "'y'"),
        ("False", "0"),
    ],
)
def test_every_other_change_of_code_shows(framework, of, into):
    text = "def f(a, b, c):\n    return {}\n\n\npenalty = Controller = f\n"
    first, second = framework("first", text.format(of)), framework("second", text.format(into))
    assert fingerprint(first.f) != fingerprint(second.f)


def test_a_default_is_code(framework):
    core = framework()
    other = framework("other", CORE.replace("scale=1.0", "scale=2.0"))
    assert fingerprint(core.penalty) != fingerprint(other.penalty)


@pytest.mark.parametrize("times", [0, 2])
def test_a_statement_that_is_not_there_exactly_once_is_refused(framework, times):
    statement = "        kl = log_ratio * 2\n"
    core = framework(core=CORE.replace(statement, times * statement or "        kl = 0\n"))
    unchanged_but_refused(core, f"'kl = log_ratio \\* 2' once, got {times}")


def test_a_closure_is_not_rewritten(framework):
    core = framework(
        core=CORE + "\n\ndef outer(factor):\n    class KLTrainer:\n        def step(self, x):\n"
        "            log_ratio = factor\n            kl = log_ratio * 2\n            return kl\n\n"
        "    return KLTrainer\n\n\nKLTrainer = outer(2)\n"
    )
    unchanged_but_refused(core, "must be a plain method, got a closure")


@pytest.mark.parametrize("where", ["made_up.core:gone", "made_up.core:KLTrainer.gone"])
def test_what_is_not_there_is_refused(framework, where):
    core = framework()
    site = Site(where, "0" * 16, replacement(doubled))
    unchanged_but_refused(core, f"the installed made_up has no {where} to replace", penalty=site)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("import nowhere_to_be_found", "for want of nowhere_to_be_found"),
        ("raise OSError('no such library')", r"OSError\('no such library'\)"),
    ],
)
def test_an_import_that_fails_is_not_taken_for_an_absence(framework, tmp_path, text, match):
    core = framework()
    (tmp_path / "made_up" / "broken.py").write_text(text)
    site = Site("made_up.broken:penalty", "0" * 16, replacement(doubled))
    unchanged_but_refused(core, f"importing made_up.broken failed.*{match}", penalty=site)


@pytest.mark.parametrize("name", ["penalty", "step"])
def test_what_somebody_has_wrapped_is_refused(framework, name):
    """The wrapper would be lost, or be called where it makes no sense."""
    core = framework()
    sites = target(core).sites
    owner = core if name == "penalty" else core.KLTrainer
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(lambda *args: original(*args)))
    before = dict(vars(core))
    with pytest.raises(PatchError, match=f"is wrapped by {__name__}"):
        patching.apply("made_up", [Target(None, (), sites)], False)
    assert vars(core) == before


# Importing all of dynamo warns.
import_dynamo = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
COMPILED = CORE.replace("def penalty(", "import torch\n\n\n@torch.compile\ndef penalty(")


def compiled_target(core):
    """A target of ``penalty``, recognised by its own code."""
    make = replacement_of_compiled(doubled, fingerprint(core.penalty.__wrapped__))
    return Target(None, (), (Site("made_up.core:penalty", None, make),), exact=True)


@import_dynamo
def test_a_function_that_torch_compile_decorates_is_replaced_by_one_that_it_does_not(framework):
    core = framework(core=COMPILED)
    user, before = sys.modules["made_up.user"], core.penalty
    with patching.apply("made_up", [compiled_target(core)], True):
        assert user.renamed(1, 2, scale=3.0) == ("exact", 3.0)
        assert not any("compile" in name for name in vars(core.penalty))
    assert core.penalty is user.renamed is before


def wrapped_once_more(core):
    return functools.wraps(core.penalty)(lambda *args: core.penalty(*args))


@import_dynamo
@pytest.mark.parametrize(
    ("instead", "match"),
    [
        (lambda core: torch.compile(core.helper), "its code is another"),
        (wrapped_once_more, f"is wrapped by {__name__}"),
    ],
    ids=["other code", "wrapped once more"],
)
def test_what_is_not_that_function_is_refused(framework, instead, match):
    core = framework(core=COMPILED)
    known = compiled_target(core)
    core.penalty = instead(core)
    before = dict(vars(core))
    with pytest.raises(PatchError, match=match):
        patching.apply("made_up", [known], False)
    assert vars(core) == before


def test_a_decorator_is_code(framework):
    core = framework()
    text = CORE.replace("def helper(x)", "@staticmethod\ndef helper(x)")
    plain, decorated = core.helper, framework("other", text).helper.__func__
    assert fingerprint(plain) != fingerprint(decorated)


def test_if_a_replacement_fails_half_way_the_first_half_is_undone(framework):
    class Stubborn(type):
        def __setattr__(cls, name, value):
            if refuses and value is not original:
                raise AttributeError("no")
            super().__setattr__(name, value)

    core = framework()
    sites = target(core).sites
    core.KLTrainer = Stubborn("KLTrainer", (core.Trainer,), dict(vars(core.KLTrainer)))
    original, refuses = vars(core.KLTrainer)["step"], True
    before = dict(vars(core))
    with pytest.raises(PatchError, match="does not let itself be patched"):
        patching.apply("made_up", [Target(None, (), sites)], False)
    assert vars(core) == before


def test_exact_is_refused_where_nothing_has_it(framework):
    core = framework()
    with pytest.raises(PatchError, match="nothing that klfast replaces in made_up has an exact"):
        patching.apply("made_up", [target(core)._replace(exact=False)], True)
    assert not any(target.exact for target in TARGETS["trlx"])


def test_what_has_no_source_is_refused(framework):
    core = framework(core=CORE + "\n\nfrom math import sqrt as helper\n")
    site = Site("made_up.core:helper", "0" * 16)
    before = dict(vars(core))
    known = Target(None, (), (Site("made_up.core:penalty", fingerprint(core.penalty)), site))
    with pytest.raises(PatchError, match="cannot be read"):
        patching.apply("made_up", [known], False)
    assert vars(core) == before


@pytest.mark.parametrize(
    ("version", "known", "fits"),
    [
        ("1.16.0", "1.16", True),
        ("1.16", "1.16", True),
        ("1.160.0", "1.16", False),
        ("1.17.0", "1.16", False),
        ("2.1.16", "1.16", False),
    ],
)
def test_the_version_must_be_known(framework, monkeypatch, version, known, fits):
    core = framework()
    monkeypatch.setattr(metadata, "version", lambda _: version)
    of_release = target(core)._replace(distribution="made-up", versions=(known,))
    if fits:
        patching.apply("made_up", [of_release], False).undo()
        return
    with pytest.raises(PatchError, match=f"made_up {version} is installed; .* patch {known}"):
        patching.apply("made_up", [of_release], False)


def test_of_several_targets_the_installed_version_decides(framework, monkeypatch):
    core = framework()
    monkeypatch.setattr(metadata, "version", lambda _: "0.11.4")
    new = Target("made-up", ("1.16",), (Site("made_up.nowhere:x", "0"),))
    old = target(core)._replace(distribution="made-up", versions=("0.11",))
    patching.apply("made_up", [new, old], False).undo()


@pytest.mark.parametrize("name", ["verl", "trl", "openrlhf"])
def test_a_framework_that_is_not_installed_is_said_to_be(name):
    with pytest.raises(PatchError, match=f"{name} is not installed"):
        patch(name)


@pytest.mark.parametrize("name", ["roll", "trlx"])
def test_so_is_one_without_releases(name):
    with pytest.raises(PatchError, match=f"^{name} is not installed$"):
        patch(name)


@pytest.mark.parametrize("call", [patch, unpatch])
def test_an_unknown_framework_lists_the_known_ones(call):
    with pytest.raises(ValueError, match="unknown framework 'verll'; expected one of 'openrlhf'"):
        call("verll")


def test_unpatch_of_what_is_not_patched():
    with pytest.raises(PatchError, match="verl is not patched"):
        unpatch("verl")


def test_every_framework_has_targets_with_sites():
    assert sorted(TARGETS) == sorted(klfast.compat.FRAMEWORKS)
    for targets in TARGETS.values():
        wheres = [site.where for target in targets for site in target.sites]
        assert wheres
        assert len(set(wheres)) == len(wheres)


def test_importing_patches_nothing_and_loads_no_framework():
    code = (
        "import sys, klfast; from klfast.compat import patching; "
        "print(bool(patching._ACTIVE), {'transformers', 'trl', 'verl'} & set(sys.modules))"
    )
    assert run_fresh(code) == "False set()"


TRLX = """
class AdaptiveKLController:
    pass


class FixedKLController:
    pass
"""
TRLX_TRAINER = """
import torch


class AcceleratePPOTrainer:
    def make_experience(self, logprobs, ref_logprobs, attention_mask):
        log_ratio = (logprobs - ref_logprobs) * attention_mask[:, :-1]
        kl = log_ratio.exp() - 1 - log_ratio
        mean_kl_per_token = kl.mean()
        mean_kl = kl.sum(1).mean()
        return log_ratio, mean_kl_per_token, mean_kl
"""


def test_trlx_s_inline_formula_is_replaced(tmp_path, monkeypatch):
    """With what peers.md says of trlx for its code: trlx itself cannot be installed."""
    for folder, file, text in [
        ("trlx", "__init__", ""),
        ("trlx/models", "__init__", ""),
        ("trlx/models", "modeling_ppo", TRLX),
        ("trlx/trainer", "__init__", ""),
        ("trlx/trainer", "accelerate_ppo_trainer", TRLX_TRAINER),
    ]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    models = importlib.import_module("trlx.models.modeling_ppo")
    (known,) = TARGETS["trlx"]
    sites = tuple(
        site._replace(code=fingerprint(getattr(models, site.where.partition(":")[2])))
        if site.code
        else site
        for site in known.sites
    )
    trainer = importlib.import_module("trlx.trainer.accelerate_ppo_trainer").AcceleratePPOTrainer()
    logprobs = -torch.rand(3, 6)
    ref_logprobs = logprobs - torch.randn(3, 6)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0, 0] + [1] * 5])
    theirs = trainer.make_experience(logprobs, ref_logprobs, mask)
    ref_logprobs[1, 5] = torch.nan
    with patching.apply("trlx", [known._replace(sites=sites)], False):
        ours = trainer.make_experience(logprobs, ref_logprobs, mask)
        assert issubclass(models.AdaptiveKLController, trlx.AdaptiveKLController)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)
    assert trainer.make_experience(logprobs, ref_logprobs, mask)[2].isnan()
    for name in [*sys.modules]:
        if name.partition(".")[0] == "trlx":
            del sys.modules[name]
