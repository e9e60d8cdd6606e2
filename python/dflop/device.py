"""The device of this process and the GPUs of this machine, for measuring and training alike."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dflop.models.errors import hinted

if TYPE_CHECKING:
    import torch


def take_device(kind: str) -> torch.device:
    """This process's device, made the current one: on a machine with GPUs that of its local rank.

    Args:
        kind: `cpu` or `cuda`.

    Returns:
        The device.

    Raises:
        Error: There are fewer GPUs than ranks on this machine.
    """
    import torch

    if kind == "cpu":
        # Two threads on a core each serve nobody: a rank is one core here, unless the user says otherwise.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return torch.device("cpu")
    # Both are read when CUDA starts. Messages of each neighbour have a stream. With the default of 8 queues
    # to the device, compute may stand in one behind a receive that waits for what this compute gives. A
    # kernel loaded at its first use may wait for all that runs, such as an open receive: all are loaded now.
    # Measuring does as training does: loaded kernels take memory, which the profile is to hold.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    _grow_segments()
    index, num = int(os.environ.get("LOCAL_RANK", "0")), num_gpus()
    if index >= num:
        message = f"local rank {index} has no GPU, {_has(num)}: a rank needs one of its own"
        raise _no_gpu(message, "look at `nvidia-smi`, or start fewer ranks here and plan for them")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _grow_segments() -> None:
    """Lets PyTorch's allocator take segments that grow, unless the user has set it otherwise.

    No two microbatches have the same shapes: of segments of fixed size, some of each would stay unused. The
    command line sets it for what it starts itself; ranks that the user's own torchrun starts come here.
    """
    import torch

    if any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        return
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # noqa: SLF001
    if settings is not None and not torch.cuda.is_initialized():
        settings("expandable_segments:True")


def num_gpus() -> int:
    """GPUs of this machine that PyTorch finds, and `CUDA_VISIBLE_DEVICES` shows.

    Returns:
        How many; 0 without a driver.
    """
    import torch

    return torch.cuda.device_count()


def check_gpus(num_ranks: int) -> None:
    """Nothing if each rank of this machine can have a GPU of its own.

    Args:
        num_ranks: Ranks that this machine is to run.

    Raises:
        Error: There are fewer GPUs; the message has both numbers.
    """
    num = num_gpus()
    if num_ranks <= num:
        return
    hint = (
        f"set `cluster.num_ranks` to {num} and plan again, or use more nodes (`torchrun`)"
        if num > 1
        else "look at `nvidia-smi`, or set `cluster.device` to cpu, then measure the model and plan again"
    )
    message = f"`cluster.device` is cuda, {num_ranks} ranks need a GPU each: {_has(num)}"
    raise _no_gpu(message, hint)


def _has(num: int) -> str:
    return f"this machine has {num}" if num else "PyTorch finds none on this machine"


def _no_gpu(message: str, hint: str) -> Exception:
    from dflop._native import Error

    return hinted(Error(message), hint)
