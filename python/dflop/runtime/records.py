"""What is written of a step, from the spans of all ranks."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dflop._native import Dataset, StepScheduler
    from dflop.runtime.adaptation import Adaptation
    from dflop.runtime.population import Population
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
    adaptation: Adaptation | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A line of `metrics.jsonl`, except for what only the caller knows, such as epoch, loss and norm.

    To be called on the leader. The scheduler also learns from the step here, to correct later predictions.

    Args:
        scheduler: The scheduler of the run.
        dataset: The dataset of the run.
        turn: The step.
        spans: Spans of all ranks, in ns since the start of the step.
        step_ns: From the start of the step to the end of its last rank.
        num_ranks: Number of all ranks.
        data_wait_ns: Time that ranks waited for samples before the step.
        adaptation: Decides whether the step is learned from; none: it is, and there are no events.

    Returns:
        The line; and events, as lines of `events.jsonl` without their step.
    """
    schedule = turn.schedule
    ramp, imbalance, transfer, late = scheduler.idle_by_cause(schedule, spans, step_ns)
    # `predicted_ns` is by the times of the model profile. A schedule that was made with corrected times has
    # another makespan in it.
    predicted_ns = 0 if turn.correction is not None else schedule.predicted_makespan_ns
    predicted_ns = predicted_ns or scheduler.predict_makespan_ns(schedule)
    began_ns = time.perf_counter_ns()
    is_monitored = adaptation is None or adaptation.is_monitored(turn.step)
    # Predicted before the step is learned from, so that only earlier steps count.
    corrected_ns = scheduler.predict_corrected_ns(schedule) if is_monitored else None
    scheduler.observe(schedule, spans, step_ns, fitted=is_monitored)
    events: list[dict[str, Any]] = []
    if adaptation is not None:
        waits = (data_wait_ns / step_ns, transfer / (num_ranks * step_ns))
        for cause, words, mend, size in scheduler.alarms(*waits):
            text = f"{words}: {mend}"
            events.append({"kind": "alarm", "cause": cause, "size": size, "words": text, "mend": mend})
            adaptation.wake()
        cost_ns = time.perf_counter_ns() - began_ns
        events += adaptation.after(turn.step, turn.correction, turn.compared_ns, step_ns, cost_ns)
    num_messages, features, features_across, num_cut = scheduler.traffic(schedule)
    line = {
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
    return line, events


def kept(
    scheduler: StepScheduler, adaptation: Adaptation | None, population: Population | None
) -> dict[str, Any]:
    """What a checkpoint keeps of what was learned from steps, so that a resumed run repeats no alarm.

    Args:
        scheduler: That of the run.
        adaptation: Decides whether schedules are corrected.
        population: Watches which samples come.

    Returns:
        Fields of the manifest.
    """
    return {
        "correction": scheduler.correction(),
        "watch": scheduler.watched(),
        "adaptation": None if adaptation is None else adaptation.state(),
        "population": None if population is None else population.state(),
    }


def restore(
    manifest: Mapping[str, Any],
    scheduler: StepScheduler,
    adaptation: Adaptation | None,
    population: Population | None,
) -> None:
    """Goes on from what `kept` gave, of the same plan and data.

    Fields that an earlier version of dflop did not write begin anew.

    Args:
        manifest: Of the checkpoint, as read from JSON.
        scheduler: The scheduler of the run.
        adaptation: Decides whether schedules are corrected.
        population: Watches which samples come.

    Raises:
        ScheduleError: The checkpoint holds something else.
    """
    _restore_correction(scheduler, manifest["correction"])
    watch = manifest.get("watch")
    if watch is not None:
        # Earlier versions of dflop kept this field as JSON text.
        scheduler.watch_from(json.loads(watch) if isinstance(watch, str) else watch)
    if adaptation is not None and manifest.get("adaptation") is not None:
        adaptation.load(manifest["adaptation"])
    if population is not None and manifest.get("population") is not None:
        population.load(manifest["population"])


def _restore_correction(scheduler: StepScheduler, kept: Any) -> None:
    """Goes on from the correction of a checkpoint; of an earlier version's as far as it can be read."""
    if len(kept) != 2 or (kept[0] and len(kept[0][0]) and kept[0][0][0] and len(kept[0][0][0][0]) != 5):
        return
    steps, components = kept
    # Earlier versions kept one number of what follows the actions, and sums by shape bin instead of packs.
    has_packs = all(isinstance(pack, list) for component in components for step in component for pack in step)
    scheduler.correct_by(
        [
            ([tuple(one) for one in sums], of_all_ns, of_components_ns[0] if of_components_ns else None)
            for sums, of_all_ns, *of_components_ns in steps
        ],
        [[_packs(step) for step in component] for component in components] if has_packs else [[], []],
    )


def _packs(step: list[Any]) -> list[tuple[float, float, list[tuple[int, int]]]]:
    """The packs of a step, as they stand in a manifest."""
    return [(excess, work, [(size, tokens) for size, tokens in parts]) for excess, work, parts in step]
