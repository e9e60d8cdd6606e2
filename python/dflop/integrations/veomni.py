"""VeOmni on batches of even work: its own task scripts, as they stand.

    torchrun --nproc-per-node 8 -m dflop.integrations.veomni tasks/train_vlm.py config.yaml

its loader -> samples of a step, not collated -> costs of all ranks -> samples travel -> its own collation

VeOmni divides its loss by the label tokens of all ranks. So samples may move between ranks and microbatches
of a step. A rank keeps its number of microbatches, and a microbatch its limit on tokens.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflop.integrations.neighbours import warn_of_parts
from dflop.integrations.read_rows import ReadRows
from dflop.integrations.veomni_spread import Spread, shortest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dflop.integrations.sent_rows import Row

_TRIED = "0.1.12"
_CPU = torch.device("cpu")
_IGNORED = -100
"""A label that is not learnt from."""

_OURS = "_dflop"
"""Of the state of a rank's loader; VeOmni's own loader forgets names with such a beginning."""

_is_balanced = False


def balance_batches() -> None:
    """Makes VeOmni's trainers of text and of pictures balance each step; the command of this module does it.

    Call it before a trainer is made. A sample costs what an encoder token and an LLM token cost in the model
    that trains (`cost_of_parameters`), counted from its own tokens. A second call does nothing.

    Raises:
        RuntimeError: this version of VeOmni lacks what is changed here.
    """
    base: Any = import_module("veomni.trainer.base")
    theirs = getattr(base.BaseTrainer, "_build_dataloader", None)
    if theirs is None:
        message = (
            f"this version of VeOmni has no `BaseTrainer._build_dataloader`: pip install veomni=={_TRIED}"
        )
        raise RuntimeError(message)
    if hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def build_dataloader(trainer: Any) -> None:
        _check(trainer)
        theirs(trainer)
        state = import_module("veomni.distributed.parallel_state").get_parallel_state()
        if state.dp_size > 1:
            trainer.train_dataloader = _BalancedLoader(trainer, state)
        _say(trainer, state)

    base.BaseTrainer._build_dataloader = build_dataloader


def _check(trainer: Any) -> None:
    """Refuses what cannot be balanced, and says where VeOmni's own gradient depends on microbatches."""
    if hasattr(trainer.args, "dpo_config"):
        message = (
            "the trainer is VeOmni's of preferences (DPO), must be that of text or of pictures: "
            "its loss is a mean over the pairs of a microbatch"
        )
        raise ValueError(message)
    warn_of_parts(trainer.model.config)


def _say(trainer: Any, state: Any) -> None:
    global _is_balanced  # noqa: PLW0603 of this process
    _is_balanced = True
    if trainer.args.train.global_rank == 0:
        ranks = f"{state.dp_size} data-parallel ranks"
        found = (
            f"balanced batches over {ranks}"
            if state.dp_size > 1
            else "one data-parallel rank, nothing to balance"
        )
        print(f"dflop: {found}", file=sys.stderr, flush=True)


class _Microbatch(ReadRows):
    """Samples of a microbatch of VeOmni's; copies of one, which it makes behind the last step, are none."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name != "padding_flag":
            message = f"VeOmni's loader sets `{name}` of a microbatch, dflop knows `padding_flag` alone"
            raise ValueError(message)
        self.rows = []


class _Unlearnt(dict[str, Any]):
    """A microbatch of which VeOmni counts no label and its model sees one: a finite loss that weighs 0."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return torch.full_like(value, _IGNORED) if name == "labels" else value


