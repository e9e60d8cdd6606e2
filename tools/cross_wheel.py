"""`make wheel-aarch64`: the wheel for aarch64 Linux, built on another kind of machine, tried in a Debian.

    python tools/cross_wheel.py dist/aarch64                  # builds; needs rustup
    python tools/cross_wheel.py dist/aarch64 --root arm64     # builds, then tries it by qemu; needs root

Zig is the linker: it brings the headers and libraries of glibc 2.28. How the Debian is made stands in the
error of one that is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = "aarch64-unknown-linux-gnu"
# As in requirements.lock; zig is of no use to those who build for their own machine, so no lock file has it.
TOOLS = ("--from", "maturin[zig]==1.16.0", "--with", "ziglang==0.17.1")
# What `chroot` answers where it found a program and could not start it.
NOT_STARTED = 126


def build(out: Path) -> Path:
    """Builds the wheel.

    Args:
        out: the directory that gets it.

    Returns:
        Its path.

    Raises:
        SystemExit: no wheel was made.
        subprocess.CalledProcessError: rustup or maturin failed.
    """
    if not shutil.which("rustup"):
        sys.exit(f"error: rustup is missing; it brings the standard library of {TARGET}")
    subprocess.run(["rustup", "target", "add", TARGET], check=True)
    uv = Path(sys.executable).parent / "uv"
    # glibc 2.28 as in .github/workflows/wheels.yml: Debian 10, RHEL 8, and all that torch itself runs on.
    options = ("--release", "--locked", "--zig", "--target", TARGET, "--compatibility", "manylinux_2_28")
    subprocess.run(
        [uv, "tool", "run", *TOOLS, "maturin", "build", *options, "--out", out], check=True, cwd=ROOT
    )
    wheels = sorted(out.glob("dflop-*_aarch64.whl"), key=lambda wheel: wheel.stat().st_mtime)
    if not wheels:
        sys.exit(f"error: `{out}`: maturin ended well and made no wheel for aarch64")
    return wheels[-1]


def try_in(root: Path, wheel: Path) -> None:
    """Runs `tools/try_wheel.py` in a root directory of an arm64 system.

    Args:
        root: the directory, of a Debian or the like that has `python3` and its `venv`.
        wheel: the wheel.

    Raises:
        SystemExit: the directory is none of this kind, the kernel does not know arm64, or the wheel is wrong.
    """
    if not (root / "usr/bin/python3").exists():
        sys.exit(
            f"error: `{root}` is no root directory with /usr/bin/python3\n"
            f"hint: debootstrap --arch arm64 --include python3,python3-venv bookworm {root}"
        )
    if os.geteuid() != 0:
        sys.exit("error: only root may change the root directory (chroot)\nhint: run it by sudo")
    for file in (wheel, ROOT / "tools/try_wheel.py"):
        shutil.copy2(file, root / "tmp" / file.name)
    # Nothing of the caller's settings: a path of this machine names nothing there.
    env = ("/usr/bin/env", "-i", "PATH=/usr/bin:/bin", "HOME=/root", "LANG=C.UTF-8")
    command = ["chroot", root, *env, "python3", "/tmp/try_wheel.py", f"/tmp/{wheel.name}"]
    status = subprocess.run(command, check=False).returncode
    if status == NOT_STARTED:
        sys.exit(
            "error: this kernel cannot start programs of arm64\n"
            "hint: apt install qemu-user-static binfmt-support"
        )
    if status:
        sys.exit(f"error: the wheel was tried and is not right (status {status}), see above")


def main() -> None:
    """Builds the wheel, and tries it where a root directory is named."""
    parser = argparse.ArgumentParser(description="Builds the wheel for aarch64 Linux, and tries it.")
    parser.add_argument("out", type=Path, help="the directory for the wheel")
    parser.add_argument(
        "--root", type=Path, help="the root directory of a Debian for arm64, to try the wheel in"
    )
    options = parser.parse_args()
    wheel = build(options.out.resolve())
    if options.root:
        try_in(options.root.resolve(), wheel)


if __name__ == "__main__":
    main()
