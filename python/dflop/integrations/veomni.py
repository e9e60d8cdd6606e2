"""VeOmni on batches of even work: its own task scripts, as they stand.

    torchrun --nproc-per-node 8 -m dflop.integrations.veomni tasks/train_vlm.py config.yaml

its loader -> samples of a step, not collated -> costs of all ranks -> samples travel -> its own collation

VeOmni divides its loss by the label tokens of all ranks. So samples may move between ranks and microbatches
of a step. A rank keeps its number of microbatches, and a microbatch its limit on tokens.
"""

from __future__ import annotations

import argparse
import math
import os
import runpy
import sys
import warnings
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from dflop.integrations.parameter_cost import cost_of_parameters
from dflop.integrations.read_rows import ReadRows
from dflop.integrations.read_spread import ReadSpread
from dflop.integrations.row_costs import ids_of_media, media_tokens, warn_of_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dflop.integrations.sent_rows import Row
    from dflop.integrations.spread import Parts

_TRIED = "0.1.12"
_CPU = torch.device("cpu")
_IGNORED = -100
"""A label that is not learnt from."""

_MASKS = {"image_mask": "image", "video_mask": "video", "audio_mask": "audio"}
"""Where a sample of VeOmni says which of its tokens stand for a medium: their ids are 0 by then."""

_OF_MICROBATCH = {
    "output_router_logits": "the router's loss",
    "dsa_indexer_loss_coef": "the indexer's loss",
}
"""Fields of a model's configuration that add a loss of another kind."""

_ENDED = "dflop_has_ended"
"""Of the state of a rank's loader."""

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
    config = trainer.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name, what in _OF_MICROBATCH.items():
        if getattr(text, name, False):
            warnings.warn(
                f"`{name}` is {getattr(text, name)!r}: {what} is a mean over a microbatch. So the gradient "
                "depends on how samples are divided, with dflop and without",
                stacklevel=3,
            )


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
        self._theirs = trainer.train_dataloader
        self._collate = _left_for_later(self._theirs)
        self._is_classification = trainer.args.data.data_type == "classification"
        self._spread = _Spread(trainer, state)
        # In this epoch, and in the state that the next one begins with.
        self._has_ended = self._was_ended = False
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
        # A state that was loaded may be of a rank whose samples had ended: it would read them again.
        self._has_ended, self._was_ended = self._was_ended, False
        theirs = iter(()) if self._has_ended else iter(self._theirs)
        return _Steps(theirs, self._balanced, self._end)

    def _end(self) -> None:
        self._has_ended = True

    def state_dict(self) -> dict[str, Any]:
        """VeOmni's, and whether this rank's samples have ended while others train on theirs."""
        state = self._theirs.state_dict()
        return {**state, _ENDED: True} if self._has_ended else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there.

        Args:
            state: of `state_dict`, or of VeOmni's own loader.
        """
        self._was_ended = bool(state.get(_ENDED, False))
        self._theirs.load_state_dict({name: value for name, value in state.items() if name != _ENDED})

    def _balanced(self, step: list[_Microbatch]) -> list[Any]:
        """The microbatches of this rank; none where no rank has read anything."""
        read = [list(batch.rows) for batch in step]
        parts = self._spread.split(read)
        if not any(parts.counts):
            return []
        rows = [row for batch in read for row in batch]
        held = [mine for _, mine, _ in parts.of_rank(rows, self._spread.rank, _CPU)]
        copies = parts.copies(rows, self._spread.rank, _CPU, _shortest(rows))
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

    def __init__(
        self,
        theirs: Iterator[Any],
        balanced: Callable[[list[Any]], list[Any]],
        end: Callable[[], None],
    ) -> None:
        self._theirs, self._balanced, self._end = theirs, balanced, end

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> list[Any]:
        step = next(self._theirs, None)
        if step is None:
            self._end()
        if not (found := self._balanced(step or [])):
            raise StopIteration
        return found


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


def _shortest(rows: Sequence[Row]) -> int:
    """Which of some samples costs least."""
    return min(range(len(rows)), key=lambda at: _length(rows[at]), default=0)


def _of_learnt(row: Row) -> Row:
    """A sample without its first label: no token stands before it, and VeOmni counts some of these."""
    if "labels" not in row:
        return row
    labels = row["labels"].clone()
    labels[..., :1] = _IGNORED
    return {**row, "labels": labels}


class _Spread:
    """Who computes which samples of a step."""

    def __init__(self, trainer: Any, state: Any) -> None:
        args = trainer.args
        # Of an omni model the thinker trains.
        model = getattr(trainer.model, "thinker", trainer.model)
        self._cost = cost_of_parameters(model)
        media = media_tokens(model, self._cost)
        config = model.config
        self._media = {
            mask: max((media.get(token, 0.0) for token in ids_of_media(config, kind)), default=0.0)
            for mask, kind in _MASKS.items()
        }
        warn_of_unknown(model)
        self.is_shared_sample, self.rank = bool(state.sp_enabled), state.dp_rank
        # Loading in a thread talks while the model does: by sockets, and in a group of its own.
        self._is_beside = args.data.dataloader.use_background_prefetcher
        self._ranks = state.dp_group
        self._spread = ReadSpread(
            "VeOmni",
            state.dp_size,
            state.dp_group,
            _CPU if self._is_beside else trainer.device,
            "step" if state.dp_mode == "ddp" else "phase",
            args.train.seed,
            # VeOmni's own: all ranks share the encoder's work.
            is_shared=bool(getattr(trainer.model.config, "encoder_data_balance", False)),
            max_tokens=_limit(args) or 0,
        )

    def begin(self) -> None:
        """Lets no thread of an epoch before meet those of this one; each rank of the run calls it."""
        if self._is_beside:
            self._spread.group = _by_sockets(self._ranks)

    def split(self, read: Sequence[Sequence[Row]]) -> Parts:
        """Who computes which samples of all ranks; each of the group calls it.

        Args:
            read: samples of each microbatch that this rank has read.

        Returns:
            Equal on all ranks.
        """
        sizes = [
            [(*self._cost((self._encoder(row), _length(row))), _length(row)) for row in batch]
            for batch in read
        ]
        return self._spread.split(sizes)[0]

    def _encoder(self, row: Row) -> float:
        """Encoder tokens of a sample."""
        return sum(count * float(row[mask].sum()) for mask, count in self._media.items() if mask in row)


def _length(row: Row) -> int:
    return int(row["input_ids"].shape[-1])


def _limit(args: Any) -> int | None:
    """Tokens that VeOmni lets a microbatch have; None: it counts samples."""
    train = args.train
    if not train.dyn_bsz:
        return None
    limit = train.micro_batch_size * args.data.max_seq_len
    # Then it counts those that are learnt from, and has another limit on all.
    if train.dyn_bsz_count_mode == "effective":
        limit = math.ceil(limit * train.dyn_bsz_physical_overflow_ratio)
    return min(limit, train.pad_to_length) if train.pad_to_length else limit


def _by_sockets(group: Any) -> Any:
    """A group of the same ranks that talks through the host; every rank of the run calls it."""
    mine = distributed.get_process_group_ranks(group)
    of_all: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(of_all, mine)
    found = None
    for ranks in sorted({tuple(one) for one in of_all}):
        made = distributed.new_group(list(ranks), backend="gloo")
        if list(ranks) == mine:
            found = made
    return found


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
