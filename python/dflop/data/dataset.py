"""Samples as tensors: tokens by the native module, tiles by the adapter, decoded ahead and cached.

    index --Dataset.encode--> EncodedSample --> Sample (token tensors, media)            every rank
    share --adapter.pixels per media--> tiles [n, *input_shape] float32 --> byte-bounded LRU   encoder ranks

Where an encoder reads patches or windows of sound, `tiles` are those.

Tiles are cached as the float32 values that the adapter gave, so a tile from the cache equals a decoded one
bit by bit, whatever the processor did. The price is four bytes a value.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from dflop._native import ProfileError
from dflop.data.sample import Sample
from dflop.data.shares import share_of
from dflop.models.adapter import MediaGrid
from dflop.models.media import MediaBytes

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from dflop._native import Dataset, EncodedSample
    from dflop.data.shares import MediumRun, Parts, Share
    from dflop.models.adapter import ModelAdapter

IGNORED_LABEL = -100
"""A position without loss, as PyTorch's cross entropy has it."""


def sample_from_encoded(index: int, encoded: EncodedSample, adapter: ModelAdapter) -> Sample:
    """The sample as tensors, with labels moved to the position that predicts them.

    Args:
        index: Position in the data profile.
        encoded: What the native module made of it.
        adapter: Knows its positions.

    Returns:
        The sample, on the CPU.

    Raises:
        ProfileError: Lists of unequal length, features that do not fill the mask, or loss on the first token;
            the message names the sample.
    """
    ids, mask, labels = encoded.input_ids, encoded.feature_mask, encoded.labels
    name = f"sample `{encoded.id}` ({index})"
    if not len(ids) == len(mask) == len(labels) or not ids:
        counts = f"{len(ids)} ids, {len(mask)} mask entries, {len(labels)} labels"
        message = f"{name}: {counts}, must be equal and above 0"
        raise ProfileError(message)
    media = tuple(
        MediaGrid(
            m.kind,
            m.num_tiles,
            m.height,
            m.width,
            m.num_features,
            patches=m.patches,
            sampled_fps=m.sampled_fps,
        )
        for m in encoded.media
    )
    num_features = sum(m.num_features for m in media)
    if num_features != sum(mask):
        message = f"{name}: its media fill {num_features} LLM tokens, its feature mask has {sum(mask)} places"
        raise ProfileError(message)
    if labels[0] != IGNORED_LABEL:
        # The profile counts it as a label token, yet no position predicts it: the loss would be too small.
        message = f"{name}: its first token carries loss, no position can predict it"
        raise ProfileError(message)
    input_ids_T = torch.tensor(ids, dtype=torch.int64)
    feature_mask_T = torch.tensor(mask, dtype=torch.bool)
    try:
        positions_T = adapter.positions(input_ids_T, feature_mask_T, media)
    except ValueError as error:
        message = f"{name}: {error}"
        raise ProfileError(message) from error
    return Sample(
        index=index,
        id=encoded.id,
        input_ids_T=input_ids_T,
        feature_mask_T=feature_mask_T,
        targets_T=torch.tensor([*labels[1:], IGNORED_LABEL], dtype=torch.int64),
        positions_T=positions_T,
        media=media,
        files=tuple(encoded.media),
        num_features=num_features,
        parts=tuple(tuple(m.parts) for m in encoded.media),
    )


Key = TypeVar("Key", bound="Hashable")
Kept = TypeVar("Kept")


