"""Samples and their tiles for one rank, read and decoded ahead of need, within a number of bytes.

    share --a thread: Dataset.encode--> jobs --a worker, or the thread--> tiles [n, *input_shape] float32
      room in the arena, in the order in which shares will be asked for --> tiles(share) --> byte-bounded LRU

Where an encoder reads patches or windows of sound, `tiles` are those. They are cached as the float32 values
that the adapter gave, so a tile from the cache equals a decoded one bit by bit, whatever the processor did.
The price is four bytes a value.
"""

from __future__ import annotations

import sys
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeVar

import torch

from dflop._native import ProfileError
from dflop.data.arena import Arena, Block
from dflop.data.cache import ByteBoundedCache
from dflop.data.dataset import sample_from_encoded
from dflop.data.decoding import Job, decode, file_of
from dflop.data.shares import share_of
from dflop.data.workers import UndecodableError, WorkerError
from dflop.models.errors import hinted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dflop._native import Dataset
    from dflop.data.sample import Sample
    from dflop.data.shares import MediumRun, Parts, Share
    from dflop.data.workers import Workers
    from dflop.models.adapter import ModelAdapter


Result = TypeVar("Result")


class HangingDecoderError(WorkerError):
    """A decoder, or the disk or network that it reads from, has not ended in time."""


class BadSampleError(ProfileError):
    """A sample that cannot be trained: its media cannot be read, or are not what was profiled."""

    def __init__(self, message: str, sample: int) -> None:
        """Of one sample.

        Args:
            message: Names the sample, the file and the cause.
            sample: Its index.
        """
        super().__init__(message)
        self.sample = sample


@dataclass(frozen=True)
class _Ready:
    """What was done ahead for a share."""

    tiles: torch.Tensor | None
    """None: they are larger than the arena, and decoded when they are asked for."""
    block: Block | None
    """Where they lie; none: in memory of their own."""


