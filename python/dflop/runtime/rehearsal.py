"""A step without computing: each action takes its predicted time, and a message carries a time stamp.

    leader: schedule --simulator--> spans --broadcast--> times of each rank's actions
    rank:   0F3: message here? -> its end sent to the ranks that hold its samples -> sleep to its start

`device_clock.py` says when an action starts and ends. Real are the ranks and their groups, the scheduler, the
action lists, the order of all messages, and the agreement of the ranks before each step. Not real are the
tensors, media and times.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflop.models.adapter import LlmInput
from dflop.runtime.boundary import TensorPair, Transfer, tensor_pairs
from dflop.runtime.device_clock import meet
from dflop.runtime.failure import talking
from dflop.runtime.messages import Messages
from dflop.runtime.stage import Stage
from dflop.runtime.work import MicrobatchWork, StepWork

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dflop._native import Schedule, SlowShapes, StepScheduler
    from dflop.runtime.device_clock import DeviceClock
    from dflop.runtime.meeting import Meeting
    from dflop.runtime.mesh import Mesh


@dataclass(frozen=True)
class Rehearsal:
    """What the command line asks of a rehearsal."""

    speed: float
    """How many times faster than predicted everything runs, to save time."""
    slow_ranks: Mapping[int, float]
    """Ranks that are slower than predicted, each with the factor on its times."""
    slow_shapes: tuple[float, float] | None
    """The share of the samples that are slower than predicted, and how many mean times of the slowest stage
    they add; none: no samples are."""
    network_latency_ns: int
    """Time that each message takes longer than predicted; `speed` is not applied to it yet."""
    kill: tuple[int, int] | None
    """A rank, and the step in which it is killed; none: no rank is."""

    @staticmethod
    def of_request(request: Mapping[str, Any], *, is_started_again: bool = False) -> Rehearsal:
        """What a request of the command line asks for.

        Args:
            request: Its part `rehearsal`.
            is_started_again: Whether ranks have died before: nobody is killed a second time.

        Returns:
            The same, read.
        """
        kill, slow = request["kill"], request["slow_shapes"]
        return Rehearsal(
            speed=request["speed"],
            slow_ranks={slow["rank"]: slow["factor"] for slow in request["slow_ranks"]},
            slow_shapes=None if slow is None else (slow["share"], slow["times"]),
            network_latency_ns=request["network_latency_ns"],
            kill=None if kill is None or is_started_again else (kill["rank"], kill["step"]),
        )


@dataclass(frozen=True)
class StepTimes:
    """How long the actions of one rank take in one step, in nanoseconds of this machine's clock."""

    actions: Mapping[str, int]
    """By name, as in `1F3`."""
    tail: int
    """Reduction and optimizer."""
    transfer: int
    """From the end of an action to the moment when another rank may use its output."""


def times_by_rank(
    scheduler: StepScheduler, schedule: Schedule, rehearsal: Rehearsal, slow_shapes: SlowShapes | None = None
) -> list[StepTimes]:
    """The predicted times of a step, divided by the rehearsal's speed. To be called on the leader.

    Args:
        scheduler: That of the run.
        schedule: Of the step.
        rehearsal: How fast, and which ranks are slow.
        slow_shapes: Samples that take longer than predicted; none: no samples do.

    Returns:
        By rank.

    Raises:
        ScheduleError: The schedule does not belong to this plan and data.
    """
    spans, tails, transfer_ns = scheduler.predicted_spans(schedule, slow_shapes)
    of_ranks: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for rank, action, start, end in spans:
        of_ranks[rank][action] = end - start
    # Rounded up, so that a time multiplied by the speed again is never shorter than predicted.
    transfer = math.ceil((transfer_ns + rehearsal.network_latency_ns) / rehearsal.speed)
    times: list[StepTimes] = []
    for rank, tail in enumerate(tails):
        factor = rehearsal.slow_ranks.get(rank, 1.0) / rehearsal.speed
        actions = {action: math.ceil(ns * factor) for action, ns in of_ranks[rank].items()}
        times.append(StepTimes(actions, math.ceil(tail * factor), transfer))
    return times


def rehearsed_work(mesh: Mesh, schedule: Schedule) -> StepWork:
    """This rank's share of a step, from the schedule alone: who sends whom a message, each of one row.

    Args:
        mesh: This rank's coordinates.
        schedule: Of the step.

    Returns:
        Work with empty batches. The leader reports all label tokens, so that their sum is right.
    """
    stages = {
        stage: [_microbatch(mesh, schedule, stage, j) for j in range(schedule.num_microbatches)]
        for stage in mesh.stages
    }
    num_targets = schedule.label_tokens if mesh.is_leader else 0
    return StepWork(schedule.step, schedule.label_tokens, stages, num_targets)


