"""Gathers criterion's estimates of one crate's benches into one small file.

Usage: python3 benches/collect.py NAME FOLDER OUT, where FOLDER is criterion's output of this run.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Writes OUT and prints a table.

    Returns:
        The exit status: 0 done, 1 no estimates were found.
    """
    name, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    cases = {}
    for path in sorted(folder.glob("**/new/estimates.json")):
        case = path.parent.parent.relative_to(folder).as_posix()
        median = json.loads(path.read_text())["median"]
        interval = median["confidence_interval"]
        cases[case] = {
            "median_ns": round(median["point_estimate"]),
            "low_ns": round(interval["lower_bound"]),
            "high_ns": round(interval["upper_bound"]),
        }
    if not cases:
        print(f"error: no estimates under `{folder}`", file=sys.stderr)
        return 1
    result = {"bench": name, **origin(), "cases": cases}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    for case, times in cases.items():
        print(f"{case:<50} {times['median_ns'] / 1e6:>12.4f} ms")
    print(f"wrote {out}", file=sys.stderr)
    return 0


def origin() -> dict[str, object]:
    """Date, commit and machine of a measurement: a number without them says nothing."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit.stdout.strip() or None,
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.platform()},
    }


def _cpu() -> str:
    """Name of the processor, as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
