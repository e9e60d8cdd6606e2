"""What ranks that share layers do together: all-reduce, all-gather and reduce-scatter of rows, broadcast."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class Sums:
    """Collectives over the ranks of a group. While silent it sends nothing: each rank runs its part alone."""

    def __init__(self, group: dist.ProcessGroup | None, degree: int = 1) -> None:
        """Not silent, unless there is no group.

        Args:
            group: the ranks, this process among them. None: one rank's part is measured alone.
            degree: how many ranks share the layers, where there is no group.
        """
        self.group, self.is_silent = group, group is None
        self.rank = 0 if group is None else dist.get_rank(group)
        self.degree = degree if group is None else group.size()

    def add(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Replaces the tensor, in place, by the sum of the tensors of all ranks (an all-reduce).

        Args:
            tensor: of the same tensor shape on all ranks.
            op: what to do instead of a sum, such as the maximum.
        """
        if not self.is_silent:
            dist.all_reduce(tensor, op, group=self.group)

    def gather(self, own_RD: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, in the order of the ranks.

        Args:
            own_RD: rows of this rank; as many on every rank.

        Returns:
            [R times ranks, D]. While silent, this rank's rows stand for those of the others.
        """
        if self.is_silent:
            return own_RD.repeat(self.degree, 1)
        rows = own_RD.new_empty(own_RD.shape[0] * self.degree, own_RD.shape[1])
        dist.all_gather_into_tensor(rows, own_RD.contiguous(), group=self.group)
        return rows

    def scatter(self, summand_SD: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum over all ranks.

        Args:
            summand_SD: this rank's summand of all rows; S is a multiple of the number of ranks.

        Returns:
            [S / ranks, D].
        """
        own_RD = summand_SD.new_empty(summand_SD.shape[0] // self.degree, summand_SD.shape[1])
        if self.is_silent:
            return own_RD.copy_(summand_SD[: own_RD.shape[0]])
        dist.reduce_scatter_tensor(own_RD, summand_SD.contiguous(), group=self.group)
        return own_RD

    def spread(self, tensor: torch.Tensor) -> None:
        """Replaces the tensor, in place, by that of the first rank (a broadcast).

        Args:
            tensor: of the same tensor shape on all ranks.
        """
        if self.group is not None and not self.is_silent:
            dist.broadcast(tensor, dist.get_global_rank(self.group, 0), group=self.group)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Lets this rank run without the others: inside, `add` leaves each tensor as it is.

        Yields:
            Nothing.
        """
        before, self.is_silent = self.is_silent, True
        try:
            yield
        finally:
            self.is_silent = before