def _microbatch(mesh: Mesh, schedule: Schedule, stage: int, microbatch: int) -> MicrobatchWork:
    plan = mesh.plan
    encoded = [
        {sample for sample, _ in schedule.encoder(microbatch, replica)}
        for replica in range(plan.encoder_replicas)
    ]
    placed = [set(schedule.llm(microbatch, replica)) for replica in range(plan.llm_replicas)]
    first_llm, last = plan.encoder_stages, plan.num_stages - 1

    def neighbour(peer_stage: int) -> list[tuple[int, TensorPair | None]]:
        return [(plan.rank(mesh.replica, peer_stage, mesh.tensor), None)]

    if stage < first_llm:
        own = encoded[mesh.encoder_replica]
        if not own:
            return MicrobatchWork(None, [], [], any(encoded))
        above = neighbour(stage - 1) if stage > 0 else []
        fed = [r for r in range(plan.llm_replicas) if own & placed[r]]
        tensor = mesh.tensor_of(stage)
        pairs = [pair for pair in tensor_pairs(plan, mesh.encoder_replica) if pair.encoder == tensor]
        is_border = stage == first_llm - 1
        across = [(plan.rank(replica, first_llm, pair.llm), pair) for replica in fed for pair in pairs]
        below = across if is_border else neighbour(stage + 1)
        return MicrobatchWork(_NOTHING, _one_row_each(above), _one_row_each(below))
    own = placed[mesh.replica]
    if not own:
        return MicrobatchWork(None, [], [], any(placed))
    if stage == first_llm:
        feeding = [replica for replica, samples in enumerate(encoded) if own & samples]
        above = [
            (plan.rank(replica, first_llm - 1, pair.encoder), pair)
            for replica in feeding
            for pair in tensor_pairs(plan, replica)
            if pair.llm == mesh.tensor
        ]
    else:
        above = neighbour(stage - 1)
    below = [] if stage == last else neighbour(stage + 1)
    return MicrobatchWork(_NOTHING, _one_row_each(above), _one_row_each(below))


def _one_row_each(peers: Sequence[tuple[int, TensorPair | None]]) -> list[Transfer]:
    return [
        Transfer(
            peer, 1, torch.tensor([place]), pair is None or pair.has_rows, pair is None or pair.has_gradients
        )
        for place, (peer, pair) in enumerate(peers)
    ]


_EMPTY = torch.empty(0, dtype=torch.int64)
_NOTHING = LlmInput(_EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY)
"""Stands for the batch of a microbatch that this rank has samples of; it holds no data."""


