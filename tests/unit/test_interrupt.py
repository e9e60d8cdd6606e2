"""Ctrl-C during a long search in Rust: it ends soon, as Python programs end, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = """
import json, random, time
import dflop

draw = random.Random(5)
# Three a bucket, none small: the bound is not met, so all work is spent.
encoder, llm = ([draw.randint(5 * 10**6, 18 * 10**6) for _ in range(150)] for _ in range(2))


def search():
    start = time.monotonic()
    try:
        dflop.balance(encoder, llm, 50, exact=True)
    except KeyboardInterrupt:
        return time.monotonic() - start, True
    return time.monotonic() - start, False


whole_s, _ = search()
print(json.dumps(whole_s), flush=True)
print(json.dumps(search()), flush=True)
"""


def test_ctrl_c_ends_a_balance_early() -> None:
    """Struck after a fifth of a search that spends all its work: KeyboardInterrupt well before its end."""
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    whole_s = json.loads(child.stdout.readline())
    time.sleep(whole_s / 5)
    child.send_signal(signal.SIGINT)
    ended_s, is_interrupted = json.loads(child.stdout.readline())
    assert child.wait(timeout=60) == 0
    assert is_interrupted
    assert ended_s < 0.7 * whole_s, f"{ended_s:.2f} s of {whole_s:.2f} s"


def test_ctrl_c_ends_the_command(tmp_path: Path) -> None:
    """`dflop schedule --exact` through Python: ended by the signal, 130 for a shell, with nothing written."""
    sizes = [(1_000_003 * i % 13_000_001, 7_000_009 * i % 13_000_057) for i in range(1, 151)]
    samples = [f"{5_000_000 + encoder},{5_000_000 + llm}" for encoder, llm in sizes]
    (tmp_path / "costs.csv").write_text("\n".join(["encoder_ns,llm_ns", *samples]) + "\n")
    # Once it says so, Python's own start is over, in which a signal would be a traceback.
    main = "import sys, dflop.__main__ as d; print('ready', file=sys.stderr, flush=True); d.main()"
    arguments = ["schedule", "--costs", "costs.csv", "--buckets", "50", "--exact", "--json"]
    with (tmp_path / "out.json").open("w") as out:
        child = subprocess.Popen(
            [sys.executable, "-c", main, *arguments],
            cwd=tmp_path,
            stdout=out,
            stderr=subprocess.PIPE,
        )
        assert child.stderr is not None
        assert child.stderr.readline() == b"ready\n"
        time.sleep(0.15)
        child.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, said = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGINT, said
    assert time.monotonic() - start < 0.5
    assert said == b""
    assert (tmp_path / "out.json").read_text() == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["costs.csv", "out.json"]


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
        ("dflop.runtime.agent", "torch.distributed.run"),
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
