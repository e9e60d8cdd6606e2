"""Every command that a page, a help text, a hint or an example shows is one that `dflop` takes; every field of a YAML block is read."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflop.integrations.yaml_options import checked

ROOT = Path(__file__).resolve().parents[2]

_spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "docs/site.py")
assert _spec is not None
assert _spec.loader is not None
_site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_site)

PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "results/README.md"]
)
# The log keeps what was run in its day.
PAGES += sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "log.md")
SOURCES = sorted((ROOT / "crates").glob("*/src/**/*.rs")) + sorted((ROOT / "python").rglob("*.py"))
SOURCES += [ROOT / "examples/demo.sh"]


@pytest.fixture(scope="module")
def helps() -> dict[tuple[str, ...], str]:
    """The help of every verb, by its words."""
    found: dict[tuple[str, ...], str] = {}
    asked = _site.Helps()

    def add(*verb: str) -> None:
        found[verb] = asked.of(*verb)
        for name in _site.verbs(found[verb]):
            add(*verb, name)

    add()
    asked.close()
    assert len(found) > 15
    return found


def shown(path: Path) -> list[str]:
    """Commands in backticks, and on lines of blocks or scripts that begin with `dflop`."""
    text = path.read_text()
    if path.suffix in {".rs", ".py"}:
        # A sentence goes on in the next line of a comment or of a literal.
        text = re.sub(r"\\?\n\s*(?://[/!]? ?|# ?)?", " ", text)
        return re.findall(r"`dflop ([^`]+)`", text)
    found = re.findall(r"`dflop\s([^`]+)`", text)
    blocks = (
        "".join(re.findall(r"^```\w*\n(.*?)^```", text, flags=re.S | re.M)) if path.suffix == ".md" else text
    )
    blocks += "".join(re.findall(r"^    .*\n", text, flags=re.M))
    for line in blocks.splitlines():
        for part in re.split(r"&&|\|\||[;|]| # ", line.strip().removeprefix("$ ")):
            if part.strip().startswith("dflop "):
                found.append(part.strip().removeprefix("dflop "))
    return found


def problem(command: str, helps: dict[tuple[str, ...], str]) -> str | None:
    """What `dflop` would refuse of a command: an unknown verb, a flag that the verb has not."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    verb: tuple[str, ...] = ()
    while words and (*verb, words[0]) in helps:
        verb = (*verb, words.pop(0))
    if words and not verb and re.fullmatch(r"[a-z][a-z-]*", words[0]):
        return f"no verb `{words[0]}`"
    flags = [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    known = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]*|-[a-z])\b", helps[verb]))
    unknown = [flag for flag in flags if flag.rstrip(",.") not in known]
    return f"`{' '.join(verb)}` has no {unknown}" if unknown else None


@pytest.mark.parametrize("rooms", [PAGES, SOURCES], ids=["pages", "sources"])
def test_every_command_shown_is_one(rooms: list[Path], helps: dict[tuple[str, ...], str]) -> None:
    wrong, num_commands = [], 0
    for path in rooms:
        for command in shown(path):
            num_commands += 1
            if found := problem(command, helps):
                wrong.append(f"{path.relative_to(ROOT)}: dflop {command}: {found}")
    assert num_commands > 50
    assert not wrong, "\n".join(wrong)


def test_what_is_no_command_is_noticed(helps: dict[tuple[str, ...], str]) -> None:
    assert problem("plan --compare", helps) is None
    assert problem("profile data -c x.yaml", helps) is None
    assert problem("plan --compere", helps) == "`plan` has no ['--compere']"
    assert problem("plann", helps) == "no verb `plann`"


def fields(value: Any, before: str = "") -> list[str]:
    """The dotted names of a configuration."""
    if not isinstance(value, dict):
        return [before]
    return [
        name for key, below in value.items() for name in fields(below, f"{before}.{key}" if before else key)
    ]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if "```yaml\n" in p.read_text()], ids=lambda page: page.name
)
def test_every_field_of_a_yaml_block_is_in_its_table(page: Path) -> None:
    table = (ROOT / "docs/configuration.md").read_text()
    entries = (ROOT / "docs/data.md").read_text()
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), flags=re.S | re.M):
        found = yaml.safe_load(block)
        if "datasets" in found:
            names = {key for entry in found["datasets"] for key in entry}
            assert not [name for name in names if f"`{name}`" not in entries]
        elif "dflop" in found:
            # Of another tool, whose keys are not ours.
            assert checked(found["dflop"]) == found["dflop"]
        else:
            assert not [name for name in fields(found) if f"`{name}`" not in table]
