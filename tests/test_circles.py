"""No Rust module imports itself through others: a room that can be read alone, and moved alone.

Only what stands in `crate::`, `super::` and `self::` paths is followed; a name that a module re-exports leads to the module
that defines it. A parent that declares its children imports nothing by that alone. Tests within a module are left out.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CRATES = sorted(p.parent.name for p in (ROOT / "crates").glob("*/src"))


def modules_of(src: Path) -> dict[str, str]:
    """The code of each module by its path, `source::store`; that of the crate itself by the empty path."""
    found = {}
    for path in src.rglob("*.rs"):
        parts = list(path.relative_to(src).with_suffix("").parts)
        if parts[-1] in {"tests", "main"}:
            continue
        if parts[-1] in {"mod", "lib"}:
            parts.pop()
        code = re.sub(r"//.*", "", path.read_text().split("#[cfg(test)]\nmod tests")[0])
        found["::".join(parts)] = code
    return found


def paths_in(tree: str) -> list[list[str]]:
    """The paths of a use tree: `a::{b, c::d}` gives `a::b` and `a::c::d`."""
    head, brace, rest = tree.partition("{")
    names = [name.split(" as ")[0].strip() for name in head.split("::")]
    names = [name for name in names if name]
    if not brace:
        return [names]
    items, depth = [""], 0
    for letter in rest.rstrip().removesuffix("}"):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            items.append("")
        else:
            items[-1] += letter
    return [names + path for item in items if item.strip() for path in paths_in(item.strip())]


def imports_of(modules: dict[str, str]) -> dict[str, set[str]]:
    """Which modules each one names, those behind re-exports included."""

    def longest(path: list[str]) -> tuple[str, str]:
        """The module that a path begins with, and the name behind it."""
        for count in range(len(path), 0, -1):
            if "::".join(path[:count]) in modules:
                return "::".join(path[:count]), (path[count] if count < len(path) else "")
        return "", path[0] if path else ""

    def absolute(module: str, kind: str, path: list[str]) -> list[str]:
        own = module.split("::") if module else []
        if kind == "crate":
            return path
        return (own if kind == "self" else own[: -kind.count("super")]) + path

    uses = r"\b(crate|self|super(?:::super)*)::((?:\w+::)*(?:\{[^;]*?\}(?=;)|\w+))"
    passed_on: dict[tuple[str, str], str] = {}
    for module, code in modules.items():
        for tree in re.findall(r"pub(?:\([^)]*\))? use ((?:\w+::)+(?:\{[^;]*\}|\w+));", code):
            for path in paths_in(tree):
                kind = path[0] if path[0] in {"crate", "super", "self"} else "self"
                behind = path[1:] if kind == path[0] else path
                passed_on[module, path[-1]] = longest(absolute(module, kind, behind))[0]
    found: dict[str, set[str]] = {module: set() for module in modules}
    for module, code in modules.items():
        for kind, tree in re.findall(uses, code):
            for path in paths_in(tree):
                other, name = longest(absolute(module, kind, path))
                while (other, name) in passed_on and passed_on[other, name] != other:
                    other = passed_on[other, name]
                if other not in {module, ""}:
                    found[module].add(other)
    return found


def circles_of(imports: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that each reach all others of the set."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = list(imports[start])
        while left:
            module = left.pop()
            if module not in seen:
                seen.add(module)
                left += imports.get(module, ())
        return seen

    reach = {module: reached(module) for module in imports}
    circles: list[set[str]] = []
    for module in sorted(imports):
        circle = {other for other in reach[module] if module in reach.get(other, ())}
        if circle and circle not in circles:
            circles.append(circle)
    return circles


def test_a_circle_is_found_through_a_re_export() -> None:
    modules = {
        "": "mod a; mod b;",
        "a": "use crate::b::{Far, near};",
        "b": "mod inner;\npub use inner::Far;\npub fn near() {}",
        "b::inner": "use super::super::a;",
        "c": "use crate::a;",
    }
    assert circles_of(imports_of(modules)) == [{"a", "b::inner"}]
    assert circles_of(imports_of({**modules, "b::inner": "use crate::d::{e, f};"})) == []


@pytest.mark.parametrize("crate", CRATES)
def test_no_module_imports_itself_through_others(crate: str) -> None:
    circles = circles_of(imports_of(modules_of(ROOT / "crates" / crate / "src")))
    assert not circles, "move what both need into a module that imports neither"
