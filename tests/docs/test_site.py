"""The site: a link leads to a page or to a file that exists, examples are pages, and the search works from disk."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs")

from mkdocs.config import load_config
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files, get_files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("dflop_site", ROOT / "docs/site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(hooks: Any) -> tuple[Any, Files]:
    """The configuration, and all files that the site has."""
    config = load_config(str(ROOT / "mkdocs.yml"))
    # mkdocs notes whose files are generated; outside a build it has no answer.
    config.plugins._current_plugin = "docs/site.py"
    return config, hooks.on_files(get_files(config), config)


def led(hooks: Any, built: tuple[Any, Files], text: str) -> str:
    """What becomes of `text` on the page `index.md`."""
    config, files = built
    file = files.get_file_from_path("index.md")
    assert file is not None
    return hooks.on_page_markdown(text, Page(None, file, config), config, files)


def test_a_link_to_no_file_ends_the_build(hooks: Any, built: tuple[Any, Files]) -> None:
    with pytest.raises(PluginError, match=r"`docs/index.md` links to `guide/quick_strat.md`"):
        led(hooks, built, "[start](guide/quick_strat.md)")


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[start](guide/quick_start.md#next)", "[start](guide/quick_start.md#next)"),
        ("[all](../results/README.md)", "[all](results/README.md)"),
        ("[ddp](../examples/train_ddp.py)", "[ddp](examples/train_ddp.py.md)"),
        ("[a test](../tests/warm.py)", "a test"),
        ("[elsewhere](https://example.org/x.md)", "[elsewhere](https://example.org/x.md)"),
    ],
)
def test_links_lead_to_pages(hooks: Any, built: tuple[Any, Files], link: str, expected: str) -> None:
    assert led(hooks, built, link) == expected


def test_each_example_is_a_page_with_its_text(built: tuple[Any, Files]) -> None:
    for path in sorted((ROOT / "examples").glob("*.py")):
        page = built[1].get_file_from_path(f"examples/{path.name}.md")
        assert page is not None, path.name
        assert path.read_text() in page.content_string


@pytest.mark.site
def test_the_search_works_from_disk(tmp_path: Path) -> None:
    """No server, and no request to elsewhere: results come from a file beside the page."""
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if browser is None:
        pytest.skip("there is no Chromium")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    for page in ("index.html", "guide/why.html"):
        scripts = re.findall(r'<script[^>]* src="([^"]+)"', (tmp_path / page).read_text())
        assert scripts
        assert not [one for one in scripts if "//" in one]
        address = f"{(tmp_path / page).as_uri()}?q=makespan"
        ask = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=15000"]
        shown = subprocess.run(
            [*ask, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", address],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout
        assert re.search(r"[1-9]\d* matching documents", shown)
        assert "/simulator.html" in shown
