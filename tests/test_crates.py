"""Licences and sources of all Rust crates, by the list of `deny.toml`.

cargo-deny would say the same, but a fresh machine builds it for minutes. Advisories are left to it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index"


def is_allowed(expression: str, allowed: set[str]) -> bool:
    """Whether an SPDX expression can be met with the licences of a set.

    Args:
        expression: with AND, OR, WITH and parentheses; an old `MIT/Apache-2.0` counts as OR.
        allowed: licences, each with its exception as one text where it has one.

    Returns:
        True where it can.

    Raises:
        ValueError: it is no such expression.
    """
    words = re.findall(r"[()]|[^\s()]+", expression.replace("/", " OR "))
    terms: list[str] = []
    while words:
        word = words.pop(0)
        if word in {"AND", "OR", "(", ")"}:
            terms.append(word.lower())
            continue
        if words[:1] == ["WITH"]:
            word = " ".join([word, *words[:2]])
            del words[:2]
        terms.append(str(word in allowed))
    try:
        # AND binds closer than OR, in SPDX as in Python. Nothing but the words above can stand here.
        return bool(eval(" ".join(terms), {"__builtins__": {}}))
    except SyntaxError as error:
        message = f"`{expression}`: it must be an SPDX expression"
        raise ValueError(message) from error


@pytest.fixture(scope="module")
def crates() -> list[dict[str, Any]]:
    """All crates of the lock file, those of other platforms and of tests among them."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    found = json.loads(answer.stdout)["packages"]
    assert len(found) > 100
    return found


@pytest.mark.parametrize(
    ("expression", "is_met"),
    [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("MIT/GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("GPL-3.0-only OR MIT AND ISC", True),
        ("(GPL-3.0-only OR MIT) AND Zlib", False),
        ("Apache-2.0 WITH LLVM-exception OR GPL-3.0-only", True),
        ("Apache-2.0", False),
    ],
)
def test_an_expression_is_met_by_some_licences(expression: str, is_met: bool) -> None:
    assert is_allowed(expression, {"MIT", "ISC", "Apache-2.0 WITH LLVM-exception"}) is is_met


@pytest.mark.parametrize("expression", ["MIT OR", "MIT Apache-2.0", "", "(MIT"])
def test_what_is_no_expression_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="must be an SPDX expression"):
        is_allowed(expression, {"MIT", "ISC"})


def test_every_crate_has_a_licence_of_the_list(crates: list[dict[str, Any]]) -> None:
    allowed = set(tomllib.loads((ROOT / "deny.toml").read_text())["licenses"]["allow"])
    bad = {
        f"{crate['name']} {crate['version']}": crate["license"]
        for crate in crates
        if crate["source"] is not None and not is_allowed(crate["license"] or "none", allowed)
    }
    assert not bad, "add the licence to `deny.toml`, or choose another crate"


def test_the_list_has_no_licence_that_no_crate_has(crates: list[dict[str, Any]]) -> None:
    allowed = tomllib.loads((ROOT / "deny.toml").read_text())["licenses"]["allow"]
    texts = [crate["license"] or "" for crate in crates]
    assert not [name for name in allowed if not any(name in text for text in texts)]


def test_every_crate_comes_from_the_registry_with_a_version(crates: list[dict[str, Any]]) -> None:
    foreign = [crate["name"] for crate in crates if crate["source"] not in {None, CRATES_IO}]
    assert not foreign
    ours = [crate for crate in crates if crate["source"] is None]
    assert len(ours) > 5
    loose = [
        f"{c['name']}: {d['name']}"
        for c in ours
        for d in c["dependencies"]
        if d["req"] == "*" and not d.get("path")
    ]
    assert not loose, "a version must be named"


@pytest.mark.parametrize("crate", sorted(path.parent.name for path in (ROOT / "crates").glob("*/Cargo.toml")))
def test_a_published_crate_has_all_that_its_sources_include(crate: str) -> None:
    """With its licence and a page to show. `cargo publish --dry-run` would build each crate anew to find that out."""
    folder = ROOT / "crates" / crate
    if "publish = false\n" in (folder / "Cargo.toml").read_text():
        return
    command = ["cargo", "package", "--list", "--offline", "--allow-dirty", "--package", f"dflop-{crate}"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert {"LICENSE", "README.md"} <= set(listed)
    packed = {(folder / name).resolve() for name in listed}
    missing = []
    for name in listed:
        if not name.endswith(".rs"):
            continue
        # Documents that are tests of ours: rustdoc alone reads them.
        text = re.sub(r"#\[cfg\(doctest\)\]\n#\[doc = include_str!\(.*?\)\]", "", (folder / name).read_text())
        for target in re.findall(r'include_(?:str|bytes)!\(\s*"([^"]+)"', text):
            path = ((folder / name).parent / target).resolve()
            if path not in packed:
                missing.append(f"{name}: {target}")
    assert not missing, "put the file into the crate, or leave the source out of it (`exclude` in Cargo.toml)"


# The first thing to run of a crate that is used alone.
EXAMPLES = {"types": "layouts", "cost": "predict", "sim": "orders", "schedule": "balance"}


@pytest.mark.more
@pytest.mark.parametrize("crate", sorted(EXAMPLES))
def test_the_example_of_a_crate_runs(crate: str) -> None:
    """Each asserts what it shows."""
    asked = ["cargo", "run", "--release", "--locked", "--quiet", "-p", f"dflop-{crate}", "--example"]
    done = subprocess.run([*asked, EXAMPLES[crate]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3


@pytest.mark.parametrize("crate", sorted(EXAMPLES))
def test_an_example_is_named_where_crates_are_described(crate: str) -> None:
    name = EXAMPLES[crate]
    assert f"-p dflop-{crate} --example {name}" in (ROOT / f"crates/{crate}/examples/{name}.rs").read_text()
    assert f"crates/{crate}/examples/{name}.rs" in (ROOT / "docs/reference/rust.md").read_text()
