"""Ctrl-C during a long search in Rust: it ends soon, as Python programs end, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = """
import random, signal, sys, threading
import dflop

draw = random.Random(5)
# Three a bucket, none small: the bound is not met, so all work is spent.
encoder, llm = ([draw.randint(5 * 10**6, 18 * 10**6) for _ in range(150)] for _ in range(2))
handled, ways, again = [], [], threading.Event()


def handle(*_):
    handled.append(len(ways))
    again.set()
    if handled.count(len(ways)) == 3:
        raise KeyboardInterrupt


def strike():
    while True:
        signal.raise_signal(signal.SIGINT)
        again.wait()
        again.clear()


def note(frame, event, function):
    if function is dflop.balance and event != "c_call":
        ways.append(event)


signal.signal(signal.SIGINT, handle)
threading.Thread(target=strike, daemon=True).start()
sys.setprofile(note)
try:
    while True:
        dflop.balance(encoder, llm, 50, exact=True)
except KeyboardInterrupt:
    sys.setprofile(None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
print(ways[-1])
"""


def test_ctrl_c_ends_a_balance_early() -> None:
    """A search looks for signals all along: three are handled inside one, and the last ends it from within.

    Each signal is sent once the one before has been handled. One that looked at its end alone would give an
    answer first (`c_return`), and would handle one signal a call.
    """
    command = [sys.executable, "-c", CHILD]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert child.stdout == "c_exception\n"


SEARCH = """
import os, sys
import dflop.__main__ as d

# No room for an answer: who searched on would wait here, and could not end before the signal comes.
os.set_blocking(1, False)
try:
    while True:
        os.write(1, b"x" * 512)
except BlockingIOError:
    os.set_blocking(1, True)
# Once it says so, Python's own handler is gone, which would write a traceback.
d.run_cli = lambda a, run=d.run_cli: (os.write(2, b"."), run(a))[1]
d.main()
"""


def test_ctrl_c_ends_the_command(tmp_path: Path) -> None:
    """`dflop schedule --exact` through Python: ended by the signal, 130 for a shell, with nothing written."""
    sizes = [(1_000_003 * i % 13_000_001, 7_000_009 * i % 13_000_057) for i in range(1, 151)]
    samples = [f"{5_000_000 + encoder},{5_000_000 + llm}" for encoder, llm in sizes]
    (tmp_path / "costs.csv").write_text("\n".join(["encoder_ns,llm_ns", *samples]) + "\n")
    arguments = ["schedule", "--costs", "costs.csv", "--buckets", "50", "--exact", "--json"]
    command = [sys.executable, "-c", SEARCH, *arguments]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stderr is not None
    assert child.stderr.read(1) == b"."
    # On a free machine the search is under way by then.
    time.sleep(0.15)
    child.send_signal(signal.SIGINT)
    out, said = child.communicate(timeout=300)
    assert child.returncode == -signal.SIGINT, said
    assert said == b""
    assert set(out) == set(b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["costs.csv"]


def test_an_ignored_ctrl_c_stays_ignored(tmp_path: Path) -> None:
    """As a script's shell starts `dflop ... &`: Ctrl-C is meant for what runs in front."""
    (tmp_path / "costs.csv").write_text("encoder_ns,llm_ns\n3,4\n5,6\n")
    main = (
        "import os, signal, sys, dflop.__main__ as d\n"
        "d.run_cli = lambda a, run=d.run_cli: (os.kill(os.getpid(), signal.SIGINT), run(a))[1]\n"
        "sys.exit(d.main())"
    )
    command = [sys.executable, "-c", main, "schedule", "--costs", "costs.csv", "--buckets", "1", "--json"]
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    done = subprocess.run(ignoring, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["assignment"] == [0, 0]


def test_these_tests_pass_under_nohup(tmp_path: Path) -> None:
    """`nohup make test &` starts them with SIGINT and SIGHUP ignored, and so would be what they start."""
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [str(tests / "test_interrupt.py"), str(tests / "test_child.py"), "-k", "command or measuring"]
    ignoring = ["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh", *command]
    done = subprocess.run(ignoring, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout


IMPORTS = """
import signal, sys, threading, importlib.abc

MODULE, STRUCK_IN = sys.argv[1:3]
sys.argv[1:] = ["nothing.json"]


class Strike(importlib.abc.MetaPathFinder):
    # As an import of torch does that tries numpy, and takes any exception for its absence.
    def find_spec(self, name, path, target=None):
        if name == STRUCK_IN:
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:
                print("swallowed", flush=True)
        return None


sys.meta_path.insert(0, Strike())
import runpy

runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("module", "struck_in"),
    [
        ("dflop.runtime.agent", "torch"),
        ("dflop.runtime.worker", "dflop.runtime.trainer"),
        ("dflop.profiling.worker", "dflop.profiling.model"),
    ],
)
def test_ctrl_c_while_torch_is_imported_ends_a_process(module: str, struck_in: str, tmp_path: Path) -> None:
    """An import that swallows KeyboardInterrupt would leave half a module, and a run that goes on."""
    (tmp_path / "nothing.json").write_text("{}")
    command = [sys.executable, "-c", IMPORTS, module, struck_in]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == -signal.SIGINT, child.stderr
    assert "swallowed" not in child.stdout


STRIKES = """
import importlib.abc, signal, sys

class Strike(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)
        return None

signal.signal(signal.SIGINT, signal.{handler})
sys.meta_path.insert(0, Strike())
"""
STARTS = {
    "dflop": [str(Path(sys.executable).parent / "dflop"), "--version"],
    "module": [sys.executable, "-m", "dflop", "--version"],
    "program": [
        sys.executable,
        "-c",
        "import sys; sys.argv[0] = '/usr/bin/dflop'; import dflop",
        "--version",
    ],
}


def struck(folder: Path, start: str, name: str, handler: str) -> subprocess.CompletedProcess[str]:
    """How a process ends that Ctrl-C meets while it imports `name`."""
    (folder / "sitecustomize.py").write_text(STRIKES.format(name=name, handler=handler))
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        STARTS[start], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("name", ["dflop._native", "dflop.data.sampler", "dflop.__main__"])
@pytest.mark.parametrize("start", ["dflop", "module"])
def test_ctrl_c_while_the_command_starts_ends_it_without_a_word(
    start: str, name: str, tmp_path: Path
) -> None:
    done = struck(tmp_path, start, name, "default_int_handler")
    assert (done.returncode, done.stderr, done.stdout) == (-signal.SIGINT, "", "")
    # Ignored, it goes on.
    done = struck(tmp_path, start, name, "SIG_IGN")
    assert (done.returncode, done.stdout[:6]) == (0, "dflop "), done.stderr


def test_a_program_that_imports_dflop_has_its_own_way_with_ctrl_c(tmp_path: Path) -> None:
    """Also one that has the name of the command: a spawned process, or a script elsewhere."""
    (tmp_path / "dflop").write_text("import dflop")
    STARTS["script"] = [sys.executable, str(tmp_path / "dflop")]
    for start in ("program", "script"):
        done = struck(tmp_path, start, "dflop._native", "default_int_handler")
        assert done.stderr.rstrip().endswith("KeyboardInterrupt")
