"""patch() recognises code, replaces it wherever a framework holds it, reports it, and undoes it.

The frameworks here are small made-up packages. tests/peers has the real ones.
"""

import ast
import functools
import importlib
import pickle
import re
import sys
import traceback
import warnings
from importlib import metadata
from types import SimpleNamespace

import packages
import pytest
import torch

import klfast
from klfast.compat import FRAMEWORKS, Left, PatchError, patch, patching, roll, trlx, unpatch
from klfast.compat.patching.fingerprints import fingerprint, fingerprint_of_tree
from klfast.compat.patching.on_import import after_import
from klfast.compat.patching.replacements import compiled, rewriting
from klfast.compat.patching.sites import INSIDE, Site
from klfast.compat.targets import TARGETS

pytestmark = pytest.mark.usefixtures("nothing_stays_patched")

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
def framework(package, tmp_path):
    """Make a package with a core, and a module that imports from it by name."""

    def make(name="made_up", core=CORE):
        user = USER.format(name=name)
        packages.write(tmp_path, {f"{name}.late": user})
        return package({f"{name}.core": core, f"{name}.user": user})[0]

    return make


def doubled(logprobs, ref_logprobs, *, scale=1.0, exact=False):
    return ("exact" if exact else "klfast", scale)


class Fixed(klfast.FixedKLController):
    """The controller that replaces the made-up one."""


def site(core, name, new=None):
    """The site of a function or class, recognised by its code."""
    return Site(f"{core.__name__}:{name}", {fingerprint(getattr(core, name)): "1.0"}, new)


def target(core, **changes):
    """The sites to replace: ``penalty`` with its callee, ``Controller`` and ``KLTrainer.step``."""
    news = {"penalty": doubled, "helper": None, "Controller": Fixed}
    sites = {name: site(core, name, new) for name, new in news.items() if name not in changes}
    sites["step"] = Site(f"{core.__name__}:KLTrainer.step", {INSIDE: "1.0"}, TRIPLE)
    sites |= changes
    return (sites["penalty"], sites["helper"]), (sites["Controller"],), (sites["step"],)


class Inline:
    """The namespace that a rewritten statement calls."""

    @staticmethod
    def triple(log_ratio, *, exact=False):
        return ("exact", log_ratio) if exact else log_ratio * 3


TRIPLE = rewriting({"kl = log_ratio*2": "kl = klfast.triple(log_ratio)"}, Inline)


def apply(core, *, exact=False, strict=False, modules=(), **changes):
    made_up = target(core, **changes)
    return packages.apply("made_up", made_up, exact=exact, strict=strict, modules=modules)


def undo():
    return patching.undo("made_up")


def everything(core):
    """Return all names that the made-up framework's modules and class hold."""
    owners = (core, sys.modules["made_up.user"], core.KLTrainer)
    return [dict(vars(owner)) for owner in owners]


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
    assert doubled(1, 2) == ("klfast", 1.0)  # klfast keeps its own
    assert Fixed.__module__ == __name__


