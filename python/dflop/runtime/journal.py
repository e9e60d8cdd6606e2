"""What a run writes, on the leader: a line a step in three files, TensorBoard events, progress on stderr.

Every line is on disk when its step ends, so a run that is stopped leaves all steps it finished. No file of an
earlier run is touched before the first step has ended: a run that comes to nothing leaves what was there. A
run that goes on from a checkpoint adds lines to the files of its directory (`resume.py`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dflop.runtime.resume import cut_back

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch.utils.tensorboard import SummaryWriter


FILES = ("metrics", "trace", "schedules", "events")
"""Files with a line a step, `.jsonl`."""


class Lines:
    """A file of whole lines: one that the disk has no room for is taken back."""

    def __init__(self, path: Path, *, is_new: bool = True) -> None:
        """Opens the file.

        Args:
            path: Of the file.
            is_new: Whether it begins empty; else lines are added to those it has.

        Raises:
            OSError: It cannot be written.
        """
        self._path = path
        # Without a buffer, which would try once more what failed when it is closed.
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
            # A device has no size to set.
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
        """Nothing is left to be written."""
        self._file.close()


class Journal:
    """The files of one run."""

    def __init__(
        self,
        out: Path,
        num_turns: int,
        request: Path | None = None,
        verb: str = "train",
        first_step: int | None = None,
    ) -> None:
        """Writes nothing yet.

        Args:
            out: Directory; made if missing, once there is something to write.
            num_turns: Training steps of the run, for the progress line.
            request: File with what the run was asked to do, which becomes `request.json` beside the others.
            verb: Of the command line, for the progress line.
            first_step: Where the run of this directory goes on; none: a new run begins.
        """
        self._out = out
        self._first_step = first_step
        self._request = request
        self._verb = verb
        self._memory: list[str] = []
        self._files: dict[str, Lines] = {}
        self._tensorboards: dict[str, SummaryWriter] = {}
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
        """Cuts the files back to where the run goes on, or makes those of an earlier run go.

        All of it before there is a line of this run.
        """
        out, is_new = self._out, self._first_step is None
        out.mkdir(parents=True, exist_ok=True)
        if self._first_step is not None:
            cut_back(out, self._first_step, FILES)
        files = {name: Lines(out / f"{name}.jsonl", is_new=is_new) for name in FILES}
        if is_new:
            for name in ("memory", *(f"{name}.undone" for name in FILES)):
                (out / f"{name}.jsonl").unlink(missing_ok=True)
            # TensorBoard draws every file of a folder: those of an earlier run would stand in the same curve.
            for folder in ("tensorboard", "checkpoints"):
                shutil.rmtree(out / folder, ignore_errors=True)
        if self._request is None:
            (out / "request.json").unlink(missing_ok=True)
        else:
            self._request.replace(out / "request.json")
        self._files = files

    def schedule(self, record: dict[str, Any]) -> None:
        """One line in `schedules.jsonl`, of every turn, warm-up too: a run can be replayed."""
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
        """One line in each file; then TensorBoard.

        Args:
            metrics: For `metrics.jsonl`; its numbers go to TensorBoard.
            trace: For `trace.jsonl`.
        """
        self._line("trace", trace)
        self._line("metrics", metrics)
        self.num_written += 1
        values = {
            "train/loss": _number(metrics["loss"]),
            "train/grad_norm": _number(metrics["grad_norm"]),
            "step/ms": metrics["step_ns"] / 1e6,
            "step/predicted_ms": metrics["predicted_ns"] / 1e6,
            "step/bubble_ratio": metrics["bubble_ratio"],
            "step/data_wait_ms": metrics["data_wait_ns"] / 1e6,
            "step/tokens_per_s": metrics["tokens"] / (metrics["step_ns"] / 1e9),
        }
        with _naming(self._out / "tensorboard" / metrics["arm"]):
            board = self._tensorboard(metrics["arm"])
            for name, value in values.items():
                board.add_scalar(name, value, metrics["step"])
            board.flush()

    def memory(self, record: dict[str, Any], summary: list[str]) -> None:
        """One line in `memory.jsonl`; `summary` is shown when the run ends."""
        if "memory" not in self._files:
            self._files["memory"] = Lines(self._out / "memory.jsonl", is_new=self._first_step is None)
        self._line("memory", record)
        self._memory += summary

    def sync(self) -> None:
        """Waits until the disk has all lines: a checkpoint must not know of steps that the journals lack."""
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
        # What has passed since the run began (or went on), all waits included, goes on as it went.
        steps_per_s = (self._num_done - self._num_before) / max(1e-9, now - self._began_s)
        left_s = round((self._num_turns - self._num_done) / steps_per_s)
        text = (
            f"{self._verb} [{'#' * filled}{'.' * (width - filled)}] {self._num_done}/{self._num_turns}  "
            f"{'' if is_recorded else 'warm-up, '}{metrics['arm']}  loss {_number(metrics['loss']):.4f}  "
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
        for line in self._memory:
            sys.stderr.write(line + "\n")
        for file in self._files.values():
            file.close()
        for board in self._tensorboards.values():
            board.close()

    def _line(self, name: str, record: dict[str, Any]) -> None:
        if not self._files:
            self._begin()
        self._files[name].add(record)

    def _tensorboard(self, arm: str) -> SummaryWriter:
        # A run each, so that TensorBoard draws the arms of a comparison over each other.
        if arm not in self._tensorboards:
            from torch.utils.tensorboard import SummaryWriter

            folder = str(self._out / "tensorboard" / arm)
            # Curves of steps that are trained again are hidden from there on.
            self._tensorboards[arm] = SummaryWriter(folder, purge_step=self._first_step)
        return self._tensorboards[arm]


def _number(value: float | None) -> float:
    """A value as a number: what is none of them stands as null in a line."""
    return math.nan if value is None else value


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Around what writes below `path` and may find the disk full: its error alone names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from error