class _BalancedLoader:
    """Stands in for VeOmni's loader: the same samples in each step, in other microbatches."""

    def __init__(self, trainer: Any, state: Any) -> None:
        """Lets the loader leave collation for later, and counts costs before the model is sharded."""
        self._trainer, self._theirs = trainer, trainer.train_dataloader
        self._collate = _left_for_later(self._theirs)
        self._is_classification = trainer.args.data.data_type == "classification"
        self._spread = Spread(trainer, state)
        self._num_ranks = state.dp_size
        self._epoch = self._num_steps = 0
        # In this epoch: of this rank, and of all.
        self._has_ended = self._is_over = False
        # A state that was loaded, until an iteration begins there.
        self._loaded: dict[str, Any] | None = None
        self._pins = torch.cuda.is_available() and trainer.args.data.dataloader.pin_memory

    def __getattr__(self, name: str) -> Any:
        # What was there is there: checkpoints, epochs, sources.
        if name == "_theirs":
            raise AttributeError(name)
        return getattr(self._theirs, name)

    def __len__(self) -> int:
        """Steps."""
        return len(self._theirs)

    def __iter__(self) -> Iterator[list[Any]]:
        """Balanced steps, from where VeOmni's loader stands."""
        self._spread.begin()
        loaded, self._loaded = self._loaded, None
        # A state that was loaded may be of a rank whose samples had ended: it would read them again.
        self._has_ended, self._is_over = bool(loaded and loaded.get(_OURS, {}).get("has_ended")), False
        if loaded is None:
            self._num_steps = 0
            _begin_anew(self._theirs)
        else:
            # Not before: with workers VeOmni's loader reads on at once, and now it knows the epoch.
            self._theirs.load_state_dict(self._of_theirs(loaded))
        theirs = iter(self._theirs)
        return _Steps(iter(()) if self._has_ended else theirs, self._step_of)

    def _of_theirs(self, loaded: dict[str, Any]) -> dict[str, Any]:
        """The state that VeOmni's loader takes."""
        found = {name: value for name, value in loaded.items() if name != _OURS}
        # It hands out a step before it counts it, so by itself `bsz_warmup` would fall behind at each resume.
        return {**found, "step": self._num_steps} if "step" in found and _OURS in loaded else found

    def _step_of(self, read: list[_Microbatch] | None) -> list[Any]:
        """The next step; empty where no rank has read anything. None: this rank has no more."""
        self._has_ended |= read is None
        found = self._balanced(read or [])
        self._is_over = not found
        self._num_steps += bool(found)
        return found

    def set_epoch(self, epoch: int) -> None:
        """Lets samples come in the order of an epoch; VeOmni calls it before it iterates.

        Args:
            epoch: from 0.
        """
        self._epoch = epoch
        self._theirs.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """VeOmni's, the place in the epoch, and whether this rank's samples have ended before others'.

        Returns:
            For `load_state_dict` of as many data-parallel ranks, or of VeOmni's own loader.
        """
        if self._loaded is not None:
            return self._loaded
        place = (self._epoch + 1, 0) if self._is_over else (self._epoch, self._num_steps)
        ours = {"has_ended": self._has_ended, "num_ranks": self._num_ranks}
        return {**self._theirs.state_dict(), _OURS: {**ours, "epoch": place[0], "num_steps": place[1]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there when the next iteration begins.

        Args:
            state: of `state_dict`, or of VeOmni's own loader.

        Raises:
            ValueError: it is of another number of data-parallel ranks.
        """
        ours = state.get(_OURS, {})
        if (num_ranks := ours.get("num_ranks", self._num_ranks)) != self._num_ranks:
            message = (
                f"the checkpoint is of {num_ranks} data-parallel ranks, this run has {self._num_ranks}: "
                f"samples would be repeated or left out. Go on with {num_ranks}, or begin anew from its "
                "weights alone (`model.model_path`)"
            )
            raise ValueError(message)
        if ours:
            # VeOmni divides its steps by `train_steps`; an epoch may have had fewer.
            place = ours["epoch"], ours["num_steps"]
            if place[1] >= self._trainer.args.train_steps:
                place = ours["epoch"] + 1, 0
            self._trainer.start_epoch, self._trainer.start_step = place
        self._loaded, self._num_steps = state, self._trainer.start_step

    def _balanced(self, step: list[_Microbatch]) -> list[Any]:
        """The microbatches of this rank; none where no rank has read anything."""
        read = [list(batch.rows) for batch in step]
        parts = self._spread.split(read)
        if not any(parts.counts):
            return []
        rows = [row for batch in read for row in batch]
        held = [mine for _, mine, _ in parts.of_rank(rows, self._spread.rank, _CPU)]
        copies = parts.copies(rows, self._spread.rank, _CPU, shortest(rows))
        # A sample that another microbatch trains fills an empty one: ranks meet, and nothing is learnt.
        found = [
            self._collated(mine) if mine else self._collated([copies.pop()], is_learnt=False) for mine in held
        ]
        if self._pins:
            pin: Any = import_module("torch.utils.data._utils.pin_memory")
            found = pin.pin_memory(found)
        return found

    def _collated(self, rows: Sequence[Row], *, is_learnt: bool = True) -> Any:
        """A microbatch by VeOmni's own collation."""
        if self._is_classification:
            batch = self._collate(list(rows))
        else:
            batch = self._collate([_of_learnt(row) for row in rows])
        labels = batch["labels"]
        # Ranks that share a sample have parts of its labels.
        if is_learnt and (self._spread.is_shared_sample or bool((labels != _IGNORED).any())):
            return batch
        # A mean over no label is no number, so there is one; it does not count.
        batch["labels"] = torch.full_like(labels, _IGNORED)
        batch["labels"][..., -1] = 0
        return _Unlearnt(batch)


class _Steps:
    """Goes on until no rank has samples."""

    def __init__(self, theirs: Iterator[Any], step_of: Callable[[Any], list[Any]]) -> None:
        self._theirs, self._step_of = theirs, step_of

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> list[Any]:
        if not (found := self._step_of(next(self._theirs, None))):
            raise StopIteration
        return found


def _begin_anew(loader: Any) -> None:
    """Forgets where a sampler was to go on, if nobody read there.

    At the end of an epoch VeOmni loads a state and begins the next epoch. With `num_workers: 0` torchdata
    would leave out as many samples of it as were read before; workers have read there by then.
    """
    sampler: Any = getattr(getattr(loader, "_dataloader", loader), "sampler", None)
    if getattr(sampler, "next_yielded", None) is not None:
        sampler.next_yielded = None


def _left_for_later(loader: Any) -> Callable[[Sequence[Row]], Any]:
    """Puts samples in the place of collated microbatches, wherever VeOmni collates; gives its collation."""
    for place, name in (
        (loader, "_collate_fn"),
        (getattr(loader, "dataset", None), "dynamic_batching_collate_fn"),
        (getattr(loader, "collate_fn", None), "internal_data_collator"),
    ):
        collate = getattr(place, name, None)
        if callable(collate):
            setattr(place, name, _Microbatch)
            return collate
    message = (
        f"the loader `{type(loader).__name__}` collates at no place that dflop knows: "
        f"`data.dataloader.type` must be `native`, of veomni=={_TRIED}"
    )
    raise RuntimeError(message)


def _of_learnt(row: Row) -> Row:
    """A sample without its first label: no token stands before it, and VeOmni counts some of these."""
    if "labels" not in row:
        return row
    labels = row["labels"].clone()
    labels[..., :1] = _IGNORED
    return {**row, "labels": labels}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command.

    Args:
        arguments: behind it; None: those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 8 -m dflop.integrations.veomni",
        description="Runs a task script of VeOmni on balanced batches. Script and configuration stay.",
        epilog="example: torchrun --nproc-per-node 8 -m dflop.integrations.veomni tasks/train_vlm.py "
        "configs/multimodal/qwen3_vl/qwen3_vl_dense.yaml --train.micro_batch_size 2",
    )
    parser.add_argument("script", metavar="SCRIPT", help="what trains, such as tasks/train_vlm.py")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="its configuration, and arguments behind it",
    )
    asked = parser.parse_args(arguments)
    if not Path(asked.script).is_file():
        message = f"`{asked.script}` is no file: name VeOmni's script, such as tasks/train_vlm.py"
        raise SystemExit(message)
    try:
        balance_batches()
    except ModuleNotFoundError as error:
        if error.name != "veomni":
            raise
        message = f"`veomni` is not installed beside dflop: pip install veomni=={_TRIED}"
        raise SystemExit(message) from None
    before = sys.argv, sys.path[:]
    sys.argv = [asked.script, *asked.arguments]
    sys.path.insert(0, str(Path(asked.script).resolve().parent))
    try:
        runpy.run_path(asked.script, run_name="__main__")
        if not _is_balanced and os.environ.get("RANK", "0") == "0":
            print(
                f"dflop: `{asked.script}` made no loader of VeOmni's `BaseTrainer`: nothing was balanced",
                file=sys.stderr,
            )
    finally:
        sys.argv, sys.path[:] = before


if __name__ == "__main__":
    # By its name: workers of a loader look for its types there, and `__main__` is the script's.
    import_module("dflop.integrations.veomni").main()
