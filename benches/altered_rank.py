"""A rank of a training run that is altered for `benches/adapt.py`: slow samples, and steps in turns.

Usage, under torchrun: ALTERED=REQUEST.json torchrun ... benches/altered_rank.py train ...

The rank is that of `dflop train`, with its model, media and messages; only the loop over the steps is
another. The request says which:

slow        {"slow": [[share, times], ...], "steps": 32, "counted": 16}
            For each pair nothing is known at first. Every step is trained with corrected schedules, and its
            actions with slow samples sleep as long as `dflop rehearse --slow-shapes` would have them take
            longer. From step `counted` on the same batch is also trained as if correction were off, and
            without slow samples.
monitoring  {"monitored": 48}
            Every batch is trained twice, with and without all that is measured and written of a step.
equal       {"equal": 64}
            Between two steps of the run the batch of step 0 is trained, scheduled as the first time.

The leader writes what it found to the path `out` of the request. `dflop train` itself has no such switch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop import __main__
from dflop._native import StepScheduler
from dflop.runtime import rank as process
from dflop.runtime.adaptation import Adaptation
from dflop.runtime.records import step_metrics
from dflop.runtime.spans import RankSpans, align
from dflop.runtime.trainer import Trainer
from dflop.runtime.turns import Turn
from dflop.runtime.work import read_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dflop._native import Schedule, SlowShapes
    from dflop.runtime.stage import Stage
    from dflop.runtime.writer import RankReport

ASKED: dict[str, Any] = json.loads(Path(os.environ["ALTERED"]).read_text())


def added_ns(scheduler: StepScheduler, schedule: Schedule, slow: SlowShapes, of_rank: int) -> dict[str, int]:
    """What slow samples add to the actions of a rank, by the name of the action."""
    spans, slowed = (scheduler.predicted_spans(schedule, shapes)[0] for shapes in (None, slow))
    usual = {(rank, action): end - start for rank, action, start, end in spans}
    return {
        action: end - start - usual[rank, action]
        for rank, action, start, end in slowed
        if rank == of_rank and end - start > usual[rank, action]
    }


class Sleeper:
    """Has the actions of one rank sleep after they have computed, before their messages leave."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        """Puts itself around forward and backward of each stage."""
        self.more_ns: dict[str, int] = {}
        """By action; one that is not there does not sleep."""
        for index, stage in stages.items():
            for letter, name in (("F", "forward"), ("B", "backward")):
                setattr(stage, name, self._around(f"{index}{letter}", getattr(stage, name)))

    def _around(self, start: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def slow(microbatch: int, *arguments: Any, **named: Any) -> Any:
            outgoing = act(microbatch, *arguments, **named)
            time.sleep(self.more_ns.get(f"{start}{microbatch}", 0) / 1e9)
            return outgoing

        return slow


class Noted:
    """Stands for the writer of a run: notes what a step took, and has the scheduler learn from it."""

    def __init__(self, trainer: AlteredTrainer) -> None:
        """Nothing noted yet."""
        self._trainer = trainer
        self.step_ns = 0
        self.corrected_ns: int | None = None
        """What was predicted of the step from those before it; none where it was not learned from."""
        self.events: list[dict[str, Any]] = []

    def write(self, turn: Turn, norm: float, reports: list[RankReport], clock_ns: dict[str, int]) -> None:
        """A step has ended; see `StepWriter.write`."""
        del norm, clock_ns
        spans, _, self.step_ns = align([report.spans for report in reports])
        trainer = self._trainer
        self.corrected_ns = None
        if not trainer.learns:
            return
        schedules, mesh = trainer._schedules, trainer._mesh
        assert schedules.scheduler is not None
        metrics, events = step_metrics(
            schedules.scheduler,
            trainer._dataset,
            turn,
            spans,
            self.step_ns,
            mesh.num_ranks,
            max(report.data_wait_ns for report in reports),
            schedules.adaptation,
        )
        self.corrected_ns = metrics["corrected_ns"]
        self.events += [{"step": turn.step, **event} for event in events]


class AlteredTrainer(Trainer):
    """One rank of the altered run."""

    learns = True
    """Whether the scheduler learns from the step under way."""

    def _run_turns(self) -> bool:
        if "slow" in ASKED:
            found: Any = self._slow()
        elif "equal" in ASKED:
            found = self._equal(ASKED["equal"])
        else:
            found = self._monitored(ASKED["monitored"])
        if self._mesh.is_leader:
            Path(ASKED["out"]).write_text(json.dumps(found))
        return True

    def _turn(self, step: int, *, is_corrected: bool) -> Turn:
        """The turn of a step, its schedule made now."""
        schedules, arm = self._schedules, self._options.arm
        held = schedules.adaptation
        if not is_corrected:
            schedules.adaptation = None
        schedules.submit(step, arm)
        taken = schedules.take(step, arm)
        schedules.adaptation = held
        self._decode(taken.schedule)
        samples = self._batches.batch(step)
        return Turn(
            step, arm, None, True, samples, taken.schedule, 0, [], taken.correction, taken.compared_ns
        )  # fmt: skip

    def _decode(self, schedule: Schedule) -> None:
        """Decodes before a step, so that no way to train it waits for media."""
        samples = read_samples(self._mesh, schedule, self._loader.adapter)
        self._loader.fill([(sample, None) for sample in samples], False)
        self._loader.fill(self._shares(schedule), True)

    def _slow(self) -> list[dict[str, Any]]:
        options, sleeper = self._options, Sleeper(self._stages)
        # Each rank has one: the run's own stands on the leader alone.
        scheduler = StepScheduler(
            options.plan_path, options.data_profile_path, options.model_profile_path, options.seed
        )
        usual = scheduler.schedule(0, self._batches.batch(0), options.arm)
        rows: list[dict[str, Any]] = []
        of_run = self._schedules.scheduler
        watched = None if of_run is None else of_run.watched()
        for share, times in ASKED["slow"]:
            slow = scheduler.slow_shapes(usual, share, times, options.seed)
            if of_run is not None and watched is not None:
                of_run.correct_by([], ([], []))
                of_run.watch_from(watched)
                self._schedules.adaptation = Adaptation("auto")
            noted = Noted(self)
            if self._mesh.is_leader:
                self._writer = noted  # pyright: ignore[reportAttributeAccessIssue]
            steps_ns: dict[str, list[int]] = {"auto": [], "off": [], "quiet": []}
            for step in range(ASKED["steps"]):
                ways = ["auto", "off", "quiet"] if step >= ASKED["counted"] else ["auto"]
                # Another one comes first each time.
                ways = ways[step % len(ways) :] + ways[: step % len(ways)]
                for way in ways:
                    self.learns = way == "auto"
                    turn = self._turn(step, is_corrected=self.learns)
                    sleeper.more_ns = (
                        {} if way == "quiet" else added_ns(scheduler, turn.schedule, slow, self._mesh.rank)
                    )
                    assert self._train(turn)
                    if step >= ASKED["counted"]:
                        steps_ns[way].append(noted.step_ns)
            row = {
                "share": share,
                "times": times,
                "slow_samples": slow.num_samples,
                "added_ms": [slow.forward_ns / 1e6, slow.backward_ns / 1e6],
                "steps_ns": steps_ns,
                "events": noted.events,
            }
            rows.append(row)
            if self._mesh.is_leader:
                print(
                    f"slept: {100 * share:g} % of the samples, {times:g} times", file=sys.stderr, flush=True
                )
        return rows

    def _equal(self, num_rounds: int) -> dict[str, Any]:
        noted = Noted(self)
        if self._mesh.is_leader:
            self._writer = noted  # pyright: ignore[reportAttributeAccessIssue]
        equal = self._turn(0, is_corrected=False)
        equal_ns: list[int] = []
        steps: list[tuple[int, int | None]] = []
        for step in range(num_rounds):
            turn = self._turn(step, is_corrected=False)
            self.learns = True
            assert self._train(turn)
            steps.append((noted.step_ns, noted.corrected_ns))
            self.learns = False
            self._decode(equal.schedule)
            assert self._train(equal)
            equal_ns.append(noted.step_ns)
        return {"steps": steps, "equal_ns": equal_ns}

    def _monitored(self, num_rounds: int) -> dict[str, Any]:
        recorder, writer = self._recorder, self._writer
        counted = Counted(recorder, writer)
        steps_ns: dict[str, list[int]] = {"on": [], "off": []}
        monitoring_ns: list[int] = []
        for step in range(num_rounds):
            # on off | off on: a machine that becomes slower in the meantime is no cost of monitoring.
            for way in ("on", "off") if step % 2 == 0 else ("off", "on"):
                turn = self._turn(step, is_corrected=True)
                own = counted if way == "on" else Unmonitored(recorder)
                self._recorder = self._executor._recorder = own  # pyright: ignore[reportAttributeAccessIssue]
                if writer is not None:
                    self._writer = own  # pyright: ignore[reportAttributeAccessIssue]
                counted.spent_ns, began_ns = 0, time.perf_counter_ns()
                assert self._train(turn)
                steps_ns[way].append(time.perf_counter_ns() - began_ns)
                if way == "on":
                    monitoring_ns.append(counted.spent_ns)
        return {"steps_ns": steps_ns, "monitoring_ns": monitoring_ns}


class Counted:
    """The recorder and the writer of a run, with the time that they take."""

    def __init__(self, recorder: Any, writer: Any) -> None:
        """Of those two; a rank that is not the leader has no writer."""
        self._recorder, self._writer = recorder, writer
        self.spent_ns = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of either, timed."""
        act = getattr(self._writer if name == "write" else self._recorder, name)

        def timed(*arguments: Any) -> Any:
            began_ns = time.perf_counter_ns()
            try:
                return act(*arguments)
            finally:
                self.spent_ns += time.perf_counter_ns() - began_ns

        return timed


class Unmonitored:
    """A recorder that records nothing, and a writer that writes nothing."""

    def __init__(self, recorder: Any) -> None:
        """In place of one that does."""
        self._nothing = dataclasses.replace(_EMPTY, rank=recorder._rank)

    def begin(self) -> None:
        """A step begins."""

    def now(self) -> int:
        """No moment."""
        return 0

    def add(self, action: str, start: int) -> None:
        """An action has ended."""

    def finish(self) -> RankSpans:
        """No spans."""
        return self._nothing

    def write(self, *arguments: object) -> None:
        """A step has ended."""


_EMPTY = RankSpans(0, "", 0, (), (0, 0))


if __name__ == "__main__":
    # The rank makes its trainer by this name, which it does not export.
    process.Trainer = AlteredTrainer  # pyright: ignore[reportPrivateImportUsage]
    sys.exit(__main__.main())
