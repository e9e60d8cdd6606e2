"""What the ranks that share layers do together: they sum, gather rows, and sum rows for their owners."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class Sums:
    """Sums over the ranks of a group; none while it is silent, when each rank runs its part alone."""

    def __init__(self, group: dist.ProcessGroup | None, degree: int = 1) -> None:
        """Sums that are not silent, unless there is nobody to sum with.

        Args:
            group: the ranks; this process is one of them. None: one rank's part, measured alone.
            degree: ranks that there would be, where there is no group.
        """
        self.group, self.is_silent = group, group is None
        self.rank = 0 if group is None else dist.get_rank(group)
        self.degree = degree if group is None else group.size()

    def add(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Puts the sum (or the like) of all ranks in the place of each one's tensor.

        Args:
            tensor: of the same tensor shape on all ranks.
            op: what is done instead of adding up.
        """
        if not self.is_silent:
            dist.all_reduce(tensor, op, group=self.group)

    def gather(self, own_RD: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, in the order of the ranks.

        Args:
            own_RD: of this rank; as many on each.

        Returns:
            [R times ranks, D]; alone this rank's rows stand for the others' too.
        """
        if self.is_silent:
            return own_RD.repeat(self.degree, 1)
        rows = own_RD.new_empty(own_RD.shape[0] * self.degree, own_RD.shape[1])
        dist.all_gather_into_tensor(rows, own_RD.contiguous(), group=self.group)
        return rows

    def scatter(self, summand_SD: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum over all ranks.

        Args:
            summand_SD: all rows; the ranks divide their number.

        Returns:
            [S / ranks, D].
        """
        own_RD = summand_SD.new_empty(summand_SD.shape[0] // self.degree, summand_SD.shape[1])
        if self.is_silent:
            return own_RD.copy_(summand_SD[: own_RD.shape[0]])
        dist.reduce_scatter_tensor(own_RD, summand_SD.contiguous(), group=self.group)
        return own_RD

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Lets this rank run without the others: nothing is added, each tensor stays what it is.

        Yields:
            Nothing.
        """
        before, self.is_silent = self.is_silent, True
        try:
            yield
        finally:
            self.is_silent = before
