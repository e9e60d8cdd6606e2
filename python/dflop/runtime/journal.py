"""What a run writes, on the leader: a line a step in several files, numbers for trackers, progress on stderr.

Every line is written when its step ends, so a run that is stopped leaves all steps that it finished. Files of
an earlier run are left alone until the first step has ended: a run that fails before that destroys nothing. A
run that goes on from a checkpoint adds lines to the files of its directory (`resume.py`).
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dflop._native import write_text
from dflop.runtime.resume import clear, cut_back

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dflop.runtime.trackers import Trackers


FILES = ("metrics", "trace", "schedules", "events")
"""Files with a line a step, `.jsonl`."""
RARE_FILES = ("memory", "evaluations", "bad_samples")
"""Files that are made only when they get their first line, `.jsonl`."""
_BAD_SHOWN = 5
"""How many bad samples are named on stderr one by one."""


class Lines:
    """A file that holds whole lines only: a line that the disk has no room for is removed again."""

    def __init__(self, path: Path, *, is_new: bool = True) -> None:
        """Opens the file.

        Args:
            path: Of the file.
            is_new: Whether it begins empty; else lines are added to those it has.

        Raises:
            OSError: It cannot be written.
        """
        self._path = path
        # No buffer: closing the file would try once more to write a line that has failed.
        self._file = path.open("wb" if is_new else "ab", buffering=0)
        self._num_bytes = 0 if is_new else self._file.tell()

    def add(self, record: dict[str, Any]) -> None:
        """Writes a record as a line.

        Args:
            record: Of the step.

        Raises:
            OSError: The disk is full, or gone; the error names the file, which ends as before.
        """
        left = memoryview((json.dumps(record) + "\n").encode())
        num_bytes = len(left)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            # A device such as /dev/null has no size that could be set.
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), self._num_bytes)
            # A full disk does not say which file it had no room for.
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._num_bytes += num_bytes

    def sync(self) -> None:
        """Waits until the disk has what was written; a device has nothing to wait for."""
        with suppress(OSError):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; every line has been written before."""
        self._file.close()


