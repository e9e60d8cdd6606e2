"""Gap to the certified bound and time of the scheduler, beside what others use and OR-Tools' CP-SAT.

Usage: python benches/schedule.py OUT.json [--seeds 10] [--cpsat-seeds 3] [--cpsat-seconds 10]
                                  [--sizes 64x8,48x16] [--sets NAME,NAME] [--makespan FILE]
       python benches/schedule.py OUT.json --show

Each set and size is drawn with `--seeds` seeds (`batches.py`), and the tables show the median and the worst
of them: one draw says little. All assignments are judged by the same loads and bound, in this process; times
are medians of several calls on one core. Every method is visited once for each batch, CP-SAT too.

CP-SAT gets its seconds, two workers and a hint: the best assignment of all baselines. It is asked for the
first `--cpsat-seeds` seeds, because each takes its whole time.
Without `ortools`, or with 0 seconds, it is left out.

The paper's program is solved in few rows only. Where it was not, the row is LPT's and says so.

OUT has a key for each part: `balance` is what this script measures, and `cells` the same by set and size.
`--show` prints the tables of an OUT that was written before, as Markdown for `results/`.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batches import cost_sets
from collect import origin

from dflop import _native
from dflop._native import testing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from batches import Costs

FEW_A_BUCKET = [(32, 8), (48, 16), (128, 32)]
SIZES = [
    (64, 8), (64, 16), (256, 16), (512, 32), (1024, 64), (2048, 128), (4096, 512), *FEW_A_BUCKET,
]  # fmt: skip
OURS = {"dflop": False, "dflop-exact": True}
"""Our methods, and whether they end with the exact search."""
CPSAT_WORKERS = 2
CPSAT_MEAN_LOAD = 10**7
"""Mean load of a bucket in CP-SAT's integers: rounding then costs a bucket of 16 samples under 1e-6."""
PAPER_SOLVER_MS = 1_000
"""The paper's own limit, "about 1 s"."""


def timed(act: Callable[[], Any], seconds: float = 0.15, calls_max: int = 15) -> tuple[Any, dict[str, float]]:
    """The answer, and medians of as many calls as fit into `seconds`; at least one.

    `cpu_seconds` well below `seconds` mean that something else had the core: measure again.
    """
    walls: list[float] = []
    cpus: list[float] = []
    while True:
        wall, cpu = time.perf_counter(), time.process_time()
        answer = act()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        if sum(walls) > seconds or len(walls) == calls_max:
            return answer, {"seconds": statistics.median(walls), "cpu_seconds": statistics.median(cpus)}


def cpsat(
    costs: Costs, num_buckets: int, seconds: float, hint: Sequence[int] | None = None
) -> tuple[dict[str, Any], list[int] | None]:
    """What CP-SAT says of minimising the worst load, and its assignment if it has one.

    Sample k, costliest first, may only enter buckets 0 to k: buckets are alike, so nothing is lost and most
    of the symmetry is gone. `hint` is an assignment to begin with; its buckets are numbered anew in that
    order.
    """
    from ortools.sat.python import cp_model

    begin = time.perf_counter()
    scale = CPSAT_MEAN_LOAD * num_buckets / max(sum(costs.encoder_ns), sum(costs.llm_ns), 1)
    columns = [[round(ns * scale) for ns in column] for column in (costs.encoder_ns, costs.llm_ns)]
    order = sorted(range(len(costs.llm_ns)), key=lambda i: -max(column[i] for column in columns))
    model = cp_model.CpModel()
    entered: list[list[tuple[int, Any]]] = [[] for _ in range(num_buckets)]
    choices: list[list[Any]] = []
    for rank, sample in enumerate(order):
        choices.append([model.new_bool_var("") for _ in range(min(rank + 1, num_buckets))])
        model.add_exactly_one(choices[-1])
        for bucket, choice in enumerate(choices[-1]):
            entered[bucket].append((sample, choice))
    if hint is not None:
        renamed: dict[int, int] = {}
        for sample, choice in zip(order, choices, strict=True):
            place = renamed.setdefault(hint[sample], len(renamed))
            for bucket, one in enumerate(choice):
                model.add_hint(one, bucket == place)
    worst = model.new_int_var(0, max(map(sum, columns)), "")
    for column in columns:
        for inside in entered:
            load = cp_model.LinearExpr.weighted_sum([c for _, c in inside], [column[i] for i, _ in inside])
            model.add(load <= worst)
    model.minimize(worst)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = CPSAT_WORKERS
    build_seconds = time.perf_counter() - begin
    status = solver.solve(model)
    report = {
        "status": solver.status_name(status).lower(),
        "seconds": solver.wall_time,
        "limit_seconds": seconds,
        "build_seconds": build_seconds,
        "bound_ns": solver.best_objective_bound / scale,
    }
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return report, None
    assignment = [0] * len(order)
    for sample, choice in zip(order, choices, strict=True):
        assignment[sample] = next(j for j, one in enumerate(choice) if solver.boolean_value(one))
    return report, assignment


