"""The process that measures: `python -m dflop.profiling.worker REQUEST.json`."""

from __future__ import annotations

import json
import os
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
    """What was measured, for people: a line a module."""
    from dflop.profiling.network import summary

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
    lines += summary(profile["network"])
    return lines


if __name__ == "__main__":
    sys.exit(main())
