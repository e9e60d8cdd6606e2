"""What the executor costs an action: the host's time between the parts of the model, on one rank.

Usage: python benches/actions.py OUT.json [--device cuda] [--steps 50]

The tiny model of the tests runs on one rank, which holds encoder and LLM. Of each step the host's time is
taken, less that inside forward and backward of the stages, over the number of actions. On a GPU the spans'
events are part of it, and the time until the device is done is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from collect import origin

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / room) for room in ("dist", "unit")]
CONTENTS = [[[5]], [[7, 1, 4]], [[2]], [[3, 0, 6]]]


def measure(device_name: str, num_steps: int, folder: Path) -> dict[str, Any]:
    """Microseconds an action, by step: all of the host, and what is not the stages'."""
    import torch
    import toy_run

    from dflop.device import take_device

    device = take_device(device_name)
    model_dir = toy_run.warm_model_dir(folder)
    plan = toy_run.write_colocated(folder / "plan.json", 1, len(CONTENTS))
    parts = toy_run.RankParts(plan, model_dir, folder / "store", 0, 60.0, device)
    schedule = toy_run.make_schedule(CONTENTS, 1)
    inside = 0.0

    def timed(call: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal inside
            start = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                inside += time.perf_counter() - start

        return run

    executor: Any = parts.executor
    for stage in executor._stages.values():
        stage.forward, stage.backward = timed(stage.forward), timed(stage.backward)
    whole_us, own_us, num = [], [], 0
    for step in range(num_steps + 5):
        work = parts.work(schedule)
        steps = executor.prepare(work, schedule)
        ended: list[float] = []
        parts.recorder.begin()
        inside, start = 0.0, time.perf_counter()
        # The loss is read after the last action, and that waits for the device: it is not counted.
        executor._messages.finish = lambda: ended.append(time.perf_counter())  # noqa: B023
        executor.run_step(work, steps)
        if step >= 5:
            num = len(steps.actions)
            whole_us.append((ended[0] - start) / num * 1e6)
            own_us.append((ended[0] - start - inside) / num * 1e6)
    torch.distributed.destroy_process_group()
    return {
        "actions": num,
        "host_us": statistics.median(whole_us),
        "executor_us": statistics.median(own_us),
        "executor_us_p95": sorted(own_us)[int(0.95 * len(own_us))],
    }


def main() -> int:
    """Measures, writes and prints.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=50)
    asked = parser.parse_args()
    # The store of the process group lies in the folder: it must outlive the group.
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(asked.device, asked.steps, Path(folder))
    found = {"bench": "actions", **origin(), "device": asked.device, **measured}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"executor {found['executor_us']:.1f} us an action, of {found['host_us']:.0f} us of the host")
    return 0


if __name__ == "__main__":
    sys.exit(main())
