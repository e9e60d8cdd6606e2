"""Tries a wheel as a stranger without torch would: an empty environment, no index, what needs no device.

    python tools/try_wheel.py dist/dflop-*.whl

docs/guide/quick_start.md installs it so, too. What needs torch must say so in words, with what to install.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
import time
import venv
from pathlib import Path

# What a stranger types first. `balance` runs the native module.
BALANCE = (
    "import dflop, sys\n"
    "answer = dflop.balance([3, 0, 7], [4, 5, 1], 2)\n"
    "assert sorted(answer.assignment) in ([0, 0, 1], [0, 1, 1]), answer\n"
    "sampler = dflop.BalancedBatchSampler([(3, 4), (0, 5), (7, 1), (2, 2)], batch_size=2)\n"
    "assert sorted(i for batch in sampler for i in batch) == [0, 1, 2, 3]\n"
    "assert not {'torch', 'numpy'} & set(sys.modules)\n"
)
# Without the mark type checkers take nothing of the types in the package.
TYPED = (
    "import pathlib, dflop\n"
    "package = pathlib.Path(dflop.__file__).parent\n"
    "assert (package / 'py.typed').exists(), 'py.typed is missing'\n"
    "assert (package / '_native' / '__init__.pyi').exists(), 'the stub of the native module is missing'\n"
)
PLAN = """\
model: {name: llava-onevision-qwen2-7b}
data: {mixture: demo/data/mixture.yaml, video_max_frames: 16}
cluster: {device: h100, num_ranks: 8}
"""
SHELLS = ("bash", "zsh", "fish", "elvish", "powershell")


class Bare:
    """An environment that holds the wheel and nothing else, and an empty folder to work in."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        venv.create(folder / "venv", with_pip=True)
        self.bin = folder / "venv" / "bin"
        # Neither packages nor settings of the one who tries it.
        self.env = {
            k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "DFLOP"))
        }
        self.run("python", "-m", "pip", "install", "--quiet", "--no-index", str(wheel.resolve()))

    def run(self, *words: str, status: int = 0) -> tuple[str, str]:
        """Runs a command of the environment in the folder, shown first with what it took.

        Args:
            words: the command; the first one is a program of the environment.
            status: the exit status that is right.

        Returns:
            stdout and stderr.

        Raises:
            SystemExit: another exit status.
        """
        shown = " ".join(word if len(word) < 80 else "..." for word in words)
        began = time.monotonic()
        program = [str(self.bin / words[0]), *words[1:]]
        done = subprocess.run(program, cwd=self.folder, env=self.env, capture_output=True, text=True)
        print(f"{time.monotonic() - began:6.1f} s  {shown}", flush=True)
        if done.returncode != status:
            told = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            message = f"error: `{shown}` ended with status {done.returncode}, must be {status}\n{told}"
            raise SystemExit(message)
        return done.stdout, done.stderr


def expect(text: str, *words: str) -> None:
    """Ends the run where a text lacks a word.

    Args:
        text: what was printed.
        words: each must stand in it.

    Raises:
        SystemExit: one does not.
    """
    for word in words:
        if word not in text:
            message = f"error: `{word}` does not stand in\n{text[-2000:]}"
            raise SystemExit(message)


def try_verbs(bare: Bare) -> None:
    """Runs every verb that needs no device.

    Args:
        bare: the environment.

    Raises:
        SystemExit: one failed, or printed what it should not.
    """
    expect(bare.run("dflop", "--version")[0], "dflop ")
    bare.run("python", "-c", TYPED)
    usage = bare.run("dflop", "--help")[0]
    bare.run("python", "-c", BALANCE)
    expect(bare.run("dflop", "models")[0], "llava-onevision-qwen2-7b", "h100")
    for shell in SHELLS:
        expect(bare.run("dflop", "completions", shell)[0], "dflop", "rehearse")
    bare.run("dflop", "man", "--out", "man")
    pages = {path.name for path in (bare.folder / "man").iterdir()}
    for verb in re.findall(r"^  ([a-z][a-z-]*)  ", usage, flags=re.M):
        if verb != "help" and f"dflop-{verb}.1" not in pages:
            message = f"error: `dflop man` writes no page of `{verb}`, but {sorted(pages)}"
            raise SystemExit(message)
    bare.run("dflop", "demo-data", "demo", "--samples", "64")
    (bare.folder / "dflop.yaml").write_text(PLAN)
    expect(bare.run("dflop", "plan", "--compare")[0], "over the best of other people's", "estimated")
    bare.run("dflop", "simulate", "--num-ranks", "8,16")
    bare.run("dflop", "report", ".")
    expect((bare.folder / "report.html").read_text(), "<html")
    # What needs torch says which command brings it.
    bare.run("dflop", "profile", "data", "--config", "demo/dflop.yaml")
    needs_torch = bare.run("dflop", "profile", "model", "--config", "demo/dflop.yaml", status=2)[1]
    expect(needs_torch, "pip install 'dflop[train]'")
    for module, name in (("dflop.integrations", "balanced_loader"), ("dflop", "BalancedStream")):
        needs_torch = bare.run("python", "-c", f"from {module} import {name}", status=1)[1]
        expect(needs_torch, "pip install 'dflop[train]'")


def main() -> None:
    """Tries each wheel that is named.

    Raises:
        SystemExit: one is not as it must be.
    """
    parser = argparse.ArgumentParser(description="Tries wheels in empty environments.")
    parser.add_argument("wheels", nargs="+", type=Path)
    for wheel in parser.parse_args().wheels:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
            try_verbs(Bare(Path(folder), wheel))


if __name__ == "__main__":
    main()
