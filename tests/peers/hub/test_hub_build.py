"""``make hub`` writes a kernel by the Hub's rules. The same sources give the same bytes."""

import ast
import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import PurePosixPath

import hub_kernel
import jinja2
import pytest
from hub_kernel import generate, sources, variants
from kernels import Metadata
from kernels._rust import Build, Digest, DigestAlgorithm
from kernels.variants import get_variants_local, resolve_variant

import klfast

BACKENDS = ("cpu", "cuda", "rocm")


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def variant(kernel, backend="cpu"):
    return kernel / "build" / f"torch-{backend}"


def test_a_build_is_made_for_every_kind_of_device(kernel):
    assert {path.name for path in (kernel / "build").iterdir()} == {
        f"torch-{backend}" for backend in BACKENDS
    }
    assert [str(backend).lower() for backend in Build.open(kernel).general.backends] == [*BACKENDS]
    chosen, _ = resolve_variant(get_variants_local(kernel / "build"), "cpu")
    assert chosen.variant_str == "torch-cpu"


def test_builds_have_what_the_project_has(kernel):
    project = contents(kernel / "torch-ext" / "klfast")
    added = {"_ops.py", "klfast/__init__.py", "metadata.json"}
    for backend in BACKENDS:
        built = contents(variant(kernel, backend))
        assert built.keys() - project.keys() == added
        assert {path: built[path] for path in project} == project


def test_the_same_sources_give_the_same_bytes(kernel, tmp_path):
    """The build runs in another folder and process, over an earlier and different kernel."""
    checkout = tmp_path / "checkout"
    for folder in ("hub", "klfast"):
        leave = shutil.ignore_patterns("__pycache__", "_C*", "_build_info.json")
        shutil.copytree(hub_kernel.ROOT / folder, checkout / folder, ignore=leave)
    shutil.copy(hub_kernel.ROOT / "LICENSE", checkout)
    other = checkout / "build" / "hub"
    other.mkdir(parents=True)
    shutil.copy(hub_kernel.HUB / "build.toml", other)
    (other / "left.py").write_text("from before")
    subprocess.run(
        [sys.executable, checkout / "hub" / "generate.py"],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        cwd=tmp_path,
        check=True,
    )
    assert contents(other) == contents(kernel)


def test_another_source_has_another_namespace(kernel):
    files = sources.package_files()
    names = {variants.name_of(files, backend) for backend in BACKENDS}
    files[PurePosixPath("version.py")] += b"\n"
    assert len(names | {variants.name_of(files, backend) for backend in BACKENDS}) == 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata(kernel, backend):
    metadata = Metadata.read_from_file(variant(kernel, backend) / "metadata.json")
    assert metadata.id == variants.name_of(sources.package_files(), backend)
    assert metadata.id.isidentifier()
    assert f'NAME = "{metadata.id}"' in (variant(kernel, backend) / "_ops.py").read_text()
    assert (str(metadata.name), metadata.version, metadata.license) == ("klfast", 0, "Apache-2.0")
    assert str(metadata.backend.backend_type).lower() == backend
    assert metadata.python_depends == metadata.kernel_depends == []
    assert metadata.provenance is None  # only kernel-builder has it


@pytest.mark.parametrize("backend", BACKENDS)
def test_digests_are_of_every_file(kernel, backend):
    folder = variant(kernel, backend)
    digest = json.loads((folder / "metadata.json").read_text())["digest"]
    assert digest["algorithm"] == "sha256"
    assert digest["files"] == {
        path: base64.b64encode(hashlib.sha256(content).digest()).decode()
        for path, content in contents(folder).items()
        if path != "metadata.json"
    }
    stated = Metadata.read_from_file(folder / "metadata.json").digest
    stated.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))


def test_public_names_are_those_of_klfast():
    """The kernel lacks the frameworks, the logger, which imports others' modules, and ``info``."""
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(sources.available()[()].source).body
        if isinstance(node, ast.Assign)
    )
    assert set(klfast.__all__) - set(names) == {"KLLog", "compat", "info"}
    assert set(names) <= set(klfast.__all__)


MADE_UP = {
    "from klfast.ops.schemas import Ops": "from .schemas import Ops",
    "from klfast.ops import schemas": "from . import schemas",
    "from klfast.stats.kl import (\n    KLStats,\n)": "from ..stats.kl import (\n    KLStats,\n)",
    "from klfast import stats as s": "from .. import stats as s",
    "from klfast.functional.rollout import f": "from ..functional.rollout import f",
    "if x: from klfast.stats.kl import y": "if x: from ..stats.kl import y",
    "'ü'; from klfast.stats.kl import y": "'ü'; from ..stats.kl import y",
    "def f():\n    from klfast.ops.load import x": "def f():\n    from .load import x",
    "from ..stats import y": "from ..stats import y",
    "from klfaster import x": "from klfaster import x",
    '"""from klfast.stats.kl import x"""': '"""from klfast.stats.kl import x"""',
    "# from klfast.stats.kl import x": "# from klfast.stats.kl import x",
    "import torch, os.path": "import torch, os.path",
}


@pytest.mark.parametrize(("before", "after"), MADE_UP.items())
def test_imports_become_relative(tmp_path, before, after):
    file = tmp_path / "made_up.py"
    file.write_text(f"import torch\n{before}\nx = 1\n", encoding="utf-8")
    rewritten = sources.rewritten(sources.Module(("ops", "made_up"), file))
    assert rewritten == f"import torch\n{after}\nx = 1\n"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import klfast", "write `from klfast import ...`"),
        ("import torch, klfast.stats.kl as s", "write `from klfast import ...`"),
        (
            "from klfast.stats.kl \\\n  import x",
            "write `from klfast.stats.kl import ...` in one line",
        ),
        ("import_module('klfast.stats.kl')", "name no module in a string, as in 'klfast.stats.kl'"),
    ],
)
def test_what_cannot_be_rewritten_is_an_error(tmp_path, source, error):
    file = tmp_path / "made_up.py"
    file.write_text(f"\n{source}\n")
    with pytest.raises(SystemExit) as raised:
        sources.rewritten(sources.Module(("made_up",), file))
    assert str(raised.value) == f"{file}:2: for the kernel, {error}"


def test_a_missing_module_is_an_error(tmp_path):
    file = tmp_path / "__init__.py"
    file.write_text('"""A package."""\n\nfrom klfast.nowhere import x\n')
    with pytest.raises(SystemExit, match=r"^there is no module klfast\.nowhere$"):
        sources.modules({(): sources.Module((), file)})


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit, match="--out must be a kernel's folder, or a new one, got "):
        generate.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_card_is_a_template_of_what_kernel_builder_gives(kernel):
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    card = environment.from_string((kernel / "CARD.md").read_text()).render(
        repo_id=hub_kernel.REPOSITORY,
        version=0,
        functions=["kl_penalty", "KLStats"],
        layers=None,
        has_benchmark=True,
        upstream=None,
        source=None,
        license="apache-2.0",
    )
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\ntags:\n")
    assert "\n- `kl_penalty`\n- `KLStats`\n\nThese names" in card
    assert f'get_kernel("{hub_kernel.REPOSITORY}", version=0, ' in card
    assert "an H100 ran these kernels once" in card
    compile(card.partition("```python\n")[2].partition("```")[0], "CARD.md", "exec")
