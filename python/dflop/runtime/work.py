"""What one rank needs for one step, made from the schedule before the step starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflop.data.collate import encoder_input, llm_input
from dflop.data.dataset import IGNORED_LABEL
from dflop.data.shares import share_of
from dflop.runtime.boundary import Transfer, encoder_transfers, llm_transfers, stage_transfers
from dflop.runtime.failure import RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from dflop._native import Schedule
    from dflop.data.sample import Sample
    from dflop.data.shares import Parts, Share
    from dflop.models.adapter import EncoderInput, LlmInput
    from dflop.runtime.mesh import Mesh


@dataclass(frozen=True)
class MicrobatchWork:
    """One microbatch on this rank."""

    batch: EncoderInput | LlmInput | None
    """None where this rank has no sample of it: its actions then do nothing."""
    above: Sequence[Transfer]
    """How what enters the stage comes, and its gradient goes; nothing for the encoder."""
    below: Sequence[Transfer]
    """How what leaves the stage goes, and its gradient comes; nothing for the last stage."""


@dataclass(frozen=True)
class StepWork:
    """All microbatches of one step on this rank."""

    step: int
    label_tokens: int
    """Of the whole global batch, at least 1."""
    microbatches: Sequence[MicrobatchWork]
    num_targets: int
    """Positions with loss on this rank, where it computes the loss; else 0. Summed: `label_tokens`."""


def samples_of(mesh: Mesh, schedule: Schedule) -> list[Share]:
    """The samples whose tensors this rank needs, or the parts of them, microbatch after microbatch."""
    microbatches = range(schedule.num_microbatches)
    if mesh.component == "encoder":
        return [share for j in microbatches for share in schedule.encoder(j, mesh.replica)]
    return [(sample, None) for j in microbatches for sample in schedule.llm(j, mesh.replica)]


def prepare(
    mesh: Mesh,
    schedule: Schedule,
    sample: Callable[[int], Sample],
    tiles: Callable[[int, Parts], torch.Tensor],
    dtype: torch.dtype,
) -> StepWork:
    """Packs this rank's samples and finds its transfers; waits for tiles that are not decoded yet.

    Args:
        mesh: This rank's place.
        schedule: Of the step.
        sample: The token tensors of a sample.
        tiles: The tiles of a share of a sample; asked for on encoder ranks only.
        dtype: Of the pixels given to the model.

    Returns:
        This rank's share of the step.

    Raises:
        RankError: The global batch has no label tokens.
        ProfileError: A sample cannot be read; the message names it.
    """
    if schedule.label_tokens < 1:
        message = f"the global batch of step {schedule.step} has no label tokens, nothing to learn from"
        raise RankError(message)
    build = _encoder_work if mesh.component == "encoder" else _llm_work
    microbatches = [build(mesh, schedule, j, sample, tiles, dtype) for j in range(schedule.num_microbatches)]
    num_targets = 0
    if mesh.is_last_stage:
        for index, _ in samples_of(mesh, schedule):
            num_targets += int((sample(index).targets_T != IGNORED_LABEL).sum())
    return StepWork(schedule.step, schedule.label_tokens, microbatches, num_targets)


def _encoder_work(
    mesh: Mesh,
    schedule: Schedule,
    microbatch: int,
    sample: Callable[[int], Sample],
    tiles: Callable[[int, Parts], torch.Tensor],
    dtype: torch.dtype,
) -> MicrobatchWork:
    scheduled = schedule.encoder(microbatch, mesh.replica)
    if not scheduled:
        return MicrobatchWork(None, [], [])
    shares = [share_of(sample(i), parts) for i, parts in scheduled]
    batch = encoder_input(shares, [tiles(i, parts) for i, parts in scheduled], dtype)
    below = encoder_transfers(mesh.plan, schedule, microbatch, mesh.replica, [share.rows for share in shares])
    return MicrobatchWork(batch, [], below)


def _llm_work(
    mesh: Mesh,
    schedule: Schedule,
    microbatch: int,
    sample: Callable[[int], Sample],
    tiles: Callable[[int, Parts], torch.Tensor],
    dtype: torch.dtype,
) -> MicrobatchWork:
    del tiles, dtype
    indices = schedule.llm(microbatch, mesh.replica)
    if not indices:
        return MicrobatchWork(None, [], [])
    samples = [sample(i) for i in indices]
    batch = llm_input(samples)
    num_tokens = batch.input_ids_T.shape[0]
    if mesh.stage == 1:
        above = llm_transfers(mesh.plan, schedule, microbatch, mesh.replica, {s.index: s for s in samples})
    else:
        above = stage_transfers(mesh.plan, mesh.replica, mesh.stage - 1, num_tokens)
    below = [] if mesh.is_last_stage else stage_transfers(mesh.plan, mesh.replica, mesh.stage + 1, num_tokens)
    return MicrobatchWork(batch, above, below)
