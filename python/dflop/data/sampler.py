"""Balanced batches for anyone's DataLoader; needs no torch.

The order of an epoch is cut into global batches, each is balanced into buckets, each replica gets its share.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dflop._native import GlobalBatches, balance, profile_shapes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_LARGEST_COST = 1_000_000_000
"""What the largest cost is scaled to where costs are no integers: nine digits, and sums far from 2^63."""


class BalancedBatchSampler:
    """Lists of sample indices whose work is even, for the `batch_sampler` of a DataLoader.

    Each global batch of `batch_size * num_buckets` samples is balanced into `num_buckets` buckets: one a
    replica, or several a replica where gradients are accumulated. Buckets hold different numbers of samples,
    `batch_size` on average, and about equal work. The samples of a global batch are those of the shuffled
    order, so balancing changes no batch statistics, only which replica computes what.

    One giant in a global batch makes all replicas but one wait; as many as there are buckets do so once. With
    `giant_llm_cost`, samples above it wait for each other: of each `giant_steps_max + 1` global batches in a
    row they stand at the end and the others move up, so that none is trained more than `giant_steps_max`
    global batches later than else. That changes which samples form a global batch, so it is off unless asked
    for.

    Each sample comes exactly once an epoch over all replicas, and each replica yields the same number of
    batches. The last global batch is smaller rather than dropped; where it has fewer samples than there are
    buckets, it is added to the one before, so that no batch is ever empty.

    An index is a position in the user's dataset: of costs and shapes, that of their entry; of a data profile,
    that of the record among all that its mixture takes, source after source in their order (of one JSONL
    file, the line without empty ones). Bad samples, which a profile leaves out or replaces by a neighbour
    (`data.on_bad_sample`), keep their place and never come: a warning says how many. A profile is refused
    where such a position is not known: of a part, of a random sample (`--sample`), and of a mixture that
    passes over records (`random:`, `end:`). With `first:` the dataset must hold only the first, too.

    NOTE: averaging a loss per batch weighs samples of small buckets more. Sum the loss and divide by the
    label tokens (or samples) of the global batch to keep the gradient that unbalanced batches give.
    """

    def __init__(
        self,
        shapes_or_profile: Iterable[Any] | str | os.PathLike[str],
        batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        *,
        num_buckets: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        giant_llm_cost: float | None = None,
        giant_steps_max: int = 7,
    ) -> None:
        """Reads the costs; balances nothing yet.

        Args:
            shapes_or_profile: One entry a sample: `(encoder cost, LLM cost)` in any one unit, best measured
                nanoseconds, also as an array or tensor of tensor shape (samples, 2); or a shape with
                `llm_tokens` and `encoder_tokens` or `encoder_segments`, as attributes or keys; or the path of
                a data profile. For shapes the cost is the token count, scaled so that encoder and LLM weigh
                the same over the data set; attention's squares are not in it.
            batch_size: Samples of a bucket, on average.
            num_replicas: Data-parallel replicas.
            rank: Which of them this is.
            num_buckets: Buckets of a global batch, a multiple of `num_replicas`, which is the default.
            seed: Of the order of samples and of ties in balancing; equal on all replicas.
            shuffle: New order each epoch; otherwise the order of the data.
            drop_last: Leave out the last global batch of an epoch where it is smaller.
            giant_llm_cost: Samples whose LLM cost (as given; of shapes and profiles, `llm_tokens`) is above
                it are giants, which wait for each other; None: none is.
            giant_steps_max: Global batches that a giant may be late, at most.

        Raises:
            ValueError: A number or entry that breaks one of the rules above, or fewer samples than buckets.
            FileNotFoundError: There is no such profile.
            ArtifactError: The file is not a data profile, or one whose rows have no position in a dataset.
        """
        num_buckets = num_replicas if num_buckets is None else num_buckets
        for name, value in [
            ("batch_size", batch_size), ("num_replicas", num_replicas), ("num_buckets", num_buckets),
        ]:  # fmt: skip
            if value < 1:
                message = f"`{name}` is {value}, must be at least 1"
                raise ValueError(message)
        if giant_steps_max < 0:
            message = f"`giant_steps_max` is {giant_steps_max}, must be at least 0"
            raise ValueError(message)
        if not 0 <= rank < num_replicas:
            message = f"`rank` is {rank}, must be from 0 to {num_replicas - 1}"
            raise ValueError(message)
        if num_buckets % num_replicas:
            message = f"`num_buckets` is {num_buckets}, must be a multiple of `num_replicas` {num_replicas}"
            raise ValueError(message)
        if not 0 <= seed < 2**64:
            message = f"`seed` is {seed}, must be from 0 to {2**64 - 1}"
            raise ValueError(message)
        self._indices: list[int] | None = None
        if isinstance(shapes_or_profile, (str, os.PathLike)):
            shapes_or_profile, self._indices = _profiled(shapes_or_profile, warns=rank == 0)
        entries = _entries(shapes_or_profile)
        self._encoder_cost, self._llm_cost = _costs(entries)
        giants: list[int] = []
        if giant_llm_cost is not None:
            giants = [index for index, entry in enumerate(entries) if _llm(entry) > giant_llm_cost]
        self._num_samples = len(entries)
        if self._num_samples < num_buckets:
            message = f"{self._num_samples} samples for {num_buckets} buckets, each needs at least one"
            raise ValueError(message)
        self._num_replicas = num_replicas
        self._rank = rank
        self._num_buckets = num_buckets
        self._seed = seed
        self._global_batch_size = batch_size * num_buckets
        self._order = GlobalBatches(
            self._num_samples,
            self._global_batch_size,
            seed,
            giants,
            giant_steps_max,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        whole, rest = divmod(self._num_samples, self._global_batch_size)
        self._is_rest_added = not drop_last and 0 < rest < num_buckets and whole > 0
        self._num_global_batches = self._order.steps_per_epoch - self._is_rest_added
        # What decides which samples stand where: a state goes on only where all of it is equal.
        self._identity = {
            "num_samples": self._num_samples,
            "global_batch_size": self._global_batch_size,
            "num_buckets": num_buckets,
            "seed": seed,
            "shuffle": int(shuffle),
            # Of one data set, as many giants are the same giants; without any the rest has no say.
            "num_giants": len(giants),
            "giant_steps_max": giant_steps_max if giants else 0,
            "drop_last": int(drop_last) if giants else 0,
        }
        self._epoch = 0
        # Where the next iteration starts, and where the running one stands: (global batch, buckets taken).
        self._start = (0, 0)
        self._position = (0, 0)

    def __len__(self) -> int:
        """Batches this replica yields in a whole epoch."""
        return self._num_global_batches * (self._num_buckets // self._num_replicas)

    def __iter__(self) -> Iterator[list[int]]:
        """This replica's batches of the epoch, from a loaded state's place on; then the next epoch begins."""
        first, taken = self._start
        self._start = (0, 0)
        for global_batch in range(first, self._num_global_batches):
            buckets = self.buckets(global_batch)
            while taken < self._num_buckets:
                bucket = buckets[taken + self._rank]
                taken += self._num_replicas
                self._position = (global_batch, taken) if taken < self._num_buckets else (global_batch + 1, 0)
                yield bucket
            taken = 0
        self._epoch += 1
        self._position = (0, 0)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch; keeps the position if that epoch is the current one.

        Args:
            epoch: From 0.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            self._start = self._position = (0, 0)

    def state_dict(self, num_batches: int | None = None) -> dict[str, int]:
        """Where the epoch stands, equal on all replicas; load it on any number of them.

        Args:
            num_batches: Batches of this epoch that this replica has trained on. Give it where the DataLoader
                has workers: they take batches ahead of the trainer, and without it those count too.

        Returns:
            Numbers, for `load_state_dict`.
        """
        global_batch, taken = self._position
        if num_batches is not None:
            slots = self._num_buckets // self._num_replicas
            global_batch, taken = num_batches // slots, num_batches % slots * self._num_replicas
        return {
            "epoch": self._epoch,
            "global_batch": global_batch,
            "buckets_taken": taken,
            **self._identity,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next iteration goes on where the state was taken, on this or another number of replicas.

        Args:
            state: Of `state_dict`.

        Raises:
            ValueError: The state is of other data, global batch size, buckets, seed, order or giants, or
                stands inside a global batch whose remaining buckets do not divide among the replicas.
        """
        for name, mine in self._identity.items():
            # States of the first version do not say whether samples were shuffled, and knew no giants.
            theirs = state.get(name, mine if name == "shuffle" else 0)
            if theirs != mine:
                message = f"the state has `{name}` {theirs}, this sampler {mine}, must be equal"
                raise ValueError(message)
        remaining = self._num_buckets - state["buckets_taken"]
        if remaining % self._num_replicas:
            message = (
                f"{remaining} buckets remain of a global batch, "
                f"they do not divide among {self._num_replicas} replicas"
            )
            raise ValueError(message)
        self._epoch = state["epoch"]
        self._start = self._position = (state["global_batch"], state["buckets_taken"])

    def buckets(self, global_batch: int) -> list[list[int]]:
        """All buckets of a global batch of this epoch, heaviest first.

        Replicas take `num_replicas` neighbours at a time, so what runs together is of nearly equal work.

        Args:
            global_batch: Position in the epoch, from 0.

        Returns:
            Sample indices of each bucket, as the class says; no bucket is empty.
        """
        samples = self._samples(global_batch)
        encoder = [self._encoder_cost[i] for i in samples]
        llm = [self._llm_cost[i] for i in samples]
        assignment = balance(encoder, llm, self._num_buckets, seed=self._seed).assignment
        buckets: list[list[int]] = [[] for _ in range(self._num_buckets)]
        for sample, bucket in zip(samples, assignment, strict=True):
            buckets[bucket].append(sample)
        for bucket in buckets:
            if not bucket:
                # Samples without cost, or a giant that leaves no work: a DataLoader takes no empty list.
                fullest = max(buckets, key=len)
                bucket.append(fullest.pop(min(range(len(fullest)), key=lambda k: self._cost(fullest[k]))))
        buckets.sort(key=lambda bucket: -sum(map(self._cost, bucket)))
        indices = self._indices
        return buckets if indices is None else [[indices[sample] for sample in b] for b in buckets]

    def _cost(self, sample: int) -> int:
        return self._encoder_cost[sample] + self._llm_cost[sample]

    def _samples(self, global_batch: int) -> list[int]:
        step = self._epoch * self._order.steps_per_epoch + global_batch
        samples = self._order.batch(step)
        is_last = global_batch == self._num_global_batches - 1
        return samples + self._order.batch(step + 1) if is_last and self._is_rest_added else samples


