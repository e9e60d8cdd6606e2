"""The start of a step: all ranks pack their share, and show each other what they are about to do.

pack --> agree --nobody has a bad sample--> ready
^        |
+- mend -+  a rank has one: the turn is changed, in the same way on all ranks
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflop.models.recipes import trains_tower
from dflop.runtime.agreement import Agreement, Statement, agree
from dflop.runtime.failure import RankError
from dflop.runtime.work import encoder_shares, prepare

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dflop._native import Dataset
    from dflop.data.loader import SampleLoader
    from dflop.runtime.actions import StepActions
    from dflop.runtime.bad_samples import BadSamples
    from dflop.runtime.executor import Executor
    from dflop.runtime.mesh import Mesh
    from dflop.runtime.turns import Turn
    from dflop.runtime.work import Packed, StepWork


@dataclass(frozen=True)
class Ready:
    """A step that all ranks may start."""

    turn: Turn
    """The turn that trains, without bad samples."""
    work: StepWork
    actions: StepActions
    data_wait_ns: int
    """Time that this rank spent on packing, waiting for media included."""


class Packer:
    """Packs the samples of one dataset on one rank."""

    def __init__(
        self,
        mesh: Mesh,
        dataset: Dataset,
        loader: SampleLoader,
        bad: BadSamples,
        dtype: torch.dtype,
        recipe: str,
    ) -> None:
        """Nothing packed.

        Args:
            mesh: This rank's coordinates.
            dataset: The samples.
            loader: Reads them.
            bad: What becomes of those that cannot be read.
            dtype: Of the model.
            recipe: What trains.
        """
        self._trains_tower = trains_tower(recipe)
        self._mesh = mesh
        self._dataset = dataset
        self._loader = loader
        self._adapter = loader.adapter
        self._bad = bad
        self._dtype = dtype

    def pack(
        self,
        turn: Turn,
        executor: Executor,
        stop: Callable[[], int],
        *,
        step: int | None = None,
        is_evaluated: bool = False,
        save_failed: bool = False,
        lap: Callable[[str], None] = lambda _: None,
    ) -> tuple[Ready | None, Agreement]:
        """Prepares this rank's work of a turn. Every rank must call it; blocks until all have packed.

        Args:
            turn: As it was drawn.
            executor: Makes lists of actions.
            stop: Gives the number of a signal that tells this process to stop, or 0.
            step: Step number that the ranks compare; none: that of the turn.
            is_evaluated: Whether only forwards will run.
            save_failed: Whether the checkpoint that this rank was writing has failed.
            lap: Called with the name of a part of the clock when it has ended; see `Clock.lap`.

        Returns:
            The step that may start, or none where some rank shall stop; and what the ranks agreed on.

        Raises:
            RankError: Ranks differ, too many samples are bad, or no sample that is left has a label token.
            ProfileError: A sample is not what was profiled or, under `fail`, cannot be read.
        """
        packed: Packed = {}
        drawn, data_wait_ns = set(encoder_shares(self._mesh, turn.schedule, self._adapter)), 0
        while True:
            began_ns = time.monotonic_ns()
            if not is_evaluated:
                _check_labels(turn)
            bad = self._bad.pack(turn.schedule, self._loader, self._dtype, packed)
            work = actions = None
            if not bad:
                sample, tiles = self._loader.sample, self._loader.tiles
                dtype, adapter = self._dtype, self._adapter
                work = prepare(
                    self._mesh,
                    turn.schedule,
                    sample,
                    tiles,
                    dtype,
                    adapter,
                    packed,
                    trains_tower=self._trains_tower,
                )
                actions = executor.prepare(work, turn.schedule, is_evaluated=is_evaluated)
            statement = Statement(
                step=turn.step if step is None else step,
                schedule=turn.schedule.digest(),
                samples=self._dataset.digest(turn.samples),
                num_targets=0 if work is None else work.num_targets,
                stop=stop(),
                save_failed=save_failed,
                num_bad=len(bad),
            )
            data_wait_ns += time.monotonic_ns() - began_ns
            lap("pack")
            agreement = agree(self._mesh, statement, turn.schedule.label_tokens)
            lap("agree")
            if agreement.stop:
                return None, agreement
            if not agreement.is_bad:
                break
            turn = self._bad.mend(turn, bad)
        self._loader.forget(drawn - set(encoder_shares(self._mesh, turn.schedule, self._adapter)))
        self._bad.count(turn)
        assert work is not None, "all ranks have packed"
        assert actions is not None, "what is packed has actions"
        return Ready(turn, work, actions, data_wait_ns), agreement


def _check_labels(turn: Turn) -> None:
    """Raises, on every rank alike, where nothing can be learned from a turn."""
    if turn.schedule.label_tokens > 0:
        return
    if turn.bad:
        one = turn.bad[0]
        message = (
            f"all samples of step {turn.step} that have label tokens are bad, nothing to learn from; one of "
            f"them: {one.cause}"
        )
        hint = "mend the file, and go on with `--resume auto`; or take the sample out of the mixture"
    else:
        message = f"the global batch of step {turn.step} has no label tokens, nothing to learn from"
        hint = "take samples without an answer out of the mixture, or raise `train.global_batch_size`"
    raise RankError(message, hint, is_of_all=True)
