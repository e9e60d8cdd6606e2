"""Records the action lists that PyTorch's own pipeline schedules run, as `torch_orders.txt` beside this file.

`python crates/sim/tests/torch_orders.py` writes the file; `crates/sim/tests/torch_orders.rs` compares our
lists with it. A stage that notes its calls stands in for the model, so that no process group is needed. What
is recorded is what the schedules run (`_step_microbatches`), not their drawing (`_get_pipeline_order`), which
in PyTorch 2.15 begins the last stage of 1F1B at microbatch 1. Of the schedules of several stages a rank, the
list that PyTorch computes for a rank is recorded: `_calculate_single_rank_operations`, before it joins
neighbouring I and W into one B. `ScheduleInterleavedZeroBubble` is recorded with one stage a rank.
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


# Ranks, stages a rank, microbatches.
INTERLEAVED = (
    (1, 2, 3),
    (2, 2, 2),
    (2, 3, 4),
    (3, 2, 6),
    (3, 2, 4),
    (4, 2, 3),
    (4, 2, 8),
    (4, 3, 10),
    (8, 2, 16),
)


def computed(schedule: type, rank: int, num_ranks: int, num_local: int, num_microbatches: int) -> str:
    """Computes what `schedule` runs on one rank.

    Args:
        schedule: A multi-stage schedule class of PyTorch.
        rank: The rank, from 0.
        num_ranks: Ranks of the pipeline.
        num_local: Stages of each rank.
        num_microbatches: Microbatches of the step; a multiple of the rounds.

    Returns:
        The actions in turn, as in `0F0 0I0 0W0`.
    """
    run = schedule.__new__(schedule)
    run.n_local_stages, run.pp_group_size, run._n_microbatches = num_local, num_ranks, num_microbatches
    run.number_of_rounds = max(1, num_microbatches // num_ranks)
    run.microbatches_per_round = num_microbatches // run.number_of_rounds
    actions = run._calculate_single_rank_operations(rank)
    return " ".join(str(action) for action in actions if action is not None)


def main() -> None:
    """Writes one line a list: order, stages (or ranks x stages a rank), microbatches, actions."""
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
    for num_stages, m in SIZES:
        # PyTorch refuses microbatches that do not fill its rounds.
        if m % max(1, m // num_stages) == 0:
            schedule = schedules.ScheduleInterleavedZeroBubble
            lines += [
                f"zero-bubble {num_stages} {m}: {computed(schedule, rank, num_stages, 1, m)}"
                for rank in range(num_stages)
            ]
    for num_ranks, num_local, m in INTERLEAVED:
        lines += [
            f"interleaved-1f1b {num_ranks}x{num_local} {m}: "
            + computed(schedules.ScheduleInterleaved1F1B, rank, num_ranks, num_local, m)
            for rank in range(num_ranks)
        ]
    Path(__file__).with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
