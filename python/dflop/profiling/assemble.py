"""From runs to the modules of a model profile.

    linear(T) = layer(T as n segments of s) - n * attention(s)

holds for times and for bytes. Attention has no weights, so all of its backward belongs to its inputs (I).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflop.models.recompute import FULL
from dflop.profiling.cases import ATTENTION, JOINT, LINEAR, SPLIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from dflop.profiling.curves import Curve
    from dflop.profiling.records import Records

# `linear` gets at least this part of a pack's time, even where noise makes attention as long as the pack.
_LINEAR_FLOOR_RATIO = 0.05


def assemble(curves: Sequence[Curve], records: Records) -> dict[str, Any]:
    """The `modules` of the profile (or of a variant), by name.

    Args:
        curves: all curves of these modules, attention before what it is subtracted from.
        records: their runs.

    Returns:
        `ModuleProfile` by name.
    """
    modules: dict[str, Any] = {}
    attention: dict[str, Mapping[int, Any]] = {}
    for curve in curves:
        name = curve.built.piece.name
        if curve.part == ATTENTION:
            points = {size: _attention_point(curve, size, records) for size in sorted(curve.cases)}
            attention[name] = {size: _mean_of_layers(point, curve) for size, point in points.items()}
            continue
        apart = attention.get(name, {})
        modules[name] = _module(curve, apart, records)
        if apart:
            modules[name]["attention"]["points"] = list(apart.values())
            by_name = {other.name: other for other in curves}
            limit = by_name[curve.name.removesuffix(LINEAR) + ATTENTION].out_of_memory_at
            if limit is not None:
                modules[name]["attention"]["out_of_memory_at"] = limit
    return modules


def _module(curve: Curve, attention: Mapping[int, Any], records: Records) -> dict[str, Any]:
    piece, layers = curve.built.piece, curve.built.piece.num_layers
    parameters = list(curve.built.module.parameters())
    sizes = [
        size
        for size in sorted(curve.cases)
        if all(segment in attention for segment in curve.cases[size].segments)
    ]
    linear: dict[str, Any] = {"points": [_linear_point(curve, size, attention, records) for size in sizes]}
    if curve.out_of_memory_at is not None:
        linear["out_of_memory_at"] = curve.out_of_memory_at
    module: dict[str, Any] = {"count": piece.count, "linear": linear, "attention": {"points": []}}
    if piece.segment_tokens is not None:
        module["segment_tokens"] = piece.segment_tokens
    recompute = {mode: _recompute(curve, mode, sizes, attention, records) for mode in curve.recompute}
    if any(recompute.values()):
        module["recompute"] = {mode: points for mode, points in recompute.items() if points}
    # Rounded up, where layers are of several kinds: no number of bytes is then too small.
    module["num_parameters"] = -(-sum(p.numel() for p in parameters) // layers)
    module["parameter_bytes"] = -(-sum(p.numel() * p.element_size() for p in parameters) // layers)
    experts = experts_of(curve.built.module, layers)
    if experts is not None:
        module["experts"] = experts
    return module


def experts_of(module: nn.Module, layers: int) -> dict[str, int] | None:
    """How many experts a layer has, and how many parameters they have.

    Args:
        module: some layers of the backbone, or another piece.
        layers: how many; all have as many experts, or none.

    Returns:
        `ExpertsProfile` of one of them; None where there are no experts.
    """
    held: list[Any] = [
        one for one in module.modules() if getattr(getattr(one, "gate_up_proj", None), "ndim", 0) == 3
    ]
    routers: list[Any] = [one for one in module.modules() if hasattr(one, "top_k")]
    if not held:
        return None
    # Gemma 4's router reads it from the configuration.
    per_token = routers[0].top_k if routers else held[0].config.top_k_experts
    parameters = [parameter for one in held for parameter in one.parameters()]
    return {
        "count": held[0].num_experts,
        "per_token": per_token,
        "num_parameters": sum(p.numel() for p in parameters) // layers,
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters) // layers,
    }


def _attention_point(curve: Curve, size: int, records: Records) -> dict[str, int]:
    summary, case = curve.summary(size, JOINT, records), curve.cases[size]
    assert summary is not None, "a measured size has runs"
    forward, backward = summary.phases_ns
    return {
        "size": size,
        # A time of 0 would mean work for free, so 1 ns, the unit of the clock, is the least.
        "forward_ns": max(1, round(forward)),
        "backward_ns": max(1, round(backward)),
        "input_ns": max(1, round(backward)),
        "weight_ns": 0,
        "spread_ns": max(0, round(summary.spread_ns)),
        "activation_bytes": round(records.numbers[f"{case.name} bytes"] / case.copies),
        # A run has several segments, in one call or in several: each gets an equal part.
        "workspace_bytes": round(records.numbers[f"{case.name} workspace"] / case.copies),
        "repeats": summary.repeats,
    }


def _mean_of_layers(point: dict[str, int], curve: Curve) -> dict[str, int]:
    """What a layer takes on average, where only some have attention; what is held for a while is whole."""
    share = 1.0 if curve.kind is None else curve.kind.layers_with
    if share == 1.0:
        return point
    whole = ("size", "workspace_bytes", "weight_ns", "repeats")
    return {name: value if name in whole else max(1, round(value * share)) for name, value in point.items()}


def _linear_point(curve: Curve, size: int, attention: Mapping[int, Any], records: Records) -> dict[str, Any]:
    case, summary = curve.cases[size], curve.summary(size, JOINT, records)
    assert summary is not None, "a measured size has runs"
    segments = [attention[segment] for segment in case.segments]
    forward, backward = summary.phases_ns
    spent = sum(point["backward_ns"] for point in segments)
    split = curve.summary(size, SPLIT, records)
    if split is not None:
        input_ns, weight_ns = _less(split.phases_ns[1], spent), split.phases_ns[2]
    elif curve.built.piece.wants_input_gradient:
        input_ns, weight_ns = _less(backward, spent), 0.0
    else:
        input_ns, weight_ns = 0.0, backward
    numbers = records.numbers
    kept = numbers[f"{case.name} bytes"] / case.copies
    return {
        "size": size,
        "forward_ns": max(1, round(_less(forward, sum(point["forward_ns"] for point in segments)))),
        "backward_ns": max(0, round(_less(backward, spent))),
        "input_ns": max(0, round(input_ns)),
        "weight_ns": max(0, round(weight_ns)),
        "spread_ns": max(0, round(summary.spread_ns)),
        "activation_bytes": max(0, round(kept - sum(point["activation_bytes"] for point in segments))),
        # Not divided by the number of layers: one layer works at a time.
        "workspace_bytes": numbers[f"{case.name} workspace"],
        # Nothing is subtracted for attention: it has no weights, so it queues nothing.
        "split": {
            "queued_bytes": -(-numbers[f"{case.name} queued"] // case.copies),
            "input_workspace_bytes": numbers[f"{case.name} input workspace"],
            "weight_workspace_bytes": numbers[f"{case.name} weight workspace"],
        },
        "repeats": summary.repeats,
    }


def _less(whole: float, parts: float) -> float:
    return max(whole - parts, _LINEAR_FLOOR_RATIO * whole)


def _recompute(
    curve: Curve, mode: str, sizes: Iterable[int], attention: Mapping[int, Any], records: Records
) -> list[dict[str, int]]:
    """The points of one mode of recomputation, without what belongs to attention.

    In mode `selective` attention keeps the same bytes as without recomputation; they are subtracted. In mode
    `full` it keeps nothing, but its forward runs again; the time of that is subtracted.
    """
    points = []
    for size in sizes:
        case = curve.cases[size]
        plain, again = curve.summary(size, JOINT, records), curve.summary(size, mode, records)
        if plain is None or again is None:
            continue
        segments = [attention[segment] for segment in case.segments]
        extra = again.total_ns - plain.total_ns
        kept = records.numbers[f"{case.name} {mode} bytes"] / case.copies
        if mode == FULL:
            extra -= sum(point["forward_ns"] for point in segments)
        else:
            kept = max(0.0, kept - sum(point["activation_bytes"] for point in segments))
        points.append({"size": size, "extra_ns": max(0, round(extra)), "activation_bytes": round(kept)})
    return points
