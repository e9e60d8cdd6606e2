"""How a global batch is cut into buckets, and which of them a replica takes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Meets = Literal["step", "phase", "pipeline"]
"""What replicas wait for."""

MEETS = ("step", "phase", "pipeline")

OF_OLD_STATES = {"is_padded": 0}
"""What a state means that is older than a field."""


@dataclass(frozen=True)
class Split:
    """Buckets of each global batch and the replicas that share them; checked."""

    num_replicas: int
    rank: int
    """This replica."""
    num_buckets: int
    """Of a global batch, a multiple of `num_replicas`."""
    meets: Meets
    seed: int
    """Of ties in balancing."""
    is_padded: bool = False
    """Whether the rows of a bucket are padded to its longest sample."""

    @classmethod
    def checked(
        cls, num_replicas: Any, rank: Any, num_buckets: Any, meets: Any, seed: Any, is_padded: bool = False
    ) -> Split:
        """The arguments of `BalancedBatchSampler` of these names, as integers in their ranges.

        Args:
            num_replicas: At least 1.
            rank: Below `num_replicas`.
            num_buckets: A multiple of `num_replicas`; None: as many.
            meets: One of `MEETS`.
            seed: From 0 to 2^64 - 1.
            is_padded: Whether the rows of a bucket are padded to its longest sample.

        Returns:
            The split.

        Raises:
            ValueError: One of them breaks its rule; the message names it.
        """
        if meets not in MEETS:
            message = f"`meets` is {meets!r}, must be one of: {', '.join(MEETS)}"
            raise ValueError(message)
        num_replicas = whole_number("num_replicas", num_replicas, 1)
        num_buckets = num_replicas if num_buckets is None else whole_number("num_buckets", num_buckets, 1)
        rank = whole_number("rank", rank, 0, num_replicas - 1)
        if num_buckets % num_replicas:
            message = f"`num_buckets` is {num_buckets}, must be a multiple of `num_replicas` {num_replicas}"
            raise ValueError(message)
        seed = whole_number("seed", seed, 0, 2**64 - 1)
        return cls(num_replicas, rank, num_buckets, meets, seed, bool(is_padded))

    def cut(
        self, num_replicas: int, max_bytes: int | None, max_tokens: int | None
    ) -> tuple[int, int, str, int | None, int | None, int, bool]:
        """What `SampleCosts.buckets` takes, for so many replicas."""
        slots = self.num_buckets // num_replicas
        return (self.num_buckets, slots, self.meets, max_bytes, max_tokens, self.seed, self.is_padded)

    def remedy(self, name: str, state: Mapping[str, Any]) -> str:
        """What makes a state fit that is of other global batches; nothing where another number differs.

        Args:
            name: of the number that differs.
            state: of `state_dict`.

        Returns:
            The end of a sentence.
        """
        size: Any = state.get("global_batch_size")
        num_buckets: Any = state.get("num_buckets")
        is_of_size = name in ("global_batch_size", "num_buckets")
        if not is_of_size or not all(isinstance(n, int) and n > 0 for n in (size, num_buckets)):
            return ""
        if num_buckets % self.num_replicas:
            return f"; its {num_buckets} buckets do not divide among {self.num_replicas} replicas"
        share = num_buckets // self.num_replicas
        return (
            f": give `batch_size={size // num_buckets}, num_buckets={num_buckets}` (`balanced_loader`: "
            f"`accumulation={share}`), so {share} of a global batch's buckets are this replica's"
        )

    def check_rest(self, taken: int) -> None:
        """Nothing where the replicas can share what remains of a global batch.

        Args:
            taken: Its buckets that are trained already.

        Raises:
            ValueError: The others do not divide among the replicas.
        """
        remaining = self.num_buckets - taken
        if remaining % self.num_replicas:
            message = (
                f"{remaining} buckets remain of a global batch, "
                f"they do not divide among {self.num_replicas} replicas"
            )
            raise ValueError(message)


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer in its range; a ValueError that names it where it is none."""
    rule = f"at least {least}" if most is None else f"from {least} to {most}"
    try:
        number = operator.index(value)
    except TypeError:
        message = f"`{name}` is {value!r}, must be an integer {rule}"
        raise ValueError(message) from None
    if number < least or (most is not None and number > most):
        message = f"`{name}` is {number}, must be {rule}"
        raise ValueError(message)
    return number