def test_statements_are_rewritten_where_code_is_inline_and_keep_their_lines(framework):
    core = framework()
    code = core.KLTrainer.step.__code__
    line = CORE.splitlines().index("        kl = log_ratio * 2") + 1
    apply(core)
    new = core.KLTrainer.step.__code__
    assert (new.co_filename, new.co_firstlineno) == (code.co_filename, code.co_firstlineno)
    with pytest.raises(TypeError) as caught:
        core.KLTrainer().step(_Unmultipliable())
    lines = {frame.lineno for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert line in lines
    assert core.KLTrainer().step(torch.tensor(5)) == ("base", 12)
    undo()
    assert core.KLTrainer().step(torch.tensor(5)) == ("base", 8)


class _Unmultipliable:
    def __sub__(self, other):
        return self


def test_a_function_that_is_replaced_and_rewritten_code_both_hear_of_exact(framework):
    core = framework()
    apply(core, exact=True)
    assert core.penalty(1, 2, scale=3.0) == ("exact", 3.0)
    assert core.KLTrainer().step(torch.tensor(5)) == ("base", ("exact", 4))
    undo()


def test_as_a_context_manager_it_undoes_after_an_error_and_both_happen_once(framework):
    core = framework()
    before, known = core.penalty, target(core)
    made = apply(core)
    assert "replaced  made_up.core:penalty (also in made_up.user)" in repr(made)
    with pytest.raises(PatchError, match="already patched; unpatch"):
        packages.apply("made_up", known)
    with pytest.raises(ZeroDivisionError), made:
        1 / (core.penalty is before)
    assert core.penalty is before
    made.undo()  # a second undo does nothing
    with apply(core):
        undo()  # an inner undo ends the patch of the block too
        assert core.penalty is before
    with pytest.raises(PatchError, match="made_up is not patched"):
        undo()


UNKNOWN = {"0" * 16: "0.9"}
SQRT = "\n\nfrom math import sqrt as helper\n"
OTHER_CODE = r"its code is none of those that klfast knows \(0.9\)"
NONE = "^(not all.*)?the installed made_up has none$"
LINE = "        kl = log_ratio * 2\n"
CLOSURE = """

def outer(factor):
    class KLTrainer:
        def step(self, x):
            log_ratio = factor
            kl = log_ratio * 2
            return kl

    return KLTrainer


KLTrainer = outer(2)
"""
LEFT = {
    "other code": ("penalty", CORE, "penalty", OTHER_CODE),
    "another callee": ("helper", CORE, "helper", OTHER_CODE),
    "another constant": ("helper", CORE + "\nLIMIT = 20.0\n", "core:LIMIT", "none of those .*0.9"),
    "no source": ("helper", CORE + SQRT, "helper", "cannot be read"),
    "another class": ("Controller", CORE, "Controller", OTHER_CODE),
    "no function": ("Controller", CORE, "core:gone", NONE),
    "no method": ("Controller", CORE, "core:Trainer.gone", NONE),
    "no module": ("Controller", CORE, "gone:step", NONE),
    "no package": ("Controller", CORE, "gone.core:step", NONE),
    "an import that fails": (
        "Controller", CORE, "broken:step", "importing made_up.broken failed.*no such library"
    ),
    "an import that is missing": (
        "Controller", CORE, "missing:step", "made_up.missing failed: nowhere_to_be_found is not"
    ),
    "no statement": ("step", CORE.replace(LINE, "        kl = 0\n"), None, "2' once, got 0"),
    "two statements": ("step", CORE.replace(LINE, 2 * LINE), None, "2' once, got 2"),
    "a closure": ("step", CORE + CLOSURE, None, "must be a plain method, got a closure"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_known_is_left_alone_with_what_was_proved_equal_with_it(
    framework, tmp_path, name
):
    """``strict`` replaces nothing. Otherwise the site and its group are named and left alone."""
    which, text, place, reason = LEFT[name]
    core = framework(core=text)
    (tmp_path / "made_up" / "broken.py").write_text("raise OSError('no such library')")
    (tmp_path / "made_up" / "missing.py").write_text("import nowhere_to_be_found")
    changes = {}
    where = "made_up.core:KLTrainer.step"
    if place is not None:
        where = f"made_up.{place}" if ":" in place else f"made_up.core:{place}"
        changes[which] = Site(where, UNKNOWN, None if which == "helper" else Fixed)
    before = dict(vars(core)), vars(core.KLTrainer)["step"]
    with pytest.raises(PatchError, match=f"not all of made_up is known.*{where}: ") as caught:
        apply(core, strict=True, **changes)
    assert re.search(reason.replace("^", ""), str(caught.value))
    left = {where: reason}
    if which == "helper":
        left["made_up.core:penalty"] = f"it is replaced together with {where} or not at all"
    with apply(core, **changes) as made:
        assert {each.where for each in made.left} == left.keys()
        assert all(re.search(left[each.where], each.reason) for each in made.left)
        replaced = {each.where.rpartition(":")[2] for each in made.replaced}
        gone = {{"helper": "penalty", "step": "KLTrainer.step"}.get(which, which)}
        assert replaced == {"penalty", "Controller", "KLTrainer.step"} - gone
        assert (core.penalty is before[0]["penalty"]) == ("penalty" in gone)
    assert (dict(vars(core)), vars(core.KLTrainer)["step"]) == before


SAME = CORE.replace('    """What it says."""\n    # how it does it\n', "    # otherwise\n")
SAME = SAME.replace("(logprobs, ref_logprobs, *, scale=1.0)", "(logprobs: int, ref_logprobs, *, "
                    "scale: float = 1.0) -> str").replace('    """Steers."""\n\n', "")  # fmt: skip


def test_comments_docstrings_and_annotations_make_no_other_code(framework):
    core, same = framework(), framework("same", SAME)
    assert fingerprint(same.penalty) == fingerprint(core.penalty)
    assert fingerprint(same.Controller) == fingerprint(core.Controller)
    with apply(core, helper=Site("made_up.core:LIMIT", {"10.0": "1.0"})) as made:
        assert "made_up.core:penalty" not in {each.where for each in made.replaced}
    core.LIMIT = 10.0  # a constant is recognised by its value
    with apply(core, helper=Site("made_up.core:LIMIT", {"10.0": "1.0"})):
        assert core.penalty(1, 2) == ("klfast", 1.0)


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
        ("a\n\n\ndef f(a, b, c=1): return a", "a\n\n\ndef f(a, b, c=2): return a"),
        ("a\n\n\n@staticmethod\ndef f(a): return a", "a\n\n\n@classmethod\ndef f(a): return a"),
    ],
)
def test_every_other_change_of_code_shows(framework, of, into):
    text = "def f(a, b, c):\n    return {}\n\n\npenalty = Controller = f\n"
    first, second = framework("first", text.format(of)), framework("second", text.format(into))
    assert fingerprint(first.f) != fingerprint(second.f)


IF = """
if self.correct:
    log_ratio = x - 1  # a comment
    kl = log_ratio * 2
else:
    kl = None
"""


def branching(framework, blocks=IF):
    """A framework whose step has these ``if`` statements."""
    body = blocks.replace("\n", "\n        ")
    core = (
        CORE
        + f"""

class Branching:
    correct = True

    def step(self, x):
        kl = "none"
        if x:{body.replace("        ", "            ")}
        return kl
"""
    )
    return framework(core=core)


@pytest.fixture
def by_block():
    """A rewriting of that ``if`` statement, known by two codes."""
    code = fingerprint_of_tree(ast.parse(IF))
    new = "if self.correct:\n    kl = klfast.triple(x)\n    kl = ('new', kl)"
    return rewriting({}, Inline, blocks={("0" * 16, code): new})


def test_an_if_statement_is_replaced_as_a_whole_wherever_it_stands(framework, by_block):
    core = branching(framework)
    assert core.Branching().step(4) == 6
    step = by_block.make(core.Branching.step, {})
    assert step(core.Branching(), 4) == ("new", 12)
    assert step(core.Branching(), 0) == "none"
    for blocks, count in ((IF.replace("* 2", "* 3"), 0), (IF + IF, 2)):
        packages.forget(["made_up"])
        with pytest.raises(PatchError, match=f"'0000000000000000 or [0-9a-f]*' once, got {count}"):
            by_block.make(branching(framework, blocks).Branching.step, {})


@pytest.mark.parametrize("name", ["penalty", "KLTrainer.step"])
def test_what_somebody_has_wrapped_before_is_left_alone(framework, name):
    """Patching would lose the wrapper, or call it where it makes no sense."""
    core = framework()
    known_there = target(core)
    owner = core if name == "penalty" else core.KLTrainer
    original = getattr(owner, name.rpartition(".")[2])
    wrapper = functools.wraps(original)(lambda *args: original(*args))
    setattr(owner, name.rpartition(".")[2], wrapper)
    with packages.apply("made_up", known_there) as made:
        (left,) = made.left
        assert left == Left(
            f"made_up.core:{name}", f"it is wrapped by {__name__}; patch first, and wrap after that"
        )
        assert getattr(owner, name.rpartition(".")[2]) is wrapper
    with pytest.raises(PatchError, match=f"is wrapped by {__name__}"):
        packages.apply("made_up", known_there, strict=True)


def wrapping(function, carefully):
    def wrapper(*args, **kwargs):
        return "wrapped", function(*args, **kwargs)

    return functools.wraps(function)(wrapper) if carefully else wrapper


@pytest.mark.parametrize("carefully", [True, False], ids=["with wraps", "without"])
@pytest.mark.parametrize("where", ["core:penalty", "core:KLTrainer.step", "user:penalty", "mine"])
def test_unpatch_does_not_lose_a_wrapper_of_what_it_replaced(
    framework, own_module, where, carefully
):
    """The function is held where it is defined, and where a module imported it by name."""
    core = framework()
    mine = own_module()
    apply(core, modules=("my_trainer",))
    owners = {"core:KLTrainer.step": core.KLTrainer, "user:penalty": sys.modules["made_up.user"]}
    owner = owners.get(where, mine if where == "mine" else core)
    name = "step" if where.endswith("step") else "penalty"
    klfasts = vars(owner)[name]
    setattr(owner, name, wrapping(klfasts, carefully))
    before = dict(vars(core)), vars(owner)[name]
    named = "my_trainer:penalty" if where == "mine" else f"made_up.{where}"
    match = f"^{named} has been wrapped or replaced since it was patched, by '.*'; undo"
    with pytest.raises(PatchError, match=match):
        undo()
    assert (dict(vars(core)), vars(owner)[name]) == before
    setattr(owner, name, klfasts)
    del sys.modules["made_up.user"].renamed  # a deleted name holds no wrapper
    undo()
    assert vars(owner)[name] is not klfasts
    assert not hasattr(sys.modules["made_up.user"], "renamed")


@pytest.mark.parametrize("of", ["patch", "unpatch"])
def test_an_interrupt_leaves_no_half_of_a_patch_and_an_unpatch_can_be_repeated(
    framework, monkeypatch, of
):
    core = framework()
    known_there, before = target(core), everything(core)
    if of == "unpatch":
        apply(core)
    calls, held = [], patching.bindings_of

    def interrupted(value):
        calls.append(value)
        if len(calls) == 2 or of == "unpatch":
            raise KeyboardInterrupt
        return held(value)

    with monkeypatch.context() as patched:
        patched.setattr(patching, "bindings_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            undo() if of == "unpatch" else packages.apply("made_up", known_there)
    if of == "unpatch":
        undo()
    assert everything(core) == before


# Importing all of dynamo warns.
import_dynamo = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
COMPILED = CORE.replace("def penalty(", "import torch\n\n\n@torch.compile\ndef penalty(")


def compiled_target(core):
    """A target of ``penalty``, recognised by its own code."""
    make = compiled(doubled, fingerprint(core.penalty.__wrapped__))
    site = Site("made_up.core:penalty", {INSIDE: "1.0"}, make)
    return ((site,),)


@import_dynamo
def test_a_function_that_torch_compile_decorates_is_replaced_by_one_that_it_does_not(framework):
    core = framework(core=COMPILED)
    user, before = sys.modules["made_up.user"], core.penalty
    with packages.apply("made_up", compiled_target(core), exact=True):
        assert user.renamed(1, 2, scale=3.0) == ("exact", 3.0)
        assert not any("compile" in name for name in vars(core.penalty))
    assert core.penalty is user.renamed is before
    known = compiled_target(core)
    for instead, match in (
        (torch.compile(core.helper), "its code is none of those"),
        (functools.wraps(before)(lambda *args: before(*args)), f"is wrapped by {__name__}"),
    ):
        core.penalty = instead
        with pytest.raises(PatchError, match=match):
            packages.apply("made_up", known)
        assert core.penalty is instead


def test_it_prints_what_was_replaced_where_and_what_was_not_and_why(framework, monkeypatch):
    core = framework()
    monkeypatch.setattr(metadata, "version", lambda name: {"made_up": "1.0.3"}[name])
    other = Site("made_up.core:Controller", {"0" * 16: "1.0, 1.1"}, Fixed)
    with apply(core, Controller=other) as made:
        assert str(made).splitlines() == [
            "klfast in made_up 1.0.3",
            "  replaced  made_up.core:penalty (also in made_up.user)",
            "  replaced  made_up.core:KLTrainer.step",
            "  left      made_up.core:Controller: its code is none of those that klfast knows "
            "(1.0, 1.1)",
        ]
        assert [each.releases for each in made.replaced] == ["1.0", "1.0"]


def test_if_nothing_is_known_the_error_names_the_version_and_the_known_ones(framework, monkeypatch):
    core = framework()
    monkeypatch.setattr(metadata, "version", lambda _: "2.0")
    sites = [
        Site(f"made_up.core:{name}", {"0" * 16: "1.0"}, Fixed) for name in ("penalty", "helper")
    ]
    targets = [((site,),) for site in sites]
    before = dict(vars(core))
    with pytest.raises(PatchError) as caught:
        packages.apply("made_up", *targets, releases="1.0, 0.1 to 0.8")
    assert str(caught.value) == (
        "nothing of made_up 2.0 is known to klfast, which knows made_up 1.0, 0.1 to 0.8; "
        "made_up.core:penalty: its code is none of those that klfast knows (1.0)"
    )
    assert vars(core) == before


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("import not_installed", "not_installed is not installed"),
        ("1 / 0", "ZeroDivisionError('division by zero')"),
    ],
)
def test_if_the_framework_does_not_import_the_error_begins_with_the_cause(
    framework, tmp_path, line, text
):
    """Such as verl without ray. Other sites, and eras without the module, give other reasons."""
    framework()
    packages.write(tmp_path, {"made_up.broken": line})
    names = ("made_up.gone:penalty", "made_up.core:penalty", "made_up.broken:penalty")
    targets = [((Site(where, {"0" * 16: "1.0"}, Fixed),),) for where in names]
    with pytest.raises(PatchError) as caught:
        packages.apply("made_up", *targets)
    expected = f"made_up cannot be patched: importing made_up.broken failed: {text}"
    assert str(caught.value) == expected
    assert caught.value.__cause__ is not None


