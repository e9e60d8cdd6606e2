"""`make package`: wheel and sdist as a stranger installs them, and the crates as crates.io would take them.

wheel   installed into an empty environment without the network: it needs nothing else
sdist   built into a wheel, and that one installed
crates  `cargo publish --dry-run`: every file they need is in them
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
# What a stranger types first. `balance` runs the native module.
TRY = (
    "import dflop\n"
    "answer = dflop.balance([3, 0, 7], [4, 5, 1], 2)\n"
    "assert sorted(answer.assignment) in ([0, 0, 1], [0, 1, 1]), answer\n"
    "print(dflop.__version__)\n"
)


def run(*command: str | Path) -> None:
    """Runs a command in the repository, shown first.

    Args:
        command: its words.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, cwd=ROOT)


def install_and_try(wheel: Path) -> None:
    """Installs a wheel into an empty environment without an index, and tries the command and the module.

    Args:
        wheel: its path.

    Raises:
        subprocess.CalledProcessError: it cannot be installed, or does not work.
    """
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        venv.create(directory, with_pip=True)
        made = time.monotonic()
        bin_dir = Path(directory) / "bin"
        run(bin_dir / "python", "-m", "pip", "install", "--quiet", "--no-index", wheel)
        installed = time.monotonic()
        run(bin_dir / "dflop", "--version")
        run(bin_dir / "python", "-c", TRY)
        run(bin_dir / "dflop", "demo-data", Path(directory) / "demo", "--samples", "16")
        run(bin_dir / "dflop", "profile", "data", "--config", Path(directory) / "demo" / "dflop.yaml")
    print(f"{wheel.name}: environment {made - began:.1f} s, install {installed - made:.1f} s", flush=True)


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
    install_and_try(wheels[-1])
    with tempfile.TemporaryDirectory() as directory:
        # Built where our own build is: what is tried is whether all sources are there.
        unpacked = Path(directory) / "sdist"
        unpacked.mkdir()
        run("tar", "--extract", "--file", sdists[-1], "--directory", unpacked, "--strip-components", "1")
        build = [BIN / "maturin", "build", "--release", "--locked", "--interpreter", sys.executable]
        manifest = unpacked / "crates" / "py" / "Cargo.toml"
        run(
            *build, "--manifest-path", manifest, "--target-dir", ROOT / "target" / "sdist", "--out", directory
        )
        install_and_try(next(Path(directory).glob("*.whl")))
    publish = [
        "cargo",
        "publish",
        "--dry-run",
        "--workspace",
        "--exclude",
        "dflop-py",
        "--no-verify",
        "--allow-dirty",
    ]
    run(*publish, "--quiet")


if __name__ == "__main__":
    main()
