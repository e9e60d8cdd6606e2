"""Two hosts of two CPU ranks, in network namespaces of this machine; their wire is slow and loses frames.

    python benches/hosts.py bench/out/hosts.json --steps 12 --delay-ms 5 --loss 0.01

    host 0: ranks 0, 1 --eth0--> wire (this process: delay, loss, cut) <--eth0-- host 1: ranks 2, 3

The hosts train until there is a checkpoint; then the wire is cut. The ranks of both must end by themselves.
With the wire whole again the run goes on from the checkpoint. In the end `schedules.jsonl` must hold the
global batches of all steps, each once and in order, and a rehearsal must run over the same wire. The exit
status is 1 where any of this does not hold. Where namespaces are not permitted (Linux, root, `ip` of
iproute2), nothing runs: `skipped` and the reason are printed, and the status is 77.

Each host runs what `dflop plan --emit torchrun` prints, with HEAD and HERE set, as a person would. Changed
in it are the names of the programs, which stand for this Python's, the port, and what comes behind `train`.

The wire is a pair of tap devices and not `tc netem`, which many kernels lack.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collect import origin
from kills import check, children, num_lines
from small import prepare

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NUM_HOSTS, RANKS_PER_HOST, EVERY = 2, 2, 3
SKIPPED = 77
"""Exit status where nothing ran, as of automake's tests."""
TIMEOUT_S, ENDING_S = 20, 90
"""A rank waits so long for another, and all must have ended so long after the cut."""
# The demo's configuration has neither nodes nor timeouts: they come behind fields that it has.
FIELDS = {
    "global_batch_size": 12,
    "num_microbatches": 4,
    "video_max_frames": 3,
    "num_ranks": f"{NUM_HOSTS * RANKS_PER_HOST}\n  ranks_per_node: {RANKS_PER_HOST}",
    "seed": f"0\n  timeout_seconds: {TIMEOUT_S}\n  first_timeout_seconds: 120",
}
# Features and the gradients of the LLM go over the wire.
LAYOUT = "colocated=false,encoder.dp=1,llm.dp=3"
MTU = 9000
# From linux/if_tun.h and linux/sched.h.
_TUNSETIFF, _TAP, _BARE, _NEW_NETWORK = 0x400454CA, 0x0002, 0x1000, 0x40000000


def main() -> int:
    """Runs to the end, writes and prints.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--delay-ms", type=float, default=5.0, help="of each frame, in each direction")
    parser.add_argument("--loss", type=float, default=0.01, help="part of the frames that are lost")
    parser.add_argument("--seed", type=int, default=0, help="decides which frames are lost")
    asked = parser.parse_args()
    missing = what_is_missing()
    if missing:
        print(f"skipped: two hosts in network namespaces need {missing}")
        return SKIPPED
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        more = f"checkpoint:\n  every: {EVERY}\n"
        prepare(folder, 40, FIELDS, more=more, only=[LAYOUT])
        wire = stack.enter_context(hosts(asked.delay_ms / 1e3, asked.loss, asked.seed))
        found = run(folder, wire, asked.steps)
    arguments = {key: value for key, value in vars(asked).items() if key != "out"}
    result = {"bench": "hosts", **origin(), "arguments": arguments, **found, **wire.counts()}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "arguments"}, indent=1))
    return 0 if found["is_right"] else 1


def what_is_missing() -> str:
    """What this machine lacks for the hosts, in words; empty: nothing."""
    if not sys.platform.startswith("linux"):
        return f"Linux: this is {sys.platform}"
    if shutil.which("ip") is None:
        return "`ip`, of iproute2: it is not installed"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "`/dev/net/tun`: this user cannot open it"
    name = f"dflop-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"permission to make them: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class Wire:
    """Carries the frames of two tap devices, with a delay; some are lost, and all while it is cut."""

    def __init__(self, ends: Sequence[int], delay_s: float, loss: float, seed: int) -> None:
        self._ends, self._delay_s, self._loss = ends, delay_s, loss
        self._draw = random.Random(seed)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="wire")
        self.is_cut = False
        self.num_carried = self.num_lost = self.num_cut_off = 0

    def __enter__(self) -> Wire:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def counts(self) -> dict[str, int]:
        """Frames."""
        return {"carried": self.num_carried, "lost": self.num_lost, "cut_off": self.num_cut_off}

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        number = 0
        while not self._ended.is_set():
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.05
            for end in select.select(self._ends, [], [], pause)[0]:
                frame = os.read(end, MTU + 64)
                number += 1
                if self.is_cut:
                    self.num_cut_off += 1
                elif self._draw.random() < self._loss:
                    self.num_lost += 1
                else:
                    other = self._ends[1 - self._ends.index(end)]
                    heapq.heappush(waiting, (time.monotonic() + self._delay_s, number, other, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, end, frame = heapq.heappop(waiting)
                self.num_carried += 1
                os.write(end, frame)


@contextmanager
def hosts(delay_s: float, loss: float, seed: int) -> Iterator[Wire]:
    """Namespaces `host(0)` and `host(1)`, with `address(i)` on `eth0`, and the wire between them."""
    made: list[str] = []
    ends: list[int] = []
    try:
        for index in range(NUM_HOSTS):
            subprocess.run(["ip", "netns", "add", host(index)], check=True)
            made.append(host(index))
            ends.append(tap(host(index)))
            for command in (
                "link set lo up",
                f"address add {address(index)}/24 dev eth0",
                f"link set eth0 mtu {MTU} up",
            ):
                subprocess.run(["ip", "-n", host(index), *command.split()], check=True)
        with Wire(ends, delay_s, loss, seed) as wire:
            yield wire
    finally:
        for end in ends:
            os.close(end)
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def host(index: int) -> str:
    """Name of a namespace."""
    return f"dflop-{os.getpid()}-{index}"


def address(index: int) -> str:
    """Of a host, on the wire."""
    return f"10.77.0.{index + 1}"


def tap(namespace: str) -> int:
    """Makes `eth0` in a namespace; the file whose frames are its. It lives as long as that is open."""
    opened: list[int | OSError] = []

    def enter() -> None:
        # A thread has a namespace of its own; this one ends with it.
        try:
            inside = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(inside, _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"the namespace {namespace} cannot be entered")
            os.close(inside)
            device = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"eth0", _TAP | _BARE))
            opened.append(device)
        except OSError as error:
            opened.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(opened[0], OSError):
        raise opened[0]
    return opened[0]


def emitted(folder: Path) -> str:
    """What `dflop plan` prints for each node; the plan is made again, and is the same."""
    command = [sys.executable, "-m", "dflop", "plan", "--only", LAYOUT, "--emit", "torchrun"]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def changed(text: str, number: int, verb: str, *arguments: str) -> str:
    """A node's command for this start, which meets at a port of its own: the one before may still be held."""
    python = shlex.quote(sys.executable)
    for before, after in (
        ("\ntorchrun ", f"\nexec {python} -m torch.distributed.run "),
        (":29400", f":{29_400 + number}"),
        ("--no-python dflop train ", f"--no-python {python} -m dflop {verb} "),
    ):
        assert text.count(before) == 1, f"{before!r} is not once in what is emitted: {text}"
        text = text.replace(before, after)
    return f"{text.rstrip()} {shlex.join(arguments)}"


