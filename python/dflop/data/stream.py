"""Balanced batches of a stream: a window of samples at a time, in order, with a state that can be loaded.

    stream --> window of batch_size * num_buckets samples --> buckets of even cost --> every replica its share

Needs torch, because a DataLoader takes streams as `torch.utils.data.IterableDataset`.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from dflop.data.costs import costs
from dflop.data.split import OF_OLD_STATES, Meets, Split, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


class BalancedStream(IterableDataset):
    """Lists of samples whose work is even, from a stream that no one can index.

    It is the dataset of a `DataLoader(..., batch_size=None)`.

    Every replica reads the same stream in the same order. Each `batch_size * num_buckets` samples in a row
    are a global batch, which is balanced into buckets as `BalancedBatchSampler` does it; a replica yields
    its own and drops the others, so what a sample costs must be known before it is decoded. Besides one
    global batch, `num_buckets` samples are read ahead. Each sample comes exactly once over all replicas, and
    each replica yields the same number of batches: a last global batch with fewer samples than buckets is
    added to the one before.

    With DataLoader workers each reads the whole stream and yields every n-th batch of its replica, so that
    batches come in the same order as without.

    A state names no replica, so it loads on another number of replicas; inside a global batch, the buckets
    that remain must divide evenly among them. If the stream or its iterator has `state_dict` and
    `load_state_dict`, it is not read again from its start.
    """

    def __init__(
        self,
        source: Iterable[Any],
        cost: Callable[[Any], Any],
        batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        *,
        meets: Meets = "step",
        num_buckets: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        max_tokens: int | None = None,
        tokens: Callable[[Any], int] | None = None,
        is_padded: bool = False,
    ) -> None:
        """Reads nothing yet.

        Args:
            source: The stream: iterated anew for each epoch, the same on all replicas.
            cost: Gives `(encoder cost, LLM cost)` of a sample, or its shape with `llm_tokens`.
            batch_size: Samples of a bucket, on average.
            num_replicas: Data-parallel replicas.
            rank: Which of them this is.
            meets: What replicas wait for, as for `BalancedBatchSampler`.
            num_buckets: Buckets of a global batch, a multiple of `num_replicas`, which is the default.
            seed: Of ties in balancing; equal on all replicas.
            drop_last: Leave out the last global batch where it is smaller.
            max_tokens: The most LLM tokens of a bucket.
            tokens: Gives the LLM tokens of a sample, for `max_tokens`; shapes have them.
            is_padded: Whether your collation pads the rows of a batch to its longest sample, as for
                `BalancedBatchSampler`.

        Raises:
            ValueError: A number that breaks one of the rules above.
        """
        batch_size = whole_number("batch_size", batch_size, 1)
        self._split = Split.checked(num_replicas, rank, num_buckets, meets, seed, is_padded)
        self._source: Any = source
        self._cost = cost
        self._tokens = tokens
        self._size = batch_size * self._split.num_buckets
        self._drop_last = drop_last
        self._max_tokens = None if max_tokens is None else whole_number("max_tokens", max_tokens, 1, 2**53)
        self._start: Mapping[str, Any] | None = None
        self._running: _Reading | None = None

    def __iter__(self) -> Iterator[list[Any]]:
        """This replica's batches, from a loaded state's place on."""
        start, self._start = self._start, None
        self._running = _Reading(self, start)
        return self._running

    def set_epoch(self, epoch: int) -> None:
        """Tells the stream its epoch, if it wants to know.

        Args:
            epoch: From 0.
        """
        tell = getattr(self._source, "set_epoch", None)
        if tell is not None:
            tell(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, equal on all replicas; ask it in the process that reads the stream.

        Returns:
            Numbers and texts, and the stream's own state where it has one.
        """
        return self._identity() if self._running is None else self._running.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on where the state was taken.

        Args:
            state: Of `state_dict`.

        Raises:
            ValueError: The state is of another global batch size, other buckets, caps, `meets`,
                `is_padded` or seed, or its remaining buckets do not divide among the replicas.
        """
        for name, mine in self._identity().items():
            theirs = state.get(name, OF_OLD_STATES.get(name))
            if theirs != mine:
                rule = "must be equal" + self._split.remedy(name, state)
                message = f"the state has `{name}` {theirs}, this stream {mine}, {rule}"
                raise ValueError(message)
        taken = whole_number("buckets_taken", state.get("buckets_taken", 0), 0, self._split.num_buckets - 1)
        self._split.check_rest(taken)
        self._start = state
        self._running = None

    def _identity(self) -> dict[str, Any]:
        return {
            "global_batch_size": self._size,
            "num_buckets": self._split.num_buckets,
            "meets": self._split.meets,
            "max_tokens": self._max_tokens or 0,
            "seed": self._split.seed,
            "is_padded": int(self._split.is_padded),
        }

    def _buckets(self, window: list[Any], num_replicas: int) -> tuple[list[list[int]], str]:
        """Places in the window of each bucket's samples, and the digest of the window's costs."""
        sizes = None if self._tokens is None else list(map(self._tokens, window))
        native = costs(list(map(self._cost, window)), tokens=sizes)._native
        cut = self._split.cut(num_replicas, None, self._max_tokens)
        native.check(cut, len(window))
        return native.buckets(range(len(window)), cut), native.digest


class _Reading:
    """One replica's batches of a stream, in one process."""

    def __init__(self, stream: BalancedStream, start: Mapping[str, Any] | None) -> None:
        self._stream = stream
        worker = get_worker_info()
        self._every, self._turn = (1, 0) if worker is None else (worker.num_workers, worker.id)
        self._reset({} if start is None else start)
        self._begun = self._number

    def _reset(self, start: Mapping[str, Any]) -> None:
        # Samples before the window, batches of this replica so far, buckets of the window taken by all.
        self._first = whole_number("samples", start.get("samples", 0), 0)
        self._number = whole_number("batches", start.get("batches", 0), 0)
        self._taken = whole_number("buckets_taken", start.get("buckets_taken", 0), 0)
        self._balanced_for = whole_number("balanced_for", start.get("balanced_for", 0), 0)
        self._digest = start.get("costs", "")
        self._state_of_source = start.get("source")
        self._window: list[Any] = []
        self._buckets: list[list[int]] | None = None
        self._ahead: deque[Any] = deque()
        # The stream's own state before the first sample of each window that has begun to be read.
        self._marks: deque[Any] = deque()
        self._num_read = self._first
        self._is_read = False
        self._from: Iterator[Any] | None = None
        self._loaded = self._state_of_source

    def __iter__(self) -> _Reading:
        return self

    def __next__(self) -> list[Any]:
        while True:
            if self._buckets is None and not self._balance():
                raise StopIteration
            number, bucket = self._number, self._take()
            if (number - self._begun) % self._every == self._turn:
                return bucket

    def _open(self) -> Iterator[Any]:
        source, state = self._stream._source, self._loaded
        if state is not None and hasattr(source, "load_state_dict"):
            source.load_state_dict(state)
            return iter(source)
        samples: Any = iter(source)
        if state is not None:
            samples.load_state_dict(state)
            return samples
        # Without a state of its own it is read again up to the place.
        for _ in islice(samples, self._first):
            pass
        return samples

    def _mark(self) -> None:
        either: tuple[Any, ...] = (self._from, self._stream._source)
        for of in either:
            if hasattr(of, "state_dict") and hasattr(of, "load_state_dict"):
                self._marks.append(of.state_dict())
                return
        self._marks.append(None)

    def _read(self, count: int) -> None:
        """Reads ahead until there are `count` samples, or the stream ends."""
        if self._from is None:
            self._from = self._open()
        while len(self._ahead) < count and not self._is_read:
            if (self._num_read - self._first) % self._stream._size == 0:
                self._mark()
            try:
                self._ahead.append(next(self._from))
                self._num_read += 1
            except StopIteration:
                self._is_read = True

    def _balance(self) -> bool:
        """Takes the next window and balances it; whether there is one."""
        stream = self._stream
        self._read(stream._size + stream._split.num_buckets)
        there = len(self._ahead)
        count = stream._size
        if there < stream._size + stream._split.num_buckets:
            # The end: what is left fills a window of its own, or is added to this one.
            count = min(there, stream._size) if stream._drop_last else there
            if stream._drop_last and there < stream._size:
                return False
        if count == 0:
            return False
        if count < stream._split.num_buckets:
            message = f"{count} samples for {stream._split.num_buckets} buckets, each needs at least one"
            raise ValueError(message)
        self._window = [self._ahead.popleft() for _ in range(count)]
        if stream._drop_last and self._is_read and len(self._ahead) < stream._size:
            self._ahead.clear()
        self._state_of_source = self._marks.popleft()
        self._buckets, digest = stream._buckets(
            self._window, self._balanced_for or stream._split.num_replicas
        )
        if self._taken and digest != self._digest:
            message = (
                "the state stands inside a global batch that was balanced by other costs: samples would be "
                "lost and repeated. Give the same `cost`, or a state between global batches"
            )
            raise ValueError(message)
        self._digest = digest
        return True

    def _take(self) -> list[Any]:
        """This replica's next bucket; the window is left behind with its last one."""
        stream, buckets = self._stream, self._buckets
        assert buckets is not None, "a window is balanced first"
        bucket = [self._window[at] for at in buckets[self._taken + stream._split.rank]]
        self._balanced_for = self._balanced_for or stream._split.num_replicas
        self._taken += stream._split.num_replicas
        self._number += 1
        if self._taken == stream._split.num_buckets:
            self._first += len(self._window)
            self._taken = self._balanced_for = 0
            self._buckets, self._window = None, []
        return bucket

    def state_dict(self) -> dict[str, Any]:
        """Where this reading stands."""
        is_inside = self._taken > 0
        between = self._marks[0] if self._marks else self._loaded
        return {
            **self._stream._identity(),
            "samples": self._first,
            "batches": self._number,
            "begun": self._begun,
            "buckets_taken": self._taken,
            "balanced_for": self._balanced_for if is_inside else 0,
            "costs": self._digest if is_inside else "",
            "source": self._state_of_source if is_inside else between,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state was taken."""
        self._stream.load_state_dict(state)
        self._stream._start = None
        self._reset(state)
        self._begun = whole_number("begun", state.get("begun", 0), 0)
