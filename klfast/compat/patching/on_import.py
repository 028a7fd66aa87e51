"""A call that waits until a framework is imported, such as ``patch`` in a worker of Ray."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from klfast.compat.frameworks import FRAMEWORKS
from klfast.compat.patching import is_patched, patch
from klfast.compat.patching.sites import is_within


def hook_of_workers(framework: str) -> Callable[[], None]:
    """The ``setup_worker`` of ``klfast.compat.<framework>``."""

    def setup_worker() -> None:
        """Patch the framework of this module as soon as this process imports its KL code.

        Ray's ``runtime_env`` names this hook for its workers, as in
        ``{"worker_process_setup_hook": "klfast.compat.verl.setup_worker"}``. The hook imports
        nothing of the framework. A worker that imports the KL code prints the replaced names. A
        second call, or a call after ``klfast.compat.patch``, changes nothing.

        Raises:
            PatchError: as :func:`klfast.compat.patch`, from the import of the framework, or from
                this call if its KL code is imported already.
        """
        row = FRAMEWORKS[framework]
        after_import(row.package, row.kl_modules, patch_once)

    def patch_once() -> None:
        if not is_patched(framework):
            print(patch(framework), flush=True)

    return setup_worker


def after_import(package: str, modules: Sequence[str], call: Callable[[], object]) -> None:
    """Call once, as soon as a module in ``modules`` is imported, or now if one is already."""
    # The call is made when the import statement that began in the package ends, even if it ends
    # with an error. No module of the package is half executed then, unless another thread imports.
    if any(module in sys.modules for module in modules):
        call()
    # A worker may run its setup twice.
    elif call not in [finder.call for finder in sys.meta_path if isinstance(finder, _Finder)]:
        # First, because the finder that finds a module ends the search.
        sys.meta_path.insert(0, _Finder(package, modules, call))


class _Finder(MetaPathFinder):
    """Finds modules of a package by the other finders, and counts the imports under way."""

    def __init__(self, package: str, modules: Sequence[str], call: Callable[[], object]) -> None:
        self._package, self._modules, self.call = package, modules, call
        # Each thread has its own nested imports.
        self._local = threading.local()

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if not is_within(name, self._package):
            return None
        # A finder of this class would search by the others once more.
        others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
        # importlib skips a finder that is older than find_spec too.
        finds = (find for finder in others if (find := getattr(finder, "find_spec", None)))
        specs = (find(name, path, target) for find in finds)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Loader) -> None:
        load = loader.exec_module

        def counted(module: ModuleType) -> None:
            self._local.depth = getattr(self._local, "depth", 0) + 1
            failed: str | None = module.__name__
            try:
                load(module)
                failed = None
            finally:
                self._local.depth -= 1
                self._call_if_due(failed)

        loader.exec_module = counted  # type: ignore[method-assign]

    def _call_if_due(self, failed: str | None) -> None:
        """Make the call if the import is the outermost one, even if it failed."""
        # Python forgets the module that failed, but keeps what this module has imported. A module
        # within the package that failed cannot be used, so the call waits for the next import.
        whole = [name for name in self._modules if failed is None or not is_within(name, failed)]
        if self._local.depth == 0 and self in sys.meta_path and any(map(sys.modules.get, whole)):
            # Removed before the call, which imports modules of the package itself.
            sys.meta_path.remove(self)
            self.call()
