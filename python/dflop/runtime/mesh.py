"""Where this rank stands, and the process groups it talks in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dflop.models.expert_ranks import ALL_EXPERTS, ExpertRank
from dflop.models.tensor import WHOLE, TensorRank
from dflop.parallel.groups import connect_group, own_group
from dflop.runtime.boundary import tensor_pairs
from dflop.runtime.deadline import Deadline
from dflop.runtime.failure import RankError, talking

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflop._native import Plan


@dataclass(frozen=True)
class Mesh:
    """One rank's coordinates in the layout."""

    plan: Plan
    rank: int
    num_ranks: int
    component: str
    """`encoder`, `llm`, or `both` in a colocated layout."""
    replica: int
    """Replica of that component, from 0; of the LLM in a colocated layout."""
    stages: tuple[int, ...]
    """Stages that this rank holds, in the order of a forward. They are counted over the encoder first, then
    the LLM. A rank has several of the LLM where they are interleaved: its chunks."""
    device: torch.device
    control: dist.ProcessGroup
    """All ranks, over gloo: small messages of the CPU, such as schedules and statements."""
    downward: dist.ProcessGroup
    """All ranks: features and hidden states (towards the loss), where the receiver has the higher number."""
    upward: dist.ProcessGroup
    """All ranks: gradients (towards the encoder), where the receiver has the lower number."""
    crossing: tuple[dist.ProcessGroup, dist.ProcessGroup]
    """The same two where the receiver's number is the lower one (features) or the higher one (gradients), as
    between colocated ranks, which encode for each other."""
    deadline: Deadline
    """A rank that waits longer than this for another gives up."""
    tensor: int = 0
    """Position in the tensor group, from 0: the ranks that share the layers of this one's stages."""
    tensor_group: dist.ProcessGroup | None = None
    """The ranks of the tensor group; none where this rank has its layers whole."""
    expert_group: dist.ProcessGroup | None = None
    """The ranks among which experts are dealt out; none where this rank has all of them."""

    @property
    def expert_rank(self) -> ExpertRank:
        """Which of the experts this rank has."""
        group = self.expert_group
        return ALL_EXPERTS if group is None else ExpertRank(group.size(), group.rank())

    @property
    def encoder_replica(self) -> int:
        """Replica of the encoder of which this rank holds layers.

        It is not `replica` where the ranks of a colocated tensor group hold whole encoders, a replica each.
        """
        replica = self.plan.encoder_replica(self.rank)
        assert replica is not None, "only ranks that hold some of the encoder ask for it"
        return replica

    def tensor_of(self, stage: int) -> int:
        """Position among the ranks that share the layers of `stage`; 0 where this rank has them whole."""
        return 0 if self._is_whole(stage) else self.tensor

    def group_of(self, stage: int) -> dist.ProcessGroup | None:
        """The ranks that share the layers of `stage`, one of this rank's; none where it has them whole."""
        return None if self._is_whole(stage) else self.tensor_group

    def tensor_rank(self, stage: int) -> TensorRank:
        """Which part of the layers of `stage` this rank has."""
        group = self.group_of(stage)
        return WHOLE if group is None else TensorRank(group.size(), self.tensor)

    def _is_whole(self, stage: int) -> bool:
        return self.is_encoder_stage(stage) and self.plan.encoders_per_group > 1

    @property
    def coordinates(self) -> str:
        """The rank in words, counted from 0: `encoder dp 1/2`, `llm pp 0/2 dp 0/1`, `colocated dp 0/4`."""
        plan, group = self.plan, self.tensor_group
        tensor = "" if group is None else f"tp {self.tensor}/{group.size()} "
        if self.component == "encoder":
            stage = f"pp {self.stages[0]}/{plan.encoder_stages} " if plan.encoder_stages > 1 else ""
            return f"encoder {tensor}{stage}dp {self.replica}/{plan.encoder_replicas}"
        replica = f"dp {self.replica}/{plan.llm_replicas}"
        if self.component == "both":
            dealt = self.expert_rank
            experts = "" if dealt.degree == 1 else f"ep {dealt.rank}/{dealt.degree} "
            return f"colocated {tensor}{experts}{replica}"
        return f"llm {tensor}pp {self.stages[0] - plan.encoder_stages}/{plan.llm_stages} {replica}"

    @property
    def timeout(self) -> timedelta:
        """The limit that holds now, and that new groups get."""
        return self.deadline.now

    def way(self, is_gradient: bool, source: int, target: int) -> dist.ProcessGroup:
        """The group of a message: between two ranks, a group carries one kind of message in one direction.

        On NCCL two ranks run the sends and receives of one group one after the other. If a receive was opened
        ahead, a send of the same group that the other rank waits for would stay behind it.

        Args:
            is_gradient: Whether it is a gradient.
            source: The rank that sends it.
            target: The rank that receives it.

        Returns:
            The group. On gloo, whose messages have tags, it is the same one for all messages.
        """
        usual = self.upward if is_gradient else self.downward
        return usual if (source > target) == is_gradient else self.crossing[is_gradient]

    @property
    def is_leader(self) -> bool:
        """Whether this rank computes schedules and writes the files."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.plan.num_stages - 1 in self.stages

    @property
    def holds_encoder(self) -> bool:
        """Whether this rank encodes media, or runs some of the layers that do."""
        return self.stages[0] < self.plan.encoder_stages

    def is_encoder_stage(self, stage: int) -> bool:
        """Whether `stage` of the whole step is one of the encoder's."""
        return stage < self.plan.encoder_stages


