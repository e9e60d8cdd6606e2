"""Gradients: summed over the ranks that hold a parameter, and clipped by the norm over all parameters.

The loss was divided by the label tokens of the whole global batch before backward, so the gradient of the
global batch is the *sum* over replicas; a mean would make it depend on how samples were dealt out.

The ranks that hold a parameter are found by its name: all replicas of its stage, and those of another stage
that shares it (a head tied to the embedding). In this file each of them has the whole gradient. In
`sharded.py` gradients are cut among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dflop.models.expert_ranks import dealt_experts
from dflop.models.parameters import squared_norm
from dflop.models.tensor import slices_of
from dflop.models.wide_gradients import sum_gradients, used_once
from dflop.parallel.groups import HolderGroups, Ranks, holder_groups
from dflop.parallel.nothing import NothingPass, Units
from dflop.parallel.shard import layers_of
from dflop.runtime.failure import RankError, talking

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from dflop._native import Plan
    from dflop.runtime.mesh import Mesh

_Facts = tuple[Any, tuple[tuple[int, ...], float, float], int]
"""Which part of a parameter a rank has (none: all); that part's tensor shape, sum and sum of squares; the
rank's position among those that share the layer, or its experts."""
BUCKET_BYTES = 25 << 20
"""Bytes of one all-reduce. The default of PyTorch's DDP: large enough that latency does not matter."""


@dataclass(frozen=True)
class Held:
    """Which ranks hold the same part of a parameter as this rank, and how they get its gradient."""

    replicas: Ranks
    """Ranks at the same position among those that share the layer, or its experts, ascending: they sum
    gradients."""
    repeats: Ranks = ()
    """Ranks of this one's tensor group that hold the same part of a cut parameter; empty where it is alone.
    Examples: heads of keys and values, where there are fewer than ranks; of the two LoRA matrices of a cut
    map, the one that stays whole. Their gradients are summed, too."""
    is_cut: bool = False
    """Whether ranks have parts of the parameter, by tensor parallelism or as dealt experts. If not, all ranks
    that share the layer have all of it, and the same gradient."""
    position: int = 0
    """This rank's position among those that share the layer, or its experts; 0 where it has all of them."""

    def counts(self, rank: int) -> bool:
        """Whether this rank counts the gradient in the norm, so that each gradient is counted once.

        Args:
            rank: This rank.

        Returns:
            True on exactly one of the ranks that share the layer and have the same gradient.
        """
        if self.is_cut:
            return not self.repeats or self.repeats[0] == rank
        return self.position == 0


@dataclass(frozen=True)
class Holders:
    """Who holds which parameters."""

    of: Mapping[str, Held]
    """Of this rank's parameters, by name."""
    sets: frozenset[Ranks]
    """All `replicas` of any rank."""
    repeats: frozenset[Ranks]
    """All `repeats` of any rank."""


@dataclass(frozen=True)
class _Flat:
    """Gradients of the parameters that the same ranks hold, in one tensor."""

    gradients: torch.Tensor
    held: Held
    group: dist.ProcessGroup | None
    """None where this rank is the only holder."""


