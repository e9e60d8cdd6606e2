"""What is written of a step, from the spans of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop._native import Dataset, StepScheduler
    from dflop.runtime.spans import Span
    from dflop.runtime.turns import Turn


def step_metrics(
    scheduler: StepScheduler,
    dataset: Dataset,
    turn: Turn,
    spans: Sequence[Span],
    step_ns: int,
    num_ranks: int,
    data_wait_ns: int = 0,
) -> dict[str, Any]:
    """A line of `metrics.jsonl`, but for what only the caller knows: epoch, loss and norm.

    To be asked of the leader. The scheduler learns from the step too: it corrects later predictions.

    Args:
        scheduler: That of the run.
        dataset: Of the run.
        turn: The step.
        spans: Of all ranks, in ns since the start of the step.
        step_ns: From the start of the step to the end of its last rank.
        num_ranks: In all.
        data_wait_ns: What ranks waited for samples before the step.

    Returns:
        The line.
    """
    schedule = turn.schedule
    ramp, imbalance, transfer, late = scheduler.idle_by_cause(schedule, spans, step_ns)
    predicted_ns = schedule.predicted_makespan_ns or scheduler.predict_makespan_ns(schedule)
    # Before this step is learned from: what the steps before it say of it.
    corrected_ns = scheduler.predict_corrected_ns(schedule)
    scheduler.observe(schedule, spans, step_ns)
    num_messages, features, features_across, num_cut = scheduler.traffic(schedule)
    return {
        "step": turn.step,
        "arm": turn.arm,
        "pair": turn.pair,
        "loss": 0.0,
        "grad_norm": 0.0,
        "step_ns": step_ns,
        "predicted_ns": predicted_ns,
        "corrected_ns": corrected_ns,
        "data_wait_ns": data_wait_ns,
        "schedule_wait_ns": turn.schedule_wait_ns,
        "tokens": sum(dataset.shape(s)[1] for s in turn.samples),
        "samples": len(turn.samples),
        "idle_ns": {
            "ramp": ramp,
            "imbalance": imbalance,
            "transfer": transfer,
            "data_wait": late + num_ranks * data_wait_ns,
        },
        "bubble_ratio": (ramp + imbalance + transfer + late) / (num_ranks * step_ns),
        "boundary": {
            "messages": num_messages,
            "feature_tokens": features,
            "feature_tokens_across_nodes": features_across,
            "cut_samples": num_cut,
        },
        "giants": schedule.giants,
        "deferred": turn.deferred,
        "was_stopped": schedule.was_stopped,
    }
