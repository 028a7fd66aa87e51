"""Made-up packages for tests of ``patch``, which are written, imported and forgotten."""

import importlib
import sys

from klfast.compat import patching
from klfast.compat.frameworks import Framework


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


def apply(name, *targets, releases="1.0", **options):
    """Run ``patch`` for a framework with these targets. The package has the framework's name."""
    return patching.apply(name, Framework(name, name, releases), targets, **options)
