"""Samples that turn out bad while a run trains: what becomes of them, on all ranks alike.

    ranks pack --some cannot decode--> agreement: how many --> all tell which --> another schedule, everywhere
                                                                              --> pack again, agree again

`data.on_bad_sample` decides, as it does for the data profile. Under `skip` a bad sample leaves its step, and
the loss is divided by the label tokens of the others. Under `substitute` a neighbour that is no larger trains
in its place; where there is none, the place stays empty. The schedule is not computed again, only changed in
these places. No sample in it became larger, so it still fits the memory that it was checked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dflop._native import Schedule
from dflop.data.collate import encoder_input
from dflop.data.loader import BadSampleError
from dflop.data.shares import share_of
from dflop.runtime.failure import RankError, talking
from dflop.runtime.work import decodes, llm_samples

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch

    from dflop._native import Dataset
    from dflop.data.loader import SampleLoader
    from dflop.runtime.mesh import Mesh
    from dflop.runtime.turns import Turn
    from dflop.runtime.work import Packed

PERCENT_MAX = 5.0
"""Percentage of bad samples above which a run ends, unless another is set; as in the data profile."""
FEW = 4
"""Up to this number, bad samples never end a run, unless a percentage is set; as in the data profile."""
NEIGHBOURS_MAX = 10_000
"""How many samples are tried at most to find a substitute."""


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be trained."""

    sample: int
    substitute: int | None
    """What trains in its place; none: nothing."""
    cause: str
    """Names the sample and the file."""


