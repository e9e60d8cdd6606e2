"""What a training step really takes on a rank, beside what was predicted for it.

    peak = parameters, gradients, optimizer states + the most that the step allocates beyond them

The bytes are counted in one step that the user names, with `ByteCounter`: exactly, on a GPU and on a CPU. On
a CPU counting slows the step down. There the inputs are copied at their forward, as they would be to a GPU,
so that they count too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflop.models.byte_counter import ByteCounter
from dflop.parallel.shard import local
from dflop.runtime.mesh import role_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from types import TracebackType

    from torch import nn
    from typing_extensions import Self

    from dflop._native import Plan, Schedule, StepScheduler

OPTIMIZER = "optimizer"
"""Name of the phase after the last action: reduction, clipping and update."""


@dataclass(frozen=True)
class StepPeak:
    """The measured peak of one rank."""

    tensor_bytes: int
    """The most bytes that tensors took at any moment of the step, `held_bytes` included."""
    held_bytes: int
    """Bytes of parameters, buffers, gradients and optimizer states, which the rank always holds."""
    moment: str
    """When the most was taken: an action, as in `1F3`, or `optimizer`."""
    reserved_bytes: int
    """The most bytes that PyTorch's allocator had reserved; 0 on a CPU."""
    device_bytes: int
    """Bytes of the device in use after the step, by this and any other process; 0 on a CPU."""


def tensor_bytes(tensors: Iterable[object]) -> int:
    """Bytes of the tensors among `tensors`; a storage counts once, however many views of it there are.

    Of a sharded tensor, this rank's shard counts.
    """
    storages = [local(t).untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class PeakMeter:
    """Measures one step, within a `with` block around all that it does."""

    def __init__(
        self,
        device: torch.device,
        pieces: Collection[nn.Module],
        held: Iterable[nn.Parameter],
        states: Iterable[torch.Tensor],
    ) -> None:
        """Nothing measured yet.

        Args:
            device: Of this rank.
            pieces: Of this rank, as they are when a step begins.
            held: Their parameters between steps, with their gradients; shards where they are cut.
            states: What the optimizer holds besides: masters and states.
        """
        self._device = device
        self._counter = ByteCounter(device)
        parameters = [*held, *(p for piece in pieces for p in piece.parameters())]
        buffers = [b for piece in pieces for b in piece.buffers()]
        on_device = [t for t in states if t.device.type == device.type]
        self._held_bytes = tensor_bytes([*parameters, *(p.grad for p in parameters), *buffers, *on_device])
        self._start_bytes = self._held_bytes

    def __enter__(self) -> Self:
        """Starts."""
        if self._device.type == "cuda":
            self._start_bytes = torch.cuda.memory_allocated(self._device)
        self._counter.__enter__()
        return self

    def phase(self, name: str) -> None:
        """A phase begins: an action, or `optimizer` after the last action."""
        self._counter.phase(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends."""
        self._counter.__exit__(kind, error, traceback)

    def peak(self) -> StepPeak:
        """What was measured; to be called after the block."""
        fullest = max(self._counter.phases, key=lambda phase: phase.peak_bytes)
        reserved_bytes = device_bytes = 0
        if self._device.type == "cuda":
            reserved_bytes = torch.cuda.max_memory_reserved(self._device)
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
            device_bytes = total_bytes - free_bytes
        return StepPeak(
            tensor_bytes=self._start_bytes + fullest.peak_bytes,
            held_bytes=self._held_bytes,
            moment=fullest.name,
            reserved_bytes=reserved_bytes,
            device_bytes=device_bytes,
        )


def compare(
    plan: Plan, scheduler: StepScheduler, schedule: Schedule, peaks: Sequence[StepPeak]
) -> list[dict[str, Any]]:
    """Predicted and measured peak of each rank, for `memory.jsonl`.

    Args:
        plan: The layout.
        scheduler: Predicts.
        schedule: Of the measured step.
        peaks: By rank.

    Returns:
        One record a rank; `predicted_tensor_bytes` is to be held against `tensor_bytes` of `measured`.
    """
    records: list[dict[str, Any]] = []
    for rank, (predicted, measured) in enumerate(zip(scheduler.memory(schedule), peaks, strict=True)):
        parts, predicted_tensor_bytes, predicted_bytes, moment = predicted
        component, replica, stage = plan.coordinates(rank)
        records.append(
            {
                "rank": rank,
                "component": component,
                "replica": replica,
                "stage": stage,
                "predicted_bytes": predicted_bytes,
                "predicted_tensor_bytes": predicted_tensor_bytes,
                "predicted_parts": dict(parts),
                "predicted_moment": moment,
                "measured": asdict(measured),
            }
        )
    return records


def summary(plan: Plan, records: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each role: its rank with the highest measured peak.

    Args:
        plan: The layout.
        records: As `compare` gave them.

    Returns:
        The lines, in the order of the roles' first ranks.
    """
    fullest: dict[str, dict[str, Any]] = {}
    for record in records:
        role, _ = role_of(plan, record["rank"])
        if role not in fullest or _measured(record) > _measured(fullest[role]):
            fullest[role] = record
    lines: list[str] = []
    for role, record in fullest.items():
        predicted, measured = record["predicted_tensor_bytes"], _measured(record)
        lines.append(
            f"memory, {role}: predicted {_size(predicted)}, measured {_size(measured)} "
            f"({predicted / max(1, measured):.3f}x)"
        )
    return lines


def _measured(record: dict[str, Any]) -> int:
    return record["measured"]["tensor_bytes"]


def _size(num_bytes: int) -> str:
    """As the command line writes bytes of memory."""
    if num_bytes < 1 << 20:
        return f"{num_bytes:,} bytes"
    return f"{num_bytes / (1 << 20):.1f} MiB" if num_bytes < 1 << 30 else f"{num_bytes / (1 << 30):.2f} GiB"