@pytest.fixture
def own_module(tmp_path):
    """Make a user's module, outside the framework, that imports the function by name."""
    made = []

    def make(name="my_trainer", text="from made_up.core import penalty\n"):
        (tmp_path / f"{name}.py").write_text(text)
        made.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    for name in made:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["my_trainer", "made_up_of_mine", "__main__"])
def test_names_in_other_modules_stay_and_are_named_unless_modules_names_them(
    framework, own_module, monkeypatch, name
):
    core = framework()
    before = core.penalty
    if name == "__main__":
        monkeypatch.setattr(sys.modules[name], "penalty", before, raising=False)
    mine = sys.modules[name] if name == "__main__" else own_module(name)
    stays = f'it was imported by name into another module; modules=("{name}",) reaches it'
    unknown = "it is not imported; what it imports from now on is klfast's"
    for modules, left in (
        ((), (Left(f"{name}:penalty", stays),)),
        ((name[:2],), (Left(name[:2], unknown), Left(f"{name}:penalty", stays))),
        ((name,), ()),
        ([name], ()),
        ("all", ()),
    ):
        with apply(core, modules=modules) as made:
            assert {*made.left} == {*left}
            assert (
                (mine.penalty is core.penalty) == (name in made.replaced[0].modules) == (not left)
            )
        assert mine.penalty is core.penalty is before


