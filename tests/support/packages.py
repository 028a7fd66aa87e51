"""Packages made up for tests of ``patch``: written to a folder, imported, and forgotten."""

import functools
import importlib
import sys

from klfast.compat.patching.fingerprints import fingerprint
from klfast.compat.targets import TARGETS


def write(folder, sources):
    """Source by dotted module name, as packages in a folder."""
    for name, source in sources.items():
        *packages, file = name.split(".")
        path = folder
        for package in packages:
            path = path / package
            path.mkdir(exist_ok=True)
            (path / "__init__.py").touch()
        (path / f"{file}.py").write_text(source)


def load(names):
    """The modules of these names, imported."""
    importlib.invalidate_caches()
    return [importlib.import_module(name) for name in names]


def forget(packages):
    """Takes packages with all their modules out of ``sys.modules``."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in packages:
            del sys.modules[name]


def retargeted(framework, *modules):
    """The framework's targets, knowing the functions of made-up modules as what stays."""
    sources = {module.__name__: module for module in modules}

    def knowing(site):
        module, _, path = site.where.partition(":")
        if module not in sources or any(form.make for form in site.forms):
            return site
        found = functools.reduce(getattr, path.split("."), sources[module])
        return site._replace(forms=(site.forms[0]._replace(code=fingerprint(found)),))

    return tuple(
        target._replace(groups=tuple(tuple(map(knowing, group)) for group in target.groups))
        for target in TARGETS[framework]
    )
