"""Build variants, as kernel-builder makes them for a kernel without compiled code.

They differ only in the namespace of their ops and in their metadata.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import PurePosixPath

from sources import HERE, PACKAGE, Files

DIGITS = 8
"""The namespace of a kernel's ops ends in so many digits of the hash of its files."""

OPS = '''"""The namespace of this build's ops."""

import torch

NAME = "{name}"
ops = getattr(torch.ops, NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    """An op's name with its namespace."""
    return f"{{NAME}}::{{op_name}}"
'''

IN_OLDER_PLACE = '''"""The kernel, where older versions of `kernels` look for it."""

import sys
from importlib import util
from pathlib import Path

NAME = "{name}"

if NAME not in sys.modules:
    _spec = util.spec_from_file_location(NAME, Path(__file__).parents[1] / "__init__.py")
    sys.modules[NAME] = util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[NAME])

__all__ = sys.modules[NAME].__all__
globals().update({{public: getattr(sys.modules[NAME], public) for public in __all__}})
'''


def configuration() -> str:
    """The text of build.toml."""
    return (HERE / "build.toml").read_text()


def backends() -> list[str]:
    """The kinds of devices that build.toml lists."""
    (listed,) = re.findall(r"^backends = \[(.*)\]$", configuration(), re.MULTILINE)
    return re.findall(r'"(\w+)"', listed)


def name_of(files: Files, backend: str) -> str:
    """The name of the module and of its ops' namespace, which is unique to these files."""
    digest = hashlib.sha256()
    for path, content in sorted(files.items()):
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return f"_{PACKAGE}_{backend}_{digest.hexdigest()[:DIGITS]}"


def hashed(content: bytes) -> str:
    return base64.b64encode(hashlib.sha256(content).digest()).decode()


def metadata_of(files: Files, name: str, backend: str) -> bytes:
    """metadata.json of a variant of these files.

    It has no provenance, which would name the kernel-builder that made the build.
    """
    of_toml = dict(re.findall(r'^(\w+) = "?([^"\n]+)"?$', configuration(), re.MULTILINE))
    metadata = {
        "name": of_toml["name"],
        "id": name,
        "version": int(of_toml["version"]),
        "license": of_toml["license"],
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {str(path): hashed(files[path]) for path in sorted(files)},
        },
    }
    return (json.dumps(metadata, indent=2) + "\n").encode()


def variant_files(files: Files, backend: str) -> Files:
    """The kernel's files, with the files that a build adds."""
    name = name_of(files, backend)
    added = {"_ops.py": OPS, f"{PACKAGE}/__init__.py": IN_OLDER_PLACE}
    built = files | {PurePosixPath(p): text.format(name=name).encode() for p, text in added.items()}
    return built | {PurePosixPath("metadata.json"): metadata_of(built, name, backend)}
