"""Action lists: what a rank does in a step, in which order, and which messages it opens when.

    0F3  forward of microbatch 3 on stage 0
    0B3  its backward; or, in two parts:
    0I3  the gradient of what came into the stage
    0W3  the gradients of the weights, at some time after

Receives are opened ahead, so that a message moves while its rank computes: when the sender can have begun
what it sends, no earlier and no later (`Plan.openings`). A GPU may wait for all messages under way, for
example to load a kernel: for receives, which end when the sender has done its part, and for sends, which end
when their receives have opened. Opened so, no such waits make a circle (`docs/runtime.md`).

Each rank has one list a step. It comes from the schedule or, where the schedule has none, from the plan's
pipeline order. In a colocated layout a rank holds stage 0 and stage 1, and its list has the actions of both:
0F3 1F3 1B3 0B3. Where the LLM's stages are interleaved, a rank holds several of them, called its chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, compress
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING

from dflop.runtime.boundary import going
from dflop.runtime.failure import RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dflop._native import Action, Schedule
    from dflop.runtime.boundary import Transfer
    from dflop.runtime.mesh import Mesh
    from dflop.runtime.work import StepWork

_NEXT = {"F": "", "B": "F", "I": "F", "W": "I"}
"""By letter: which action of the same microbatch must come just before it on the stage; empty: none."""


@dataclass(frozen=True)
class Receive:
    """One message to come."""

    stage: int
    """The stage of this rank that the message comes to."""
    microbatch: int
    is_gradient: bool
    transfer: Transfer

    @property
    def sender(self) -> tuple[int, int]:
        """The stage of the peer that sends it, and the microbatch."""
        return self.stage + (1 if self.is_gradient else -1), self.microbatch


@dataclass(frozen=True)
class StepActions:
    """What one rank does in one step."""

    actions: Sequence[Action]
    receives: Sequence[Sequence[Receive]]
    """For each action, the receives to open just before it."""
    split: frozenset[tuple[int, int]]
    """(stage, microbatch) of each backward that runs as I and W."""


class ActionLists:
    """The action lists of this rank and of the ranks it receives from."""

    def __init__(self, mesh: Mesh) -> None:
        """Nothing read yet.

        Args:
            mesh: This rank's coordinates.
        """
        self._mesh = mesh
        self._of_plan: dict[int, list[Action]] = {}

    def of_step(self, schedule: Schedule, work: StepWork, *, is_evaluated: bool = False) -> StepActions:
        """This rank's actions of a step, checked, with the messages to open at each.

        Messages of a peer are opened in the order in which the peer sends them, which may not be that of this
        rank's list: where messages have no tags (NCCL) the first that is sent is the first that is received.

        Args:
            schedule: Of the step.
            work: This rank's share of it.
            is_evaluated: Whether only forwards run. They keep their order in the list, which is safe: what a
                forward waits for comes before it in that order, too.

        Returns:
            What the executor runs.

        Raises:
            RankError: A list, this rank's or a peer's, does not have for each microbatch a forward and then a
                backward (B, or I and W); an action needs the result of an action that comes later on this
                rank; or, where ranks meet in each action (ZeRO-3, dealt experts), two ranks have different
                lists or a list has I and W. The message names step, rank and action.
            ScheduleError: The lists of all ranks cannot be run, for example since ranks wait in a circle; the
                message names two of them.
        """
        num_microbatches = schedule.num_microbatches
        own = self._checked(schedule, self._mesh.rank, num_microbatches)
        self._check_results_of_own(schedule.step, own, work)
        if self._mesh.plan.meets_in_layers:
            self._check_meetings(schedule, own, num_microbatches)
        forwards = [action.letter == "F" for action in own]
        if is_evaluated:
            own = list(compress(own, forwards))
        needed = [
            [
                Receive(action.stage, action.microbatch, action.takes_gradient, transfer)
                for transfer in _incoming(action, work)
                if transfer.peer != self._mesh.rank
            ]
            for action in own
        ]
        peers = {(r.transfer.peer, r.is_gradient) for receives in needed for r in receives}
        turns = {
            (peer, is_gradient): _turns(self._checked(schedule, peer, num_microbatches), is_gradient)
            for peer, is_gradient in peers
        }
        openings = self._openings(schedule)
        if is_evaluated:
            # Of the actions that come before, those that run.
            openings = [
                {group: (sum(forwards[:before]), start) for group, (before, start) in of_action.items()}
                for of_action in compress(openings, forwards)
            ]
        split = frozenset((action.stage, action.microbatch) for action in own if action.letter == "I")
        return StepActions(own, _opened(needed, openings, turns, self._mesh.plan.group), split)

    def _openings(self, schedule: Schedule) -> Sequence[Mapping[int, tuple[int, int]]]:
        """See `Plan.openings`, of this rank."""
        return self._mesh.plan.openings(schedule, self._mesh.rank)

    def _check_results_of_own(self, step: int, own: Sequence[Action], work: StepWork) -> None:
        """Raises if a stage of this rank takes a result of another stage of this rank before it is there."""
        done: set[tuple[int, int, bool]] = set()
        for action in own:
            if any(transfer.peer == self._mesh.rank for transfer in _incoming(action, work)):
                giver = action.stage + (1 if action.takes_gradient else -1)
                if (giver, action.microbatch, action.takes_gradient) not in done:
                    what = f"`{giver}{'B' if action.takes_gradient else 'F'}{action.microbatch}`"
                    where = f"the actions of step {step} on rank {self._mesh.rank}"
                    message = f"{where}: `{action}` takes what {what} gives, must come after it"
                    raise RankError(message)
            if action.letter != "W":
                done.add((action.stage, action.microbatch, action.takes_gradient))

    def _check_meetings(self, schedule: Schedule, own: Sequence[Action], num_microbatches: int) -> None:
        """Raises unless this rank has the list of rank 0, with whole backwards: ranks meet in each action."""
        where = f"the actions of step {schedule.step}"
        why = "dealt experts" if self._mesh.plan.expert_parallel_degree > 1 else "ZeRO-3"
        for position, (a, b) in enumerate(
            zip(self._checked(schedule, 0, num_microbatches), own, strict=True)
        ):
            if a != b:
                message = f"{where}: number {position} is `{a}` on rank 0 and `{b}` on rank {self._mesh.rank}"
                raise RankError(message + f", must be equal where ranks meet in each action ({why})")
            if b.letter in ("I", "W"):
                message = (
                    f"{where}: `{b}`, must be a whole backward (B) where ranks meet in each action ({why})"
                )
                raise RankError(message)

    def _checked(self, schedule: Schedule, rank: int, num_microbatches: int) -> Sequence[Action]:
        plan = self._mesh.plan
        actions = schedule.actions(plan.group(rank))
        if actions is None:
            if rank not in self._of_plan:
                self._of_plan[rank] = plan.actions(rank)
            actions = self._of_plan[rank]
        check_actions(actions, schedule.step, rank, plan.stages(rank), num_microbatches)
        return actions


def check_actions(
    actions: Sequence[Action], step: int, rank: int, stages: Sequence[int], num_microbatches: int
) -> None:
    """Raises unless each microbatch has F and then B, or F, then I, then W, each once.

    That holds on each stage of the rank; an action of any other stage is an error.

    Args:
        actions: Of one rank.
        step: For the message.
        rank: For the message.
        stages: That the rank holds.
        num_microbatches: Of the step.

    Raises:
        RankError: The first action that breaks the rule, or the first microbatch that is not done.
    """
    where = f"the actions of step {step} on rank {rank}"
    done = {(stage, j): "" for stage in stages for j in range(num_microbatches)}
    for action in actions:
        if action.stage not in stages:
            names = f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"
            message = f"{where}: `{action}`, must be of its own {names}"
            raise RankError(message)
        j = action.microbatch
        if j >= num_microbatches:
            message = f"{where}: `{action}`, the step has {num_microbatches} microbatches"
            raise RankError(message)
        before = done[action.stage, j]
        if before != _NEXT[action.letter]:
            place = f"comes after {before}" if before else "comes first"
            rule = "must be F, then B or I and W, each once"
            message = f"{where}: `{action}` {place} of its microbatch, {rule}"
            raise RankError(message)
        done[action.stage, j] = action.letter
    for (stage, j), letter in done.items():
        if letter not in ("B", "W"):
            left = "nothing of it" if letter == "" else f"no {'W' if letter == 'I' else 'backward'}"
            place = f" on stage {stage}" if len(stages) > 1 else ""
            message = f"{where}: microbatch {j} is not done{place}, there is {left}"
            raise RankError(message)


def _incoming(action: Action, work: StepWork) -> Sequence[Transfer]:
    """The messages that an action waits for."""
    if action.letter == "W":
        return ()
    microbatch = work.of(action)
    return going(microbatch.below if action.takes_gradient else microbatch.above, action.takes_gradient)


def _turns(actions: Sequence[Action], is_gradient: bool) -> dict[tuple[int, int], int]:
    """By (stage, microbatch): its place among the rank's actions that send rows, or gradients."""
    sending = [a for a in actions if a.letter != "W" and a.takes_gradient == is_gradient]
    return {(action.stage, action.microbatch): turn for turn, action in enumerate(sending)}


