"""Changes to modules of others that are made when a program imports them."""

from __future__ import annotations

from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.machinery import ModuleSpec


class WhenImported(MetaPathFinder):
    """Calls a function with a module behind the module's own code; it stands in `sys.meta_path`.

    Args:
        changes: by the full name of a module, what is called with it.
    """

    def __init__(self, changes: Mapping[str, Callable[[Any], None]]) -> None:
        self.changes = changes

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Finds such a module as ever, and adds a call behind its code."""
        change = self.changes.get(fullname)
        spec = None if change is None else PathFinder.find_spec(fullname, path, target)
        if change is None or spec is None or spec.loader is None:
            return None
        loader = spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            change(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
