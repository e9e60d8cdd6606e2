"""`make release`: the version in every file that names it."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from release import with_heading, with_version  # noqa: E402


def test_the_manifest_names_the_version_once_for_all_and_once_a_crate() -> None:
    manifest = (ROOT / "Cargo.toml").read_text()
    changed = with_version(manifest, "12.3.4")
    num_crates = manifest.count('path = "crates/')
    assert changed.count('version = "12.3.4"') == 1 + num_crates
    # Nothing else changed: set back, it is what it was.
    assert with_version(changed, manifest.split('\nversion = "')[1].split('"')[0]) == manifest


def test_the_changelog_gets_the_days_heading() -> None:
    text = "# Changelog\n\n## Unreleased\n\n- A thing.\n"
    changed = with_heading(text, "0.2.0", datetime.date(2026, 12, 1))
    assert changed == "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2026-12-01)\n\n- A thing.\n"
    with pytest.raises(ValueError, match=r"none of 0\.2\.0"):
        with_heading(changed, "0.2.0", datetime.date(2026, 12, 1))


def test_the_changelog_of_today_can_be_released() -> None:
    with_heading((ROOT / "CHANGELOG.md").read_text(), "999.0.0", datetime.date(2026, 12, 1))
