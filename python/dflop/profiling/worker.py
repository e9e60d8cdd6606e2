"""The process that measures, or one rank of it: `python -m dflop.profiling.worker REQUEST.json`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from dflop._native import Error
from dflop.child import end_with_parent
from dflop.profiling.adaptive import Sample, gaps_of, largest_error


def main() -> int:
    """Measures what the request names and writes the model profile.

    Returns:
        The exit status: 0 done, 2 the model cannot be measured, 130 interrupted.
    """
    end_with_parent()
    began_s = time.monotonic()
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if request.get("network_only"):
        return _measure_network(request)
    # Python's own handler would raise inside the import of torch, which may swallow the exception; measuring
    # would then begin all the same.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dflop.profiling.artifact import write_artifact
    from dflop.profiling.model import profile_model
    from dflop.profiling.progress import progress_bar
    from dflop.profiling.request import DEFAULT_BUDGET_S
    from dflop.profiling.team import LeaderStoppedError

    signal.signal(signal.SIGINT, handler)
    try:
        if not _is_first():
            profile_model(request)
            return 0
        with progress_bar("measuring") as progress:
            profile = profile_model(request, progress)
        write_artifact(request["out"], profile)
    except KeyboardInterrupt:
        return 130
    except LeaderStoppedError:
        # Rank 0 or the failed rank has said why.
        return 2
    except (Error, OSError, ValueError) as error:
        return _fail(error)
    _say(_summary(profile))
    budget_s = float(request.get("budget_s") or DEFAULT_BUDGET_S)
    print(_took(time.monotonic() - began_s, budget_s), file=sys.stderr)
    print(f"wrote {request['out']}", file=sys.stderr)
    return 0


def _took(took_s: float, budget_s: float) -> str:
    """What the command took, beside what the budget bounds."""
    return (
        f"took {took_s:,.0f} s in all; the budget of {budget_s:,.0f} s is for the runs that time layers, the "
        "rest is PyTorch's start, building modules, first runs, links and the optimizer"
    )


def _is_first() -> bool:
    """Whether this is rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def _measure_network(request: dict[str, Any]) -> int:
    """Replaces the links of an existing profile. Gives the exit status, as `main`."""
    from dflop.profiling.network import summary, update_network

    try:
        network = update_network(request)
    except KeyboardInterrupt:
        return 130
    except (Error, OSError, ValueError) as error:
        return _fail(error)
    if _is_first():
        _say(summary(network))
        print(f"wrote {request['out']}; plans made from it before are to be made anew", file=sys.stderr)
    return 0


def _say(lines: list[str]) -> None:
    """Prints lines. It is no error if the reader has gone, as in `dflop profile model | head -1`."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        # Python flushes stdout again when it ends; that must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    for note in getattr(error, "__notes__", []):
        print(f"\nhint: {note}", file=sys.stderr)
    return 2


def _summary(profile: dict[str, Any]) -> list[str]:
    """Lines for people: for each module, one layer at the middle of the measured sizes."""
    from dflop.profiling.network import summary

    device = profile["device"]
    lines = [
        f"{profile['family']} on {device['name']} ({device['dtype']}, torch {device['torch']})",
        *_table(profile["modules"]),
    ]
    for variant in profile["variants"]:
        degree = variant["tensor_parallel_degree"]
        how = "measured with the sums of its ranks" if variant["has_collectives"] else "one rank's part alone"
        lines.append(
            f"tensor parallel degree {degree}, LoRA rank {variant['lora_rank']}"
            + (f": {how}" if degree > 1 else "")
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


def _leave() -> NoReturn:
    """Ends this process with the exit status of `main`.

    A rank ends at once: its process group may wait for ranks that are gone.
    """
    try:
        status = main()
    except KeyboardInterrupt:
        # Ctrl-C came while torch was imported.
        status = 130
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    _leave()
