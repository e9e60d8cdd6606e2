"""Opens receives ahead, and keeps what is sent in memory until it has left; transfers are `boundary.py`'s.

What a rank sends to itself, from one of its stages to the next, stays where it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dflop.runtime.boundary import Transfer, join, split
from dflop.runtime.failure import RankError, talking
from dflop.runtime.mesh import role_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.runtime.actions import Receive
    from dflop.runtime.mesh import Mesh


class Messages:
    """The traffic of one rank.

    A message is identified by its peer, its direction, the stage that it comes to and its microbatch. The
    last three make its tag. NCCL has no tags: between two ranks, the first message sent in a direction is
    the first received. So receives are always opened in the order in which the peer sends (`actions.py`). On
    NCCL, waiting for a message only makes the device wait; this process goes on. Where the peer has gone,
    NCCL's watchdog ends this process at the timeout.
    """

    def __init__(self, mesh: Mesh, width: Sequence[int] | int, dtype: torch.dtype) -> None:
        """No message is under way.

        Args:
            mesh: This rank's coordinates.
            width: Values of a row, D; or a list: the values of a row that leaves each stage but the last.
            dtype: Of features and hidden states.
        """
        self._mesh = mesh
        borders = mesh.plan.num_stages - 1
        self._widths = [width] * borders if isinstance(width, int) else list(width)
        self._dtype = dtype
        self._posted: dict[tuple[int, int, int, bool], tuple[torch.Tensor, dist.Work]] = {}
        self._own: dict[tuple[int, int, bool], torch.Tensor] = {}
        self._sent: list[tuple[torch.Tensor, dist.Work]] = []

    def post(self, receives: Sequence[Receive]) -> None:
        """Opens receives and returns at once, whether or not the peers have begun to send.

        Args:
            receives: Messages to come; those of one peer in the order in which it sends them.

        Raises:
            RankError: A peer has gone; the message names it.
        """
        for receive in receives:
            peer, num_rows = receive.transfer.peer, receive.transfer.num_rows
            place = (receive.stage, receive.microbatch, receive.is_gradient)
            width = self._width(receive.stage, receive.is_gradient)
            buffer = torch.empty(num_rows, width, dtype=self._dtype, device=self._mesh.device)
            try:
                group = self._mesh.way(receive.is_gradient, peer, self._mesh.rank)
                work = dist.irecv(buffer, peer, group=group, tag=self._tag(*place))
            except RuntimeError as error:
                raise self._peer_failed(peer, "no message from") from error
            assert work is not None
            self._posted[(peer, *place)] = (buffer, work)

    def receive(
        self, stage: int, microbatch: int, is_gradient: bool, transfers: Sequence[Transfer]
    ) -> list[torch.Tensor]:
        """The messages of one action; blocks until all are here.

        Args:
            stage: Of the action.
            microbatch: Its number.
            is_gradient: Whether they are gradients.
            transfers: What comes from where. Receives from other ranks have been posted, and what comes from
                another stage of this rank has been sent.

        Returns:
            One [num_rows, D] tensor a transfer.

        Raises:
            RankError: A peer has gone, or did not send within the timeout; the message names it.
        """
        received: list[torch.Tensor] = []
        for transfer in transfers:
            if transfer.peer == self._mesh.rank:
                received.append(self._own.pop((stage, microbatch, is_gradient)))
                continue
            buffer, work = self._posted.pop((transfer.peer, stage, microbatch, is_gradient))
            try:
                self._wait(work)
            except RuntimeError as error:
                raise self._peer_failed(transfer.peer, "no message from") from error
            received.append(buffer)
        return received

    def send(
        self,
        stage: int,
        microbatch: int,
        is_gradient: bool,
        rows_RD: torch.Tensor,
        transfers: Sequence[Transfer],
    ) -> None:
        """Sends this rank's rows over the transfers of one action and returns at once.

        Args:
            stage: Of the action: gradients go to the one before it, all else to the next.
            microbatch: Its number.
            is_gradient: Whether they are gradients.
            rows_RD: All rows of this rank.
            transfers: Which of them go where.

        Raises:
            RankError: A peer has gone; the message names it.
        """
        # Frees messages that have left. gloo tells this only to a caller that waits, so there they live until
        # `finish`.
        self._sent = [(payload, work) for payload, work in self._sent if not work.is_completed()]
        place = (stage + (-1 if is_gradient else 1), microbatch, is_gradient)
        for transfer, payload in zip(transfers, split(rows_RD, transfers), strict=True):
            if transfer.peer == self._mesh.rank:
                self._own[place] = payload
                continue
            try:
                group = self._mesh.way(is_gradient, self._mesh.rank, transfer.peer)
                work = dist.isend(payload, transfer.peer, group=group, tag=self._tag(*place))
            except RuntimeError as error:
                raise self._peer_failed(transfer.peer, "cannot send to") from error
            assert work is not None
            self._sent.append((payload, work))

    def joined(
        self, stage: int, is_gradient: bool, received: Sequence[torch.Tensor], transfers: Sequence[Transfer]
    ) -> torch.Tensor:
        """All rows of this rank, [R, D], from the messages of one action; [0, D] where there are none.

        Args:
            stage: Of the action.
            is_gradient: Whether they are gradients.
            received: The messages.
            transfers: What came from where.

        Returns:
            The rows in their places.
        """
        if not received:
            width = self._width(stage, is_gradient)
            return torch.empty(0, width, dtype=self._dtype, device=self._mesh.device)
        return join(received, transfers)

    def _width(self, stage: int, is_gradient: bool) -> int:
        """Values of a row that comes to `stage`: from the stage before; of a gradient, from the one after."""
        return self._widths[stage if is_gradient else stage - 1]

    def finish(self) -> None:
        """Waits until everything sent has left; to be called at the end of a step.

        Raises:
            RankError: A peer has gone.
        """
        with talking("deliver messages"):
            for _, work in self._sent:
                self._wait(work)
        self._sent = []

    def _wait(self, work: dist.Work) -> None:
        if self._mesh.device.type == "cuda":
            # Only the device waits. NCCL's watchdog applies the timeout of the group.
            work.wait()
        else:
            work.wait(self._mesh.deadline.now)

    def _peer_failed(self, peer: int, what: str) -> RankError:
        role, replica = role_of(self._mesh.plan, peer)
        message = f"{what} rank {peer} ({role}, replica {replica}), it stopped or is too slow"
        return RankError(message, is_of_other=True)

    def _tag(self, stage: int, microbatch: int, is_gradient: bool) -> int:
        return 2 * (microbatch * self._mesh.plan.num_stages + stage) + is_gradient
