"""Where this rank stands, and the process groups it talks in."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from dflop.runtime.failure import RankError

if TYPE_CHECKING:
    import torch

    from dflop._native import Plan


@dataclass(frozen=True)
class Mesh:
    """One rank's place in the layout."""

    plan: Plan
    rank: int
    num_ranks: int
    component: str
    """`encoder` or `llm`."""
    replica: int
    """Replica of that component, from 0."""
    stage: int
    """Stage of the whole step: 0 is the encoder."""
    device: torch.device
    control: dist.ProcessGroup
    """All ranks, gloo: small things on the CPU."""
    downward: dist.ProcessGroup
    """All ranks: features and hidden states, towards the loss."""
    upward: dist.ProcessGroup
    """All ranks: gradients, towards the encoder. Apart from `downward` on NCCL, where a communicator runs its
    sends and receives one after the other and two neighbours would wait for each other."""

    @property
    def coordinates(self) -> str:
        """The rank in words, counted from 0, as in `encoder dp 1/2` or `llm pp 0/2 dp 0/1`."""
        if self.component == "encoder":
            return f"encoder dp {self.replica}/{self.plan.encoder_replicas}"
        return f"llm pp {self.stage - 1}/{self.plan.llm_stages} dp {self.replica}/{self.plan.llm_replicas}"

    @property
    def is_leader(self) -> bool:
        """Whether this rank computes schedules and writes the files."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stage == self.plan.llm_stages


def join(
    plan: Plan,
    device: torch.device,
    timeout_s: float,
    *,
    init_method: str = "env://",
    rank: int = -1,
    num_ranks: int = -1,
) -> Mesh:
    """This rank's mesh. Every rank must call it; blocks until all have.

    Args:
        plan: The layout.
        device: Of this rank; its type chooses NCCL or gloo for tensors.
        timeout_s: A rank that waits longer than this for another gives up with an error.
        init_method: How ranks find each other; the default reads torchrun's environment.
        rank: Of this process, where the environment does not say it.
        num_ranks: Of all processes, where the environment does not say it.

    Returns:
        This rank's place.

    Raises:
        RankError: The number of processes is not that of the plan.
    """
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=num_ranks, timeout=timeout
    )
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if num_ranks != plan.num_ranks:
        message = f"{num_ranks} processes were started, the plan needs {plan.num_ranks}"
        raise RankError(message)
    world = dist.group.WORLD
    assert world is not None
    if backend == "nccl":
        control = dist.new_group(backend="gloo", timeout=timeout)
        upward = dist.new_group(backend="nccl", timeout=timeout)
        assert isinstance(control, dist.ProcessGroup)
        assert isinstance(upward, dist.ProcessGroup)
    else:
        control = upward = world
    component, replica, stage = plan.coordinates(rank)
    return Mesh(plan, rank, num_ranks, component, replica, stage, device, control, world, upward)
