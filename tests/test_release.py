"""`make release`: the version in every file that names it; and what builds releases elsewhere."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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


def test_what_is_built_elsewhere_is_built_with_our_rust() -> None:
    """The container's toolchain is that of `rust-toolchain.toml`, which is not copied into it."""
    assert "rust-toolchain.toml" in (ROOT / ".dockerignore").read_text().split()
    channel = re.search(r'channel = "(\d+\.\d+)\.\d+"', (ROOT / "rust-toolchain.toml").read_text())
    image = re.search(r"library/rust:([\d.]+)-", (ROOT / "Containerfile").read_text())
    assert channel
    assert image
    assert image[1] == channel[1]


@pytest.mark.parametrize("name", ["check", "wheels"])
def test_a_workflow_runs_what_is_there(name: str) -> None:
    """Every file and every make target that its steps name."""
    flow = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    steps = [step for job in flow["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands
    makefile = (ROOT / "Makefile").read_text()
    for command in commands:
        words = command.split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, flags=re.M), command
        for word in words:
            if word.startswith((".ci/", "tools/")):
                assert (ROOT / word).is_file(), command


def test_wheels_are_built_for_linux_and_macos_of_both_processors() -> None:
    flow = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())
    targets = {row["target"] for row in flow["jobs"]["wheel"]["strategy"]["matrix"]["include"]}
    systems = ("unknown-linux-gnu", "apple-darwin")
    assert targets == {f"{cpu}-{system}" for cpu in ("x86_64", "aarch64") for system in systems}


def test_a_release_changes_a_copy_of_this_repository_and_nothing_else(tmp_path) -> None:
    """The whole command, on a clone: manifest, lock file and changelog, and no more."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
    subprocess.run([sys.executable, "tools/release.py", "99.0.0"], cwd=clone, check=True, capture_output=True)
    changed = subprocess.run(
        ["git", "diff", "--name-only"], cwd=clone, check=True, capture_output=True, text=True
    )
    assert changed.stdout.split() == ["CHANGELOG.md", "Cargo.lock", "Cargo.toml"]
    lock = (clone / "Cargo.lock").read_text()
    assert lock.count('version = "99.0.0"') == len(list((ROOT / "crates").glob("*/Cargo.toml")))
    refused = subprocess.run(
        [sys.executable, "tools/release.py", "99.0"], cwd=clone, capture_output=True, text=True
    )
    assert refused.returncode == 1
    assert "hint: make release VERSION=" in refused.stderr
