"""Who sends which rows to whom in one microbatch, computed from the schedule on both sides.

    encoder replica e: features_ED --rows of r's samples--> LLM replica r, for every r that holds some of them
    LLM replica r:     rows of e's samples, for every e --into the order of r's packed samples--> features_ED

Both sides know the feature rows of their own samples, so no header travels, and a message that would be empty
does not exist. A message holds its samples in the encoder replica's packing order. Gradients go back over the
same transfers. Between two LLM stages of a replica there is one transfer: all T rows of the microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dflop._native import Plan, Schedule


@dataclass(frozen=True)
class Transfer:
    """One message of a microbatch and its gradient, seen from this rank."""

    peer: int
    """The other rank."""
    num_rows: int
    """Rows of the message, at least 1."""
    rows: torch.Tensor | None
    """[num_rows] int64, the place of each row of the message among this rank's rows; none: all, in order."""


def encoder_transfers(
    plan: Plan, schedule: Schedule, microbatch: int, replica: int, num_features: Mapping[int, int]
) -> list[Transfer]:
    """What encoder replica `replica` sends, by LLM replica.

    Args:
        plan: The layout.
        schedule: Of the step.
        microbatch: Which one.
        replica: Encoder replica of this rank.
        num_features: Feature rows of this rank's samples.

    Returns:
        One transfer an LLM replica that holds samples of this rank; together they cover each row once.
    """
    own = schedule.encoder(microbatch, replica)
    transfers: list[Transfer] = []
    for llm_replica in range(plan.llm_replicas):
        wanted = set(schedule.llm(microbatch, llm_replica))
        message = [sample for sample in own if sample in wanted]
        transfers += _transfer(plan.rank(llm_replica, 1), message, own, num_features)
    return transfers


def llm_transfers(
    plan: Plan, schedule: Schedule, microbatch: int, replica: int, num_features: Mapping[int, int]
) -> list[Transfer]:
    """What the first stage of LLM replica `replica` receives, by encoder replica.

    Args:
        plan: The layout.
        schedule: Of the step.
        microbatch: Which one.
        replica: LLM replica of this rank.
        num_features: Feature rows of this rank's samples.

    Returns:
        One transfer an encoder replica that holds samples of this rank; together they cover each row once.
    """
    own = schedule.llm(microbatch, replica)
    wanted = set(own)
    transfers: list[Transfer] = []
    for encoder_replica in range(plan.encoder_replicas):
        message = [sample for sample in schedule.encoder(microbatch, encoder_replica) if sample in wanted]
        transfers += _transfer(plan.rank(encoder_replica, 0), message, own, num_features)
    return transfers


def stage_transfers(plan: Plan, replica: int, peer_stage: int, num_tokens: int) -> list[Transfer]:
    """The hidden states between two LLM stages of a replica; nothing for an empty microbatch."""
    return [Transfer(plan.rank(replica, peer_stage), num_tokens, None)] if num_tokens else []


def _transfer(
    peer: int, message: Sequence[int], own: Sequence[int], num_features: Mapping[int, int]
) -> list[Transfer]:
    num_rows = sum(num_features[sample] for sample in message)
    if num_rows == 0:
        return []
    if list(message) == [sample for sample in own if num_features[sample]]:
        return [Transfer(peer, num_rows, None)]
    first_row, start = 0, {}
    for sample in own:
        start[sample] = first_row
        first_row += num_features[sample]
    rows = torch.cat([torch.arange(start[s], start[s] + num_features[s]) for s in message])
    return [Transfer(peer, num_rows, rows)]


def split(rows_RD: torch.Tensor, transfers: Sequence[Transfer]) -> list[torch.Tensor]:
    """One contiguous [num_rows, D] tensor a transfer, out of all rows of this rank."""
    return [
        (rows_RD if t.rows is None else rows_RD.index_select(0, t.rows.to(rows_RD.device))).contiguous()
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
        rows_RD.index_copy_(0, transfer.rows.to(message.device), message)
    return rows_RD