class Gradients:
    """The gradients of this rank's pieces, as views into a few flat tensors.

    A parameter that a step does not reach has a zero gradient, on every rank alike: the optimizer treats all
    replicas the same way whichever samples they had.
    """

    def __init__(self, pieces: Mapping[int, nn.Module], mesh: Mesh) -> None:
        """Finds the holders and makes their groups. Every rank must call it; blocks until all have.

        Args:
            pieces: Of this rank, by stage.
            mesh: This rank's coordinates.

        Raises:
            RankError: Two ranks hold a parameter of the same name with other tensor shapes or other values.
        """
        self._mesh = mesh
        holders = find_holders(pieces, mesh)
        groups = groups_of(holders, mesh)
        self._repeats = repeat_groups(holders, mesh)
        # `named_parameters` gives a parameter that has two names only once.
        self.held = {name: p for piece in pieces.values() for name, p in piece.named_parameters()}
        """All parameters of this rank, trained or not."""
        self.parameters = {name: p for name, p in self.held.items() if p.requires_grad}
        self._nothing = {
            stage: NothingPass(
                piece, Units(None, layers_of(piece), None), takes_hidden=True, gives_zeros=False
            )
            for stage, piece in pieces.items()
            if dealt_experts(piece) is not None
        }
        self._flats: list[_Flat] = []
        once = used_once(pieces.values())
        kinds = {holders.of[name] for name in self.parameters}
        for held in sorted(kinds, key=lambda held: (held.replicas, held.repeats, held.is_cut, held.position)):
            members = [p for name, p in self.parameters.items() if holders.of[name] == held]
            # Float32 for weights of any type: in bfloat16 the sum would lose what late microbatches add.
            flat = torch.zeros(sum(p.numel() for p in members), dtype=torch.float32, device=mesh.device)
            offset = 0
            for p in members:
                part = flat[offset : offset + p.numel()].view_as(p)
                sum_gradients(p, part, is_used_once=p in once)
                offset += p.numel()
            self._flats.append(_Flat(flat, held, groups[held.replicas].whole))

    def nothing(self, stage: int) -> NothingPass | None:
        """As in `ShardedGradients`: here ranks meet in layers with dealt experts alone."""
        return self._nothing.get(stage)

    def gather(self) -> None:
        """Does nothing: each rank has whole parameters. As in `ShardedGradients`."""

    def release(self) -> None:
        """Does nothing: each rank keeps whole parameters. As in `ShardedGradients`."""

    def zero(self) -> None:
        """Sets all gradients to zero, in place."""
        for flat in self._flats:
            flat.gradients.zero_()

    def reduce(self) -> None:
        """Sums each gradient over the ranks that hold it.

        Every holder must call it after its last backward; sends buckets of 25 MiB; blocks until they are
        summed.

        Raises:
            RankError: Another rank has gone.
        """
        repeated = [flat for flat in self._flats if flat.held.repeats]
        with talking("sum gradients"):
            _sum([(flat.gradients, flat.group) for flat in self._flats if flat.group is not None])
            _sum([(flat.gradients, self._repeats[flat.held.repeats]) for flat in repeated])

    def clip(self, max_norm: float | None) -> torch.Tensor:
        """Scales all gradients of the model down to `max_norm` if their norm is above it.

        Every rank must call it after `reduce`; sums one float64 over all ranks. Replicas count once.

        Args:
            max_norm: The largest norm allowed; none clips nothing.

        Returns:
            The norm before clipping, on the device, equal on all ranks; where it is not finite, nothing was
            scaled.

        Raises:
            RankError: Another rank has gone.
        """
        return clip(self._mesh, self.counted(), self.flat(), max_norm)

    def counted(self) -> list[torch.Tensor]:
        """The gradients that this rank counts in the norm, flat."""
        own = self._mesh.rank
        first = [flat for flat in self._flats if flat.held.replicas[0] == own]
        return [flat.gradients for flat in first if flat.held.counts(own)]

    def flat(self) -> list[torch.Tensor]:
        """All gradients of this rank."""
        return [flat.gradients for flat in self._flats]