class Journal:
    """The files of one run."""

    def __init__(
        self,
        out: Path,
        num_turns: int,
        request: Path | None = None,
        trackers: Trackers | None = None,
        first_step: int | None = None,
        verb: str = "train",
        kept: Mapping[str, bytes] | None = None,
    ) -> None:
        """Writes nothing yet.

        Args:
            out: Directory; made if missing, once there is something to write.
            num_turns: Training steps of the run, for the progress line.
            request: File with what the run was asked to do, which becomes `request.json` beside the others.
            trackers: Also take the numbers of each step; none: there are no trackers.
            first_step: Where the run of this directory goes on; none: a new run begins.
            verb: The command's name for the progress line, as in `train`.
            kept: Files that are kept beside the others, by name: the plan and what it was made from. So a
                report finds them when a new plan has taken their place. None: none are.
        """
        self._out = out
        self._first_step = first_step
        self._request = request
        self._verb = verb
        self._kept = dict(kept or {})
        self._memory: list[str] = []
        self._files: dict[str, Lines] = {}
        self._trackers = trackers
        self._bad = 0
        self._num_turns = num_turns
        self._num_before = self._num_done = first_step or 0
        self.num_written = first_step or 0
        """Steps in `metrics.jsonl`."""
        self._began_s = time.monotonic()
        self._shown_s = 0.0
        self._step_ns = 0
        self._wait_ns = 0
        self._longest_wait = (0, 0)

    @property
    def has_begun(self) -> bool:
        """Whether the files are those of this run."""
        return bool(self._files)

    def _begin(self) -> None:
        """Cuts the files back to the step where the run goes on, or removes those of an earlier run.

        All of this is done before the first line of this run is written.
        """
        out, is_new = self._out, self._first_step is None
        out.mkdir(parents=True, exist_ok=True)
        if self._first_step is not None:
            cut_back(out, self._first_step, (*FILES, *RARE_FILES))
        files = {name: Lines(out / f"{name}.jsonl", is_new=is_new) for name in FILES}
        if is_new:
            for name in (*RARE_FILES, *(f"{name}.undone" for name in (*FILES, *RARE_FILES))):
                (out / f"{name}.jsonl").unlink(missing_ok=True)
            if stayed := clear(out):
                names = ", ".join(f"`{path}`" for path in stayed)
                self.note(f"not of dflop, left as they are: {names}")
        for name, content in self._kept.items():
            # Whole or not at all: a later report reads it.
            write_text(out / name, name.partition(".")[0], content.decode())
        if self._request is None:
            (out / "request.json").unlink(missing_ok=True)
        else:
            self._request.replace(out / "request.json")
        self._files = files

    def schedule(self, record: dict[str, Any]) -> None:
        """Writes a turn to `schedules.jsonl`, in the warm-up too: with all turns a run can be replayed."""
        self._line("schedules", record)

    def events(self, step: int, events: Sequence[dict[str, Any]]) -> None:
        """Lines in `events.jsonl`: alarms, and decisions about the correction; said on stderr too.

        Args:
            step: After which they came.
            events: Each with `kind` and `words`.
        """
        for event in events:
            self._line("events", {"step": step, **event})
            self.note(f"step {step}: {event['words']}")

    def write(self, metrics: dict[str, Any], trace: dict[str, Any]) -> None:
        """Writes one line to each of the two files, and gives the numbers to the trackers.

        Args:
            metrics: For `metrics.jsonl`; its numbers go to the trackers.
            trace: For `trace.jsonl`.
        """
        self._line("trace", trace)
        self._line("metrics", metrics)
        self.num_written += 1
        if self._trackers is not None:
            self._trackers.step(metrics)

    def memory(self, record: dict[str, Any], summary: list[str]) -> None:
        """One line in `memory.jsonl`; `summary` is shown when the run ends."""
        self._line("memory", record)
        self._memory += summary

    def evaluation(self, record: dict[str, Any], arm: str) -> None:
        """One line in `evaluations.jsonl`, and one for people."""
        self._line("evaluations", record)
        if self._trackers is not None:
            self._trackers.evaluation(record, arm)
        kinds = ", ".join(
            f"{kind} {_number(of['loss']):.4f}" for kind, of in record["loss_by"]["kind"].items()
        )
        self.note(
            f"after step {record['step']}: evaluation loss {_number(record['loss']):.4f} ({kinds}) "
            f"of {record['samples']} samples in {record['seconds']:.1f} s"
        )

    def bad_sample(self, record: dict[str, Any], num_so_far: int) -> None:
        """One line in `bad_samples.jsonl`; the first few bad samples are also named on stderr."""
        self._line("bad_samples", record)
        self._bad = num_so_far
        if num_so_far <= _BAD_SHOWN:
            other = record["substitute"]
            done = "left out" if other is None else f"sample {other} trains in its place"
            self.note(f"step {record['step']}: {record['cause']}: {done}")

    def clock(self, totals: Mapping[str, int]) -> None:
        """Where the wall clock of this run went: `clock.json`, and a line on stderr when it ends.

        Args:
            totals: Nanoseconds by part, from `Clock.totals`.
        """
        if not self._files:
            return
        path = self._out / "clock.json"
        path.write_text(json.dumps(dict(totals)) + "\n", encoding="utf-8")
        parts = ", ".join(f"{part} {ns / 1e9:.1f}" for part, ns in totals.items() if part != "end" and ns > 0)
        self._memory.insert(0, f"clock: {totals['end'] / 1e9:.1f} s: {parts}")

    def sync(self) -> None:
        """Waits until the disk has all lines, so that the journals hold every step a checkpoint counts."""
        for file in self._files.values():
            file.sync()

    def note(self, text: str) -> None:
        """A line on stderr that stays, beside the progress."""
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        sys.stderr.write(f"{start}note: {text}\n")
        sys.stderr.flush()

    def progress(self, metrics: dict[str, Any], is_recorded: bool) -> None:
        """The line on stderr: in place on a terminal, else a line every ten seconds and at the end."""
        self._num_done += 1
        self._step_ns += metrics["step_ns"]
        self._wait_ns += metrics["schedule_wait_ns"]
        self._longest_wait = max(self._longest_wait, (metrics["schedule_wait_ns"], metrics["step"]))
        is_last = self._num_done == self._num_turns
        is_terminal = sys.stderr.isatty()
        now = time.monotonic()
        if not is_terminal and not is_last and now - self._shown_s < 10.0:
            return
        self._shown_s = now
        width = 24
        filled = width * self._num_done // max(1, self._num_turns)
        # The time left assumes the mean speed since the run began (or went on), all waits included.
        steps_per_s = (self._num_done - self._num_before) / max(1e-9, now - self._began_s)
        left_s = round((self._num_turns - self._num_done) / steps_per_s)
        # A rehearsal computes no loss.
        loss = "" if metrics.get("is_rehearsed") else f"loss {_number(metrics['loss']):.4f}  "
        text = (
            f"{self._verb} [{'#' * filled}{'.' * (width - filled)}] {self._num_done}/{self._num_turns}  "
            f"{'' if is_recorded else 'warm-up, '}{metrics['arm']}  {loss}"
            f"{metrics['step_ns'] / 1e6:.0f} ms  idle {metrics['bubble_ratio'] * 100:.0f} %  "
            f"{metrics['tokens'] / (metrics['step_ns'] / 1e9):.0f} tokens/s  {timedelta(seconds=left_s)} left"
        )
        if is_terminal:
            sys.stderr.write(f"\r\x1b[K{text}" + ("\n" if is_last else ""))
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Shows how long schedules were waited for and what memory was measured, and closes all files."""
        num_here = self._num_done - self._num_before
        if sys.stderr.isatty() and num_here > 0 and self._num_done < self._num_turns:
            sys.stderr.write("\n")
        if num_here > 0:
            longest_ns, step = self._longest_wait
            sys.stderr.write(
                f"schedules: waited {self._wait_ns / 1e6:.2f} ms in {num_here} steps, "
                f"{100 * self._wait_ns / self._step_ns:.3f} % of their time "
                f"(most: {longest_ns / 1e6:.2f} ms, step {step})\n"
            )
        if self._bad > 0:
            noun = "sample" if self._bad == 1 else "samples"
            sys.stderr.write(f"{self._bad} bad {noun}: bad_samples.jsonl\n")
        for line in self._memory:
            sys.stderr.write(line + "\n")
        for file in self._files.values():
            file.close()
        if self._trackers is not None:
            self._trackers.close()

    def _line(self, name: str, record: dict[str, Any]) -> None:
        if not self._files:
            self._begin()
        if name not in self._files:
            self._files[name] = Lines(self._out / f"{name}.jsonl", is_new=self._first_step is None)
        self._files[name].add(record)


def _number(value: float | None) -> float:
    """A value of a line as a number: lines have null where a number is not finite."""
    return math.nan if value is None else value
