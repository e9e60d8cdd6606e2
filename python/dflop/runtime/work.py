"""What one rank needs for one step, made from the schedule before the step starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from dflop.data.collate import encoder_input, llm_input, sizes_alone
from dflop.data.dataset import IGNORED_LABEL
from dflop.data.pin import Batch, pinned
from dflop.data.shares import share_of
from dflop.models.recompute import most_of
from dflop.models.sequence import rows_of_rank
from dflop.runtime.boundary import Transfer, encoder_transfers, llm_transfers, stage_transfers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from dflop._native import Action, Schedule
    from dflop.data.sample import Sample
    from dflop.data.shares import Parts, Share
    from dflop.models.adapter import EncoderInput, LlmInput, MediaGrid
    from dflop.runtime.mesh import Mesh


class EncoderBorders(Protocol):
    """The part of a model's adapter that tells what goes into the encoder, and from stage to stage of it."""

    runs_read_inputs: bool
    input_shape: tuple[int, ...]

    def num_rows(self, media: Sequence[MediaGrid]) -> int:
        """See `ModelAdapter.num_rows`."""
        ...


@dataclass(frozen=True)
class MicrobatchWork:
    """One microbatch on one stage of this rank."""

    batch: EncoderInput | LlmInput | None
    """None where this rank has no sample of it: its actions then do nothing."""
    above: Sequence[Transfer]
    """Transfers of what enters the stage, and back of its gradient; none for the encoder's first stage."""
    below: Sequence[Transfer]
    """Transfers of what leaves the stage, and back of its gradient; none for the last stage."""
    is_elsewhere: bool = False
    """Whether this rank has no sample of it, but another replica of the stage has."""
    recompute: str | None = None
    """What the layers of the stage recompute in it; none: what the plan says."""


@dataclass(frozen=True)
class StepWork:
    """All microbatches of one step on this rank."""

    step: int
    label_tokens: int
    """Of the whole global batch, at least 1."""
    stages: Mapping[int, Sequence[MicrobatchWork]]
    """Microbatches in their order, of each stage that this rank holds."""
    num_targets: int
    """Positions with a loss on this rank, if it computes the loss and is the first rank of its tensor group;
    else 0. Summed over all ranks this must be `label_tokens`."""

    def of(self, action: Action) -> MicrobatchWork:
        """What an action of this rank works on."""
        return self.stages[action.stage][action.microbatch]


Packed: TypeAlias = "dict[tuple[Share, ...], EncoderInput]"
"""What the encoder reads of a microbatch, by its shares."""


def decodes(mesh: Mesh, encoder: EncoderBorders) -> bool:
    """Whether this rank reads media: on the encoder's first stage, or on each if all need the inputs.

    Args:
        mesh: This rank's coordinates.
        encoder: Of the model.

    Returns:
        False on ranks that hold LLM layers alone, and on all but the first of the ranks that share the
        encoder's layers, which get what that one has packed.
    """
    if not mesh.holds_encoder or mesh.tensor_of(mesh.stages[0]) > 0:
        return False
    return 0 in mesh.stages or encoder.runs_read_inputs


def encoder_shares(mesh: Mesh, schedule: Schedule, encoder: EncoderBorders) -> list[Share]:
    """The samples, or parts of samples, whose media this rank decodes, microbatch after microbatch.

    Args:
        mesh: This rank's coordinates.
        schedule: Of the step.
        encoder: Of the model.

    Returns:
        Samples with their parts.
    """
    return _group_shares(mesh, schedule) if decodes(mesh, encoder) else []


def _group_shares(mesh: Mesh, schedule: Schedule) -> list[Share]:
    """What the encoder replica of this rank reads, microbatch after microbatch."""
    replica = mesh.encoder_replica
    return [share for j in range(schedule.num_microbatches) for share in schedule.encoder(j, replica)]


def llm_samples(mesh: Mesh, schedule: Schedule) -> list[int]:
    """The samples whose tokens this rank needs for its LLM layers, microbatch after microbatch."""
    if mesh.component == "encoder":
        return []
    return [sample for j in range(schedule.num_microbatches) for sample in schedule.llm(j, mesh.replica)]


def read_samples(mesh: Mesh, schedule: Schedule, encoder: EncoderBorders) -> list[int]:
    """The samples whose records alone this rank needs: for tokens, or for sizes of media that others decode.

    Args:
        mesh: This rank's coordinates.
        schedule: Of the step.
        encoder: Of the model.

    Returns:
        Samples, microbatch after microbatch; those of the LLM first.
    """
    samples = llm_samples(mesh, schedule)
    if mesh.holds_encoder and not decodes(mesh, encoder):
        samples += [sample for sample, _ in _group_shares(mesh, schedule)]
    return samples


