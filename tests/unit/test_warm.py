"""Programs in forks of a warm process end, print and see the world as programs that are started anew."""

from __future__ import annotations

import subprocess
import sys

import pytest

import warm

PROGRAM = """
import os, pathlib, sys
print(sys.argv, os.environ.get("MARK"), pathlib.Path.cwd().name, __name__)
print("talk", file=sys.stderr)
"""
ENDS = [
    "pass",
    "raise SystemExit(3)",
    "raise SystemExit('bad')",
    "raise ValueError('x')",
    "import os; os._exit(5)",
]


def test_a_program_sees_its_own_arguments_folder_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", "here")
    (tmp_path / "program.py").write_text(PROGRAM)
    for arguments in (["-c", PROGRAM, "a"], ["-m", "program", "b"], ["program.py", "c"]):
        anew = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True)
        done = warm.run(arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (anew.returncode, anew.stdout, anew.stderr)


@pytest.mark.parametrize("code", ENDS)
def test_a_program_ends_as_it_does_anew(code, tmp_path):
    anew = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    done = warm.run(["-c", code], cwd=tmp_path)
    assert done.returncode == anew.returncode
    assert done.stderr.splitlines()[-1:] == anew.stderr.splitlines()[-1:]


def test_a_program_that_hangs_is_killed(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run(["-c", "import time; time.sleep(1000)"], cwd=tmp_path, timeout=0.5)
    assert warm.run(["-c", "print(1)"], cwd=tmp_path).stdout == "1\n"


def test_nothing_of_a_test_is_in_a_program(tmp_path, monkeypatch):
    """Neither what it patched, nor its threads."""
    monkeypatch.setattr(sys, "mark_of_a_test", 1, raising=False)
    code = "import sys, os; print(hasattr(sys, 'mark_of_a_test'), len(os.listdir('/proc/self/task')))"
    assert warm.run(["-c", code], cwd=tmp_path).stdout == "False 1\n"