def test_two_calls_that_wait_for_the_same_import_are_both_made(tmp_path, monkeypatch):
    package = tmp_path / "awaited"
    package.mkdir()
    for name in ("__init__", "core", "other"):
        (package / f"{name}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    calls = []
    for number in (1, 2):
        after_import("awaited", ("awaited.core",), functools.partial(calls.append, number))
    importlib.import_module("awaited.core")
    importlib.import_module("awaited.other")
    assert sorted(calls) == [1, 2]
    after_import("awaited", ("awaited.core",), functools.partial(calls.append, 3))
    assert calls[2:] == [3]


def test_a_call_that_waits_is_made_although_an_import_fails(tmp_path, monkeypatch):
    package = tmp_path / "late"
    package.mkdir()
    sources = {
        "__init__": "import late.core\nimport not_installed",
        "core": "",
        "broken": "import not_installed",
        "extra": "import late.core\nimport not_installed",
    }
    for name, source in sources.items():
        (package / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    calls = []
    after_import("late", ("late.core", "late.broken"), lambda: calls.append([*sys.modules]))

    def fails(module):
        with pytest.raises(ImportError, match="not_installed"):
            importlib.import_module(module)

    fails("late")  # without its package, late.core cannot be used
    assert calls == []
    monkeypatch.delitem(sys.modules, "late.core")
    (package / "__init__.py").write_text("")
    importlib.invalidate_caches()
    fails("late.broken")
    assert calls == []
    fails("late.extra")
    assert len(calls) == 1
    assert {"late", "late.core"} <= {*calls[0]}
    for module in [name for name in sys.modules if name.startswith("late")]:
        monkeypatch.delitem(sys.modules, module)


def test_a_call_that_waits_goes_on_beside_an_old_finder(tmp_path, monkeypatch):
    """Python skips a finder without ``find_spec``."""
    (tmp_path / "aged.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    old = SimpleNamespace(find_module=lambda name, path: None)
    monkeypatch.setattr(sys, "meta_path", [old, *sys.meta_path])
    calls = []
    after_import("aged", ("aged",), lambda: calls.append("aged" in sys.modules))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)  # of Python 3.10 and 3.11
        importlib.import_module("aged")
    monkeypatch.delitem(sys.modules, "aged")
    assert calls == [True]


def test_another_module_that_imports_while_it_is_patched_keeps_what_it_got(framework, own_module):
    core = framework()
    apply(core)
    mine = own_module()
    assert mine.penalty is core.penalty
    kept = undo()
    assert kept == (Left("my_trainer:penalty", "imported from the patched framework"),)
    assert mine.penalty is not core.penalty
    assert mine.penalty(1, 2) == ("klfast", 1.0)


@pytest.mark.parametrize("modules", ["my_trainer", 3, (sys,), None], ids=str)
def test_modules_must_be_names(framework, modules):
    core = framework()
    before = dict(vars(core))
    with pytest.raises(TypeError, match='modules must be "all" or a sequence of module names, got'):
        apply(core, modules=modules)
    assert vars(core) == before


@pytest.mark.parametrize("kernel", ["its own kernel", None])
@pytest.mark.parametrize("there", [True, False], ids=["GPU", "CPU"])
def test_code_that_calls_a_fused_kernel_is_left_alone_on_a_gpu(
    framework, monkeypatch, there, kernel
):
    core = framework()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    asked = []
    penalty = Site(
        "made_up.core:penalty",
        {fingerprint(core.penalty): "1.0"},
        doubled,
        lambda module: asked.append(module) or kernel,
    )
    before = core.penalty
    with apply(core, penalty=penalty, strict=True) as made:
        left_so = there and kernel is not None
        assert (core.penalty is before) == left_so
        assert asked == ([core] if there else [])
        assert made.left == ((Left(penalty.where, on_gpu(kernel)),) if left_so else ())


def on_gpu(does):
    return f"on a GPU it {does}; no measurement shows klfast to be faster"


@pytest.mark.parametrize("where", ["core:gone", "core:Trainer.gone", "gone:step"])
def test_strict_takes_what_a_known_release_lacks(framework, where):
    core = framework()
    site = Site(f"made_up.{where}", {"0" * 16: "1.0"}, doubled)._replace(absent="as until 0.9")
    with apply(core, Controller=site, strict=True) as made:
        assert made.left == (Left(site.where, "the installed made_up has none (as until 0.9)"),)
        assert len(made.replaced) == 2
    with pytest.raises(PatchError, match="nothing of made_up is known"):
        packages.apply("made_up", ((site,),))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_that_is_not_installed_is_said_to_be(name):
    with pytest.raises(PatchError, match=f"^{name} is not installed$"):
        patch(name)
    with pytest.raises(PatchError, match=f"^{name} is not patched$"):
        unpatch(name)


@pytest.mark.parametrize("call", [patch, unpatch])
@pytest.mark.parametrize(("name", "error"), [("verll", ValueError), ([], TypeError)], ids=str)
def test_an_unknown_framework_lists_the_known_ones(call, name, error):
    with pytest.raises(error, match=r"unknown framework .*; expected one of 'trlx', 'trl', 'verl'"):
        call(name)


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


def test_trlx_s_inline_formula_is_replaced(package):
    """The code is the lines of trlx v0.7, because trlx cannot be installed."""
    models, trainer = package(
        {"trlx.models.modeling_ppo": TRLX, "trlx.trainer.accelerate_ppo_trainer": TRLX_TRAINER}
    )
    ((_, make_experience),) = TARGETS["trlx"]
    controllers = tuple(
        Site(f"trlx.models.modeling_ppo:{name}", {fingerprint(getattr(models, name)): "0.7"}, new)
        for name, new in (("AdaptiveKLController", trlx.AdaptiveKLController),)
    )
    trainer = trainer.AcceleratePPOTrainer()
    logprobs = -torch.rand(3, 6)
    ref_logprobs = logprobs - torch.randn(3, 6)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0, 0] + [1] * 5])
    theirs = trainer.make_experience(logprobs, ref_logprobs, mask)
    ref_logprobs[1, 5] = torch.nan
    with packages.apply("trlx", (controllers, make_experience), strict=True):
        ours = trainer.make_experience(logprobs, ref_logprobs, mask)
        assert issubclass(models.AdaptiveKLController, trlx.AdaptiveKLController)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)
    assert trainer.make_experience(logprobs, ref_logprobs, mask)[2].isnan()