def role_of(plan: Plan, rank: int) -> tuple[str, int]:
    """What a rank holds, in words, and its replica: `encoder`, `encoder stage 1`, `llm stage 2`.

    Stages are counted over encoder and LLM. An encoder of one stage has no number. A rank with two chunks is
    `llm stages 1, 3`.

    Args:
        plan: The layout.
        rank: Any of its ranks.

    Returns:
        (role, replica).
    """
    component, replica, stage = plan.coordinates(rank)
    if component == "both":
        return "encoder and llm", replica
    if component == "encoder" and plan.encoder_stages == 1:
        return component, replica
    stages = plan.stages(rank)
    if len(stages) > 1:
        return f"{component} stages {', '.join(map(str, stages))}", replica
    return f"{component} stage {stage}", replica


def _check_num_ranks(num_ranks: int, plan: Plan) -> None:
    """Refuses a number of processes that is not the plan's; a negative one is not known yet."""
    if 0 <= num_ranks != plan.num_ranks:
        message = f"{num_ranks} processes were started, the plan needs {plan.num_ranks}"
        raise RankError(message)


def join(
    plan: Plan,
    device: torch.device,
    timeout_s: float,
    *,
    first_timeout_s: float | None = None,
    init_method: str = "env://",
    rank: int = -1,
    num_ranks: int = -1,
) -> Mesh:
    """This rank's mesh. Every rank must call it; blocks until all have.

    Args:
        plan: The layout.
        device: Of this rank; its type chooses NCCL or gloo for tensors.
        timeout_s: A rank that waits longer than this for another gives up with an error.
        first_timeout_s: The same until the first step has ended; none: `timeout_s` from the beginning.
        init_method: How ranks find each other; the default reads torchrun's environment.
        rank: Of this process, where the environment does not say it.
        num_ranks: Of all processes, where the environment does not say it.

    Returns:
        This rank's coordinates.

    Raises:
        RankError: The number of processes is not that of the plan, or two ranks cannot talk.
    """
    # Told before the ranks meet: where one ends, others that still connect would wait or lose the store.
    is_told = num_ranks < 0 and init_method == "env://" and "WORLD_SIZE" in os.environ
    _check_num_ranks(int(os.environ["WORLD_SIZE"]) if is_told else num_ranks, plan)
    deadline = Deadline(timeout_s if first_timeout_s is None else first_timeout_s, timeout_s)
    timeout = deadline.now
    backend = "nccl" if device.type == "cuda" else "gloo"
    # `device_id` is left out on purpose. With it, NCCL would run all messages of a group one after the other,
    # even those of different peers: a receive opened ahead would hold up a send that another rank waits for.
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=num_ranks, timeout=timeout
    )
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    _check_num_ranks(num_ranks, plan)
    world = dist.group.WORLD
    assert world is not None
    control, ways = world, [world] * 4
    if backend == "nccl":
        made = [dist.new_group(backend=kind, timeout=timeout) for kind in ("gloo", *[message_backend()] * 4)]
        control, *ways = [group for group in made if isinstance(group, dist.ProcessGroup)]
    downward, upward, *crossing = ways
    component, replica, _ = plan.coordinates(rank)
    stages = tuple(plan.stages(rank))
    shared = _shared_by(plan, plan.group, rank, deadline.now)
    dealt = _shared_by(plan, plan.expert_group, rank, deadline.now)
    mesh = Mesh(
        plan,
        rank,
        num_ranks,
        component,
        replica,
        stages,
        device,
        control,
        downward,
        upward,
        (crossing[0], crossing[1]),
        deadline,
        plan.tensor(rank),
        shared,
        dealt,
    )
    if backend == "nccl":
        connect(mesh)
    return mesh


