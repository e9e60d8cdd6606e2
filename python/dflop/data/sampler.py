"""Balanced batches for anyone's DataLoader; needs no torch.

    order of an epoch --> global batches --> buckets, balanced by cost --> every replica its share

A state is a position in an epoch: a global batch, and how many of its buckets all replicas have taken. It
names no replica, so it can be loaded with any number of replicas.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dflop._native import GlobalBatches
from dflop.data.costs import Costs, costs, warn_of_bad
from dflop.data.iteration import EpochPosition, Iteration
from dflop.data.split import OF_OLD_STATES, Meets, Split, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class BalancedBatchSampler:
    """Lists of sample indices with about equal work, for the `batch_sampler` of a DataLoader.

    Each global batch of `batch_size * num_buckets` samples is balanced into `num_buckets` buckets: one a
    replica, or several a replica where gradients are accumulated. Buckets hold different numbers of samples,
    `batch_size` on average, and about equal work. `meets` says which work is made equal: replicas that meet
    once a step wait for another sum of work than replicas that meet in each layer. A global batch has the
    same samples as the shuffled order gives it. So balancing changes no batch statistics, only which
    replica computes what.

    Where a collation pads, say `is_padded=True`: a bucket then holds samples of like length, more of them
    where they are short. Without it buckets are even in real tokens, and a bucket of one long and many short
    samples takes longest.

    With `max_tokens` (or `max_bytes`) no bucket ever holds more. Beside a `batch_size` that is a cap: a
    global batch that cannot keep it is an error. Without a `batch_size` each global batch takes as many
    samples of the order as fit, so that their number varies.

    One giant in a global batch makes all replicas but one wait. As many giants as there are buckets, in one
    global batch, cause that wait only once. With `giant_llm_cost`, samples above it wait for each other: in
    each window of `giant_steps_max + 1` global batches they move to the end, and the other samples move up.
    So none is trained more than `giant_steps_max` global batches later than without it. That changes which
    samples form a global batch, so it is off unless you ask for it.

    Each sample comes exactly once an epoch over all replicas, and each replica yields the same number of
    batches. The last global batch is smaller rather than dropped; where it has fewer samples than there are
    buckets, it is added to the one before (with `max_tokens` alone it takes samples from that one), so that
    no batch is ever empty.

    An iterator keeps the epoch that it was made for: `set_epoch` and other iterators do not touch it. A
    sampler can be copied and pickled; the copy starts where the last state was loaded, or at the start of
    the epoch.

    An index is a position in the user's dataset. With costs or shapes it is the position of their entry.
    With a data profile it is the position of the record among all records of its mixture, source after
    source in their order (for one JSONL file: the number of the line, without counting empty lines). Bad
    samples, which a profile leaves out or replaces by a neighbour (`data.on_bad_sample`), keep their
    position, but it never comes: a warning says how many there are. A profile is refused where these
    positions are not known: a profile of a part, of a random sample (`--sample`), or of a mixture that
    passes over records (`random:`, `end:`). With `first:` the dataset must hold only the first records,
    too.

    NOTE: averaging a loss per batch gives samples of small buckets too much weight. Sum the loss and divide
    by the label tokens (or samples) of the global batch to keep the gradient that unbalanced batches give;
    under DDP, which averages gradients over ranks, multiply by the number of ranks.
    """

    def __init__(
        self,
        source: Costs | Iterable[Any] | Callable[[int], Any] | str | os.PathLike[str],
        batch_size: int | None = None,
        num_replicas: int = 1,
        rank: int = 0,
        *,
        meets: Meets = "step",
        num_buckets: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        max_tokens: int | None = None,
        max_bytes: int | None = None,
        num_samples: int | None = None,
        giant_llm_cost: float | None = None,
        giant_steps_max: int = 7,
        is_padded: bool = False,
    ) -> None:
        """Reads the costs; balances nothing yet.

        Args:
            source: What `dflop.costs` takes, or its answer.
            batch_size: Samples of a bucket, on average; None: as many as `max_tokens` and `max_bytes` allow.
            num_replicas: Data-parallel replicas.
            rank: Which of them this is.
            meets: What replicas wait for: `step` where they meet once a step (DDP, ZeRO-1, ZeRO-2), `phase`
                where they meet in each component of each microbatch (ZeRO-3, FSDP), `pipeline` where the
                encoder and the LLM stand on different ranks. `dflop.balance` says what each makes even.
            num_buckets: Buckets of a global batch, a multiple of `num_replicas`, which is the default.
            seed: Seed of the order of samples and of ties in balancing; must be equal on all replicas.
            shuffle: New order each epoch; otherwise the order of the data.
            drop_last: Leave out the last global batch of an epoch where it is smaller; without a
                `batch_size`, where it has fewer samples than there are buckets.
            max_tokens: The most LLM tokens of a bucket. Costs that are pairs need `dflop.costs(...,
                tokens=)`.
            max_bytes: The most bytes of a bucket; they need `dflop.costs(..., bytes=)`.
            num_samples: Samples of the dataset, where `source` is a function of the index.
            giant_llm_cost: Samples whose LLM cost (as given; `llm_tokens` for shapes and profiles) is above
                this are giants, which wait for each other; None: no sample is a giant.
            giant_steps_max: The most global batches that a giant may be late.
            is_padded: Whether your collation pads the rows of a batch to its longest sample, and the model
                computes the padding. Then the LLM's work of a bucket is its number of samples times its
                largest LLM cost, and `max_tokens` and `max_bytes` hold for padded rows. Leave it out where
                batches are packed, or where `dflop.integrations.remove_padding` takes the padding away.

        Raises:
            ValueError: A number or entry that breaks one of the rules above, a sample over a cap, costs too
                large to add up, or fewer samples than buckets.
            FileNotFoundError: There is no such profile.
            ArtifactError: The file is not a data profile, or one whose rows have no position in a dataset.
        """
        split = Split.checked(num_replicas, rank, num_buckets, meets, seed, is_padded)
        giant_steps_max = whole_number("giant_steps_max", giant_steps_max, 0, 2**32 - 1)
        max_tokens = None if max_tokens is None else whole_number("max_tokens", max_tokens, 1, 2**53)
        max_bytes = None if max_bytes is None else whole_number("max_bytes", max_bytes, 1, 2**53)
        if batch_size is not None:
            batch_size = whole_number("batch_size", batch_size, 1)
        elif max_tokens is None and max_bytes is None:
            message = "`batch_size` is None, must be at least 1 where there is no `max_tokens` or `max_bytes`"
            raise ValueError(message)
        elif giant_llm_cost is not None:
            message = "`giant_llm_cost` needs a `batch_size`: without one no global batch is known in advance"
            raise ValueError(message)
        found = costs(source, num_samples=num_samples, batch_size=batch_size or 1)
        if split.rank == 0:
            warn_of_bad(found, source)
        self._costs = found._native
        self._num_samples = len(found)
        if self._num_samples < split.num_buckets:
            counted = "1 sample" if self._num_samples == 1 else f"{self._num_samples} samples"
            message = (
                f"{counted} for {split.num_buckets} buckets, each needs at least one: a step has a bucket "
                "for each microbatch of each rank"
            )
            raise ValueError(message)
        self._split = split
        self._caps = (max_bytes, max_tokens)
        self._drop_last = drop_last
        # None: as many samples as fit.
        self._global_batch_size = None if batch_size is None else batch_size * split.num_buckets
        giants = [] if giant_llm_cost is None else self._costs.giants(giant_llm_cost)
        self._of_order: tuple[Any, ...] = (giants, giant_steps_max, shuffle, drop_last)
        self._make_order()
        size = self._global_batch_size or self._num_samples
        whole, rest = divmod(self._num_samples, size)
        self._is_rest_added = (
            self._global_batch_size is not None
            and not drop_last
            and 0 < rest < split.num_buckets
            and whole > 0
        )
        largest = size + rest if self._is_rest_added else size
        self._costs.check(self._cut(split.num_replicas), min(largest, self._num_samples))
        # What decides which samples stand where: a state goes on only where all of it is equal.
        self._identity = {
            "num_samples": self._num_samples,
            "global_batch_size": self._global_batch_size or 0,
            "num_buckets": split.num_buckets,
            "seed": split.seed,
            "shuffle": int(shuffle),
            # Of one data set, as many giants are the same giants; without any the rest has no say.
            "num_giants": len(giants),
            "giant_steps_max": giant_steps_max if giants else 0,
            "drop_last": int(drop_last) if giants else 0,
        }
        # Where the next iteration starts, and the one that began last.
        self._start = EpochPosition(epoch=0)
        self._running: Iteration | None = None
        # Global batches of an epoch, where they must be counted.
        self._counted: dict[int, int] = {}

    def __len__(self) -> int:
        """Batches that this replica yields in a whole epoch.

        Without a `batch_size` epochs differ: this is of the current one, and the first call packs all of it.
        """
        return self._num_global_batches(self._start.epoch) * (
            self._split.num_buckets // self._split.num_replicas
        )

    @property
    def epoch(self) -> int:
        """That of the next iteration: as chosen or loaded, or the one after an iteration that ended."""
        return self._start.epoch

    @property
    def num_records(self) -> int:
        """Entries that the dataset must have: the samples with costs, and the bad ones of a profile."""
        return self._num_samples + self._costs.num_bad

    @property
    def num_text_alone(self) -> int:
        """Samples that have no cost on the encoder."""
        column = self._costs.column("encoder_ns")
        return 0 if column is None else memoryview(column).cast("Q").tolist().count(0)

    def __iter__(self) -> Iterator[list[int]]:
        """This replica's batches of the epoch, from a loaded position on; then the next epoch begins."""
        return Iteration(self, self._start)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch; keeps the position if that epoch is the current one.

        An iterator that has begun goes on with its own epoch.

        Args:
            epoch: From 0.
        """
        epoch = whole_number("epoch", epoch, 0, 2**40)
        if epoch != self._start.epoch:
            self._start = EpochPosition(epoch=epoch)
            self._running = None
        elif self._running is not None and self._running.epoch != epoch:
            self._running = None

    def state_dict(self, num_batches: int | None = None) -> dict[str, int | str]:
        """Where the epoch stands, equal on all replicas; load it on any number of them.

        Args:
            num_batches: Batches that this replica has trained on since the loop over them began. Give it
                where the DataLoader has workers: they take batches ahead of the trainer, and without it those
                count too.

        Returns:
            Numbers and texts, for `load_state_dict`.
        """
        iteration = self._running or Iteration(self, self._start)
        count = iteration.num_yielded if num_batches is None else whole_number("num_batches", num_batches, 0)
        return self._state(self._settled(iteration.position_after(count)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on where the state was taken, on this or another number of replicas.

        Args:
            state: Of `state_dict`.

        Raises:
            ValueError: The state is of other data, global batch size, buckets, seed, order or giants; or it
                stands inside a global batch that was balanced by other costs, caps, `meets` or `is_padded`,
                or whose remaining buckets do not divide among the replicas.
        """
        self._start = self._settled(self._position_of(state))
        self._running = None

    def buckets(self, global_batch: int) -> list[list[int]]:
        """All buckets of a global batch of this epoch.

        Replica `rank` of `num_replicas` gets the buckets `rank`, `num_replicas + rank` and so on of this
        list, one after the other. So the first `num_replicas` buckets run at the same time, then the next
        ones. With `phase` and `pipeline` the heaviest buckets come first, and buckets that run at the same
        time have nearly equal work. With `step` all buckets of a replica together have as much work as those
        of any other.

        Args:
            global_batch: Position in the epoch, from 0.

        Returns:
            Sample indices of each bucket, as the class says; no bucket is empty.
        """
        epoch = self._start.epoch
        position = EpochPosition(epoch=epoch, global_batch=whole_number("global_batch", global_batch, 0))
        if self._global_batch_size is None:
            position = EpochPosition(epoch=epoch)
            while position.global_batch < global_batch and self._is_inside(position):
                position = self._after(position)
        if not self._is_inside(position):
            message = f"`global_batch` is {global_batch}, must be below {self._num_global_batches(epoch)}"
            raise ValueError(message)
        return self._buckets(position)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_order", "_running", "_counted")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._running = None
        self._counted = {}
        self._make_order()

    def _make_order(self) -> None:
        giants, steps_max, shuffle, drop_last = self._of_order
        # Where as many come as fit, only the order counts.
        size = self._global_batch_size
        self._order = GlobalBatches(
            self._num_samples,
            size or self._num_samples,
            self._split.seed,
            giants,
            steps_max,
            shuffle=shuffle,
            drop_last=drop_last and size is not None,
        )

    def _cut(self, num_replicas: int) -> tuple[int, int, str, int | None, int | None, int, bool]:
        return self._split.cut(num_replicas, *self._caps)

    def _samples(self, position: EpochPosition) -> list[int]:
        """The samples of the global batch at a position."""
        if self._global_batch_size is None:
            return self._order.samples(position.epoch, position.first, self._num_fitting(position))
        step = position.epoch * self._order.steps_per_epoch + position.global_batch
        samples = self._order.batch(step)
        is_last = position.global_batch == self._num_global_batches(position.epoch) - 1
        return samples + self._order.batch(step + 1) if is_last and self._is_rest_added else samples

    def _buckets(self, position: EpochPosition) -> list[list[int]]:
        cut = self._cut(position.balanced_for or self._split.num_replicas)
        return self._costs.buckets(self._samples(position), cut)

    def _num_fitting(self, position: EpochPosition) -> int:
        """Samples of the global batch at a position, where as many come as fit."""
        remaining = self._num_samples - position.first
        cut = self._cut(self._split.num_replicas)
        # Always the same lengths, so that an epoch is cut alike wherever it is begun.
        length = 4 * self._split.num_buckets
        while True:
            samples = self._order.samples(position.epoch, position.first, length)
            count = self._costs.fitting(samples, cut)
            if count < length or length >= remaining:
                break
            length *= 2
        rest = remaining - count
        if 0 < rest < self._split.num_buckets and not self._drop_last:
            # The last global batch needs a sample for each bucket: this one leaves it some of its own.
            spared = count - (self._split.num_buckets - rest)
            if spared < self._split.num_buckets:
                message = (
                    f"the last {rest} samples of epoch {position.epoch} cannot fill "
                    f"{self._split.num_buckets} buckets, "
                    f"and the {count} before them fill theirs with at least one each: no batch may be empty. "
                    "Give `drop_last=True`, a higher cap or fewer buckets"
                )
                raise ValueError(message)
            return spared
        return count

    def _is_inside(self, position: EpochPosition) -> bool:
        """Whether a position is before the end of its epoch."""
        if self._global_batch_size is not None:
            return position.global_batch < self._num_global_batches(position.epoch)
        remaining = self._num_samples - position.first
        return remaining >= self._split.num_buckets or (remaining > 0 and not self._drop_last)

    def _after(self, position: EpochPosition) -> EpochPosition:
        """The begin of the next global batch."""
        first = 0
        if self._global_batch_size is None:
            first = position.first + self._num_fitting(position)
        return EpochPosition(epoch=position.epoch, global_batch=position.global_batch + 1, first=first)

    def _num_global_batches(self, epoch: int) -> int:
        if self._global_batch_size is not None:
            return self._order.steps_per_epoch - self._is_rest_added
        if epoch not in self._counted:
            position = EpochPosition(epoch=epoch)
            while self._is_inside(position):
                position = self._after(position)
            self._counted = {epoch: position.global_batch}
        return self._counted[epoch]

    def _inside(self) -> dict[str, int | str]:
        """What decides which buckets the rest of a global batch has."""
        max_bytes, max_tokens = self._caps
        return {
            "costs": self._costs.digest,
            "meets": self._split.meets,
            "max_tokens": max_tokens or 0,
            "max_bytes": max_bytes or 0,
            "is_padded": int(self._split.is_padded),
        }

    def _state(self, position: EpochPosition) -> dict[str, int | str]:
        return {
            "epoch": position.epoch,
            "global_batch": position.global_batch,
            "buckets_taken": position.buckets_taken,
            "first_sample": position.first,
            "balanced_for": position.balanced_for,
            **self._identity,
            **self._inside(),
        }

    def _position_of(self, state: Mapping[str, Any]) -> EpochPosition:
        """The position of a state, checked."""
        for name in ("epoch", "global_batch", "buckets_taken"):
            if name not in state:
                message = f"the state has no `{name}`, it is none of `BalancedBatchSampler.state_dict`"
                raise ValueError(message)
        for name, mine in self._identity.items():
            # States of the first version do not say whether samples were shuffled, and knew no giants.
            theirs = state.get(name, mine if name == "shuffle" else 0)
            if theirs != mine:
                rule = "must be equal" + self._split.remedy(name, state)
                message = f"the state has `{name}` {theirs}, this sampler {mine}, {rule}"
                raise ValueError(message)
        epoch = whole_number("epoch", state["epoch"], 0, 2**40)
        taken = whole_number("buckets_taken", state["buckets_taken"], 0, self._split.num_buckets - 1)
        if self._global_batch_size is not None:
            last = self._num_global_batches(epoch)
            position = EpochPosition(
                epoch, whole_number("global_batch", state["global_batch"], 0, last), taken
            )
        else:
            first = whole_number("first_sample", state.get("first_sample", -1), 0, self._num_samples)
            position = EpochPosition(
                epoch, whole_number("global_batch", state["global_batch"], 0), taken, first
            )
        if taken:
            position = replace(position, balanced_for=self._balanced_for(state, taken))
        return position

    def _settled(self, position: EpochPosition) -> EpochPosition:
        """The position, or the begin of the next epoch where this one is over."""
        return position if self._is_inside(position) else EpochPosition(epoch=position.epoch + 1)

    def _balanced_for(self, state: Mapping[str, Any], taken: int) -> int:
        """The replicas a begun global batch was balanced for; ValueError where its rest would be another."""
        self._split.check_rest(taken)
        inside = self._inside()
        is_plain = self._split.meets == "pipeline" and self._caps == (None, None)
        if "costs" not in state and is_plain and not self._split.is_padded:
            # The first version knew this objective alone, and no digest.
            return self._split.num_replicas
        for name, mine in inside.items():
            theirs = state.get(name, OF_OLD_STATES.get(name))
            if theirs != mine:
                message = (
                    f"the state stands inside a global batch that was balanced with `{name}` {theirs}, "
                    f"this sampler has {mine}: samples would be lost and repeated. Give the same `{name}`, "
                    "or a state between global batches"
                )
                raise ValueError(message)
        balanced_for = whole_number("balanced_for", state.get("balanced_for"), 1, self._split.num_buckets)
        if self._split.num_buckets % balanced_for:
            message = f"`balanced_for` is {balanced_for}, must divide the {self._split.num_buckets} buckets"
            raise ValueError(message)
        return balanced_for

    def _begin(self, iteration: Iteration, start: EpochPosition) -> None:
        """An iteration yields its first batch: the next one will start over, from the begin of the epoch."""
        self._running = iteration
        if self._start == start:
            self._start = EpochPosition(epoch=start.epoch)

    def _end(self, iteration: Iteration) -> None:
        """An iteration has yielded its last batch: the epoch after it begins, unless another was chosen."""
        if self._start.epoch == iteration.epoch:
            self._start = EpochPosition(epoch=iteration.epoch + 1)