def prepare(
    mesh: Mesh,
    schedule: Schedule,
    sample: Callable[[int], Sample],
    tiles: Callable[[int, Parts], torch.Tensor],
    dtype: torch.dtype,
    encoder: EncoderBorders,
    packed: Packed | None = None,
    *,
    trains_tower: bool = True,
) -> StepWork:
    """Packs this rank's samples and finds its transfers. Waits for tiles that are not decoded yet.

    Args:
        mesh: This rank's coordinates.
        schedule: Of the step.
        sample: The token tensors of a sample.
        tiles: The tiles of a share of a sample; called only on ranks that read media.
        dtype: Of the pixels given to the model.
        encoder: What goes into the encoder, and from stage to stage of it.
        packed: Microbatches of the encoder that are packed already.
        trains_tower: Whether the recipe trains the encoder before its projector.

    Returns:
        This rank's share of the step.

    Raises:
        ProfileError: A sample cannot be read; the message names it.
    """
    stages: dict[int, list[MicrobatchWork]] = {}
    packed_llm: dict[int, LlmInput] = {}
    for stage in mesh.stages:
        stages[stage] = [
            _encoder_work(mesh, schedule, stage, j, sample, tiles, dtype, encoder, packed or {}, trains_tower)
            if mesh.is_encoder_stage(stage)
            else _llm_work(mesh, schedule, stage, j, sample, packed_llm)
            for j in range(schedule.num_microbatches)
        ]
    num_targets = 0
    # All ranks of a tensor group have the same samples: only the first one counts them.
    if mesh.is_last_stage and mesh.tensor == 0:
        for index in llm_samples(mesh, schedule):
            num_targets += int((sample(index).targets_T != IGNORED_LABEL).sum())
    # What is evaluated may have no label token, and nothing is learned from its loss.
    return StepWork(schedule.step, max(1, schedule.label_tokens), stages, num_targets)


def _encoder_work(
    mesh: Mesh,
    schedule: Schedule,
    stage: int,
    microbatch: int,
    sample: Callable[[int], Sample],
    tiles: Callable[[int, Parts], torch.Tensor],
    dtype: torch.dtype,
    encoder: EncoderBorders,
    packed: Packed,
    trains_tower: bool,
) -> MicrobatchWork:
    replica, tensor = mesh.encoder_replica, mesh.tensor_of(stage)
    scheduled = schedule.encoder(microbatch, replica)
    if not scheduled:
        others = range(mesh.plan.encoder_replicas)
        is_elsewhere = any(schedule.encoder(microbatch, other) for other in others)
        return MicrobatchWork(None, [], [], is_elsewhere)
    shares = [share_of(sample(i), parts) for i, parts in scheduled]
    reads_inputs = stage == 0 or encoder.runs_read_inputs
    batch = packed.get(tuple(scheduled)) if reads_inputs else None
    if reads_inputs and tensor != 0:
        batch = sizes_alone(shares, encoder.input_shape, dtype)
    elif batch is None:
        inputs = [tiles(i, parts) for i, parts in scheduled] if reads_inputs else []
        batch = encoder_input(shares, inputs, dtype)
    plan, num_rows = mesh.plan, encoder.num_rows(batch.media)
    recompute = schedule.recompute(microbatch, mesh.replica)

    def neighbour(peer_stage: int) -> list[Transfer]:
        # The projector is in the last stage, so no stage takes its gradient from the stage above.
        return stage_transfers(plan, replica, peer_stage, num_rows, tensor, has_gradients=trains_tower)

    above = neighbour(stage - 1) if stage > 0 else []
    if stage < plan.encoder_stages - 1:
        below = neighbour(stage + 1)
    else:
        rows = [share.rows for share in shares]
        below = encoder_transfers(plan, schedule, microbatch, replica, rows, tensor)
    return MicrobatchWork(_pinned(mesh, batch), above, below, recompute=recompute and recompute[0])


def _pinned(mesh: Mesh, batch: Batch) -> Batch:
    return pinned(batch) if mesh.device.type == "cuda" else batch


def _llm_work(
    mesh: Mesh,
    schedule: Schedule,
    stage: int,
    microbatch: int,
    sample: Callable[[int], Sample],
    packed: dict[int, LlmInput],
) -> MicrobatchWork:
    """Packs a microbatch, unless it is in `packed`: all chunks of a rank read the same batch."""
    indices = schedule.llm(microbatch, mesh.replica)
    if not indices:
        others = range(mesh.plan.llm_replicas)
        is_elsewhere = any(schedule.llm(microbatch, other) for other in others)
        recompute = _llm_recompute(mesh, schedule, microbatch)
        return MicrobatchWork(None, [], [], is_elsewhere, recompute=recompute)
    samples = [sample(i) for i in indices]
    batch = packed.get(microbatch)
    if batch is None:
        batch = packed[microbatch] = _pinned(mesh, llm_input(samples))
    num_tokens = batch.input_ids_T.shape[0]
    plan, tensor = mesh.plan, mesh.tensor
    # With sequence parallelism a rank of a tensor group has only a part of the rows between layers, and
    # sends that part to the next stage.
    num_rows = rows_of_rank(num_tokens, plan.llm_tensor)
    if mesh.is_encoder_stage(stage - 1):
        by_index = {s.index: s for s in samples}
        above = llm_transfers(plan, schedule, microbatch, mesh.replica, by_index, tensor)
    else:
        above = stage_transfers(plan, mesh.replica, stage - 1, num_rows, tensor)
    is_last = stage == plan.num_stages - 1
    below = [] if is_last else stage_transfers(plan, mesh.replica, stage + 1, num_rows, tensor)
    return MicrobatchWork(batch, above, below, recompute=_llm_recompute(mesh, schedule, microbatch))


def _llm_recompute(mesh: Mesh, schedule: Schedule, microbatch: int) -> str | None:
    """What the LLM's layers recompute on this rank; none: what the plan says.

    A layer with dealt experts exchanges rows again where it recomputes, so all ranks recompute the same: what
    the one of them does that has the least memory left.
    """
    plan = mesh.plan
    if plan.expert_parallel_degree == 1:
        own = schedule.recompute(microbatch, mesh.replica)
        return own and own[1]
    with_samples = [r for r in range(plan.llm_replicas) if schedule.llm(microbatch, r)]
    modes = [schedule.recompute(microbatch, replica) for replica in with_samples]
    return most_of(mode[1] if mode else plan.llm_recompute for mode in modes) if modes else None