def measure(costs: Costs, num_buckets: int, cpsat_seconds: float) -> dict[str, Any]:
    """One row: every method's worst load, gap and seconds on one global batch."""
    encoder, llm, tokens = costs.encoder_ns, costs.llm_ns, costs.tokens
    methods: dict[str, dict[str, Any]] = {}
    # The exact search proves better bounds: every gap of the row is to the best of both.
    bound = 0
    balance = functools.partial(_native.balance, encoder, llm, num_buckets, meets="pipeline")
    for name, exact in OURS.items():
        ours, times = timed(lambda exact=exact: balance(exact=exact))
        bound = max(bound, ours.lower_bound_ns)
        methods[name] = {"max_load_ns": ours.max_load_ns, "is_proven": ours.proven_optimal, **times}

    def judge(assignment: Sequence[int]) -> int:
        return testing.judge(encoder, llm, num_buckets, assignment, meets="pipeline").max_load_ns

    best: tuple[int, str, list[int]] | None = None
    for name in testing.baselines():
        act = lambda name=name: testing.baseline(  # noqa: E731
            name, encoder, llm, tokens, num_buckets, solver_ms=PAPER_SOLVER_MS
        )
        (assignment, note), times = timed(act)
        methods[name] = {"max_load_ns": judge(assignment), **times}
        if note is not None:
            methods[name]["answered_by"] = note
        if best is None or methods[name]["max_load_ns"] < best[0]:
            best = methods[name]["max_load_ns"], name, assignment
    if cpsat_seconds > 0 and best is not None:
        report, assignment = cpsat(costs, num_buckets, cpsat_seconds, best[2])
        worst = judge(assignment) if assignment else None
        methods["cp-sat"] = report | {"hint": best[1], "max_load_ns": worst}
    for method in methods.values():
        worst = method["max_load_ns"]
        method["gap"] = None if worst is None else worst / bound - 1 if bound else 0.0
    return {
        "num_samples": len(llm),
        "num_buckets": num_buckets,
        "encoder_total_ns": sum(encoder),
        "llm_total_ns": sum(llm),
        "lower_bound_ns": bound,
        "methods": methods,
    }


def time_ratio(ours: dict[str, Any], other: dict[str, Any]) -> float:
    """Our time over CP-SAT's: what it ran, but no more than its limit, which large models make it overrun."""
    return ours["seconds"] / min(other["seconds"], other["limit_seconds"])


def claims(row: dict[str, Any]) -> dict[str, bool]:
    """What is promised of this row's size, and whether it holds."""
    ours = row["methods"]["dflop"]
    size = row["num_samples"], row["num_buckets"]
    held = {}
    if "cp-sat" in row["methods"]:
        other = row["methods"]["cp-sat"]
        held["no worse than CP-SAT"] = (
            other["max_load_ns"] is None or ours["max_load_ns"] <= other["max_load_ns"]
        )
        held["in 0.5 % of its time"] = time_ratio(ours, other) <= 0.005
    if size == (2048, 128):
        held["gap 0.01 % in 20 ms"] = ours["gap"] <= 1e-4 and ours["seconds"] <= 0.020
    if size in FEW_A_BUCKET:
        exact = row["methods"]["dflop-exact"]
        held["exact: gap 0.5 % in 1 s"] = exact["gap"] <= 5e-3 and exact["seconds"] <= 1
    return held