def _entries(source: Iterable[Any]) -> list[Any]:
    """One entry a sample, all pairs or all shapes."""
    # Arrays and tensors: their rows as lists, from any device.
    to_list = getattr(source, "tolist", None)
    entries = list(source if to_list is None else to_list())
    if not entries:
        message = "there are no samples"
        raise ValueError(message)
    pair, shape = "a pair (encoder cost, LLM cost)", "a shape with `llm_tokens`"
    if _is_pair(entries[0]):
        is_right, rule = _is_pair, f"{pair}, as sample 0 is"
    elif _is_shape(entries[0]):
        is_right, rule = _is_shape, f"{shape}, as sample 0 is"
    else:
        is_right, rule = _is_pair, f"{pair} or {shape}"
    for index, entry in enumerate(entries):
        if not is_right(entry):
            message = f"sample {index} is {entry!r}, must be {rule}"
            raise ValueError(message)
    return entries


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, (tuple, list)) and len(entry) == 2


def _llm(entry: Any) -> Any:
    """The number that an entry gives for the LLM, in its own unit."""
    return entry[1] if _is_pair(entry) else float(_field(entry, "llm_tokens"))


def _costs(entries: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Encoder and LLM cost of each sample, as integers of one unit."""
    llm = [_llm(entry) for entry in entries]
    if _is_pair(entries[0]):
        encoder = [entry[0] for entry in entries]
        for index, cost in enumerate(zip(encoder, llm, strict=True)):
            if not all(map(_is_cost, cost)):
                message = f"the costs of sample {index} are {cost}, must be numbers, finite and not negative"
                raise ValueError(message)
        if all(isinstance(c, int) for c in [*encoder, *llm]):
            return encoder, llm
    else:
        encoder = [_encoder_tokens(entry) for entry in entries]
        if sum(encoder) > 0:
            scale = sum(llm) / sum(encoder)
            encoder = [tokens * scale for tokens in encoder]
    largest = max(*encoder, *llm) or 1.0
    return (
        [round(c / largest * _LARGEST_COST) for c in encoder],
        [round(c / largest * _LARGEST_COST) for c in llm],
    )


def _is_cost(value: Any) -> bool:
    try:
        return bool(0 <= value < float("inf"))
    except TypeError:
        return False


def _profiled(path: str | os.PathLike[str], *, warns: bool) -> tuple[list[Any], list[int] | None]:
    """The shapes of a data profile and their positions in the dataset; None where they are 0, 1, 2, ..."""
    rows, num_bad = profile_shapes(os.fspath(path))
    if num_bad and warns:
        message = f"`{os.fspath(path)}`: {num_bad} of {len(rows) + num_bad} samples are bad and never come"
        # The caller of the sampler.
        warnings.warn(message, stacklevel=3)
    shapes = [{"encoder_tokens": encoder, "llm_tokens": llm} for _, encoder, llm in rows]
    return shapes, [index for index, _, _ in rows] if num_bad else None


def _is_shape(entry: Any) -> bool:
    return "llm_tokens" in entry if isinstance(entry, Mapping) else hasattr(entry, "llm_tokens")


def _field(shape: Any, name: str) -> Any:
    return shape[name] if isinstance(shape, Mapping) else getattr(shape, name)


def _encoder_tokens(shape: Any) -> float:
    has_tokens = "encoder_tokens" in shape if isinstance(shape, Mapping) else hasattr(shape, "encoder_tokens")
    if has_tokens:
        return float(_field(shape, "encoder_tokens"))
    segments = _field(shape, "encoder_segments")
    return float(sum(_field(s, "count") * _field(s, "tokens") for s in segments))
