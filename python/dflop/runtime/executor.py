"""Runs the action list of this rank: the very list the simulator timed, in its order, deciding nothing.

    F of microbatch j:  receive above[j] -> stage.forward  -> send below[j]
    B of microbatch j:  receive gradients of below[j] -> stage.backward -> send gradients of above[j]
    I of microbatch j:  as B, but for the gradients of the weights, which W of j computes

A rank holds one stage. It holds several stages of the LLM where they are interleaved, and the encoder and the
LLM in a colocated layout; what its stages hand to each other stays on the rank. Receives are opened
ahead, so that a message moves while this rank computes. For a microbatch of which this rank has no
sample, it computes nothing and sends nothing; its peers know that from the schedule. Where ranks meet in each
action (ZeRO-3, dealt experts), the rank still takes part in what they do together.

Lists that the simulator accepts cannot hang. It accepts them only if all actions of all ranks can be put in
one order, in which each action comes after its inputs and after the earlier actions of its rank. Suppose that
a step hangs, and take the first action of that order that has not ended. All earlier actions of its rank have
ended, so the rank has come to it. The actions that give its inputs have ended too, so they have sent: a send
returns at once, whether or not the receiver has opened its receive. This rank has opened the receives of the
action, since opening waits for nobody. So the messages arrive and the action ends, against what was supposed.
On a GPU a rank may also wait for every message under way, its sends too: `actions.py` says when they open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.runtime.actions import ActionLists, StepActions
from dflop.runtime.boundary import going

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from dflop._native import Action, Schedule
    from dflop.runtime.mesh import Mesh
    from dflop.runtime.messages import Messages
    from dflop.runtime.spans import SpanRecorder
    from dflop.runtime.stage import Stage
    from dflop.runtime.work import StepWork


class Executor:
    """One rank at work."""

    def __init__(
        self,
        mesh: Mesh,
        stages: Mapping[int, Stage],
        recorder: SpanRecorder,
        messages: Messages,
    ) -> None:
        """Ready for the first step.

        Args:
            mesh: This rank's coordinates.
            stages: Its pieces, by stage.
            recorder: Takes the span of each action.
            messages: Its traffic with other ranks.
        """
        self._stages = stages
        self._recorder = recorder
        self._messages = messages
        self._lists = ActionLists(mesh)
        # All ranks of a tensor group compute the same loss; only the first of them reports it.
        self._says_loss = mesh.tensor == 0
        self.running: str | None = None
        """The action under way, for error messages; none between steps."""

    def prepare(self, work: StepWork, schedule: Schedule, *, is_evaluated: bool = False) -> StepActions:
        """What this rank will do in a step; to be asked before the step starts.

        Args:
            work: This rank's share of the step.
            schedule: Of the step.
            is_evaluated: Whether to run the forwards alone.

        Returns:
            The actions, for `run_step`.

        Raises:
            RankError: A list cannot be run; see `ActionLists.of_step`.
        """
        return self._lists.of_step(schedule, work, is_evaluated=is_evaluated)

    def run_step(
        self, work: StepWork, steps: StepActions, watch: Callable[[str], None] | None = None
    ) -> float:
        """Runs all actions; the gradients of this rank's samples are in `.grad` after it.

        Every rank must call it with the work of the same schedule; sends features, hidden states and their
        gradients to the ranks that hold the same samples; blocks.

        Args:
            work: This rank's share of the step.
            steps: As `prepare` gave it for this work.
            watch: Called with the name of each action before it runs.

        Returns:
            This rank's share of the loss; 0 where it computes none, or is not the first rank of its tensor
            group.

        Raises:
            RankError: A peer stopped; the message names it.
        """
        actions, receives = steps.actions, steps.receives
        for stage in self._stages.values():
            stage.begin()
        # Should a peer have gone already, opening the first receives fails: the error names the first action.
        self.running = actions[0].name if actions else None
        if actions:
            self._messages.post(receives[0])
        for next_position, action in enumerate(actions, start=1):
            self.running = action.name
            if watch is not None:
                watch(action.name)
            start = self._run(action, work, (action.stage, action.microbatch) in steps.split)
            if next_position < len(actions):
                self._messages.post(receives[next_position])
            # Handing over messages and freeing memory belong to the span of the action, since they keep the
            # rank busy: the simulator knows of no time between two actions.
            self._recorder.add(action.name, start)
        self.running = None
        self._messages.finish()
        return sum(stage.loss for stage in self._stages.values()) if self._says_loss else 0.0

    def _run(self, action: Action, work: StepWork, is_split: bool) -> int | torch.cuda.Event:
        """Runs one action. Gives the moment when it had all its inputs, at which its span starts."""
        j = action.microbatch
        stage, microbatch = self._stages[action.stage], work.of(action)
        if microbatch.batch is None or action.letter == "W":
            start = self._recorder.now()
            if microbatch.is_elsewhere:
                stage.pass_by(action.takes_gradient, j, microbatch.recompute)
            elif microbatch.batch is not None:
                stage.weights(j)
            return start
        if action.takes_gradient:
            below = going(microbatch.below, is_gradient=True)
            received = self._messages.receive(action.stage, j, True, below)
            start = self._recorder.now()
            gradient = self._messages.joined(action.stage, True, received, below) if below else None
            outgoing = stage.backward(j, gradient)
        else:
            above = going(microbatch.above, is_gradient=False)
            received = self._messages.receive(action.stage, j, False, above)
            start = self._recorder.now()
            is_first = action.stage == 0
            incoming = None if is_first else self._messages.joined(action.stage, False, received, above)
            outgoing = stage.forward(
                j, microbatch.batch, incoming, work.label_tokens, is_split, microbatch.recompute
            )
        if outgoing is not None:
            transfers = microbatch.above if action.takes_gradient else microbatch.below
            is_gradient = action.takes_gradient
            self._messages.send(action.stage, j, is_gradient, outgoing, going(transfers, is_gradient))
        return start
