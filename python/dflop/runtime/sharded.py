"""Gradients cut among the replicas of a stage (ZeRO-1 to 3); `gradients.py` has those that are whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dflop.parallel.shard import PARAMETERS, ShardedPiece, is_first_copy, local
from dflop.runtime.failure import RankError, talking
from dflop.runtime.gradients import (
    Gradients,
    clip,
    find_holders,
    groups_of,
    repeat_groups,
    replicas_of,
    replicas_of_experts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from dflop.parallel.nothing import NothingPass
    from dflop.runtime.mesh import Mesh


class ShardedGradients:
    """The gradients of this rank's pieces, each rank with its shard; the same methods as `Gradients`."""

    def __init__(self, pieces: Mapping[int, nn.Module], mesh: Mesh, dtype: torch.dtype) -> None:
        """Cuts the pieces, in place. Every rank must call it; blocks until all have.

        Args:
            pieces: Of this rank, by stage; whole, float32.
            mesh: This rank's coordinates.
            dtype: Type that layers compute in. The shards stay float32: they are the optimizer's masters.

        Raises:
            RankError: Two ranks hold a parameter of the same name with other tensor shapes or other values.
        """
        self._mesh = mesh
        holders = find_holders(pieces, mesh)
        groups = groups_of(holders, mesh)
        repeats = repeat_groups(holders, mesh)
        dealt = mesh.expert_rank
        same_experts = None if dealt.degree == 1 else replicas_of_experts(mesh.plan, dealt.rank)
        self._pieces: dict[int, ShardedPiece] = {}
        self._counts: dict[str, bool] = {}
        for stage, piece in pieces.items():
            names = [name for name, _ in piece.named_parameters()]
            replicas = replicas_of(mesh.plan, stage, mesh.tensor_of(stage))
            shards = groups[replicas].shards
            assert shards is not None, "a stage with one replica has nothing to cut"
            self._pieces[stage] = ShardedPiece(
                piece,
                shards,
                mesh.plan.zero,
                takes_hidden=stage > 0,
                compute_dtype=None if dtype == torch.float32 else dtype,
                reduce_dtype=torch.float32,
                expert_mesh=None if same_experts is None else groups[same_experts].shards,
            )
            # Of a parameter that another stage holds too, the first of both counts. Of its experts each rank
            # has a shard that no other has.
            firsts = {replicas[0]} if same_experts is None else {replicas[0], same_experts[0]}
            first = {n for n in names if holders.of[n].replicas[0] in firsts}
            is_first = is_first_copy(shards)
            self._counts |= {n: is_first and n in first and holders.of[n].counts(mesh.rank) for n in names}
        # Read between steps: what is gathered within a step is not a parameter of the optimizer.
        self.held: dict[str, nn.Parameter] = {
            name: p for piece in pieces.values() for name, p in piece.named_parameters()
        }
        """This rank's shards of all its parameters, trained or not."""
        self.parameters = {name: p for name, p in self.held.items() if p.requires_grad}
        # Ranks that hold the same part cut it into the same shards, so their shards can be summed: those of a
        # tensor group, and those of another stage (a head tied to the embedding).
        trained = {name: holders.of[name] for name in self.parameters}
        self._repeated = [(n, repeats[held.repeats]) for n, held in trained.items() if held.repeats]
        self._repeated += [(n, ends) for n, held in trained.items() if (ends := groups[held.replicas].ends)]

    def nothing(self, stage: int) -> NothingPass | None:
        """What `stage` runs for a microbatch without samples; none where nobody meets in its layers."""
        piece = self._pieces.get(stage)
        return piece.nothing if piece is not None and piece.meets else None

    def gather(self) -> None:
        """Gathers what a step needs whole (ZeRO-1, 2), unless it is whole. Every rank must call it; blocks.

        Raises:
            RankError: Another rank has gone.
        """
        with talking("gather parameters"):
            for piece in self._pieces.values():
                piece.gather()

    def release(self) -> None:
        """Frees the gathered parameters: `named_parameters` of the pieces are shards again."""
        for piece in self._pieces.values():
            piece.release()

    def zero(self) -> None:
        """Drops all gradients: `.grad` is none."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def reduce(self) -> None:
        """Sums each gradient over its ranks, unless a backward has done it; leaves this rank its shard.

        Every rank must call it after its last backward; blocks until they are summed.

        Raises:
            RankError: Another rank has gone.
        """
        with talking("sum gradients"):
            for piece in self._pieces.values():
                piece.reduce()
            for name, group in self._repeated:
                dist.all_reduce(local(_gradient(self.parameters[name])), group=group)

    def clip(self, max_norm: float | None) -> torch.Tensor:
        """As `Gradients.clip`: every shard counts once.

        Args:
            max_norm: The largest norm allowed; none clips nothing.

        Returns:
            The norm before clipping, on the device, equal on all ranks.
        """
        return clip(self._mesh, self.counted(), self.flat(), max_norm)

    def counted(self) -> list[torch.Tensor]:
        """The shards that this rank counts in the norm, flat."""
        counted = [p for name, p in self.parameters.items() if self._counts[name]]
        return [local(_gradient(p)).reshape(-1) for p in counted]

    def flat(self) -> list[torch.Tensor]:
        """All shards of this rank."""
        return [local(_gradient(p)) for p in self.parameters.values()]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "`reduce` comes before"
    return parameter.grad


class JoinedGradients:
    """Gradients of a rank of which one component is cut and the other whole; the same methods as `Gradients`.

    Example: one replica of the LLM on a tensor group whose ranks each hold a whole encoder. The encoder is
    cut among these ranks, and the LLM has no other replica to be cut among.
    """

    def __init__(self, cut: ShardedGradients, whole: Gradients, mesh: Mesh) -> None:
        """Both as one.

        Args:
            cut: Of some stages of this rank.
            whole: Of the others.
            mesh: This rank's coordinates.
        """
        self._cut, self._whole, self._mesh = cut, whole, mesh

    @property
    def held(self) -> dict[str, nn.Parameter]:
        """All parameters of this rank, trained or not; shards where they are cut."""
        return {**self._cut.held, **self._whole.held}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that train."""
        return {**self._cut.parameters, **self._whole.parameters}

    def nothing(self, stage: int) -> NothingPass | None:
        """As in `ShardedGradients`; none for a stage that is whole."""
        return self._cut.nothing(stage)

    def gather(self) -> None:
        """As in `ShardedGradients`."""
        self._cut.gather()

    def release(self) -> None:
        """As in `ShardedGradients`."""
        self._cut.release()

    def zero(self) -> None:
        """Drops the gradients that are cut, and sets the others to zero."""
        self._cut.zero()
        self._whole.zero()

    def reduce(self) -> None:
        """Sums all gradients. Every rank must call it after its last backward; blocks until that is done."""
        self._cut.reduce()
        self._whole.reduce()

    def clip(self, max_norm: float | None) -> torch.Tensor:
        """As `Gradients.clip`.

        Args:
            max_norm: The largest norm allowed; none clips nothing.

        Returns:
            The norm of all gradients before clipping, on the device, equal on all ranks.
        """
        parts = (self._cut, self._whole)
        counted = [gradient for part in parts for gradient in part.counted()]
        return clip(self._mesh, counted, [gradient for part in parts for gradient in part.flat()], max_norm)


