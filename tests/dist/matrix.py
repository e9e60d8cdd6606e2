"""Every layout of at most eight ranks."""

from __future__ import annotations

import itertools

MOST_RANKS = 8
VALUES = {
    "encoder_dp": (1, 2, 3, 4),
    "encoder_pp": (1, 2, 3),
    "encoder_tp": (1, 2, 4),
    "llm_dp": (1, 2, 3, 4),
    "llm_pp": (1, 2, 3),
    "llm_tp": (1, 2, 4),
    "llm_interleave": (1, 2),
    "zero": (0, 1, 2),
    "rank_order": ("tp-pp-dp", "tp-dp-pp"),
}


def num_ranks(layout):
    return sum(layout[f"{c}_dp"] * layout[f"{c}_pp"] * layout[f"{c}_tp"] for c in ("encoder", "llm"))


def has_rank_orders(layout):
    """Whether some component has several stages and several replicas."""
    return any(layout[f"{c}_dp"] > 1 and layout[f"{c}_pp"] > 1 for c in ("encoder", "llm"))


def all_layouts():
    """Every disaggregated one that there is: no chunks without stages, nothing cut among replicas where there is one of each."""
    layouts = (dict(zip(VALUES, values, strict=True)) for values in itertools.product(*VALUES.values()))
    return [
        layout
        for layout in layouts
        if num_ranks(layout) <= MOST_RANKS
        and (layout["llm_interleave"] == 1 or layout["llm_pp"] > 1)
        and (layout["zero"] == 0 or max(layout["encoder_dp"], layout["llm_dp"]) > 1)
        and (layout["rank_order"] == "tp-pp-dp" or has_rank_orders(layout))
    ]


def colocated_layouts():
    """Every colocated one that there is, with hybrid shards where they are not all replicas."""
    layouts = (
        {"dp": dp, "tp": tp, "zero": zero, "shard_ranks": ranks}
        for dp, tp, zero, ranks in itertools.product((1, 2, 3, 4), (1, 2, 4), range(4), (None, 2))
    )
    return [
        layout
        for layout in layouts
        if layout["dp"] * layout["tp"] <= MOST_RANKS
        and (layout["shard_ranks"] is None or (layout["zero"] and layout["dp"] == 4))
    ]