class ByteBoundedCache(Generic[Key, Kept]):
    """Values by key, the least recently used out when their bytes exceed the bound; for any thread."""

    def __init__(self, bound_bytes: int) -> None:
        """Empty.

        Args:
            bound_bytes: Bytes of all values together; a larger value is not kept.
        """
        self._bound_bytes = bound_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, tuple[Kept, int]] = OrderedDict()
        self.num_bytes = 0

    def __contains__(self, key: Key) -> bool:
        """Whether the value is kept; does not count as a use."""
        return key in self._entries

    def get(self, key: Key) -> Kept | None:
        """The value, now the most recently used; none if it is not kept."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Key, value: Kept, num_bytes: int) -> None:
        """Keeps the value if it fits the bound at all, and throws out what no longer fits."""
        with self._lock:
            if num_bytes > self._bound_bytes or key in self._entries:
                return
            self._entries[key] = (value, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self._bound_bytes:
                _, (_, oldest_bytes) = self._entries.popitem(last=False)
                self.num_bytes -= oldest_bytes


class SampleLoader:
    """Samples by index and tiles by share, decoded ahead in a few threads; one per rank, for one thread."""

    def __init__(
        self,
        dataset: Dataset,
        adapter: ModelAdapter,
        cache_bytes: int = 1 << 30,
        token_bytes: int = 1 << 28,
        num_threads: int = 2,
    ) -> None:
        """Starts no work.

        Args:
            dataset: Where samples come from.
            adapter: Decodes media.
            cache_bytes: Tiles kept after use, least recently used out first; 0 keeps none.
            token_bytes: Token tensors kept after use, likewise.
            num_threads: Threads that decode ahead.
        """
        self._dataset = dataset
        self._adapter = adapter
        self._told = threading.Lock()
        self._noticed: set[int] = set()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")
        self._samples: ByteBoundedCache[int, Sample] = ByteBoundedCache(token_bytes)
        self._tiles: ByteBoundedCache[Share, torch.Tensor] = ByteBoundedCache(cache_bytes)
        # Decoded or decoding and not yet asked for. Apart from the cache, so that a cache smaller than a step
        # does not throw tiles out before their first use.
        self._ahead: dict[Share, Future[torch.Tensor]] = {}

    def sample(self, index: int) -> Sample:
        """The token tensors of a sample.

        Args:
            index: Position in the data profile.

        Returns:
            The sample, on the CPU.

        Raises:
            ProfileError: The sample cannot be read or contradicts itself; the message names it.
        """
        if (known := self._samples.get(index)) is not None:
            return known
        encoded = self._dataset.encode(index)
        if encoded.notice:
            self._tell(index, encoded.notice)
        sample = sample_from_encoded(index, encoded, self._adapter)
        self._samples.put(index, sample, sample.num_bytes)
        return sample

    def tiles(self, index: int, parts: Parts = None) -> torch.Tensor:
        """All tiles of a share, media after media: [n, *input_shape] float32 on the CPU; do not write to it.

        Waits for the decoding threads if they have it, else decodes here.

        Args:
            index: Position in the data profile.
            parts: Of the sample; none: all of them.

        Returns:
            [n, *input_shape]; n is 0 for text alone.

        Raises:
            ProfileError: A file cannot be decoded, or gives another number of tiles than profiled; the
                message names sample and file.
        """
        share = (index, parts)
        if (known := self._tiles.get(share)) is not None:
            return known
        future = self._ahead.pop(share, None)
        tiles = self._decode(share) if future is None else future.result()
        self._tiles.put(share, tiles, tiles.numel() * tiles.element_size())
        return tiles

    def prefetch(self, shares: Iterable[Share], with_tiles: bool) -> None:
        """Starts reading samples in the threads and returns at once.

        Args:
            shares: What this rank will ask for next.
            with_tiles: Decode their media too (encoder ranks).
        """
        for share in shares:
            if not with_tiles:
                if share[0] not in self._samples:
                    self._pool.submit(self._read_quietly, share[0])
            elif share not in self._tiles and share not in self._ahead:
                self._ahead[share] = self._pool.submit(self._decode, share)

    def fill(self, shares: Sequence[Share], with_tiles: bool) -> None:
        """Brings samples into the cache and waits for it: what follows finds them warm.

        Args:
            shares: What this rank will ask for next.
            with_tiles: Decode their media too (encoder ranks).

        Raises:
            ProfileError: As `sample` and `tiles`.
        """
        self.prefetch(shares, with_tiles)
        for index, parts in shares:
            self.sample(index)
            if with_tiles:
                self.tiles(index, parts)

    def close(self) -> None:
        """Stops the threads; what they have not begun is given up."""
        self._pool.shutdown(wait=False, cancel_futures=True)
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
            self.sample(index)
        except Exception:  # noqa: BLE001
            return

    def _decode(self, share: Share) -> torch.Tensor:
        index, parts = share
        sample = self.sample(index)
        found: list[torch.Tensor] = []
        for run in share_of(sample, parts).runs:
            path = sample.files[run.medium].path
            name, file = f"sample `{sample.id}` ({index})", f"file `{path}`"
            try:
                tiles = self._tiles_of(sample, run)
            except Exception as error:
                # The adapter's own errors name the file already.
                message = f"{name}: {error}" if path in str(error) else f"{name}, {file}: {error}"
                raise ProfileError(message) from error
            expected = (run.grid.num_inputs, *self._adapter.input_shape)
            if tuple(tiles.shape) != expected:
                shape = tuple(tiles.shape)
                message = f"{name}, {file}: decoded to tiles of shape {shape}, profiled as {expected}"
                raise ProfileError(message)
            found.append(tiles.to(torch.float32))
        return torch.cat(found) if found else torch.empty(0, *self._adapter.input_shape)

    def _tiles_of(self, sample: Sample, run: MediumRun) -> torch.Tensor:
        medium, whole = sample.files[run.medium], sample.media[run.medium]
        found = Path(medium.path) if medium.is_local else MediaBytes(medium.path, medium.read())
        frames, first = medium.frame_indices, run.first_tile
        if frames:
            # Of a video, only the frames of the run: all tiles have as many, but the last may lack one.
            each = -(-len(frames) // whole.num_tiles)
            chosen = frames[each * first : each * (first + run.grid.num_tiles)]
            return self._adapter.pixels(found, whole.kind, chosen, run.grid)
        tiles = self._adapter.pixels(found, whole.kind, frames, whole)
        if run.grid.num_tiles == whole.num_tiles:
            # All of them pass as they are: their number is compared with the profile's.
            return tiles
        per_tile = whole.num_inputs // whole.num_tiles
        return tiles[per_tile * first : per_tile * (first + run.grid.num_tiles)]
