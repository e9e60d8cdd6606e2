"""What stands in `_native` serves the package; what only tests and benches ask stands in `_native.testing`."""

from __future__ import annotations

import ast
from pathlib import Path

import dflop

PACKAGE = Path(dflop.__file__).parent
STUBS = Path(__file__).parents[2] / "python/dflop/_native"
# Read by users of the package (`dflop.balance`, `dflop.Media`), and by pickle.
OF_USERS = {"Balance", "from_json", "to_json", "of_state"}
# Python that the native module starts calls it.
OF_RUST = {"serve_chat_templates"}


def names(stub: str) -> set[str]:
    """Functions, classes and methods of a stub; fields are left out."""
    tree = ast.parse((STUBS / stub).read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds) and not node.name.startswith("_")}


def used() -> set[str]:
    """Every name that the code of the package mentions; comments and texts do not count."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.ImportFrom):
                found |= {alias.name for alias in node.names}
    return found


def test_the_package_calls_what_the_native_module_offers() -> None:
    assert names("__init__.pyi") - used() == OF_USERS - used() | OF_RUST


def test_the_package_calls_nothing_that_is_for_tests() -> None:
    modules = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    imported = {
        path.relative_to(PACKAGE).as_posix()
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and "testing" in f"{node.module} {[a.name for a in node.names]}")
        or (isinstance(node, ast.Attribute) and node.attr == "testing")
    }
    assert not imported