class SampleLoader:
    """Samples by index and tiles by share; for one thread, which asks for them in the order of `prefetch`."""

    def __init__(
        self,
        dataset: Dataset,
        adapter: ModelAdapter,
        cache_bytes: int = 1 << 30,
        token_bytes: int = 1 << 28,
        num_threads: int = 2,
        *,
        arena: Arena | None = None,
        workers: Workers | None = None,
        limit_s: Callable[[], float] | None = None,
    ) -> None:
        """Starts no work.

        Args:
            dataset: Where samples come from.
            adapter: Decodes media.
            cache_bytes: Tiles kept after use, least recently used out first; 0 keeps none.
            token_bytes: Token tensors kept after use, likewise.
            num_threads: Threads that decode ahead; with workers, one for each of them.
            arena: Where tiles wait that are decoded ahead; none: memory without a limit.
            workers: Processes that decode into the arena; none: the threads decode.
            limit_s: Seconds that `sample` and `tiles` wait at most; none: as long as it takes.
        """
        assert workers is None or arena is not None, "workers decode into an arena"
        self._dataset = dataset
        self.adapter = adapter
        self._arena = arena
        self._workers = workers
        self._limit_s = limit_s
        self._told = threading.Lock()
        self._noticed: set[int] = set()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")
        # Apart: a thread that waits for room in the arena must not hold up text, which needs none.
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="read")
        # For what nobody does ahead, where there is a limit: a thread cannot stop itself.
        self._here = ThreadPoolExecutor(1, thread_name_prefix="here")
        self._samples: ByteBoundedCache[int, Sample] = ByteBoundedCache(token_bytes)
        self._tiles: ByteBoundedCache[Share, torch.Tensor] = ByteBoundedCache(cache_bytes)
        # Decoded or decoding and not yet asked for. Apart from the cache, so that a cache smaller than a step
        # does not throw tiles out before their first use.
        self._ahead: dict[Share, Future[_Ready]] = {}

    def sample(self, index: int) -> Sample:
        """The token tensors of a sample.

        Args:
            index: Position in the data profile.

        Returns:
            The sample, on the CPU.

        Raises:
            BadSampleError: Its record or media cannot be read any more; the message names it.
            ProfileError: It is not what was profiled; the message names it.
            HangingDecoderError: Reading it has not ended within the limit; the message names it.
        """
        if (known := self._samples.get(index)) is not None:
            return known
        if self._limit_s is None:
            return self._read(index)
        return self._awaited(self._here.submit(self._read, index), (index, None))

    def _read(self, index: int) -> Sample:
        """As `sample`, in this thread."""
        if (known := self._samples.get(index)) is not None:
            return known
        try:
            encoded = self._dataset.encode(index)
        except ProfileError as error:
            if getattr(error, "is_of_sample", False):
                raise BadSampleError(str(error), index) from error
            raise
        if encoded.notice:
            self._tell(index, encoded.notice)
        sample = sample_from_encoded(index, encoded, self.adapter)
        self._samples.put(index, sample, sample.num_bytes)
        return sample

    def tiles(self, index: int, parts: Parts = None) -> torch.Tensor:
        """All tiles of a share, media after media: [n, *input_shape] float32 on the CPU; do not write to it.

        Waits for those who decode it ahead, else decodes here. Its room in the arena is free again when the
        tensor is gone: who keeps it copies it.

        Args:
            index: Position in the data profile.
            parts: Of the sample; none: all of them.

        Returns:
            [n, *input_shape]; n is 0 for text alone.

        Raises:
            BadSampleError: A file cannot be decoded, or gives another number of tiles than profiled; the
                message names sample and file.
            WorkerError: The process that decoded it has ended; the message names the sample.
            HangingDecoderError: Decoding has not ended within the limit; the message names sample and file.
        """
        share = (index, parts)
        if (known := self._tiles.get(share)) is not None:
            return known
        future = self._ahead.pop(share, None)
        ready = _Ready(None, None) if future is None else self._awaited(future, share)
        tiles = ready.tiles
        if tiles is None and self._limit_s is None:
            tiles = self._decode_here(share)
        elif tiles is None:
            tiles = self._awaited(self._here.submit(self._decode_here, share), share)
        num_bytes = tiles.numel() * tiles.element_size()
        if ready.block is not None and self._arena is not None:
            free = self._arena.free
            if not self._tiles.keeps(num_bytes):
                weakref.finalize(tiles, free, ready.block)
                return tiles
            tiles = tiles.clone()
            free(ready.block)
        self._tiles.put(share, tiles, num_bytes)
        return tiles

    def prefetch(self, shares: Iterable[Share], with_tiles: bool) -> None:
        """Starts reading samples in the background and returns at once.

        Args:
            shares: What this rank will ask for next, in that order.
            with_tiles: Decode their media too (encoder ranks).
        """
        for share in shares:
            if not with_tiles:
                if share[0] not in self._samples:
                    self._readers.submit(self._read_quietly, share[0])
            elif share not in self._tiles and share not in self._ahead:
                turn = None if self._arena is None else self._arena.turn()
                self._ahead[share] = self._pool.submit(self._decode_ahead, share, turn)

    def fill(self, shares: Sequence[Share], with_tiles: bool) -> None:
        """Brings samples into the cache and waits for it: what follows finds them warm.

        Args:
            shares: What this rank will ask for next.
            with_tiles: Decode their media too (encoder ranks).

        Raises:
            ProfileError: As `sample`.
        """
        self.prefetch(shares, with_tiles)
        for index, parts in shares:
            # A bad one is told of when it is asked for.
            with suppress(BadSampleError):
                self.sample(index)
                if with_tiles:
                    self.tiles(index, parts)

    def forget(self, shares: Iterable[Share]) -> None:
        """Gives back the room of what nobody will ask for; waits until it is decoded.

        Args:
            shares: Once prefetched.
        """
        for share in shares:
            future = self._ahead.pop(share, None)
            if future is None:
                continue
            try:
                ready = self._awaited(future, share)
            except ProfileError:
                continue
            if ready.block is not None and self._arena is not None:
                self._arena.free(ready.block)

    def close(self) -> None:
        """Stops the threads; what they have not begun is given up."""
        if self._arena is not None:
            self._arena.close()
        for pool in (self._pool, self._readers, self._here):
            pool.shutdown(wait=False, cancel_futures=True)
        if len(self._noticed) > 1:
            print(f"warning: {len(self._noticed)} samples have such media", file=sys.stderr)

    def _tell(self, index: int, notice: str) -> None:
        """Says the first notice at once and counts samples: a dataset that was copied has one for each."""
        with self._told:
            if not self._noticed:
                print(f"warning: {notice}", file=sys.stderr)
            self._noticed.add(index)

    def _read_quietly(self, index: int) -> None:
        # The error comes again, with its sample named, when the sample is asked for: nothing is lost here.
        try:
            self._read(index)
        except Exception:  # noqa: BLE001
            return

    def _awaited(self, future: Future[Result], share: Share) -> Result:
        """What it comes to, within the limit."""
        limit_s = None if self._limit_s is None else self._limit_s()
        if wait([future], limit_s).done:
            return future.result()
        index, parts = share
        # Known here where it was read; else the record itself is what hangs.
        sample = self._samples.get(index)
        where = f"sample {index}"
        if sample is not None:
            paths = [f"`{sample.files[run.medium].path}`" for run in share_of(sample, parts).runs]
            where = f"{_name(sample)}, file {' or '.join(dict.fromkeys(paths))}"
        message = f"{where}: reading and decoding has not ended in {limit_s:g} s"
        hint = "look at the file and at the disk or network that holds it, or raise `train.timeout_seconds`"
        raise hinted(HangingDecoderError(message), hint)

    def _decode_ahead(self, share: Share, turn: int | None) -> _Ready:
        """In a thread of the pool."""
        arena = self._arena
        if arena is None or turn is None:
            return _Ready(self._decode_here(share), None)
        try:
            sample, runs, jobs = self._jobs(share)
            width = prod(self.adapter.input_shape)
            num_values = sum(run.grid.num_inputs for run in runs) * width
            if not 0 < 4 * num_values <= arena.num_bytes:
                return _Ready(None, None)
            block = arena.reserve(turn, 4 * num_values)
        finally:
            arena.give_up(turn)
        try:
            tiles = arena.view(block, (num_values // width, *self.adapter.input_shape))
            if self._workers is None:
                tiles.copy_(self._decoded(sample, runs, jobs))
            else:
                self._decode_there(sample, runs, jobs, arena, block)
        except BaseException:
            arena.free(block)
            raise
        return _Ready(tiles, block)

    def _decode_there(
        self, sample: Sample, runs: Sequence[MediumRun], jobs: Sequence[Job], arena: Arena, block: Block
    ) -> None:
        assert self._workers is not None, "who decodes there has workers"
        try:
            self._workers.decode(jobs, arena, block, _name(sample))
        except UndecodableError as error:
            raise _bad(sample, runs[error.job], error) from error

    def _decode_here(self, share: Share) -> torch.Tensor:
        return self._decoded(*self._jobs(share))

    def _decoded(self, sample: Sample, runs: Sequence[MediumRun], jobs: Sequence[Job]) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for run, job in zip(runs, jobs, strict=True):
            try:
                found.append(decode(self.adapter, job))
            except Exception as error:
                raise _bad(sample, run, error) from error
        return torch.cat(found) if found else torch.empty(0, *self.adapter.input_shape)

    def _jobs(self, share: Share) -> tuple[Sample, Sequence[MediumRun], list[Job]]:
        index, parts = share
        sample = self._read(index)
        runs = share_of(sample, parts).runs
        jobs: list[Job] = []
        for run in runs:
            medium = sample.files[run.medium]
            try:
                found = file_of(medium)
            except ProfileError as error:
                raise _bad(sample, run, error) from error
            whole = sample.media[run.medium]
            jobs.append(Job(found, medium.frame_indices, whole, run.first_tile, run.grid))
        return sample, runs, jobs


def _name(sample: Sample) -> str:
    return f"sample `{sample.id}` ({sample.index})"


def _bad(sample: Sample, run: MediumRun, error: Exception) -> BadSampleError:
    path = sample.files[run.medium].path
    # The adapter's own errors name the file already.
    where = _name(sample) if f"`{path}`" in str(error) else f"{_name(sample)}, file `{path}`"
    return BadSampleError(f"{where}: {error}", sample.index)