class Fate:
    """Whether and when this rank is killed: amid its actions of one step, while messages are under way."""

    def __init__(self, rank: int, kill: tuple[int, int] | None) -> None:
        """Of one rank.

        Args:
            rank: This one.
            kill: As in `Rehearsal`.
        """
        self._rank = rank
        self._step = kill[1] if kill is not None and kill[0] == rank else None
        self._num_left: int | None = None

    def begin(self, step: int, num_actions: int) -> None:
        """A step begins.

        Args:
            step: Which.
            num_actions: Actions that the rank's list has in it, over all its stages.
        """
        self._num_left = num_actions // 3 if step == self._step else None

    def act(self) -> None:
        """The next action is issued; in the step asked for the rank dies after a third of them."""
        if self._num_left == 0:
            self.end()
        elif self._num_left is not None:
            self._num_left -= 1

    def end(self) -> None:
        """The last action is issued: a rank with few actions, since most had no sample, dies here."""
        if self._num_left is not None:
            # Else whoever reads of SIGKILL looks for the system's reasons.
            sys.stderr.write(f"rehearse: rank {self._rank} is killed in step {self._step}, as --kill asks\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)


class RehearsedStage(Stage):
    """A stage whose actions take their predicted times and compute nothing."""

    def __init__(
        self,
        mesh: Mesh,
        clock: DeviceClock,
        stage: int,
        fate: Fate,
        meeting: Meeting | None = None,
    ) -> None:
        """A stage without times yet; `take` gives them.

        Args:
            mesh: This rank's coordinates.
            clock: Of the device that it stands for.
            stage: Which one of its stages.
            fate: Of this rank.
            meeting: Ranks that start each action together, since they gather layers (ZeRO-3); none: no ranks
                do.
        """
        super().__init__(torch.nn.Identity(), is_last=False, device=mesh.device)
        self._clock = clock
        self._fate = fate
        self._stage = stage
        self._meeting = meeting
        self._work: StepWork | None = None
        self._times = StepTimes({}, 0, 0)

    def take(self, work: StepWork, times: StepTimes) -> None:
        """Takes the work and the times of the step that comes next.

        Args:
            work: This rank's share of it.
            times: Of its actions.
        """
        self._work, self._times = work, times

    def forward(
        self,
        microbatch: int,
        batch: object,
        incoming_RD: torch.Tensor | None,
        label_tokens: int,
        is_split: bool = False,
        recompute: str | None = None,
    ) -> torch.Tensor | None:
        """Issues the forward, which takes its predicted time.

        Args:
            microbatch: Its number.
            batch: Not used.
            incoming_RD: Time stamps; not used.
            label_tokens: Not used.
            is_split: Not used.
            recompute: Not used.

        Returns:
            A time stamp for each message that leaves; none where none leaves.
        """
        del batch, incoming_RD, label_tokens, is_split, recompute
        return self._act("F", microbatch)

    def backward(self, microbatch: int, gradient_RD: torch.Tensor | None) -> torch.Tensor | None:
        """The same for the backward, or its part I.

        Args:
            microbatch: Its number.
            gradient_RD: Time stamps; not used.

        Returns:
            As `forward`.
        """
        del gradient_RD
        return self._act("B" if self._name("B", microbatch) in self._times.actions else "I", microbatch)

    def weights(self, microbatch: int) -> None:
        """Issues W."""
        self._act("W", microbatch)

    def pass_by(self, takes_gradient: bool, microbatch: int, recompute: str | None = None) -> None:
        """Joins the other ranks in an action of which this rank has no sample, where ranks meet in each.

        Args:
            takes_gradient: Whether it is a backward.
            microbatch: Its number.
            recompute: Not used.
        """
        del recompute
        if self._meeting is not None:
            self._act("B" if takes_gradient else "F", microbatch)

    def _name(self, letter: str, microbatch: int) -> str:
        return f"{self._stage}{letter}{microbatch}"

    def _act(self, letter: str, microbatch: int) -> torch.Tensor | None:
        if self._meeting is not None:
            with talking("start an action together"):
                meet(self._clock, self._meeting)
        assert self._work is not None, "`take` comes before the step"
        self._fate.act()
        work = self._work.stages[self._stage][microbatch]
        messages = () if letter == "W" else work.below if letter == "F" else work.above
        receivers = [transfer.peer for transfer in messages]
        end_ns = self._clock.run(self._times.actions.get(self._name(letter, microbatch), 0), receivers)
        if not receivers:
            return None
        return torch.tensor([[end_ns, self._clock.clock]] * len(receivers), dtype=torch.int64)


class RehearsedMessages(Messages):
    """Messages of one row: `[end of the action that gives it, clock]`."""

    def __init__(self, mesh: Mesh, clock: DeviceClock) -> None:
        """Nothing under way.

        Args:
            mesh: This rank's coordinates.
            clock: Of the device that it stands for.
        """
        super().__init__(mesh, 2, torch.int64)
        self._clock = clock
        self.transfer_ns = 0
        """Predicted time of a message in the step under way."""

    def joined(
        self, stage: int, is_gradient: bool, received: Sequence[torch.Tensor], transfers: Sequence[Transfer]
    ) -> torch.Tensor:
        """The time stamps of one action, one after the other, in the order of their messages."""
        del stage, is_gradient, transfers
        return torch.cat(list(received)) if received else torch.empty(0, 2, dtype=torch.int64)

    def receive(
        self, stage: int, microbatch: int, is_gradient: bool, transfers: Sequence[Transfer]
    ) -> list[torch.Tensor]:
        """The time stamps of one action; tells the device clock when the predicted transfers have arrived.

        Args:
            stage: Of the action.
            microbatch: Its number.
            is_gradient: Whether they are gradients.
            transfers: What comes from where.

        Returns:
            One [1, 2] tensor a transfer.

        Raises:
            RankError: A peer has gone.
        """
        received = super().receive(stage, microbatch, is_gradient, transfers)
        here = time.monotonic_ns()
        # The clock of another machine cannot be compared: its message counts from its arrival.
        sent = [
            int(stamp[0, 0]) if int(stamp[0, 1]) == self._clock.clock else here
            for stamp, transfer in zip(received, transfers, strict=True)
            if transfer.peer != self._mesh.rank
        ]
        self._clock.arrive(sent, self.transfer_ns)
        return received
