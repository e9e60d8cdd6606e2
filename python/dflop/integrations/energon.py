"""Even packs with Megatron-Energon: grouping inside a task encoder.

Energon distributes its shards over the ranks, so no rank can give samples to another. What can be made even
is the packs: each has the same work on every rank and at every step, instead of the same number of samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from dflop._native import balance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Sample = TypeVar("Sample")

_LARGEST_COST = 1_000_000
"""What the largest cost becomes: the scheduler counts in integers."""


def even_packs(
    samples: Sequence[Sample],
    cost: Callable[[Sample], float],
    work_per_pack: float,
    *,
    tokens: Callable[[Sample], int] | None = None,
    tokens_max: int | None = None,
) -> list[list[Sample]]:
    """The samples of a buffer in packs of about `work_per_pack` each; for `select_samples_to_pack`.

    Args:
        samples: of the buffer; the larger it is, the more even the packs.
        cost: predicted work of a sample, encoder and LLM together, in any one unit.
        work_per_pack: in that unit; the same on all ranks, so that their packs take the same time.
        tokens: LLM tokens of a sample, for `tokens_max`.
        tokens_max: of a pack, at most.

    Returns:
        The packs; each sample stands in one.

    Raises:
        ValueError: `work_per_pack` is not above zero, `tokens_max` has no `tokens`, or a sample alone has
            more tokens.
    """
    if not work_per_pack > 0:
        message = f"`work_per_pack` is {work_per_pack}, must be above 0"
        raise ValueError(message)
    if tokens_max is not None and tokens is None:
        message = f"`tokens_max` is {tokens_max}: give `tokens` too, the LLM tokens of a sample"
        raise ValueError(message)
    costs = [float(cost(sample)) for sample in samples]
    if not costs:
        return []
    num_packs = max(1, round(sum(costs) / work_per_pack))
    sizes: list[int] = []
    caps: dict[str, Any] = {}
    if tokens is not None and tokens_max is not None:
        sizes = [int(tokens(sample)) for sample in samples]
        if max(sizes) > tokens_max:
            at = sizes.index(max(sizes))
            message = f"sample {at} of the buffer has {sizes[at]} tokens, `tokens_max` is {tokens_max}"
            raise ValueError(message)
        num_packs = max(num_packs, -(-sum(sizes) // tokens_max))
        caps = {"tokens": sizes, "bucket_tokens_max": tokens_max}
    largest = max(costs) or 1.0
    whole = [round(value / largest * _LARGEST_COST) for value in costs]
    while True:
        num_packs = min(num_packs, len(costs))
        try:
            assignment = balance([0] * len(whole), whole, num_packs, **caps).assignment
            break
        except ValueError:
            # The caps allow no such number of packs: one more. As many as samples always do.
            if num_packs == len(costs):
                raise
            num_packs += 1
    packs: list[list[Sample]] = [[] for _ in range(num_packs)]
    for sample, pack in zip(samples, assignment, strict=True):
        packs[pack].append(sample)
    return [pack for pack in packs if pack]


class BalancedPacking:
    """For a task encoder: `class Mine(BalancedPacking, DefaultTaskEncoder)`, with `packing_buffer_size` set.

    `pack_selected_samples` remains the task encoder's own.
    """

    work_per_pack: float
    """In the unit of `work`; the same on all ranks."""
    tokens_max: int | None = None
    """LLM tokens of a pack, at most; needs `num_tokens`."""

    def work(self, sample: Any) -> float:
        """Predicted work of a sample; to be written.

        Args:
            sample: encoded.

        Returns:
            Any one unit.

        Raises:
            NotImplementedError: it is not written.
        """
        raise NotImplementedError

    def num_tokens(self, sample: Any) -> int:
        """LLM tokens of a sample; to be written where `tokens_max` is set.

        Args:
            sample: encoded.

        Returns:
            A count.

        Raises:
            NotImplementedError: it is not written.
        """
        raise NotImplementedError

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        """Energon calls it with a full buffer.

        Args:
            samples: encoded.

        Returns:
            Packs of even work.
        """
        tokens = None if self.tokens_max is None else self.num_tokens
        return even_packs(samples, self.work, self.work_per_pack, tokens=tokens, tokens_max=self.tokens_max)
