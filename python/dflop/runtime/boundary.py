"""Who sends which rows to whom in one microbatch, computed from the schedule on both sides.

    encoder replica e: features_ED --rows of r's samples--> LLM replica r, for every r that holds some of them
    LLM replica r:     rows of e's shares, for every e --into the order of r's packed samples--> features_ED

Several encoder replicas may each encode a part of one sample. Both sides know from the schedule how many
feature rows each part has. So messages have no header, and a message without rows is not sent. A message
holds its shares in the order in which the encoder replica packed them. Features leave the last stage of an
encoder replica and come to the first stage of an LLM replica. Their gradients go back over the same
transfers.

Between two stages of the same component there is one transfer: all rows of the microbatch. Where nothing
before the second stage trains, one row goes back in place of the gradients, as a sign. Between LLM stages
a row is an LLM token, and the ranks of a tensor group may each send a part of the rows. Between encoder
stages a row is an encoder token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from dflop.data.shares import share_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dflop._native import Plan, Schedule
    from dflop.data.sample import Sample


@dataclass(frozen=True)
class TensorPair:
    """A rank of an encoder's tensor group and one of an LLM's that talk at the boundary."""

    encoder: int
    llm: int
    has_rows: bool
    has_gradients: bool


def tensor_pairs(plan: Plan, replica: int) -> list[TensorPair]:
    """Which ranks of an encoder replica's and of an LLM's tensor group talk to each other.

    All ranks of a tensor group have the same features, and the same gradients of them. So each rank needs
    them from one rank of the other group only; the ranks of that group are taken in turn. Example: with 2
    encoder ranks and 4 LLM ranks, LLM ranks 0 and 2 get features from encoder rank 0, LLM ranks 1 and 3 from
    encoder rank 1. Encoder rank 0 gets gradients from LLM rank 0, encoder rank 1 from LLM rank 1.

    Where each rank of a colocated tensor group holds a whole encoder, all ranks of the LLM's group need its
    features, and the one at the position of this encoder gives the gradients. Within a group that is the rank
    itself, so no gradients are sent there.

    Args:
        plan: The layout.
        replica: Of the encoder.

    Returns:
        Each pair once. In a colocated layout whose encoder is cut, too, each pair is one and the same rank.
    """
    encoders, llms, per_group = plan.encoder_tensor, plan.llm_tensor, plan.encoders_per_group
    if per_group > 1:
        return [TensorPair(0, t, True, t == replica % per_group) for t in range(llms)]
    pairs = [TensorPair(e, t, t % encoders == e, e % llms == t) for e in range(encoders) for t in range(llms)]
    return [pair for pair in pairs if pair.has_rows or pair.has_gradients]


@dataclass(frozen=True)
class Transfer:
    """One message of a microbatch, and the message with its gradient, seen from this rank."""

    peer: int
    """The other rank."""
    num_rows: int
    """Rows of the message, at least 1."""
    rows: torch.Tensor | None
    """[num_rows] int64, the place of each row of the message among this rank's rows; none: all, in order."""
    has_rows: bool = True
    """Whether the rows themselves are sent, in the forward, towards the loss."""
    has_gradients: bool = True
    """Whether their gradients are sent, in the backward, towards the encoder."""


def going(transfers: Sequence[Transfer], is_gradient: bool) -> list[Transfer]:
    """The transfers of a microbatch that send something in its forward, or in its backward.

    Args:
        transfers: Of one microbatch.
        is_gradient: True: those that send gradients, in the backward; false: those that send rows.

    Returns:
        A part of `transfers`; all of them where both tensor groups have the same size.
    """
    return [t for t in transfers if (t.has_gradients if is_gradient else t.has_rows)]


def encoder_transfers(
    plan: Plan, schedule: Schedule, microbatch: int, replica: int, rows: Sequence[range], tensor: int = 0
) -> list[Transfer]:
    """What encoder replica `replica` sends, by LLM replica.

    Args:
        plan: The layout.
        schedule: Of the step.
        microbatch: Which one.
        replica: Encoder replica of this rank.
        rows: For each share of this rank, which feature rows of its sample the share gives.
        tensor: Position of this rank in its tensor group.

    Returns:
        For each LLM replica that holds samples of this rank, one transfer to each rank of its tensor group
        that this rank talks to. Taken over the replicas they cover each row once.
    """
    samples = [sample for sample, _ in schedule.encoder(microbatch, replica)]
    ends = list(accumulate(map(len, rows), initial=0))
    transfers: list[Transfer] = []
    for llm_replica in range(plan.llm_replicas):
        wanted = set(schedule.llm(microbatch, llm_replica))
        message = [range(*ends[k : k + 2]) for k, sample in enumerate(samples) if sample in wanted]
        for pair in tensor_pairs(plan, replica):
            if pair.encoder == tensor:
                peer = plan.rank(llm_replica, plan.encoder_stages, pair.llm)
                transfers += _transfer(peer, message, ends[-1], pair)
    return transfers