STATIC = """
class Owner:
    @staticmethod
    def loss(x, y=1):
        return x
"""


def test_a_static_method_is_replaced_as_one_and_hears_of_exact(package):
    (module,) = package({"made_up_static": STATIC})
    site = Site(
        "made_up_static:Owner.loss",
        {fingerprint(vars(module.Owner)["loss"]): "1.0"},
        lambda x, *, exact=False: (x, exact),
    )
    with packages.apply("made_up_static", ((site,),), exact=True):
        assert module.Owner.loss(3) == module.Owner().loss(3) == (3, True)
    assert module.Owner().loss(3) == 3


VARIOUS_DIVERGENCE = """
class VariousDivergence:
    def __init__(self, pipeline_config, padding_id=-100):
        self.kd_temperature = pipeline_config.kd_temperature
        self.dist_func = getattr(self, f"compute_{pipeline_config.kd_objective}_divergence")

    def __call__(self, logits, teacher_probs, teacher_log_probs, teacher_inf_mask):
        return self.dist_func(logits, teacher_probs, teacher_log_probs, teacher_inf_mask)
"""
OBJECTIVES = {"forward_kl": "forward_kl", "reverse_kl": "reverse_kl", "js": "js_divergence"}
for _name in (*OBJECTIVES, "skewed_forward_kl"):
    VARIOUS_DIVERGENCE += f"""
    def compute_{_name}_divergence(
        self, logits, teacher_probs, teacher_log_probs, teacher_inf_mask
    ):
        return "theirs, {_name}"
"""


def test_roll_s_divergences_are_klfast_s_where_it_has_them(package):
    """The module is made up with ROLL's names, because ROLL is installed from source."""
    (module,) = package({"roll.pipeline.distill.various_divergence": VARIOUS_DIVERGENCE})
    groups = []
    for (site,) in (group for group in TARGETS["roll"][0] if ".distill." in group[0].where):
        method = vars(module.VariousDivergence)[site.where.rpartition(".")[2]]
        groups.append((site._replace(codes={fingerprint(method): "1.0"}),))
    logits, logprobs = torch.randn(2, 4, 9).log_softmax(-1)

    def divergence(cls, kd_objective):
        config = SimpleNamespace(kd_temperature=2.0, kd_objective=kd_objective)
        return cls(config)(logits, logprobs.exp(), logprobs, logprobs.isinf())

    with packages.apply("roll", groups):
        for objective, name in OBJECTIVES.items():
            value = divergence(module.VariousDivergence, objective)
            assert torch.equal(value, divergence(roll.VariousDivergence, name))
        skewed = divergence(module.VariousDivergence, "skewed_forward_kl")
        assert skewed == "theirs, skewed_forward_kl"
    assert divergence(module.VariousDivergence, "js") == "theirs, js"
