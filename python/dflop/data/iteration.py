"""One pass of a replica over its batches of an epoch, and the positions that it passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class EpochPosition:
    """Where an epoch stands, for all replicas."""

    epoch: int
    global_batch: int = 0
    buckets_taken: int = 0
    """Of that global batch, by all replicas."""
    first: int = 0
    """Samples of the epoch that stand before that global batch."""
    balanced_for: int = 0
    """The replicas that its buckets were made for, where some are taken; else 0."""


class Iteration:
    """One replica's batches of an epoch, from a position on; its own, whatever becomes of the sampler."""

    def __init__(self, sampler: Any, start: EpochPosition) -> None:
        self._sampler = sampler
        self._reset(start)

    def _reset(self, start: EpochPosition) -> None:
        self._start = start
        self.num_yielded = 0
        self._position = start
        # Begins of the global batches so far, the first one being the start.
        self._begins = [start]
        # Buckets of the global batch at `_position`, all replicas'; none before it is balanced.
        self._buckets: list[list[int]] | None = None
        self._is_over = False

    @property
    def epoch(self) -> int:
        """The epoch that it passes over."""
        return self._start.epoch

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> list[int]:
        sampler, position = self._sampler, self._position
        if not self._is_over and not sampler._is_inside(position):
            self._is_over = True
            sampler._end(self)
        if self._is_over:
            raise StopIteration
        if self.num_yielded == 0:
            sampler._begin(self, self._start)
        if self._buckets is None:
            self._buckets = sampler._buckets(position)
        assert self._buckets is not None
        bucket = self._buckets[position.buckets_taken + sampler._split.rank]
        self._position = self._next(position)
        if self._position.buckets_taken == 0:
            self._buckets = None
            self._begins.append(self._position)
        self.num_yielded += 1
        return bucket

    def _next(self, position: EpochPosition, count: int = 1) -> EpochPosition:
        """The position after this replica's `count` next batches, all of the same global batch."""
        sampler = self._sampler
        taken = position.buckets_taken + count * sampler._split.num_replicas
        if taken == sampler._split.num_buckets:
            return sampler._after(position)
        return replace(
            position, buckets_taken=taken, balanced_for=position.balanced_for or sampler._split.num_replicas
        )

    def position_after(self, num_batches: int) -> EpochPosition:
        """The position after so many batches of this iteration."""
        sampler, start = self._sampler, self._start
        of_first = (sampler._split.num_buckets - start.buckets_taken) // sampler._split.num_replicas
        position, left = start, num_batches
        if num_batches >= of_first:
            # The last global batch that is known and is not behind the position.
            passed, _ = divmod(
                num_batches - of_first, sampler._split.num_buckets // sampler._split.num_replicas
            )
            passed = min(passed + 1, len(self._begins) - 1)
            if passed:
                position = self._begins[passed]
                left -= of_first + (passed - 1) * (sampler._split.num_buckets // sampler._split.num_replicas)
        while left and sampler._is_inside(position):
            count = min(
                left, (sampler._split.num_buckets - position.buckets_taken) // sampler._split.num_replicas
            )
            position = self._next(position, count)
            left -= count
        if left:
            most = num_batches - left
            message = f"`num_batches` is {num_batches}, must be at most {most}, all that the epoch had left"
            raise ValueError(message)
        return position

    def state_dict(self) -> dict[str, int | str]:
        """Where this iteration stands, its end too; `torchdata.StatefulDataLoader` asks for it."""
        return self._sampler._state(self.position_after(self.num_yielded))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state was taken."""
        self._reset(self._sampler._position_of(state))