def llm_transfers(
    plan: Plan,
    schedule: Schedule,
    microbatch: int,
    replica: int,
    samples: Mapping[int, Sample],
    tensor: int = 0,
) -> list[Transfer]:
    """What the first stage of LLM replica `replica` receives, by encoder replica.

    Args:
        plan: The layout.
        schedule: Of the step.
        microbatch: Which one.
        replica: LLM replica of this rank.
        samples: Those of this rank, by index.
        tensor: Position of this rank in its tensor group.

    Returns:
        For each encoder replica that holds parts of samples of this rank, one transfer from each rank of its
        tensor group that this rank talks to. Taken over the replicas they cover each row once.
    """
    own = schedule.llm(microbatch, replica)
    ends = list(accumulate((samples[sample].num_features for sample in own), initial=0))
    start = dict(zip(own, ends, strict=False))
    transfers: list[Transfer] = []
    for encoder_replica in range(plan.encoder_replicas):
        message: list[range] = []
        for sample, parts in schedule.encoder(microbatch, encoder_replica):
            if sample in start:
                rows = share_of(samples[sample], parts).rows
                message.append(range(start[sample] + rows.start, start[sample] + rows.stop))
        for pair in tensor_pairs(plan, encoder_replica):
            if pair.llm == tensor:
                peer = plan.rank(encoder_replica, plan.encoder_stages - 1, pair.encoder)
                transfers += _transfer(peer, message, ends[-1], pair)
    return transfers


def stage_transfers(
    plan: Plan, replica: int, peer_stage: int, num_tokens: int, tensor: int = 0, *, has_gradients: bool = True
) -> list[Transfer]:
    """The transfer of hidden states between two stages of one replica; none for an empty microbatch.

    Args:
        plan: The layout.
        replica: Of this rank.
        peer_stage: Stage of the other rank.
        num_tokens: Rows of the microbatch.
        tensor: Position of both ranks in their tensor groups.
        has_gradients: Whether a parameter trains in the stage above or before it. If not, one row goes back:
            without a sign that the stage below is done, the stage above would run ahead, and more messages
            would wait in memory than the plan allows for.

    Returns:
        One transfer, or one for the rows and one for the sign.
    """
    if not num_tokens:
        return []
    peer = plan.rank(replica, peer_stage, tensor)
    if has_gradients:
        return [Transfer(peer, num_tokens, None)]
    return [
        Transfer(peer, num_tokens, None, has_gradients=False),
        Transfer(peer, 1, None, has_rows=False),
    ]


def _transfer(peer: int, message: Sequence[range], num_own_rows: int, pair: TensorPair) -> list[Transfer]:
    """A transfer of the rows at the places `message` among this rank's rows; none where there are no rows."""
    num_rows = sum(map(len, message))
    if num_rows == 0:
        return []
    starts = accumulate(map(len, message), initial=0)
    if num_rows == num_own_rows and all(
        rows.start == start for rows, start in zip(message, starts, strict=False)
    ):
        return [Transfer(peer, num_rows, None, pair.has_rows, pair.has_gradients)]
    rows = torch.cat([torch.arange(r.start, r.stop) for r in message])
    return [Transfer(peer, num_rows, rows, pair.has_rows, pair.has_gradients)]


def split(rows_RD: torch.Tensor, transfers: Sequence[Transfer]) -> list[torch.Tensor]:
    """One contiguous [num_rows, D] tensor a transfer, out of all rows of this rank."""
    return [
        (rows_RD if t.rows is None else rows_RD.index_select(0, _on(rows_RD.device, t.rows))).contiguous()
        for t in transfers
    ]


def join(messages: Sequence[torch.Tensor], transfers: Sequence[Transfer]) -> torch.Tensor:
    """All rows of this rank, [R, D], from one [num_rows, D] tensor a transfer; at least one transfer."""
    if len(messages) == 1 and transfers[0].rows is None:
        return messages[0]
    num_rows = sum(t.num_rows for t in transfers)
    rows_RD = messages[0].new_empty(num_rows, messages[0].shape[1])
    for message, transfer in zip(messages, transfers, strict=True):
        assert transfer.rows is not None, "several transfers each name their rows"
        rows_RD.index_copy_(0, _on(message.device, transfer.rows), message)
    return rows_RD


def _on(device: torch.device, rows: torch.Tensor) -> torch.Tensor:
    # A blocking copy would wait until the device has done all its earlier work.
    return rows.to(device, non_blocking=True)
