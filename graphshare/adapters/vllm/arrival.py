"""Acting on a module when it is imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["when_imported"]


def when_imported(name: str, act: Callable[[ModuleType], object]) -> Callable[[], None]:
    """Call ``act(module)`` once: now if the module is there, otherwise when it has been imported.

    Args:
        name: Full name of the module.
        act: What it raises goes to whoever imports the module.

    Returns:
        A function that ends the wait; harmless when it is over.
    """
    module = sys.modules.get(name)
    if module is not None:
        act(module)
        return lambda: None
    finder = _Finder(name, act)
    sys.meta_path.insert(0, finder)
    return finder.stop


class _Finder(MetaPathFinder):
    def __init__(self, name: str, act: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._act = act

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != self._name:
            return None
        # Once, and out of the way before the others are asked.
        self.stop()
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        spec.loader = _Loader(spec, spec.loader, self._act)
        return spec


class _Loader(Loader):
    """The module's own loader, with one thing more to do at the end."""

    def __init__(self, spec: ModuleSpec, own: Loader, act: Callable[[ModuleType], object]) -> None:
        self._spec, self._own, self._act = spec, own, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        self._act(module)