def _sum(flats: Sequence[tuple[torch.Tensor, dist.ProcessGroup]]) -> None:
    """Sums each tensor over its group, in buckets; blocks until all are summed."""
    pending: list[dist.Work] = []
    for gradients, group in flats:
        for bucket in gradients.split(max(1, BUCKET_BYTES // gradients.element_size())):
            work = dist.all_reduce(bucket, group=group, async_op=True)
            assert work is not None
            pending.append(work)
    for work in pending:
        work.wait()


def clip(
    mesh: Mesh, counted: Sequence[torch.Tensor], scaled: Sequence[torch.Tensor], max_norm: float | None
) -> torch.Tensor:
    """Scales all gradients of the model down to `max_norm` if their norm is above it.

    Every rank must call it; sums one float64 over all ranks. On a GPU the host reads nothing back: the device
    itself decides whether to scale.

    Args:
        mesh: This rank's coordinates.
        counted: Gradients that this rank counts in the norm, flat; over all ranks each gradient comes once.
        scaled: All gradients of this rank.
        max_norm: The largest norm allowed; none clips nothing.

    Returns:
        The norm before clipping, on the device, equal on all ranks; where it is not finite, nothing was
        scaled.

    Raises:
        RankError: Another rank has gone.
    """
    squares = [squared_norm(gradients) for gradients in counted]
    nothing = torch.zeros((), dtype=torch.float64, device=mesh.device)
    total = torch.stack(squares).sum() if squares else nothing
    with talking("sum the gradients' norm"):
        # In the default group: all ranks, and NCCL where the tensor is on a GPU.
        dist.all_reduce(total)
    norm = total.sqrt()
    if max_norm is not None:
        is_above = (norm > max_norm) & norm.isfinite()
        factor = torch.where(is_above, max_norm / norm, 1.0)
        # On a CPU reading the flag costs nothing, while scaling by 1 would cost a pass over all gradients.
        if mesh.device.type != "cpu" or bool(is_above):
            for gradients in scaled:
                gradients.mul_(factor)
    return norm


def groups_of(holders: Holders, mesh: Mesh) -> dict[Ranks, HolderGroups]:
    """The groups of each set of holders. Every rank must call it; blocks until all have.

    Args:
        holders: Of the parameters.
        mesh: This rank's coordinates.

    Returns:
        By set of ranks: of each set of holders, and of the replicas of each stage where the plan cuts.
    """
    plan = mesh.plan
    cut: set[Ranks] = set()
    if plan.zero > 0:
        for stage in range(plan.num_stages):
            tensors = plan.encoder_tensor if mesh.is_encoder_stage(stage) else plan.llm_tensor
            cut |= {replicas_of(plan, stage, tensor) for tensor in range(tensors)}
        # One replica of a stage stays whole. One of experts is a shard of one rank, beside others' shards.
        cut = {ranks for ranks in cut if len(ranks) > 1}
        degree = plan.expert_parallel_degree
        cut |= {replicas_of_experts(plan, position) for position in range(degree) if degree > 1}
    with talking("connect the ranks that hold the same parameters"):
        return holder_groups(holders.sets, cut, mesh.rank, plan.shard_ranks, mesh.device, mesh.timeout)


def replicas_of(plan: Plan, stage: int, tensor: int) -> Ranks:
    """The ranks that hold the same part of a stage: one in each replica, ascending.

    Args:
        plan: The layout.
        stage: Of the whole step.
        tensor: Position among the ranks that share the layers of the stage.

    Returns:
        Them.
    """
    replicas = plan.encoder_replicas if stage < plan.encoder_stages else plan.llm_replicas
    return tuple(sorted(plan.rank(replica, stage, tensor) for replica in range(replicas)))


def replicas_of_experts(plan: Plan, position: int) -> Ranks:
    """The ranks that hold the same experts, ascending: one in each expert group.

    Args:
        plan: The layout, in which experts are dealt out.
        position: In the expert group.

    Returns:
        Them.
    """
    return tuple(range(position, plan.num_ranks, plan.expert_parallel_degree))


def repeat_groups(holders: Holders, mesh: Mesh) -> dict[Ranks, dist.ProcessGroup]:
    """The groups of ranks that hold the same part. Every rank must call it; blocks until all have.

    Args:
        holders: Of the parameters.
        mesh: This rank's coordinates.

    Returns:
        The groups that this rank is in, by `Held.repeats`.
    """
    with talking("connect the ranks that hold the same parameters"):
        made = holder_groups(holders.repeats, (), mesh.rank, None, mesh.device, mesh.timeout)
    return {ranks: groups.whole for ranks, groups in made.items() if groups.whole is not None}


def find_holders(pieces: Mapping[int, nn.Module], mesh: Mesh) -> Holders:
    """The ranks that hold each parameter; checks that they hold the same.

    Every rank must call it; blocks until all have.

    Args:
        pieces: Of this rank, by stage; whole, but for what tensor parallelism has cut, and experts that other
            ranks have.
        mesh: This rank's coordinates.

    Returns:
        Those of this rank's parameters, and all sets of ranks.

    Raises:
        RankError: Two ranks hold a parameter of the same name with other tensor shapes or other values.
    """
    # Two different initialisations differ in sum and sum of squares, so no weights need to be sent.
    own: dict[str, _Facts] = {}
    for stage, piece in pieces.items():
        slices = slices_of(piece)
        for name, p in piece.named_parameters():
            values, part = p.detach().double(), slices.get(name)
            facts = (tuple(p.shape), float(values.sum()), float(values.square().sum()))
            cut = None if part is None else (part.dim, part.runs)
            # Where experts are dealt out, nothing else is cut.
            position = mesh.tensor_of(stage) if cut is None else mesh.tensor_of(stage) + mesh.expert_rank.rank
            own[name] = (cut, facts, position)
    held: list[dict[str, _Facts]] = [{} for _ in range(mesh.num_ranks)]
    dist.all_gather_object(held, own, group=mesh.control)
    plan = mesh.plan
    replicas: dict[tuple[str, int], Ranks] = {}
    repeats: dict[tuple[str, int, Any], Ranks] = {}
    first_with: dict[tuple[str, Any], int] = {}
    for rank, facts in enumerate(held):
        for name, (part, value, position) in facts.items():
            place = (name, position)
            replicas[place] = (*replicas.get(place, ()), rank)
            if part is not None:
                same = (name, plan.group(rank), part)
                repeats[same] = (*repeats.get(same, ()), rank)
            first = first_with.setdefault((name, part), rank)
            if held[first][name][1] != value:
                message = (
                    f"`{name}` is {value} (tensor shape, sum, sum of squares) on rank {rank} and "
                    f"{held[first][name][1]} on rank {first}, must start equal"
                )
                raise RankError(message)

    def of(name: str, part: Any, position: int) -> Held:
        same = repeats.get((name, plan.group(mesh.rank), part), ())
        return Held(replicas[name, position], same if len(same) > 1 else (), part is not None, position)

    return Holders(
        {name: of(name, part, position) for name, (part, _, position) in own.items()},
        frozenset(replicas.values()),
        frozenset(ranks for ranks in repeats.values() if len(ranks) > 1),
    )
