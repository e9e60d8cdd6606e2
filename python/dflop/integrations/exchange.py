"""Rows that go to other ranks, and whose gradients come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dflop.models.sums import send_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, token: torch.Tensor, sent: Any, received: Any, group: Any
    ) -> torch.Tensor:
        ctx.splits = (received, sent)
        ctx.group = group
        ctx.token = (token.shape, token.dtype, token.device)
        return send_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        sent, received = ctx.splits
        shape, dtype, device = ctx.token
        back = send_rows(gradients[0], sent, received, ctx.group)
        return back, torch.zeros(shape, dtype=dtype, device=device), None, None, None


def exchange(
    rows: torch.Tensor,
    token: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: ProcessGroup,
) -> torch.Tensor:
    """As `send_rows`, and the gradient of what arrived goes back to the rank that sent it.

    The backward of this call talks too, so every rank's loss must depend on what arrived there, be it of no
    rows: `rows.sum()` of none is a zero that does.

    Args:
        rows: as for `send_rows`.
        token: a number that changes nothing and gets a gradient of zero: what depends on it takes part in the
            backward even where no row does.
        sent: rows for each rank.
        received: rows from each rank.
        group: of the ranks.

    Returns:
        [sum of `received`, ...].
    """
    arrived: torch.Tensor = _Exchange.apply(rows, token, list(sent), list(received), group)  # type: ignore[assignment]
    return arrived