def is_cut(mesh: Mesh, stage: int) -> bool:
    """Whether parameters, gradients and states of a stage of this rank are cut among its replicas."""
    plan = mesh.plan
    replicas = plan.encoder_replicas if mesh.is_encoder_stage(stage) else plan.llm_replicas
    return plan.zero > 0 and replicas > 1


def gradients_of(
    pieces: Mapping[int, nn.Module], mesh: Mesh, dtype: torch.dtype
) -> Gradients | ShardedGradients | JoinedGradients:
    """The gradients of this rank, whole or cut as the plan says.

    Every rank must call it; blocks until all have.

    Args:
        pieces: Of this rank, by stage; float32 where they are cut, and cut in place.
        mesh: This rank's coordinates.
        dtype: Type that layers compute in.

    Returns:
        Whole gradients where the plan cuts none (ZeRO-0), or of stages that have one replica.

    Raises:
        RankError: The plan cuts parameters (ZeRO-3) of stages that meet others in the midst of a microbatch.
    """
    plan = mesh.plan
    if plan.zero == PARAMETERS and plan.placement != "colocated":
        message = (
            f"zero {plan.zero} in a layout with encoder and LLM on different ranks, must be 2 at most there"
        )
        raise RankError(
            message, "plan again with `--only zero=2`, or `--only colocated=true`", is_of_all=True
        )
    cut = {stage: piece for stage, piece in pieces.items() if is_cut(mesh, stage)}
    whole = {stage: piece for stage, piece in pieces.items() if stage not in cut}
    if not cut:
        return Gradients(whole, mesh)
    sharded = ShardedGradients(cut, mesh, dtype)
    return JoinedGradients(sharded, Gradients(whole, mesh), mesh) if whole else sharded
