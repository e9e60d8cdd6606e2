"""`make package`: wheel and sdist as a stranger installs them, and the crates as crates.io would take them.

wheel   installed into an empty environment without the network: it needs nothing else
sdist   built into a wheel, and that one installed
crates  `cargo publish --dry-run`: each builds from the files that are in it
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def run(*command: str | Path) -> None:
    """Runs a command in the repository, shown first.

    Args:
        command: its words.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, cwd=ROOT)


def try_wheel(wheel: Path) -> None:
    """Tries a wheel in an empty environment, see `tools/try_wheel.py`.

    Args:
        wheel: its path.

    Raises:
        subprocess.CalledProcessError: it cannot be installed, or does not work.
    """
    run(sys.executable, Path(__file__).parent / "try_wheel.py", wheel)


def main() -> None:
    """Packs and tries everything; the files stay in the directory that was named.

    Raises:
        SystemExit: the wheel or the sdist was not made.
        subprocess.CalledProcessError: a step failed.
    """
    out = ROOT / (sys.argv[1] if len(sys.argv) > 1 else "dist")
    run(BIN / "maturin", "sdist", "--out", out)
    wheels, sdists = sorted(out.glob("dflop-*.whl")), sorted(out.glob("dflop-*.tar.gz"))
    if not wheels or not sdists:
        sys.exit(f"error: `{out}`: there must be a wheel (`make setup` makes it) and an sdist")
    try_wheel(wheels[-1])
    with tempfile.TemporaryDirectory() as directory:
        # Built where our own build is: what is tried is whether all sources are there.
        unpacked = Path(directory) / "sdist"
        unpacked.mkdir()
        # Times of now: the archive's are old, and cargo would take what an earlier sdist was built into.
        run("tar", "-xmf", sdists[-1], "--directory", unpacked, "--strip-components", "1")
        # Not `--locked`: the sdist has no benches, so cargo takes their lines out of its Cargo.lock. All else
        # stays as it is pinned.
        build = [BIN / "maturin", "build", "--release", "--interpreter", sys.executable]
        manifest = unpacked / "crates" / "py" / "Cargo.toml"
        run(
            *build, "--manifest-path", manifest, "--target-dir", ROOT / "target" / "sdist", "--out", directory
        )
        try_wheel(next(Path(directory).glob("*.whl")))
    # All of them in one call: what a crate of ours needs of another is taken from here, not from crates.io.
    # Each is built from what is in it, apart from our own build.
    publish = ["cargo", "publish", "--dry-run", "--workspace", "--exclude", "dflop-py", "--locked"]
    run(*publish, "--target-dir", ROOT / "target" / "publish", "--allow-dirty", "--quiet")


if __name__ == "__main__":
    main()