def _opened(
    needed: Sequence[Sequence[Receive]],
    openings: Sequence[Mapping[int, tuple[int, int]]],
    turns: Mapping[tuple[int, bool], Mapping[tuple[int, int], int]],
    group_of: Callable[[int], int],
) -> list[list[Receive]]:
    """For each action, the receives to open just before it.

    Args:
        needed: Those that each action needs.
        openings: For each action, by the group of the peer: how many actions of this rank come before the
            receive opens, and when the peer begins what it sends. Of a group that is not there the receive
            opens just before the action, the last.
        turns: By peer and direction, the order in which the peer sends.
        group_of: The group of a rank.

    Returns:
        The same receives, at each action in the order in which the peers begin what they send. So those of
        one peer and direction are in the order in which the peer sends them.
    """
    ways: dict[tuple[int, bool], list[tuple[int, Receive]]] = {key: [] for key in turns}
    for position, receives in enumerate(needed):
        for receive in receives:
            ways[receive.transfer.peer, receive.is_gradient].append((position, receive))
    opened: list[list[tuple[float, int, Receive]]] = [[] for _ in needed]
    for key, way in ways.items():
        group = group_of(key[0])
        way.sort(key=lambda one, turn=turns[key]: turn[one[1].sender])
        # What is sent before a message is opened before it, even if it is needed later. So it does not wait
        # for other inputs of the action that needs it.
        latest = reversed(list(accumulate((at for at, _ in reversed(way)), min)))
        place = 0
        for (position, receive), last in zip(way, latest, strict=True):
            num_before, start = openings[position].get(group, (position, inf))
            place = max(place, min(num_before, last))
            opened[place].append((start, key[0], receive))
    # Sorting keeps the order of a way: its peer begins one message after the other.
    return [[receive for *_, receive in sorted(at, key=itemgetter(0, 1))] for at in opened]