def percent(gap: float | None) -> str:
    """A gap for people, with as many digits as matter."""
    if gap is None:
        return "none"
    value = gap * 100
    return f"{value:.4f}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def paper_name(rows: Iterable[dict[str, Any]]) -> str:
    """Who answered for the paper: its integer program in all rows, LPT in all, or how many of each."""
    solved = [row["methods"]["paper"]["answered_by"] == "ilp" for row in rows]
    if all(solved):
        return "ILP"
    return "LPT" if not any(solved) else f"ILP {sum(solved)}, LPT {len(solved) - sum(solved)}"


def cell(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A set and size over its seeds: gaps and times of each method, and who answered for the paper."""

    def over(values: list[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "worst": max(values)}

    methods: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row["methods"]):
        found = [row["methods"][name] for row in rows if name in row["methods"]]
        gaps = [method["gap"] for method in found if method["gap"] is not None]
        methods[name] = {
            "num_seeds": len(found),
            "num_answers": len(gaps),
            "gap": over(gaps) if gaps else None,
            "seconds": over([method["seconds"] for method in found]),
        }
    first = rows[0]
    return {
        "set": first["set"],
        "num_samples": first["num_samples"],
        "num_buckets": first["num_buckets"],
        "num_seeds": len(rows),
        "paper_answered_by": paper_name(rows),
        "methods": methods,
    }


def cells(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All sets and sizes, in the order of the rows."""
    by_place: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        by_place.setdefault((row["set"], row["num_samples"], row["num_buckets"]), []).append(row)
    return [cell(same) for same in by_place.values()]


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Prints a table as it stands in `results/`."""
    for line in (head, ["---"] * len(head), *lines):
        print("| " + " | ".join(line) + " |", flush=True)


PUBLISHED = ["arrival", "token-lpt", "sum-lpt", "verl", "sum-karmarkar-karp", "greedy", "paper"]
"""Baselines of the published table; OUT has all."""


def gap_of(method: dict[str, Any] | None, num_seeds: int) -> str:
    """Median and worst gap; with the number of seeds where that is not all of them."""
    if method is None:
        return "-"
    if method["gap"] is None:
        return "none"
    text = f"{percent(method['gap']['median'])} / {percent(method['gap']['worst'])}"
    if method["num_answers"] == num_seeds:
        return text
    return f"{text} (of {method['num_answers']})"


def print_gaps(found: list[dict[str, Any]]) -> None:
    """A line for each set and size."""
    print("\nGap to the certified bound in per cent, and time: median / worst over the seeds\n")
    head = ["set", "size", "dflop", "ms", "exact", "ms", "CP-SAT", "s", *PUBLISHED, "paper is"]
    lines = []
    for row in found:
        methods, seeds = row["methods"], row["num_seeds"]
        line = [row["set"], f"{row['num_samples']}x{row['num_buckets']}"]
        for name in OURS:
            seconds = methods[name]["seconds"]
            line += [
                gap_of(methods[name], seeds),
                f"{seconds['median'] * 1e3:.2f} / {seconds['worst'] * 1e3:.2f}",
            ]
        solver = methods.get("cp-sat")
        line += [gap_of(solver, seeds), f"{solver['seconds']['median']:.1f}" if solver else "-"]
        line += [gap_of(methods[name], seeds) for name in PUBLISHED]
        lines.append([*line, row["paper_answered_by"]])
    markdown(head, lines)


def print_times(found: list[dict[str, Any]]) -> None:
    """Median milliseconds over sets and seeds, by size and method."""
    names = [*OURS, *testing.baselines()]
    print("\nMilliseconds: median over the sets of the median over the seeds\n")
    lines = []
    for size in dict.fromkeys((row["num_samples"], row["num_buckets"]) for row in found):
        same = [row["methods"] for row in found if (row["num_samples"], row["num_buckets"]) == size]
        times = [statistics.median(methods[name]["seconds"]["median"] for methods in same) for name in names]
        lines.append([f"{size[0]}x{size[1]}", *(f"{seconds * 1e3:.3f}" for seconds in times)])
    markdown(["size", *names], lines)


def summarise(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """By claim: rows that keep it, and rows that it is about."""
    names = dict.fromkeys(name for row in rows for name in row["claims"])
    held = {name: [row["claims"][name] for row in rows if name in row["claims"]] for name in names}
    return {name: {"held": sum(values), "of": len(values)} for name, values in held.items()}


def solver_version() -> str | None:
    """OR-Tools' version, None where it cannot be imported."""
    try:
        import ortools
    except ImportError:
        return None
    return ortools.__version__


def arguments() -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description="Gap and time of the scheduler beside others")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=10, help="draws of each set and size, from seed 1")
    parser.add_argument("--cpsat-seeds", type=int, default=3, help="of these the first that CP-SAT gets too")
    parser.add_argument("--cpsat-seconds", type=float, default=10.0)
    parser.add_argument("--sizes", default=",".join(f"{n}x{m}" for n, m in SIZES))
    parser.add_argument("--sets", help="names, with commas between them [default: all]")
    parser.add_argument("--makespan", type=Path, help="what the example `makespan` of dflop-plan wrote")
    parser.add_argument("--show", action="store_true", help="measure nothing: print the tables of OUT")
    asked = parser.parse_args()
    if asked.seeds < 1:
        parser.error("`--seeds` must be 1 or more")
    return asked


