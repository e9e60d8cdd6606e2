"""Who computes which samples of a step of VeOmni's: even encoder and LLM work within its limit on tokens.

samples of each rank -> costs of all, gathered -> microbatches of all ranks -> the samples travel (Parts)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from dflop.integrations.parameter_cost import cost_of_parameters
from dflop.integrations.read_spread import ReadSpread
from dflop.integrations.row_costs import ids_of_media, media_tokens, warn_of_unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.data.split import Meets
    from dflop.integrations.sent_rows import Row
    from dflop.integrations.spread import Parts

_CPU = torch.device("cpu")

_MASKS = {"image_mask": "image", "video_mask": "video", "audio_mask": "audio"}
"""Where a sample of VeOmni says which of its tokens stand for a medium: their ids are 0 by then."""


class Spread:
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
            _meets(state),
            args.train.seed,
            is_shared=_shares_encoder(trainer.model),
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


def _shares_encoder(model: Any) -> bool:
    """Whether VeOmni itself lets all ranks share the encoder's work.

    `encoder_data_balance` of a configuration does not say it: models for transformers 5 do not read that.
    """
    return any(getattr(module, "encoder_data_balance", None) is not None for module in model.modules())


def _meets(state: Any) -> Meets:
    """What data-parallel ranks wait for: those with parts of a model wait for each other in every layer."""
    # Ranks that share experts out lie in one shard, so inside of one data-parallel rank where it is a shard.
    holds_all = state.dp_shard_size == 1 or (state.dp_mode == "ddp" and not state.any_extra_parallel_enabled)
    return "step" if holds_all else "phase"


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


def shortest(rows: Sequence[Row]) -> int:
    """Which of some samples costs least."""
    return min(range(len(rows)), key=lambda at: _length(rows[at]), default=0)
