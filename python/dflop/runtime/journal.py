"""What a run writes, on the leader: a line a step in three files, TensorBoard events, progress on stderr.

Every line is flushed when its step ends, so a run that is stopped leaves all steps it finished.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from pathlib import Path

    from torch.utils.tensorboard import SummaryWriter


class Journal:
    """The files of one run."""

    def __init__(self, out: Path, num_turns: int) -> None:
        """Opens `metrics.jsonl`, `trace.jsonl` and `schedules.jsonl` anew.

        Args:
            out: Directory; made if missing.
            num_turns: Training steps to come, for the progress line.

        Raises:
            OSError: The directory cannot be written.
        """
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._memory: list[str] = []
        (out / "memory.jsonl").unlink(missing_ok=True)
        # TensorBoard draws every file of a folder: those of an earlier run would stand in the same curve.
        shutil.rmtree(out / "tensorboard", ignore_errors=True)
        self._files: dict[str, TextIO] = {
            name: (out / f"{name}.jsonl").open("w", encoding="utf-8")
            for name in ("metrics", "trace", "schedules")
        }
        self._tensorboards: dict[str, SummaryWriter] = {}
        self._num_turns = num_turns
        self._num_done = 0
        self.num_written = 0
        """Steps in `metrics.jsonl`."""
        self._shown_s = 0.0
        self._step_ns = 0
        self._wait_ns = 0
        self._longest_wait = (0, 0)

    def schedule(self, record: dict[str, Any]) -> None:
        """One line in `schedules.jsonl`, flushed; of every turn, warm-up too: a run can be replayed."""
        self._line("schedules", record)

    def write(self, metrics: dict[str, Any], trace: dict[str, Any]) -> None:
        """One line in each file, flushed; then TensorBoard.

        Args:
            metrics: For `metrics.jsonl`; its numbers go to TensorBoard.
            trace: For `trace.jsonl`.
        """
        self._line("trace", trace)
        self._line("metrics", metrics)
        self.num_written += 1
        board = self._tensorboard(metrics["arm"])
        board.add_scalar("train/loss", metrics["loss"], metrics["step"])
        board.add_scalar("train/grad_norm", metrics["grad_norm"], metrics["step"])
        board.add_scalar("step/ms", metrics["step_ns"] / 1e6, metrics["step"])
        board.add_scalar("step/predicted_ms", metrics["predicted_ns"] / 1e6, metrics["step"])
        board.add_scalar("step/bubble_ratio", metrics["bubble_ratio"], metrics["step"])
        board.add_scalar("step/data_wait_ms", metrics["data_wait_ns"] / 1e6, metrics["step"])
        board.add_scalar("step/tokens_per_s", metrics["tokens"] / (metrics["step_ns"] / 1e9), metrics["step"])
        board.flush()

    def memory(self, record: dict[str, Any], summary: list[str]) -> None:
        """One line in `memory.jsonl`; `summary` is shown when the run ends."""
        with (self._out / "memory.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self._memory += summary

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
        text = (
            f"train [{'#' * filled}{'.' * (width - filled)}] {self._num_done}/{self._num_turns}  "
            f"{'' if is_recorded else 'warm-up, '}{metrics['arm']}  loss {metrics['loss']:.4f}  "
            f"{metrics['step_ns'] / 1e6:.0f} ms  idle {metrics['bubble_ratio'] * 100:.0f} %"
        )
        if is_terminal:
            sys.stderr.write(f"\r\x1b[K{text}" + ("\n" if is_last else ""))
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Shows how long schedules were waited for and what memory was measured, and closes all files."""
        if sys.stderr.isatty() and 0 < self._num_done < self._num_turns:
            sys.stderr.write("\n")
        if self._num_done > 0:
            longest_ns, step = self._longest_wait
            sys.stderr.write(
                f"schedules: waited {self._wait_ns / 1e6:.2f} ms in {self._num_done} steps, "
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
        file = self._files[name]
        try:
            file.write(json.dumps(record) + "\n")
            file.flush()
        except OSError as error:
            # A full disk does not say which file it had no room for.
            raise OSError(error.errno, error.strerror, file.name) from error

    def _tensorboard(self, arm: str) -> SummaryWriter:
        # A run each, so that TensorBoard draws the arms of a comparison over each other.
        if arm not in self._tensorboards:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboards[arm] = SummaryWriter(str(self._out / "tensorboard" / arm))
        return self._tensorboards[arm]
