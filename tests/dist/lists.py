"""Action lists that no pipeline order has, drawn at random among all lists that can run."""

from __future__ import annotations

import random


def random_lists(plan, num_microbatches, seed, split_ratio=0.5):
    """Lists of all ranks, as in `0F3`: some order in which one rank after the other does what it can.

    Microbatches come in any order, other ones on each rank; forwards run ahead as far as chance has it; about
    `split_ratio` of the backwards are I and W, with anything between them.
    """
    draw = random.Random(seed)
    stages = [plan.coordinates(rank)[2] for rank in range(plan.num_ranks)]
    last = max(stages)
    at = {stage: [r for r, s in enumerate(stages) if s == stage] for stage in range(last + 1)}
    done = [set() for _ in stages]
    is_split = [[draw.random() < split_ratio for _ in range(num_microbatches)] for _ in stages]
    lists = [[] for _ in stages]

    def can_run(rank, letter, j):
        stage = stages[rank]
        if letter == "F":
            return stage == 0 or all(("F", j) in done[r] for r in at[stage - 1])
        if letter == "W":
            return ("B", j) in done[rank]
        return ("F", j) in done[rank] and (stage == last or all(("B", j) in done[r] for r in at[stage + 1]))

    left = {
        (rank, letter, j) for rank in range(len(stages)) for letter in "FB" for j in range(num_microbatches)
    }
    left |= {(r, "W", j) for r, splits in enumerate(is_split) for j, split in enumerate(splits) if split}
    while left:
        rank, letter, j = draw.choice(sorted(action for action in left if can_run(*action)))
        left.remove((rank, letter, j))
        done[rank].add((letter, j))
        name = "I" if letter == "B" and is_split[rank][j] else letter
        lists[rank].append(f"{stages[rank]}{name}{j}")
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