def start(
    folder: Path, emitted: str, number: int, verb: str, *arguments: str
) -> list[subprocess.Popen[bytes]]:
    """An agent of torchrun on each host, which starts its ranks, as `dflop plan --emit torchrun` says it."""
    text = changed(emitted, number, verb, *arguments)
    agents = []
    for index in range(NUM_HOSTS):
        command = ["ip", "netns", "exec", host(index), "bash", "-c", text]
        # The name of this machine stands for an address that the other host cannot reach.
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        environment |= {"HEAD": address(0), "HERE": address(index)}
        print(f"host {index}: {text.splitlines()[-1]}", file=sys.stderr, flush=True)
        log = (folder / f"host{index}-{number}.log").open("wb")
        agents.append(
            subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        )
    return agents


def ended(agents: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """Exit statuses of agents; `None` of one that did not end in time, and is told to end."""
    until = time.monotonic() + seconds
    statuses: list[int | None] = []
    for agent in agents:
        try:
            statuses.append(agent.wait(max(0.1, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            statuses.append(None)
            # It ends its ranks, which a kill would leave behind.
            agent.terminate()
            try:
                agent.wait(60)
            except subprocess.TimeoutExpired:
                agent.kill()
    return statuses


def running(agents: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Ranks of agents that have not ended, whether or not their agent has asked for their status.

    An agent that waits for the store of the first host, a minute at a time, leaves ended ranks as zombies.
    """
    return [child for agent in agents for child in children(agent.pid) if not has_ended(child)]


def has_ended(process: int) -> bool:
    """Whether a process is gone, or a zombie."""
    try:
        # The name in brackets may hold anything; the state comes behind it.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def run(folder: Path, wire: Wire, num_steps: int) -> dict[str, Any]:
    """Trains, cuts, goes on, rehearses; what was found."""
    text = emitted(folder)
    train = ["train", "--steps", str(num_steps), "--out", "run"]
    agents = start(folder, text, 0, *train)
    # One step further than a checkpoint that is whole, so that something is to be done again.
    saved = folder / f"run/checkpoints/step-{EVERY}/checkpoint.json"
    while all(agent.poll() is None for agent in agents) and not (
        saved.exists() and num_lines(folder / "run/metrics.jsonl") > EVERY
    ):
        time.sleep(0.05)
    wire.is_cut = True
    cut = time.monotonic()
    written = num_lines(folder / "run/metrics.jsonl")
    while time.monotonic() < cut + ENDING_S and running(agents):
        time.sleep(0.1)
    seconds = time.monotonic() - cut
    have_ended = not running(agents)
    # An agent that has lost the first host asks it for minutes; its ranks are what counts.
    ended(agents, 1)
    wire.is_cut = False
    went_on = ended(start(folder, text, 1, *train, "--resume", "auto"), 240)
    rehearsed = ended(start(folder, text, 2, "rehearse", "--steps", "4", "--out", "rehearsal"), 240)
    found = check(folder, num_steps) if (folder / "run/schedules.jsonl").exists() else {"is_right": False}
    is_rehearsed = rehearsed == [0, 0] and num_lines(folder / "rehearsal/metrics.jsonl") == 4
    # A line may have been under way.
    is_kept = num_lines(folder / "run/metrics.undone.jsonl") <= written + 1 - EVERY
    is_right = found["is_right"] and have_ended and went_on == [0, 0] and is_kept and is_rehearsed
    if not is_right:
        for log in sorted(folder.glob("host*.log")):
            print(f"== {log.name}\n{log.read_text(errors='replace')[-6000:]}", file=sys.stderr)
    return {
        **found,
        "is_right": is_right,
        "steps_before_the_cut": written,
        "have_ranks_ended_after_the_cut": have_ended,
        "seconds_until_they_had": seconds,
        "statuses_of_the_run_that_went_on": went_on,
        "statuses_of_the_rehearsal": rehearsed,
    }


if __name__ == "__main__":
    sys.exit(main())
