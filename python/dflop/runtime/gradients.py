"""Gradients: summed over the ranks that hold a parameter, and clipped by the norm over all parameters.

The loss was divided by the label tokens of the whole global batch before backward, so the gradient of the
global batch is the *sum* over replicas; a mean would make it depend on how samples were dealt out.

Which ranks hold a parameter is found by its name: the replicas of one stage, and whichever stage shares it.
Here each of them has all of it; `sharded.py` has gradients that are cut among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dflop.models.parameters import squared_norm
from dflop.parallel.groups import HolderGroups, Ranks, holder_groups
from dflop.runtime.failure import RankError, talking

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from dflop.parallel.nothing import NothingPass
    from dflop.runtime.mesh import Mesh

BUCKET_BYTES = 25 << 20
"""Bytes of one all-reduce; DDP's default, large enough that latency does not count."""


@dataclass(frozen=True)
class _Flat:
    """Gradients of the parameters that the same ranks hold, in one tensor."""

    gradients: torch.Tensor
    holders: tuple[int, ...]
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
            mesh: This rank's place.

        Raises:
            RankError: Two ranks hold a parameter of the same name with other tensor shapes or other values.
        """
        self._mesh = mesh
        holders = find_holders(pieces.values(), mesh)
        groups = groups_of(holders, mesh)
        # A parameter under two names is one parameter.
        self.held = {name: p for piece in pieces.values() for name, p in piece.named_parameters()}
        """All parameters of this rank, trained or not."""
        self.parameters = {name: p for name, p in self.held.items() if p.requires_grad}
        self._flats: list[_Flat] = []
        for ranks in sorted({holders[name] for name in self.parameters}):
            members = [p for name, p in self.parameters.items() if holders[name] == ranks]
            # Float32 whatever the weights are: in bfloat16 what a late microbatch adds would be lost.
            flat = torch.zeros(sum(p.numel() for p in members), dtype=torch.float32, device=mesh.device)
            offset = 0
            for p in members:
                p.grad_dtype = torch.float32
                p.grad = flat[offset : offset + p.numel()].view_as(p)
                offset += p.numel()
            self._flats.append(_Flat(flat, ranks, groups[ranks].whole))

    def nothing(self, stage: int) -> NothingPass | None:
        """None: no ranks meet in an action."""
        del stage

    def gather(self) -> None:
        """Nothing: all is here."""

    def release(self) -> None:
        """Nothing: all stays here."""

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
        pending: list[dist.Work] = []
        for flat in self._flats:
            if flat.group is None:
                continue
            for bucket in flat.gradients.split(max(1, BUCKET_BYTES // flat.gradients.element_size())):
                with talking("sum gradients"):
                    work = dist.all_reduce(bucket, group=flat.group, async_op=True)
                assert work is not None
                pending.append(work)
        with talking("sum gradients"):
            for work in pending:
                work.wait()

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
        own = self._mesh.rank
        counted = [flat.gradients for flat in self._flats if flat.holders[0] == own]
        return clip(self._mesh, counted, [flat.gradients for flat in self._flats], max_norm)


def clip(
    mesh: Mesh, counted: Sequence[torch.Tensor], scaled: Sequence[torch.Tensor], max_norm: float | None
) -> torch.Tensor:
    """Scales all gradients of the model down to `max_norm` if their norm is above it.

    Every rank must call it; sums one float64 over all ranks. On a GPU nothing is read back: whether to scale
    is decided there.

    Args:
        mesh: This rank's place.
        counted: Gradients of one dimension whose norm this rank brings; over all ranks, each once.
        scaled: All that this rank has.
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
        # Over all ranks, where the tensors are.
        dist.all_reduce(total)
    norm = total.sqrt()
    if max_norm is not None:
        is_above = (norm > max_norm) & norm.isfinite()
        factor = torch.where(is_above, max_norm / norm, 1.0)
        # On a CPU it costs nothing to look, and a factor of 1 would cost a pass.
        if mesh.device.type != "cpu" or bool(is_above):
            for gradients in scaled:
                gradients.mul_(factor)
    return norm


def groups_of(holders: Mapping[str, Ranks], mesh: Mesh) -> dict[Ranks, HolderGroups]:
    """The groups of each set of holders. Every rank must call it; blocks until all have.

    Args:
        holders: Of each parameter of any rank.
        mesh: This rank's place.

    Returns:
        By set; what the replicas of one stage hold is cut where the plan says so.
    """
    plan = mesh.plan
    cut: set[Ranks] = set()
    if plan.zero > 0:
        for stage in range(plan.num_stages):
            is_encoder = stage < plan.encoder_stages
            replicas = plan.encoder_replicas if is_encoder else plan.llm_replicas
            cut.add(tuple(sorted(plan.rank(replica, stage) for replica in range(replicas))))
    return holder_groups(holders.values(), cut, mesh.rank, plan.shard_ranks, mesh.device, mesh.timeout)


def find_holders(pieces: Iterable[nn.Module], mesh: Mesh) -> dict[str, Ranks]:
    """The ranks that hold each parameter of any rank, by name, in order; checks that they hold the same.

    Every rank must call it; blocks until all have.

    Args:
        pieces: Of this rank; whole.
        mesh: This rank's place.

    Returns:
        Ranks by name, those of other ranks' parameters too.

    Raises:
        RankError: Two ranks hold a parameter of the same name with other tensor shapes or other values.
    """
    # Sum and sum of squares tell two initialisations apart without sending weights.
    own = {
        name: (tuple(p.shape), float(p.detach().double().sum()), float(p.detach().double().square().sum()))
        for piece in pieces
        for name, p in piece.named_parameters()
    }
    held: list[dict[str, tuple[tuple[int, ...], float, float]]] = [{} for _ in range(mesh.num_ranks)]
    dist.all_gather_object(held, own, group=mesh.control)
    holders: dict[str, Ranks] = {}
    for rank, values in enumerate(held):
        for name, value in values.items():
            holders[name] = (*holders.get(name, ()), rank)
            first = holders[name][0]
            if held[first][name] != value:
                message = (
                    f"`{name}` is {value} (tensor shape, sum, sum of squares) on rank {rank} and "
                    f"{held[first][name]} on rank {first}, must start equal"
                )
                raise RankError(message)
    return holders
