"""PyTorch's flight recorder: the last collectives of each rank, on disk when a rank gives up waiting.

    OUT/flight-recorder/rank-3.json     what rank 3 had begun and ended, in order

To find where ranks hang, look for the first entry that is not the same in all files. With NCCL, its watchdog
also writes a file (`rank-3.nccl` and a number), which `torch.distributed.flight_recorder` reads.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from torch._C import _distributed_c10d as c10d

if TYPE_CHECKING:
    from pathlib import Path

_NUM_ENTRIES = "2000"
"""Collectives that a rank remembers; a step has some tens."""


def record_flight(out: Path, device_type: str) -> None:
    """Turns the recorder on, before process groups are made. Variables that the user has set stay.

    Args:
        out: Directory of the run.
        device_type: `cuda` or `cpu`.
    """
    rank = os.environ.get("RANK", "0")
    for name, value in {
        "TORCH_FR_BUFFER_SIZE": _NUM_ENTRIES,
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(out / "flight-recorder" / f"rank-{rank}.nccl"),
    }.items():
        os.environ.setdefault(name, value)
    # NCCL's watchdog does not make the folder that it writes to.
    if device_type == "cuda":
        with contextlib.suppress(OSError):
            (out / "flight-recorder").mkdir(parents=True, exist_ok=True)


def dump_flight(out: Path, rank: int) -> None:
    """Writes what this rank has recorded. Where the disk has no room, nothing is written, without an error.

    Args:
        out: Directory of the run.
        rank: Of this process.
    """
    with contextlib.suppress(OSError):
        folder = out / "flight-recorder"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{rank}.json").write_bytes(c10d._dump_fr_trace_json())  # noqa: SLF001
