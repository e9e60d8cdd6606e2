"""Runs the action list of this rank: the very list the simulator timed, in its order, deciding nothing.

    F of microbatch j:  receive above[j] -> stage.forward  -> send below[j]
    B of microbatch j:  receive gradients of below[j] -> stage.backward -> send gradients of above[j]

Receives are opened a few actions ahead, so that a message moves while this rank computes. A microbatch of
which this rank has no sample does nothing and sends nothing, and its peers know that from the schedule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflop.runtime.messages import Messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from dflop.runtime.mesh import Mesh
    from dflop.runtime.spans import SpanRecorder
    from dflop.runtime.stage import Stage
    from dflop.runtime.work import StepWork

_ACTION = re.compile(r"(\d+)([FB])(\d+)")


@dataclass(frozen=True)
class Action:
    """One cell of the step on this rank."""

    name: str
    is_backward: bool
    microbatch: int


def parse_actions(names: Sequence[str], stage: int) -> list[Action]:
    """The actions in words.

    Args:
        names: As in `0F3`.
        stage: That of this rank; all actions must be of it.

    Returns:
        One action a name, in order.

    Raises:
        ValueError: An action of another stage, or of a kind this runtime does not run.
    """
    actions: list[Action] = []
    for name in names:
        match = _ACTION.fullmatch(name)
        if match is None or int(match[1]) != stage:
            message = f"action `{name}` on stage {stage}, this runtime runs F and B of its own stage"
            raise ValueError(message)
        actions.append(Action(name, match[2] == "B", int(match[3])))
    return actions


class Executor:
    """One rank at work."""

    def __init__(
        self,
        mesh: Mesh,
        stage: Stage,
        recorder: SpanRecorder,
        width: int,
        dtype: torch.dtype,
        num_ahead: int = 4,
    ) -> None:
        """Ready for the first step.

        Args:
            mesh: This rank's place.
            stage: Its piece.
            recorder: Takes the span of each action.
            width: D of features and hidden states.
            dtype: Of features and hidden states.
            num_ahead: Actions whose receives are open at a time, the running one included; at least 1.
        """
        self._mesh = mesh
        self._stage = stage
        self._recorder = recorder
        self._messages = Messages(mesh, width, dtype)
        self._actions = parse_actions(mesh.plan.actions(mesh.rank), mesh.stage)
        self._num_ahead = num_ahead
        self.running: str | None = None
        """The action under way, for error messages; none between steps."""

    def run_step(self, work: StepWork, watch: Callable[[str], None] | None = None) -> float:
        """Runs all actions; the gradients of this rank's samples are in `.grad` after it.

        Every rank must call it with the work of the same schedule; sends features, hidden states and their
        gradients to the ranks that hold the same samples; blocks.

        Args:
            work: This rank's share of the step.
            watch: Called with the name of each action before it runs.

        Returns:
            This rank's share of the loss: 0 where it does not compute the loss.

        Raises:
            ValueError: The action list is not one forward and one backward a microbatch of the step.
            RankError: A peer stopped; the message names it.
        """
        expected = len(work.microbatches)
        if len(self._actions) != 2 * expected:
            message = f"the schedule has {expected} microbatches, the plan {len(self._actions) // 2}"
            raise ValueError(message)
        self._stage.begin()
        # Opening the first receives belongs to the first action, should a peer have gone by then.
        self.running = self._actions[0].name if self._actions else None
        for position in range(min(self._num_ahead, len(self._actions))):
            self._post(self._actions[position], work)
        for position, action in enumerate(self._actions):
            self.running = action.name
            if watch is not None:
                watch(action.name)
            self._run(action, work)
            if position + self._num_ahead < len(self._actions):
                self._post(self._actions[position + self._num_ahead], work)
        self.running = None
        self._messages.finish()
        return self._stage.loss

    def _post(self, action: Action, work: StepWork) -> None:
        microbatch = work.microbatches[action.microbatch]
        transfers = microbatch.below if action.is_backward else microbatch.above
        self._messages.post(action.microbatch, action.is_backward, transfers)

    def _run(self, action: Action, work: StepWork) -> None:
        j = action.microbatch
        microbatch = work.microbatches[j]
        if microbatch.batch is None:
            self._messages.receive(j, action.is_backward, [])
            self._recorder.add(action.name, self._recorder.now())
            return
        if action.is_backward:
            received = self._messages.receive(j, True, microbatch.below)
            start = self._recorder.now()
            gradient = self._messages.joined(received, microbatch.below) if microbatch.below else None
            outgoing = self._stage.backward(j, gradient)
        else:
            received = self._messages.receive(j, False, microbatch.above)
            start = self._recorder.now()
            incoming = (
                None
                if self._mesh.component == "encoder"
                else self._messages.joined(received, microbatch.above)
            )
            outgoing = self._stage.forward(j, microbatch.batch, incoming, work.label_tokens)
        self._recorder.add(action.name, start)
        if outgoing is not None:
            transfers = microbatch.above if action.is_backward else microbatch.below
            self._messages.send(j, action.is_backward, outgoing, transfers)
