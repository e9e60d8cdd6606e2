"""What ranks that share layers do together: sums, gathers, exchanges of rows, broadcasts."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


def send_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Rows of this rank to each rank, and those of each rank for this one (an all-to-all); no gradient.

    Every rank of `group` must call it, and those that send and receive nothing too. On a GPU it does not
    block the host.

    Args:
        rows: those for rank 0 first, then for rank 1, and so on; [sum of `sent`, ...].
        sent: rows for each rank.
        received: rows from each rank.
        group: of the ranks; None: all of them.

    Returns:
        [sum of `received`, ...], in the order of the ranks.
    """
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived


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

    def exchange(self, rows_SD: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """As `send_rows`.

        Args:
            rows_SD: [S, D], those for the first rank first.
            sent: how many of them are for each rank.
            received: how many rows each rank has for this one.

        Returns:
            [R, D], in the order of the ranks. While silent, this rank's rows as they are.
        """
        return rows_SD if self.is_silent else send_rows(rows_SD, sent, received, self.group)

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
