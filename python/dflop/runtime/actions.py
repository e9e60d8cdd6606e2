"""Action lists: what a rank does in a step, in which order, and which messages it opens when.

    0F3  forward of microbatch 3 on stage 0
    0B3  its backward; or, in two parts:
    0I3  the gradient of what came in
    0W3  the gradients of the weights, at some time after

A list is the schedule's own or, where that has none, the plan's for its pipeline order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflop.runtime.failure import RankError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dflop._native import Action, Schedule
    from dflop.runtime.boundary import Transfer
    from dflop.runtime.mesh import Mesh
    from dflop.runtime.work import StepWork

_NEXT = {"F": "", "B": "F", "I": "F", "W": "I"}
"""What of a microbatch must have run just before a letter."""


@dataclass(frozen=True)
class Receive:
    """One message to come."""

    microbatch: int
    is_gradient: bool
    transfer: Transfer


@dataclass(frozen=True)
class StepActions:
    """What one rank does in one step."""

    actions: Sequence[Action]
    receives: Sequence[Sequence[Receive]]
    """By action: the messages to open when its turn to open comes, so that each is open before its use."""
    split: frozenset[int]
    """Microbatches whose backward runs as I and W."""


class ActionLists:
    """The lists of a run, of this rank and of those it receives from."""

    def __init__(self, mesh: Mesh) -> None:
        """Nothing read yet.

        Args:
            mesh: This rank's place.
        """
        self._mesh = mesh
        self._of_plan: dict[int, list[Action]] = {}

    def of_step(self, schedule: Schedule, work: StepWork) -> StepActions:
        """This rank's actions of a step, checked, with the messages to open at each.

        Messages of a peer are opened in the order in which the peer sends them, which may not be that of this
        rank's list: where messages have no tags (NCCL) the first that is sent is the first that is received.

        Args:
            schedule: Of the step.
            work: This rank's share of it.

        Returns:
            What the executor runs.

        Raises:
            RankError: A list, this rank's or a peer's, is not a forward and then a backward, whole or as I
                and W, of each microbatch; with step, rank and action.
        """
        num_microbatches = len(work.microbatches)
        own = self._checked(schedule, self._mesh.rank, num_microbatches)
        needed = [
            [Receive(action.microbatch, action.takes_gradient, t) for t in _incoming(action, work)]
            for action in own
        ]
        peers = {(r.transfer.peer, r.is_gradient) for receives in needed for r in receives}
        turns = {
            (peer, is_gradient): _turns(self._checked(schedule, peer, num_microbatches), is_gradient)
            for peer, is_gradient in peers
        }
        split = frozenset(action.microbatch for action in own if action.letter == "I")
        return StepActions(own, _in_order_of_senders(needed, turns), split)

    def _checked(self, schedule: Schedule, rank: int, num_microbatches: int) -> Sequence[Action]:
        plan = self._mesh.plan
        actions = schedule.actions(rank)
        if actions is None:
            if rank not in self._of_plan:
                self._of_plan[rank] = plan.actions(rank)
            actions = self._of_plan[rank]
        stage = plan.coordinates(rank)[2]
        check_actions(actions, schedule.step, rank, stage, num_microbatches)
        return actions


def check_actions(actions: Sequence[Action], step: int, rank: int, stage: int, num_microbatches: int) -> None:
    """Nothing if each microbatch has F and then B, or F, then I, then W, each once, all of the rank's stage.

    Args:
        actions: Of one rank.
        step: For the message.
        rank: For the message.
        stage: That the rank holds.
        num_microbatches: Of the step.

    Raises:
        RankError: The first action that breaks the rule, or the first microbatch that is not done.
    """
    where = f"the actions of step {step} on rank {rank}"
    done = [""] * num_microbatches
    for action in actions:
        if action.stage != stage:
            message = f"{where}: `{action}`, must be of its own stage {stage}"
            raise RankError(message)
        j = action.microbatch
        if j >= num_microbatches:
            message = f"{where}: `{action}`, the step has {num_microbatches} microbatches"
            raise RankError(message)
        if done[j] != _NEXT[action.letter]:
            before = f"comes after {done[j]}" if done[j] else "comes first"
            rule = "must be F, then B or I and W, each once"
            message = f"{where}: `{action}` {before} of its microbatch, {rule}"
            raise RankError(message)
        done[j] = action.letter
    for j, letter in enumerate(done):
        if letter not in ("B", "W"):
            left = "nothing of it" if letter == "" else f"no {'W' if letter == 'I' else 'backward'}"
            message = f"{where}: microbatch {j} is not done, there is {left}"
            raise RankError(message)


def _incoming(action: Action, work: StepWork) -> Sequence[Transfer]:
    """The messages that an action waits for."""
    microbatch = work.microbatches[action.microbatch]
    if action.letter == "W":
        return ()
    return microbatch.below if action.takes_gradient else microbatch.above


def _turns(actions: Sequence[Action], is_gradient: bool) -> dict[int, int]:
    """When a rank sends what it has of each microbatch, counted from its first."""
    sending = [a.microbatch for a in actions if a.letter != "W" and a.takes_gradient == is_gradient]
    return {microbatch: turn for turn, microbatch in enumerate(sending)}


def _in_order_of_senders(
    needed: Sequence[Sequence[Receive]], turns: Mapping[tuple[int, bool], Mapping[int, int]]
) -> list[list[Receive]]:
    """Which messages to open at each action: those that it needs, and those that peers send before them."""
    waiting: dict[tuple[int, bool], list[Receive]] = {key: [] for key in turns}
    for receives in needed:
        for receive in receives:
            waiting[receive.transfer.peer, receive.is_gradient].append(receive)
    # The next to open stands last.
    waiting = {
        key: sorted(receives, key=lambda r, turn=turns[key]: turn[r.microbatch], reverse=True)
        for key, receives in waiting.items()
    }
    opened: set[tuple[int, bool, int]] = set()
    posts: list[list[Receive]] = []
    for receives in needed:
        post: list[Receive] = []
        for receive in receives:
            peer, is_gradient = receive.transfer.peer, receive.is_gradient
            while (peer, is_gradient, receive.microbatch) not in opened:
                first = waiting[peer, is_gradient].pop()
                opened.add((peer, is_gradient, first.microbatch))
                post.append(first)
        posts.append(post)
    return posts