PLACE = ("num_ranks", "layout", "num_microbatches", "memory_budget_bytes")
"""What a line of the table of makespans is about; recomputation is chosen by each way for itself."""


def way_over_seeds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One way at one place: the recomputation with the smallest median of those that run every seed.

    Where none does, the bytes of the one that needs least.
    """

    def ratios(row: dict[str, Any]) -> list[float]:
        return [seed["over_bound"] for seed in row["seeds"] if seed["over_bound"] is not None]

    runs = [row for row in rows if len(ratios(row)) == len(row["seeds"])]
    if runs:
        best = min(runs, key=lambda row: statistics.median(ratios(row)))
        return {"recompute": best["recompute"], "ratios": ratios(best)}
    needed = [max(seed["needed_bytes"] or 0 for seed in row["seeds"]) for row in rows]
    return {"recompute": None, "needed_bytes": min(needed)}


def makespans(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A place each, with all ways, and the best baseline over the best of ours, seed by seed."""
    places: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    kinds: dict[str, bool] = {}
    for row in rows:
        place = places.setdefault(tuple(row[key] for key in PLACE), {})
        place.setdefault(row["way"], []).append(row)
        kinds[row["way"]] = row["is_baseline"]
    found = []
    for place, by_way in places.items():
        ways = {name: way_over_seeds(same) for name, same in by_way.items()}

        def fastest(is_baseline: bool, ways: dict[str, Any] = ways) -> str | None:
            runs = [name for name, way in ways.items() if kinds[name] == is_baseline and "ratios" in way]
            return min(runs, key=lambda name: statistics.median(ways[name]["ratios"]), default=None)

        baseline, ours = fastest(True), fastest(False)
        gains = None
        if baseline and ours:
            pairs = zip(ways[baseline]["ratios"], ways[ours]["ratios"], strict=True)
            gains = [theirs / own for theirs, own in pairs]
        found.append(
            {
                **dict(zip(PLACE, place, strict=True)),
                "ways": ways,
                "best_baseline": baseline,
                "best_ours": ours,
                "gain": {"median": statistics.median(gains), "worst": min(gains)} if gains else None,
            }
        )
    return found


def over_bound(way: dict[str, Any] | None) -> str:
    """Makespan over the work bound, median and worst, and what is recomputed; or the bytes it needs."""
    if way is None:
        return "-"
    if "ratios" not in way:
        return f"refused: {way['needed_bytes'] / 1e9:.0f} GB"
    text = f"{statistics.median(way['ratios']):.3f} / {max(way['ratios']):.3f}"
    return text if way["recompute"] == "none" else f"{text} ({way['recompute']})"


