"""The process that measures: `python -m dflop.profiling.worker REQUEST.json`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from dflop._native import Error
from dflop.profiling.adaptive import Sample, gaps_of, largest_error


def main() -> int:
    """Measures what the request names and writes the model profile.

    Returns:
        The exit status: 0 done, 2 the model cannot be measured, 130 interrupted.
    """
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    from dflop.profiling.artifact import write_artifact
    from dflop.profiling.model import profile_model
    from dflop.profiling.progress import progress_bar

    if request.get("network_only"):
        return _measure_network(request)
    try:
        with progress_bar("measuring") as progress:
            profile = profile_model(request, progress)
        write_artifact(request["out"], profile)
    except KeyboardInterrupt:
        return 130
    except (Error, OSError, ValueError) as error:
        return _fail(error)
    for line in _summary(profile):
        print(line)
    print(f"wrote {request['out']}", file=sys.stderr)
    return 0


def _measure_network(request: dict[str, Any]) -> int:
    """Replaces the links of the profile that is there; the exit status as of `main`."""
    from dflop.profiling.network import summary, update_network

    try:
        network = update_network(request)
    except KeyboardInterrupt:
        return 130
    except (Error, OSError, ValueError) as error:
        return _fail(error)
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(summary(network)))
        print(f"wrote {request['out']}; plans made from it before are to be made anew", file=sys.stderr)
    return 0


def _fail(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    for note in getattr(error, "__notes__", []):
        print(f"\nhint: {note}", file=sys.stderr)
    return 2


def _summary(profile: dict[str, Any]) -> list[str]:
    """What was measured, for people: a line a module, of one layer at the middle of the measured sizes."""
    from dflop.profiling.network import summary

    device = profile["device"]
    lines = [
        f"{profile['family']} on {device['name']} ({device['dtype']}, torch {device['torch']})",
        *_table(profile["modules"]),
    ]
    for variant in profile["variants"]:
        lines.append(
            f"tensor parallel degree {variant['tensor_parallel_degree']}, LoRA rank {variant['lora_rank']}: "
            "one rank's part alone, without its collectives"
        )
        lines += _table(variant["modules"])
    lines += summary(profile["network"])
    return lines


_COLUMNS = ("module", "count", "size", "F ms", "B ms", "I ms", "W ms", "spread", "points", "error")


def _table(modules: dict[str, Any]) -> list[str]:
    rows = [_COLUMNS]
    for name, module in modules.items():
        rows += [
            _row(label, module["count"], module[part]["points"])
            for part, label in (("linear", name), ("attention", "  attention"))
            if module[part]["points"]
        ]
    return [f"{row[0]:<20}" + "".join(f"{cell:>9}" for cell in row[1:]) for row in rows]


def _row(label: str, count: int, points: list[dict[str, int]]) -> tuple[str, ...]:
    middle = points[len(points) // 2]
    names = ("forward_ns", "backward_ns", "input_ns", "weight_ns")
    times = [f"{middle[name] / 1e6:.3f}" for name in names]
    total = middle["forward_ns"] + middle["backward_ns"]
    samples = {
        point["size"]: Sample(
            point["forward_ns"] + point["backward_ns"], point["spread_ns"], point["repeats"]
        )
        for point in points
    }
    error = largest_error({label: gaps_of(samples)}) if len(points) > 2 else 0.0
    return (
        label,
        str(count),
        f"{middle['size']:,}",
        *times,
        f"{100 * middle['spread_ns'] / max(total, 1):.0f} %",
        str(len(points)),
        f"{100 * error:.1f} %" if len(points) > 2 else "-",
    )


if __name__ == "__main__":
    sys.exit(main())
