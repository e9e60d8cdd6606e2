"""Action lists that no pipeline order has, drawn at random among all lists that can run."""

from __future__ import annotations

import random
from dataclasses import replace

from dflop.runtime.actions import ActionLists


def random_lists(plan, num_microbatches, seed, split_ratio=0.5, whole_ranks=()):
    """Lists of all ranks, as in `0F3`: some order in which one rank after the other does what it can.

    Microbatches come in any order, other ones on each rank; forwards run ahead as far as chance has it; about
    `split_ratio` of the backwards are I and W, with anything between them; none on `whole_ranks`.
    """
    draw = random.Random(seed)
    places = [(rank, stage) for rank in range(plan.num_ranks) for stage in plan.stages(rank)]
    last = plan.num_stages - 1
    at = {stage: [place for place in places if place[1] == stage] for stage in range(last + 1)}
    done = {place: set() for place in places}
    is_split = {
        place: [draw.random() < split_ratio and place[0] not in whole_ranks for _ in range(num_microbatches)]
        for place in places
    }
    lists = [[] for _ in range(plan.num_ranks)]

    def can_run(rank, stage, letter, j):
        own = done[rank, stage]
        if letter == "F":
            return stage == 0 or all(("F", j) in done[place] for place in at[stage - 1])
        if letter == "W":
            return ("B", j) in own
        is_there = stage == last or all(("B", j) in done[place] for place in at[stage + 1])
        return ("F", j) in own and is_there

    left = {(*place, letter, j) for place in places for letter in "FB" for j in range(num_microbatches)}
    left |= {
        (*place, "W", j) for place, splits in is_split.items() for j, split in enumerate(splits) if split
    }
    while left:
        rank, stage, letter, j = draw.choice(sorted(action for action in left if can_run(*action)))
        left.remove((rank, stage, letter, j))
        done[rank, stage].add((letter, j))
        name = "I" if letter == "B" and is_split[rank, stage][j] else letter
        lists[rank].append(f"{stage}{name}{j}")
    return lists


def lists_of_rounds(plan, rounds):
    """The pipeline runs empty between `rounds` of microbatches, which pass a rank chunk by chunk, and back."""
    lists = []
    for rank in range(plan.num_ranks):
        stages = list(plan.stages(rank))
        there = [(stage, "F") for stage in stages]
        back = [(stage, "B") for stage in reversed(stages)]
        lists.append(
            [f"{s}{letter}{j}" for of_round in rounds for s, letter in there + back for j in of_round]
        )
    return lists


def late_weights(plan, num_microbatches):
    """All forwards, last microbatch first; then I of each; then W of each: the most that can wait."""
    backwards = range(num_microbatches)
    return [
        [
            f"{stage}{letter}{j}"
            for letter, order in [("F", reversed(backwards)), ("I", backwards), ("W", backwards)]
            for j in order
        ]
        for stage in (plan.coordinates(rank)[2] for rank in range(plan.num_ranks))
    ]


def open_early(monkeypatch):
    """Has all receives opened before the first action, whatever the ranks that send have still to wait for."""

    def of_all(lists, schedule):
        num_actions = len(lists._checked(schedule, lists._mesh.rank, schedule.num_microbatches))
        return [dict.fromkeys(range(lists._mesh.plan.num_groups), (0, 0))] * num_actions

    monkeypatch.setattr(ActionLists, "_openings", of_all)


def open_by_peer(monkeypatch):
    """Has the receives of a place ordered by peer, on every other rank from the last peer to the first."""
    of_step = ActionLists.of_step

    def by_peer(lists, *arguments, **options):
        found = of_step(lists, *arguments, **options)
        sign = -1 if lists._mesh.rank % 2 else 1
        receives = [sorted(at, key=lambda one: sign * one.transfer.peer) for at in found.receives]
        return replace(found, receives=receives)

    monkeypatch.setattr(ActionLists, "of_step", by_peer)


def open_late(monkeypatch):
    """Has receives opened just before their actions, whatever the ranks that send wait for."""
    monkeypatch.setattr(
        ActionLists, "_openings", lambda lists, schedule: [{}] * 2 * schedule.num_microbatches
    )