def print_makespans(rows: list[dict[str, Any]]) -> None:
    """A line for each place, a column for each way."""
    found = makespans(rows)
    ways = list(dict.fromkeys(name for place in found for name in place["ways"]))
    print(
        "\nSimulated makespan over the work bound (all work of the batch without recomputation, over all "
        "ranks), median / worst over the seeds, with what is recomputed where that is not nothing; "
        "LLaVA-OneVision 7B on H100, times and bytes estimated. `data-parallel` is simulated, this version "
        "does not train it.\n"
    )
    lines = []
    for place in found:
        gain = place["gain"]
        text = "-"
        if gain:
            names = f"{place['best_baseline']} over {place['best_ours']}"
            text = f"{gain['median']:.3f} / {gain['worst']:.3f} ({names})"
        elif place["best_ours"]:
            text = "no baseline can run"
        limit = f"{place['memory_budget_bytes'] / 1e9:.0f} GB"
        line = [str(place["num_ranks"]), place["layout"], str(place["num_microbatches"]), limit]
        lines.append([*line, *(over_bound(place["ways"].get(way)) for way in ways), text])
    markdown(["ranks", "layout", "microbatches", "budget", *ways, "best baseline over ours"], lines)


def show(result: dict[str, Any]) -> None:
    """All tables of OUT."""
    for one in result["sets"]:
        print(f"{one['name']}: {one['what']}")
    print_gaps(result["cells"])
    print_times(result["cells"])
    if "makespan" in result:
        print_makespans(result["makespan"])
    print()
    for name, counts in result["claims"].items():
        print(f"{name}: {counts['held']} of {counts['of']} rows")


def main() -> None:
    """Measures, prints and writes."""
    chosen = arguments()
    if chosen.show:
        show(json.loads(chosen.out.read_text()))
        return
    sizes = [tuple(map(int, size.split("x"))) for size in chosen.sizes.split(",")]
    version = solver_version()
    if version is None:
        print("CP-SAT is left out: `ortools` cannot be imported (it is in the extra `dev`)", file=sys.stderr)
    cpsat_seconds = chosen.cpsat_seconds if version else 0.0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sets = cost_sets(Path(folder))
        if chosen.sets:
            known = {one.name: one for one in sets}
            if unknown := [name for name in chosen.sets.split(",") if name not in known]:
                sys.exit(f"error: no set is called `{unknown[0]}`, there are: {', '.join(known)}")
            sets = [known[name] for name in chosen.sets.split(",")]
        for one in sets:
            for num_samples, num_buckets in sizes:
                for seed in range(1, chosen.seeds + 1):
                    seconds = cpsat_seconds if seed <= chosen.cpsat_seeds else 0.0
                    # A process for each row: a solver's memory and threads would still be there at the next.
                    with multiprocessing.get_context("spawn").Pool(1) as fresh:
                        row = fresh.apply(measure, (one.draw(num_samples, seed), num_buckets, seconds))
                    rows.append({"set": one.name, "seed": seed, **row, "claims": claims(row)})
                print(f"{one.name} {num_samples}x{num_buckets}: done", file=sys.stderr, flush=True)
    result = {
        "bench": "schedule",
        **origin(),
        "versions": {
            "python": platform.python_version(),
            "dflop": _native.__version__,
            "ortools": version,
        },
        "seeds": chosen.seeds,
        "cpsat": {"seconds": cpsat_seconds, "workers": CPSAT_WORKERS, "seeds": chosen.cpsat_seeds}
        if cpsat_seconds
        else None,
        "sets": [{"name": one.name, "what": one.what, "is_estimated": one.is_estimated} for one in sets],
        "balance": rows,
        "cells": cells(rows),
        "claims": summarise(rows),
    }
    if chosen.makespan:
        result["makespan"] = json.loads(chosen.makespan.read_text())
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    print(f"wrote {chosen.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
