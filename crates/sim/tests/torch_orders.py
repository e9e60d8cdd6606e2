"""Records the action lists that PyTorch's own pipeline schedules run, as `torch_orders.txt` beside this file.

`python crates/sim/tests/torch_orders.py` writes the file; `crates/sim/tests/torch_orders.rs` compares our
lists with it. A stage that notes its calls stands in for the model, so that no process group is needed. What
is recorded is what the schedules run (`_step_microbatches`), not their drawing (`_get_pipeline_order`), which
in PyTorch 2.15 begins the last stage of 1F1B at microbatch 1.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
from torch.distributed.pipelining import schedules

SIZES = ((1, 1), (1, 3), (2, 1), (2, 5), (3, 4), (4, 2), (4, 4), (4, 8), (8, 3), (8, 12))


def recorded(schedule: type, stage_index: int, num_stages: int, num_microbatches: int) -> str:
    """Notes what `schedule` runs on one stage.

    Args:
        schedule: A single-stage schedule class of PyTorch.
        stage_index: The stage, from 0.
        num_stages: Stages of the pipeline.
        num_microbatches: Microbatches of the step.

    Returns:
        The actions in turn, as in `0F0 0B0`.
    """
    actions = []
    stage = mock.MagicMock(stage_index=stage_index, num_stages=num_stages)
    stage.is_last = stage_index == num_stages - 1
    stage.is_first = stage_index == 0
    stage.forward_one_chunk.side_effect = lambda j, *_, **__: actions.append(f"{stage_index}F{j}")
    stage.backward_one_chunk.side_effect = lambda j, *_, **__: actions.append(f"{stage_index}B{j}")
    with (
        mock.patch.object(schedules, "_batch_p2p", return_value=[]),
        mock.patch.object(schedules, "_sorted_batch_p2p", return_value={}),
        mock.patch.object(schedule, "_initialize_stage"),
        mock.patch.object(schedule, "_maybe_compute_loss"),
        mock.patch.object(schedule, "_maybe_get_loss"),
        mock.patch.object(schedule, "_update_losses"),
    ):
        run = schedule(stage, num_microbatches, loss_fn=lambda *_: None)
        nothing = [()] * num_microbatches
        run._step_microbatches(nothing, [{}] * num_microbatches, nothing, [])
    return " ".join(actions)


def main() -> None:
    """Writes one line a list: order, stages, microbatches, actions."""
    version = torch.__version__.split("+")[0]
    lines = [f"# Run by PyTorch {version}: order, stages, microbatches: list of a stage"]
    for name, schedule in (("gpipe", schedules.ScheduleGPipe), ("1f1b", schedules.Schedule1F1B)):
        for num_stages, m in SIZES:
            # PyTorch refuses 1F1B with fewer microbatches than stages.
            if name == "1f1b" and m < num_stages:
                continue
            lines += [
                f"{name} {num_stages} {m}: {recorded(schedule, stage, num_stages, m)}"
                for stage in range(num_stages)
            ]
    Path(__file__).with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
