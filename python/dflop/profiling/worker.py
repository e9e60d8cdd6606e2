"""The process that measures: `python -m dflop.profiling.worker REQUEST.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dflop._native import Error


def main() -> int:
    """Measures what the request names and writes the model profile.

    Returns:
        The exit status: 0 done, 2 the model cannot be measured, 130 interrupted.
    """
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    from dflop.profiling.artifact import write_artifact
    from dflop.profiling.model import profile_model
    from dflop.profiling.progress import progress_bar

    try:
        with progress_bar("measuring") as progress:
            profile = profile_model(request, progress)
        write_artifact(request["out"], profile)
    except KeyboardInterrupt:
        return 130
    except (Error, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", []):
            print(f"\nhint: {note}", file=sys.stderr)
        return 2
    for line in _summary(profile):
        print(line)
    print(f"wrote {request['out']}", file=sys.stderr)
    return 0


def _summary(profile: dict[str, Any]) -> list[str]:
    """What was measured, for people: a line a module."""
    device = profile["device"]
    lines = [
        f"{profile['family']} on {device['name']} ({device['dtype']}, torch {device['torch']})",
        f"{'module':<16}{'parameters':>12}{'points':>8}{'largest size':>14}{'forward':>12}{'backward':>12}",
    ]
    for name, module in profile["modules"].items():
        points = module["linear"]["points"]
        last = points[-1]
        lines.append(
            f"{name:<16}{module['num_parameters']:>12,}"
            f"{len(points) + len(module['attention']['points']):>8}{last['size']:>14,}"
            f"{last['forward_ns'] / 1e6:>9.2f} ms{last['backward_ns'] / 1e6:>9.2f} ms"
        )
    network = profile["network"]
    if network["bandwidth_bytes_per_s"]:
        lines.append(
            f"links: {network['latency_ns'] / 1e3:.0f} us a message, "
            f"{network['bandwidth_bytes_per_s'] / 1e9:.2f} GB/s"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
