"""Where the numbers of each step go besides the files: TensorBoard, and Weights & Biases where asked for.

metrics of a step --values--> train/loss, train/loss_by_kind/image, step/ms, ...   TensorBoard: a run an arm
                                                                                   W&B: one run
                  of a rehearsal: under ARM-rehearsed
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dflop._native import Error
from dflop.models.errors import hinted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch.utils.tensorboard import SummaryWriter

ID_FILE = "wandb_id"
"""File in the directory of a run: the identity that the run has at W&B, so that it can go on there."""


def values_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The curves of a step.

    Args:
        metrics: A line of `metrics.jsonl`.

    Returns:
        A value a curve.
    """
    values = {
        "train/loss": _number(metrics["loss"]),
        "train/grad_norm": _number(metrics["grad_norm"]),
        "step/ms": metrics["step_ns"] / 1e6,
        "step/predicted_ms": metrics["predicted_ns"] / 1e6,
        "step/bubble_ratio": metrics["bubble_ratio"],
        "step/data_wait_ms": metrics["data_wait_ns"] / 1e6,
        "step/tokens_per_s": metrics["tokens"] / (metrics["step_ns"] / 1e9),
    }
    for name in ("samples_per_s", "tokens_per_s", "mfu"):
        if metrics.get(name) is not None:
            values[f"run/{name}"] = metrics[name]
    values |= {f"rates/{component}": rate for component, rate in metrics.get("learning_rates", {}).items()}
    return values | _by(metrics, "train")


def evaluation_values(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """The curves of an evaluation.

    Args:
        evaluation: A line of `evaluations.jsonl`.

    Returns:
        A value a curve.
    """
    return {"evaluation/loss": _number(evaluation["loss"])} | _by(evaluation, "evaluation")


def _by(record: Mapping[str, Any], section: str) -> dict[str, float]:
    return {
        f"{section}/loss_by_{by}/{name}": _number(entry["loss"])
        for by, entries in record.get("loss_by", {}).items()
        for name, entry in entries.items()
    }


class Trackers:
    """The trackers of one run; nothing is opened before the first step has ended."""

    def __init__(self, out: Path, wandb_project: str | None = None, first_step: int | None = None) -> None:
        """Imports what is asked for, and opens nothing.

        Args:
            out: Directory of the run.
            wandb_project: Project of Weights & Biases; none: nothing is sent there.
            first_step: Where the run of this directory goes on; none: a new run begins.

        Raises:
            Error: Weights & Biases is asked for, and not installed.
        """
        self._out = out
        self._first_step = first_step
        self._boards: dict[str, SummaryWriter] = {}
        self._project = wandb_project
        self._wandb: Any = None
        if wandb_project is not None:
            try:
                import wandb  # noqa: F401
            except ImportError as error:
                message = f"`train.wandb_project` is `{wandb_project}`, the package wandb is not installed"
                hint = "`pip install wandb`, or take the field out"
                raise hinted(Error(message), hint) from error

    def step(self, metrics: Mapping[str, Any]) -> None:
        """A step.

        Args:
            metrics: Its line of `metrics.jsonl`.

        Raises:
            OSError: The disk is full; the error names the directory.
        """
        # A rehearsal's numbers stand in no curve of a training run.
        mark = "-rehearsed" if metrics.get("is_rehearsed") else ""
        self._add(values_of(metrics), metrics["step"], metrics["arm"] + mark)

    def evaluation(self, evaluation: Mapping[str, Any], arm: str) -> None:
        """An evaluation.

        Args:
            evaluation: Its line of `evaluations.jsonl`.
            arm: That of the run.

        Raises:
            OSError: As for `step`.
        """
        self._add(evaluation_values(evaluation), evaluation["step"], arm)

    def close(self) -> None:
        """Ends the trackers: no more numbers will come."""
        for board in self._boards.values():
            board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _add(self, values: Mapping[str, float], step: int, arm: str) -> None:
        with _naming(self._out / "tensorboard" / arm):
            board = self._board(arm)
            for name, value in values.items():
                board.add_scalar(name, value, step)
            board.flush()
        if self._project is not None:
            # W&B's own step counter is not used: it drops steps that are trained again after a kill.
            self._opened().log({**{f"{arm}/{name}": value for name, value in values.items()}, "step": step})

    def _board(self, arm: str) -> SummaryWriter:
        # Each arm is a run of its own, so that TensorBoard draws the arms of a comparison over each other.
        if arm not in self._boards:
            from torch.utils.tensorboard import SummaryWriter

            folder = str(self._out / "tensorboard" / arm)
            # Hides old points of steps that are trained again.
            self._boards[arm] = SummaryWriter(folder, purge_step=self._first_step)
        return self._boards[arm]

    def _opened(self) -> Any:
        """The run at Weights & Biases; the earlier one where this run goes on from a checkpoint."""
        if self._wandb is None:
            import wandb

            path = self._out / ID_FILE
            if self._first_step is None or not path.exists():
                path.write_text(uuid4().hex[:8], encoding="utf-8")
            self._wandb = wandb.init(
                project=self._project,
                id=path.read_text(encoding="utf-8"),
                name=self._out.absolute().name,
                dir=str(self._out),
                resume="allow",
            )
            self._wandb.define_metric("*", step_metric="step")
        return self._wandb


def _number(value: float | None) -> float:
    """A value of a line as a number: lines have null where a number is not finite."""
    return math.nan if value is None else value


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Adds `path` to the error of a full disk, which names no file; put around what writes below `path`."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from error