def message_backend() -> str:
    """The backend of groups that carry messages between GPUs.

    From torch 2.15 on, `nccl` has one queue for each group: an open receive holds up the sends to all other
    ranks. `nccl-lazy` has one queue for each pair of ranks, as `nccl` had before.
    """
    known = {entry.name for entry in entry_points(group="torch.distributed.backends")}
    return "nccl-lazy" if "nccl-lazy" in known else "nccl"


def _shared_by(
    plan: Plan, number: Callable[[int], int], rank: int, timeout: timedelta
) -> dist.ProcessGroup | None:
    """The group of the ranks with this one's `number`. Every rank must call it; blocks until all have.

    Args:
        plan: The layout.
        number: Of the group of each rank.
        rank: This one.
        timeout: Of each collective.

    Returns:
        Their group; none where this rank is alone.
    """
    members: dict[int, list[int]] = {}
    for other in range(plan.num_ranks):
        members.setdefault(number(other), []).append(other)
    return own_group([ranks for _, ranks in sorted(members.items()) if len(ranks) > 1], rank, timeout)


def neighbours(plan: Plan) -> list[tuple[int, int]]:
    """Ranks that may send each other messages, of two consecutive stages; no rank sends to itself.

    Args:
        plan: The layout.

    Returns:
        (rank above, rank below), towards the loss; ascending.
    """
    encoders, replicas = range(plan.encoder_replicas), range(plan.llm_replicas)
    first_llm = plan.encoder_stages
    pairs = {
        (plan.rank(e, first_llm - 1, pair.encoder), plan.rank(r, first_llm, pair.llm))
        for e in encoders
        for pair in tensor_pairs(plan, e)
        for r in replicas
    }
    for of_component, stages, tensors in (
        (encoders, range(first_llm - 1), range(plan.encoder_tensor)),
        (replicas, range(first_llm, plan.num_stages - 1), range(plan.llm_tensor)),
    ):
        pairs |= {
            (plan.rank(r, s, t), plan.rank(r, s + 1, t))
            for r in of_component
            for s in stages
            for t in tensors
        }
    return sorted((above, below) for above, below in pairs if above != below)


def connect(mesh: Mesh) -> None:
    """Sends one number each way between all neighbours. Every rank must call it; blocks until all have.

    NCCL connects two ranks at their first message, and the rank that comes first blocks until the other comes
    too. In the first step ranks that have several neighbours could then wait in a circle, since receives are
    opened ahead. Here all ranks take the pairs in the same order. So both ranks of the first pair that is
    left always come to it.

    Args:
        mesh: This rank's coordinates.

    Raises:
        RankError: A neighbour has gone, or cannot be reached.
    """
    number = torch.zeros(1, device=mesh.device)
    # NCCL also takes its memory then. The default group would talk only after the last action of the first
    # step, when the allocator may have all that is left.
    with talking("connect all ranks"):
        connect_group(dist.group.WORLD, mesh.device)
        connect_group(mesh.tensor_group, mesh.device)
        connect_group(mesh.expert_group, mesh.device)
    for above, below in neighbours(mesh.plan):
        ways = ((above, below, False), (below, above, True))
        for source, target, is_gradient in ways if mesh.rank in (above, below) else ():
            group = mesh.way(is_gradient, source, target)
            with talking(f"connect ranks {above} and {below}"):
                if mesh.rank == source:
                    dist.send(number, target, group=group)
                else:
                    dist.recv(number, source, group=group)
                if mesh.device.type == "cuda":
                    torch.cuda.synchronize(mesh.device)
