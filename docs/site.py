"""What the site adds to `docs/`: pages that stand elsewhere in the repository, and the help of every command.

mkdocs calls the functions `on_*` (https://www.mkdocs.org/user-guide/configuration/#hooks). A link to a file
that is no page of the site becomes plain text; a link to no file at all ends the build.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Beside those in `docs/`.
PAGES = ["CONTRIBUTING.md", "CHANGELOG.md"]
COMMANDS = "reference/commands.md"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


# Prints the help of each line of verbs that it reads, and behind each a line `END`. To start `dflop` once for
# every verb takes ten times as long.
ASK = """
import sys
from dflop._native import run_cli
for line in sys.stdin:
    status, _ = run_cli(["dflop", *line.split(), "--help"])
    if status != 0:
        sys.exit(status)
    print("END", flush=True)
"""


class Helps:
    """Prints help texts, 80 columns wide, which is what a page shows, from one process."""

    def __init__(self) -> None:
        self._asked = subprocess.Popen(
            [sys.executable, "-c", ASK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"COLUMNS": "80"},
        )

    def of(self, *verb: str) -> str:
        """What `dflop VERB --help` prints.

        Args:
            verb: the words after `dflop`.

        Returns:
            The text.

        Raises:
            RuntimeError: the command failed; its error stands on stderr.
        """
        assert self._asked.stdin is not None
        assert self._asked.stdout is not None
        self._asked.stdin.write(" ".join(verb) + "\n")
        self._asked.stdin.flush()
        lines = []
        for line in self._asked.stdout:
            if line == "END\n":
                return "".join(lines)
            lines.append(line)
        message = f"`dflop {' '.join(verb)} --help` ended with status {self._asked.wait()}"
        raise RuntimeError(message)

    def close(self) -> None:
        """Ends the process."""
        self._asked.communicate()


def verbs(text: str) -> list[str]:
    """The verbs that a help text lists, but `help` itself."""
    found = re.search(r"^Commands:\n(.*?)\n\n", text, flags=re.S | re.M)
    names = re.findall(r"^  ([a-z][a-z-]*)", found[1], flags=re.M) if found else []
    return [name for name in names if name != "help"]


def commands() -> str:
    """The page of all commands, made from their `--help`."""
    text = ["# Commands", "", "What `dflop VERB --help` prints, for every verb.", ""]

    helps = Helps()

    def add(*verb: str) -> None:
        shown = helps.of(*verb)
        text.extend([f"## {' '.join(['dflop', *verb])}", "", "```text", shown.rstrip(), "```", ""])
        for name in verbs(shown):
            add(*verb, name)

    add()
    helps.close()
    return "\n".join(text)


def examples() -> list[Path]:
    """The scripts of `examples/`, each of which is a page."""
    return sorted((ROOT / "examples").glob("*.py")) + sorted((ROOT / "examples").glob("*.sh"))


def page_of(example: Path) -> str:
    """Where the site shows an example."""
    return f"examples/{example.name}.md"


def source(uri: str) -> str:
    """Where the repository keeps what the site shows at `uri`."""
    if uri.startswith("examples/"):
        # A page is called `.md`; what it shows has an ending of its own.
        return next(str(path.relative_to(ROOT)) for path in examples() if page_of(path) == uri)
    outside = uri in PAGES or uri.startswith("results/")
    return uri if outside else posixpath.join("docs", uri)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that do not stand in `docs/`."""
    from mkdocs.structure.files import File

    results = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "results").glob("*.md"))
    for uri in PAGES + results:
        files.append(File.generated(config, uri, content=(ROOT / uri).read_text()))
    for path in sorted((ROOT / "results").glob("*.svg")):
        files.append(File.generated(config, f"results/{path.name}", content=path.read_bytes()))
    for path in examples():
        language = "python" if path.suffix == ".py" else "sh"
        shown = f"# {path.name}\n\n```{language}\n{path.read_text()}```\n"
        files.append(File.generated(config, page_of(path), content=shown))
    files.append(File.generated(config, COMMANDS, content=commands()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links of the repository to the site's pages; what is no page becomes plain text.

    Raises:
        PluginError: a link leads to a file that the repository does not have.
    """
    from mkdocs.exceptions import PluginError

    here = page.file.src_uri
    known = {source(file.src_uri): file.src_uri for file in files}

    def led(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if "://" in target or target.startswith(("#", "mailto:")):
            return link[0]
        path, hash_sign, anchor = target.partition("#")
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source(here)), path))
        if wanted == "README.md":
            wanted = "docs/index.md"
        if wanted not in known:
            if not (ROOT / wanted).exists():
                message = (
                    f"`{source(here)}` links to `{target}`, but there is no `{wanted}`: correct the link"
                )
                raise PluginError(message)
            return text
        to = posixpath.relpath(known[wanted], posixpath.dirname(here) or ".")
        return f"[{text}]({to}{hash_sign}{anchor})"

    return LINK.sub(led, markdown)
