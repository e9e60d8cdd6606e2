"""Hostile inputs, each given to the real command in a process with a limit on its memory.

`make test-hostile` runs this folder within `ulimit -v`; each command has its own limit besides, so that the
tests mean the same wherever they are started. `docs/limits.md` says what is promised.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MEMORY_BYTES = 6 << 30
"""Address space of one command. Threads reserve 64 MiB of it each without using them."""
DEADLINE_S = 120
"""Only against hanging: no answer is asked for within a time."""


@dataclass(frozen=True)
class Answer:
    """What a command came to."""

    status: int
    out: str
    error: str

    @property
    def is_sound(self) -> bool:
        """It was done or refused: neither killed, nor a panic, nor a traceback."""
        text = self.out + self.error
        return self.status in (0, 1, 2) and "panicked" not in text and "Traceback" not in text

    def refuses(self, *words: str) -> bool:
        """It ended with an error that holds each of the words."""
        return self.is_sound and self.status != 0 and all(word in self.error for word in words)


def limit_memory() -> None:
    """Limits the address space of this process, and lets it leave no core file."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_in(folder: Path, *arguments: str) -> Answer:
    """Runs the command there."""
    done = subprocess.run(
        [sys.executable, "-m", "dflop", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=DEADLINE_S,
        preexec_fn=limit_memory,  # noqa: PLW1509
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def dflop(tmp_path: Path) -> Callable[..., Answer]:
    """Runs the command in an empty folder."""
    return lambda *arguments: run_in(tmp_path, *arguments)


@pytest.fixture(scope="session")
def made_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, small; each test has a copy, as making it is half of what a test takes."""
    folder = tmp_path_factory.mktemp("demo")
    made = run_in(folder, "demo-data", ".", "--samples", "8")
    assert made.status == 0, made.error
    return folder


@pytest.fixture(scope="session")
def made_plan(made_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with its profiles and a plan, on estimated times."""
    folder = tmp_path_factory.mktemp("planned")
    shutil.copytree(made_demo, folder, dirs_exist_ok=True)
    for verb in (
        ["profile", "data"],
        ["profile", "model", "--estimate", "--hardware", "h100"],
        ["plan", "--sampled-batches", "1", "--only", "colocated=false"],
    ):
        made = run_in(folder, *verb)
        assert made.status == 0, made.error
    return folder


@pytest.fixture
def demo(tmp_path: Path, made_demo: Path) -> Path:
    """The demo in the folder of the command."""
    return Path(shutil.copytree(made_demo, tmp_path, dirs_exist_ok=True))


@pytest.fixture
def planned(tmp_path: Path, made_plan: Path) -> Path:
    """The planned demo in the folder of the command."""
    return Path(shutil.copytree(made_plan, tmp_path, dirs_exist_ok=True))


def refused(answers: Sequence[Answer]) -> bool:
    """All of them are errors of ours."""
    return all(answer.is_sound and answer.status != 0 for answer in answers)
