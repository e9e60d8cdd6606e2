"""`make release VERSION=0.2.0`: one version in every file, and the day's heading in the changelog.

The Python package takes its version from the workspace. Nothing is committed, tagged or uploaded: look at the
diff first.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSION = re.compile(r"\d+\.\d+\.\d+(-[0-9A-Za-z.]+)?")


def with_version(manifest: str, version: str) -> str:
    """The workspace's `Cargo.toml` with another version, its own crates' among the dependencies too.

    Args:
        manifest: the text of the file.
        version: as in `0.2.0`.

    Returns:
        The new text.

    Raises:
        ValueError: the file names no version where one is expected.
    """
    manifest, num = re.subn(r'(?m)^version = "[^"]+"', f'version = "{version}"', manifest, count=1)
    crates = r'(?m)^(dflop-[a-z]+ = \{ path = "[^"]+", version = )"[^"]+"'
    manifest, num_crates = re.subn(crates, rf'\g<1>"{version}"', manifest)
    if not num or not num_crates:
        message = "`Cargo.toml`: it must name the workspace's version, and one for each crate"
        raise ValueError(message)
    return manifest


def with_heading(changelog: str, version: str, day: datetime.date) -> str:
    """The changelog with what was unreleased under the version's own heading.

    Args:
        changelog: the text of the file.
        version: as in `0.2.0`.
        day: of the release.

    Returns:
        The new text.

    Raises:
        ValueError: it has no heading `## Unreleased`, or one of this version.
    """
    if f"## {version} " in changelog or "## Unreleased\n" not in changelog:
        message = f"`CHANGELOG.md`: it must have a heading `## Unreleased`, and none of {version}"
        raise ValueError(message)
    return changelog.replace("## Unreleased\n", f"## Unreleased\n\n## {version} ({day})\n", 1)


def main() -> None:
    """Writes the files.

    Raises:
        SystemExit: no version was given, or a file is not as expected; nothing is written then.
    """
    version = sys.argv[1] if len(sys.argv) == 2 else ""
    if not VERSION.fullmatch(version):
        sys.exit(f"error: `{version}` is no version\n\nhint: make release VERSION=0.2.0")
    try:
        texts = {
            "Cargo.toml": with_version((ROOT / "Cargo.toml").read_text(), version),
            "CHANGELOG.md": with_heading(
                (ROOT / "CHANGELOG.md").read_text(),
                version,
                datetime.datetime.now(datetime.timezone.utc).date(),
            ),
        }
    except ValueError as error:
        sys.exit(f"error: {error}")
    for name, text in texts.items():
        (ROOT / name).write_text(text)
    subprocess.run(["cargo", "update", "--workspace", "--offline"], cwd=ROOT, check=True)
    print(f"version {version}: look at `git diff`, then commit, tag v{version}, and `make package`")


if __name__ == "__main__":
    main()