class BadSamples:
    """The bad samples of a run so far. Every rank knows the same ones."""

    def __init__(self, mesh: Mesh, dataset: Dataset, policy: str, percent_max: float | None) -> None:
        """None yet.

        Args:
            mesh: This rank's coordinates.
            dataset: Knows sizes of samples.
            policy: `fail`, `skip` or `substitute`.
            percent_max: The run ends where more than this percentage of the samples seen so far, rounded up
                to a whole sample, is bad. None: 5 percent, but never because of four bad samples or fewer.
        """
        self._mesh = mesh
        self._dataset = dataset
        self._policy = policy
        self._percent_max = percent_max
        self._known: set[int] = set()
        self._num_seen = 0

    @property
    def num_known(self) -> int:
        """Bad samples so far, each once."""
        return len(self._known)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the bad samples, and how many samples were seen."""
        return {"known": sorted(self._known), "seen": self._num_seen}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self._known, self._num_seen = set(state["known"]), state["seen"]

    def pack(
        self, schedule: Schedule, loader: SampleLoader, dtype: torch.dtype, packed: Packed
    ) -> dict[int, str]:
        """Reads the samples of this rank and packs what its encoder reads.

        Args:
            schedule: Of the step.
            loader: Of this rank.
            dtype: Of the model.
            packed: Microbatches of the encoder that are packed already; those whose samples are all good are
                added.

        Returns:
            The bad samples with their causes; empty where all are good.

        Raises:
            BadSampleError: Under `fail`, the first.
            ProfileError: A sample is not what was profiled.
        """
        bad: dict[int, str] = {}
        for index in llm_samples(self._mesh, schedule):
            self._try(lambda index=index: loader.sample(index), bad)
        reads_media = decodes(self._mesh, loader.adapter)
        for j in range(schedule.num_microbatches if self._mesh.holds_encoder else 0):
            shares = tuple(schedule.encoder(j, self._mesh.encoder_replica))
            if not reads_media:
                # Later stages of the encoder, and all but the first rank of a tensor group, need no decoded
                # media, only their sizes, which the record has.
                for index, _ in shares:
                    self._try(lambda index=index: loader.sample(index), bad)
                continue
            if not shares or shares in packed:
                continue
            tiles = [self._try(lambda share=share: loader.tiles(*share), bad) for share in shares]
            found = [each for each in tiles if each is not None]
            if len(found) == len(shares):
                cut = [share_of(loader.sample(index), parts) for index, parts in shares]
                packed[shares] = encoder_input(cut, found, dtype)
        return bad

    def _try(self, read: Any, bad: dict[int, str]) -> Any:
        try:
            return read()
        except BadSampleError as error:
            if self._policy == "fail":
                raise
            bad.setdefault(error.sample, str(error))
            return None

    def mend(self, turn: Turn, own: Mapping[int, str]) -> Turn:
        """A turn without the samples that some rank found bad. Every rank must call it; blocks.

        Args:
            turn: As it was to be trained.
            own: What this rank found.

        Returns:
            The turn that trains instead, equal on all ranks.

        Raises:
            RankError: There are too many bad samples; on every rank alike.
        """
        gathered: list[Any] = [None] * self._mesh.num_ranks
        with talking("tell each other of bad samples"):
            dist.all_gather_object(gathered, dict(own), group=self._mesh.control)
        causes: dict[int, str] = {}
        for found in gathered:
            causes = {**found, **causes}
        self._num_seen += 0 if turn.bad else len(turn.samples)
        self._known |= causes.keys()
        self._check(causes)
        stands_for = {one.substitute: one for one in turn.bad if one.substitute is not None}
        # Two bad samples of a step must not get the same substitute.
        taken = set(turn.samples)
        bad: dict[int, Any] = {one.sample: one for one in turn.bad}
        instead: dict[int, int | None] = {}
        for index in sorted(causes):
            # A substitute that is bad itself: the sample that it stood for gets another one.
            first = stands_for.get(index) or BadSample(index, None, causes[index])
            instead[index] = other = self._substitute(first.sample, taken)
            bad[first.sample] = replace(first, substitute=other)
            if other is not None:
                taken.add(other)
        samples = [instead.get(index, index) for index in turn.samples]
        kept = [index for index in samples if index is not None]
        return replace(
            turn,
            samples=kept,
            schedule=changed(turn.schedule, instead, kept, self._dataset),
            bad=list(bad.values()),
        )

    def count(self, turn: Turn) -> None:
        """Counts the samples of a step as seen; `mend` has done it where some were bad."""
        self._num_seen += 0 if turn.bad else len(turn.samples)

    def _check(self, causes: Mapping[int, str]) -> None:
        percent_max = PERCENT_MAX if self._percent_max is None else self._percent_max
        # Rounded up: a share above 0 allows the first bad sample, whatever number of samples came before it.
        allowed = math.ceil(percent_max / 100 * self._num_seen)
        if self.num_known <= (max(allowed, FEW) if self._percent_max is None else allowed):
            return
        percent = 100 * self.num_known / max(1, self._num_seen)
        message = (
            f"{self.num_known} of {self._num_seen} samples are bad ({percent:.1f} %), "
            f"`data.bad_samples_max_percent` is {percent_max:g}; one of them: {min(causes.values())}"
        )
        hint = "mend what `bad_samples.jsonl` lists, or allow more, and go on with `--resume auto`"
        raise RankError(message, hint, is_of_all=True)

    def _substitute(self, bad: int, taken: Collection[int]) -> int | None:
        """The next sample that is no larger, is not bad and does not train in the step already."""
        if self._policy != "substitute":
            return None
        limits, taken, num_samples = self._dataset.shape(bad), set(taken), len(self._dataset)
        for distance in range(1, min(num_samples, NEIGHBOURS_MAX)):
            index = (bad + distance) % num_samples
            if index in taken or index in self._known:
                continue
            sizes = self._dataset.shape(index)
            if sizes[2] > 0 and all(size <= limit for size, limit in zip(sizes, limits, strict=True)):
                return index
        return None


def changed(
    schedule: Schedule, instead: Mapping[int, int | None], samples: Collection[int], dataset: Dataset
) -> Schedule:
    """A schedule with other samples in some places.

    Args:
        schedule: As it was.
        instead: For each sample to be taken out, the sample that takes its place; none: its place is empty.
        samples: All samples of the step after the change.
        dataset: Knows their label tokens, and which have media.

    Returns:
        The same microbatches and actions. Where several ranks were to encode parts of the bad sample, the
        rank that had its first part encodes the whole substitute.
    """
    others = [other for other in instead.values() if other is not None]
    encoded = {other for other in others if dataset.shape(other)[0] > 0}
    return schedule.replaced(instead, encoded, sum(dataset.shape(index)[2] for index in samples))
