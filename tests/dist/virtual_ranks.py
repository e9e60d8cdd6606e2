"""All ranks of a plan as threads of one process, over a network like NCCL's that sees when nobody can go on.

Real are the action lists, the executor, which messages there are, and the order in which they are opened. Between
two ranks, a group has one queue on each side, without tags: its first send meets the first receive of the other side.
Actions take no time.
"""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace

import torch

from dflop.runtime import meeting, messages
from dflop.runtime.device_clock import DeviceClock, DeviceRecorder
from dflop.runtime.executor import Executor
from dflop.runtime.meeting import Meeting
from dflop.runtime.mesh import Mesh
from dflop.runtime.rehearsal import (
    Fate,
    RehearsedMessages,
    RehearsedStage,
    StepTimes,
    rehearsed_work,
)

NO_TIMES = StepTimes({}, 0, 0)


class HangError(RuntimeError):
    """No rank can go on."""


class Operation:
    """A send or a receive under way."""

    def __init__(self, network, rank, peer, tag, tensor, is_send):
        self.network, self.rank, self.peer, self.tag = network, rank, peer, tag
        self.tensor, self.is_send, self.done = tensor, is_send, threading.Event()

    def wait(self, timeout=None):
        del timeout
        self.network.wait(self)

    def is_completed(self):
        return self.done.is_set()


class Network:
    """The queues of all pairs, and who waits."""

    def __init__(self, num_ranks):
        self.lock, self.own = threading.Lock(), threading.local()
        self.queues, self.waiting, self.alive, self.hang = {}, {}, set(range(num_ranks)), None

    def put(self, tensor, peer, group, tag, is_send):
        rank = self.own.rank
        operation = Operation(self, rank, peer, tag, tensor.clone() if is_send else tensor, is_send)
        with self.lock:
            mine = self.queues.setdefault((group, rank, peer), deque())
            theirs = self.queues.setdefault((group, peer, rank), deque())
            mine.append(operation)
            while mine and theirs and mine[0].is_send != theirs[0].is_send:
                ends = mine.popleft(), theirs.popleft()
                source, target = ends if ends[0].is_send else ends[::-1]
                assert source.tag == target.tag, f"rank {target.rank} took a message for another"
                target.tensor.copy_(source.tensor)
                for end in ends:
                    if self.waiting.get(end.rank) is end:
                        del self.waiting[end.rank]
                    end.done.set()
        return operation

    def isend(self, tensor, peer, group, tag):
        return self.put(tensor, peer, group, tag, True)

    def irecv(self, tensor, peer, group, tag):
        return self.put(tensor, peer, group, tag, False)

    def send(self, tensor, peer, group, tag):
        self.isend(tensor, peer, group, tag).wait()

    def recv(self, tensor, peer, group, tag):
        self.irecv(tensor, peer, group, tag).wait()

    def wait(self, operation):
        with self.lock:
            if not operation.done.is_set():
                self.waiting[operation.rank] = operation
                self.look()
        operation.done.wait()
        if self.hang is not None:
            raise HangError(self.hang)

    def look(self):
        """Ends all waits where nobody is left who could end one."""
        if self.waiting and len(self.waiting) == len(self.alive):
            waits = sorted((rank, operation.peer) for rank, operation in self.waiting.items())
            self.hang = "; ".join(f"rank {rank} waits for rank {peer}" for rank, peer in waits)
            for operation in self.waiting.values():
                operation.done.set()

    def leave(self, rank):
        with self.lock:
            self.alive.discard(rank)
            self.look()


class VirtualRank:
    """What a rank keeps from step to step."""

    def __init__(self, plan, rank):
        component, replica, _ = plan.coordinates(rank)
        self.mesh = Mesh(
            plan,
            rank,
            plan.num_ranks,
            component,
            replica,
            tuple(plan.stages(rank)),
            torch.device("cpu"),
            "control",
            "downward",
            "upward",
            ("downward crossing", "upward crossing"),
            SimpleNamespace(now=None),
            plan.tensor(rank),
        )
        clock = DeviceClock(0, [0] * plan.num_ranks, lambda: 0, lambda _: None)
        together = Meeting(range(plan.num_ranks), rank, "meeting") if plan.meets_in_layers else None
        self.stages = {
            stage: RehearsedStage(self.mesh, clock, stage, Fate(0, None), together)
            for stage in self.mesh.stages
        }
        recorder = DeviceRecorder(rank, clock)
        self.clock, self.recorder = clock, recorder
        self.executor = Executor(self.mesh, self.stages, recorder, RehearsedMessages(self.mesh, clock))

    def step(self, schedule):
        """The names of the actions that ran."""
        work = rehearsed_work(self.mesh, schedule)
        actions = self.executor.prepare(work, schedule)
        for stage in self.stages.values():
            stage.take(work, NO_TIMES)
        self.clock.begin(0)
        self.recorder.begin()
        self.executor.run_step(work, actions)
        return [name for name, _, _ in self.recorder._marks]


class VirtualRanks:
    """All ranks of a plan."""

    def __init__(self, plan, monkeypatch):
        self.ranks = [VirtualRank(plan, rank) for rank in range(plan.num_ranks)]
        self.monkeypatch = monkeypatch

    def step(self, schedule):
        """The names of the actions that each rank ran; `HangError` where the step has no end."""
        network = Network(len(self.ranks))
        calls = {name: getattr(network, name) for name in ("isend", "irecv", "send", "recv")}
        self.monkeypatch.setattr(messages, "dist", SimpleNamespace(**calls))
        self.monkeypatch.setattr(meeting, "dist", SimpleNamespace(**calls))
        ran, errors = [None] * len(self.ranks), []

        def run(index, rank):
            network.own.rank = index
            try:
                ran[index] = rank.step(schedule)
            except BaseException as error:
                errors.append(error)
            finally:
                network.leave(index)

        threads = [threading.Thread(target=run, args=place) for place in enumerate(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if network.hang is not None:
            raise HangError(network.hang)
        if errors:
            raise errors[0]
        return ran
