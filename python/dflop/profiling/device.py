"""The device that is measured, by facts that must be equal for two profiles to be comparable."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from dflop.profiling.request import Request


def device_facts(request: Request, device: torch.device) -> dict[str, Any]:
    """`Device` of the profile.

    Args:
        request: what was asked for.
        device: to measure on.

    Returns:
        Its fields.
    """
    is_cpu = device.type == "cpu"
    return {
        "kind": device.type,
        "name": _device_name(device),
        "num_threads": 1 if is_cpu else 0,
        "num_neighbours": request.num_neighbours if is_cpu else 0,
        "dtype": request.dtype,
        **({"compiles_layers": True} if request.compiles_layers else {}),
        "torch": torch.__version__,
        "driver": "" if is_cpu else _driver_version(),
        # Ranks on CPUs share the memory of the machine, so there is no number for one device.
        "memory_bytes": 0 if is_cpu else torch.cuda.get_device_properties(device).total_memory,
    }


def _driver_version() -> str:
    """Version of the GPU's driver from `nvidia-smi`; without it, the newest CUDA that the driver supports."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return answer.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return f"CUDA {cast('Any', torch._C)._cuda_getDriverVersion()}"


def context_bytes(device: torch.device) -> int:
    """Bytes of the device that are not tensors of this process: kernels, libraries, and other processes.

    Args:
        device: to measure on; kernels must have run before, since they are loaded at their first use.

    Returns:
        0 on a CPU.
    """
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(total - free - torch.cuda.memory_reserved(device), 0)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
