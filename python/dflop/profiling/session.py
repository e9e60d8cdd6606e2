"""The order of the measurements: few sizes first, more where they help most, then runs until time is spent.

    first sizes --rounds--> points --adaptive.choose--> more sizes --rounds--> ... --> rounds over all

In every round all cases take turns, so that drift (clock rate, other load) affects all of them alike.
"""

from __future__ import annotations

import functools
import logging
import random
import statistics
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from dflop.profiling import adaptive
from dflop.profiling.cases import JOINT, LINEAR, Case
from dflop.profiling.workbench import Workbench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dflop.models.sums import Sums
    from dflop.profiling.curves import Curve
    from dflop.profiling.progress import Progress
    from dflop.profiling.records import Records
    from dflop.profiling.request import Request
    from dflop.profiling.workbench import Bench

_LOG = logging.getLogger("dflop")

MIN_REPEATS = 5
"""The least runs of each case, even if the budget is exceeded."""
MIN_REPEATS_OTHER = 3
"""The least runs of a case that takes more than a hundredth of the budget, or in another way than `joint`."""
MAX_REPEATS = 400
"""The most runs of each case."""
PRECISE_RATIO = 0.005
"""Measuring ends early if all medians are known to this relative error and no gap is left to fill."""
ERROR_THRESHOLD = 0.01
"""A gap between sizes is left alone if its error beyond noise is smaller than this."""
_LARGE_RATIO = 0.01
# Share of the budget after which no more sizes are added; the rest goes into better medians.
_EXPLORE_RATIO = 0.6
# How often a new size is run before its gaps are judged.
_FIRST_RUNS = 3
# The most runs of a case in one round. Cheap cases get several, since a better median costs little there.
_MAX_RUNS_A_ROUND = 6
# How many sizes are tried between the largest that fits into memory and the smallest that does not.
_MEMORY_BISECTIONS = 3


class Session:
    """Measures some curves within a time budget."""

    def __init__(
        self,
        curves: Sequence[Curve],
        request: Request,
        budget_s: float,
        records: Records,
        progress: Progress | None,
        label: str,
        bench: Bench | None = None,
    ) -> None:
        """A session that has measured nothing but what `records` hold.

        Args:
            curves: at least one; attention before the linear part that it is subtracted from.
            request: what was asked for.
            budget_s: time for this session and earlier ones with the same records, in seconds; exceeded where
                the least number of runs takes longer.
            records: of this and earlier sessions.
            progress: called after each run.
            label: of the variant; empty for the whole model as it trains.
            bench: where the cases of `curves` run; None: on this rank alone.
        """
        self.curves, self.request, self.records, self.progress = curves, request, records, progress
        self.label = label
        self.device = torch.device(request.device)
        self._bench = bench or Workbench(curves, self.device)
        self._order = random.Random(0)
        self._by_name = {curve.name: curve for curve in curves}
        self._budget_s = budget_s
        self._start = time.monotonic()
        self._before_s = 1e-3 * records.numbers.get(f"{label}spent_ms", 0)
        self._done_ratio, self._share, self._shown = 0.0, 1.0, 0.0
        self._error = 1.0
        self._is_explored = False

    def prepare(self) -> None:
        """Runs each case of the first sizes and of earlier sessions once. A curve ends where memory runs out.

        Raises:
            ProfileError: not even the smallest size of a curve fits the device.
        """
        for curve in self.curves:
            before = self._known(curve, "size")
            curve.out_of_memory_at = min(self._known(curve, "out_of_memory"), default=None)
            is_limit_known = curve.out_of_memory_at is not None
            first = curve.first_sizes(self.device.type == "cpu")
            # Only first sizes are measured with recomputation, not those that an earlier session added.
            for size in sorted(before | set(first)):
                self._add(curve, size, with_recompute=size in first)
            if not is_limit_known:
                self._approach_limit(curve)
            if not curve.cases:
                from dflop._native import ProfileError

                message = f"`{curve.built.piece.name}` does not fit the device even at size {curve.first}"
                raise ProfileError(message)
        if self.request.compiles_layers:
            # Layers were compiled in these first runs, for longer than a short budget.
            self._start = time.monotonic()

    def _known(self, curve: Curve, fact: str) -> set[int]:
        """Sizes of a curve of which an earlier session recorded a fact."""
        start = f"{curve.name} {fact} "
        return {int(name[len(start) :]) for name in self.records.numbers if name.startswith(start)}

    def _approach_limit(self, curve: Curve) -> None:
        for _ in range(_MEMORY_BISECTIONS):
            if curve.out_of_memory_at is None or not curve.cases:
                return
            size = adaptive.split_of(max(curve.cases), curve.out_of_memory_at, curve.allowed)
            if size is None:
                return
            self._add(curve, size, with_recompute=False)

    def _add(self, curve: Curve, size: int, *, with_recompute: bool) -> bool:
        """Makes a case and runs it once in each way; false if it does not fit into memory."""
        if size in curve.cases:
            return True
        if curve.out_of_memory_at is not None and size >= curve.out_of_memory_at:
            return False
        prefix = curve.case_name(size) + " "
        numbers = self.records.numbers
        known = {name[len(prefix) :]: numbers[name] for name in numbers if name.startswith(prefix)}
        found = self._bench.try_size(curve.name, size, with_recompute=with_recompute, known=known)
        if found is None:
            self._note_out_of_memory(curve, size)
            return False
        for name, number in found.items():
            self.records.add_number(prefix + name, number)
        if f"{curve.name} size {size}" not in self.records.numbers:
            self.records.add_number(f"{curve.name} size {size}", 1)
        return all(self._add_segment(curve, segment) for segment in set(curve.cases[size].segments))

    def _note_out_of_memory(self, curve: Curve, size: int) -> None:
        curve.out_of_memory_at = size
        self.records.add_number(f"{curve.name} out_of_memory {size}", 1)
        _LOG.warning("%s: out of memory at size %d, measured up to the size before", curve.name, size)

    def _add_segment(self, curve: Curve, segment: int) -> bool:
        """Adds the attention of a segment, which is subtracted from packs with such segments."""
        name = curve.name.removesuffix(LINEAR) + "attention"
        return self._add(self._by_name[name], segment, with_recompute=False)

    def measure(self, done_ratio: float, share: float) -> None:
        """Measures until the budget is spent and each case has its least number of runs.

        Args:
            done_ratio: progress to start from.
            share: share of this session in the whole progress.
        """
        finished = f"{self.label}finished_ms"
        self._done_ratio, self._share = done_ratio, share
        if self.records.numbers.get(finished, -1) >= round(1e3 * self._budget_s):
            return
        self._explore()
        while not self._is_done():
            self._round(self.curves)
        self._show("")
        self.records.add_number(finished, round(1e3 * self._budget_s))

    def _spent_ratio(self) -> float:
        return (self._before_s + time.monotonic() - self._start) / self._budget_s

    def _explore(self) -> None:
        """Adds sizes while there is time and a gap is worth it."""
        self._first_runs(self._all_cases())
        while self._spent_ratio() < _EXPLORE_RATIO:
            gaps = self.gaps()
            self._error = adaptive.largest_error(gaps)
            wanted = adaptive.choose(
                gaps,
                self.weights(),
                self._allowed,
                threshold=ERROR_THRESHOLD,
                limit=max(2, len(self.curves) // 2),
            )
            if not wanted:
                self._is_explored = True
                return
            added: list[tuple[Curve, Case]] = []
            for name, size in wanted:
                curve = self._by_name[name]
                if self._add(curve, size, with_recompute=False):
                    added.append((curve, curve.cases[size]))
            self._first_runs(added)
            # Packs may have added new segments, whose attention has no runs yet.
            self._first_runs(self._all_cases())

    def _all_cases(self) -> list[tuple[Curve, Case]]:
        return [(curve, case) for curve in self.curves for case in curve.cases.values()]

    def _allowed(self, name: str, size: int) -> int:
        return self._by_name[name].allowed(size)

    def _first_runs(self, cases: Iterable[tuple[Curve, Case]]) -> None:
        """Runs until each case has been run a few times, taking turns."""
        waiting = list(cases)
        for number in range(1, _FIRST_RUNS + 1):
            self._order.shuffle(waiting)
            for curve, case in waiting:
                if len(self.records.timings[f"{case.name} {JOINT}"]) < number:
                    self._run(curve, case, JOINT)

    def gaps(self) -> dict[str, list[adaptive.Gap]]:
        """The gaps between measured sizes.

        Returns:
            By the name of the curve.
        """
        return {curve.name: adaptive.gaps_of(curve.samples(self.records)) for curve in self.curves}

    def weights(self) -> dict[str, float]:
        """The share of each curve in the time of a step.

        Returns:
            By the name of the curve; they add up to 1.
        """
        times = {curve.name: curve.step_ns(self.records, self.request) for curve in self.curves}
        # A pack counts here with its attention, which is subtracted only later. That is exact enough.
        total = sum(times.values()) or 1.0
        return {name: value / total for name, value in times.items()}

    def _round(self, curves: Sequence[Curve]) -> None:
        """Runs each case of each curve in each of its ways, in random order; cheap ones several times."""
        self._bench.collect()
        mean_ns = self._mean_ns()
        for curve in self._order.sample(list(curves), len(curves)):
            self._bench.warm_up(curve.name)
            turns = [(case, way) for case in curve.cases.values() for way in case.ways]
            for case, way in self._order.sample(turns, len(turns)):
                for _ in range(self._runs(case, way, mean_ns)):
                    self._run(curve, case, way)

    def _runs(self, case: Case, way: str, mean_ns: float) -> int:
        """How often to run a case in this round: more often if cheap, less in other ways than `joint`."""
        seen = self.records.timings[f"{case.name} {way}"]
        if len(seen) >= MAX_REPEATS:
            return 0
        if way != JOINT and len(seen) >= MIN_REPEATS_OTHER and self._order.random() < 0.5:
            return 0
        return 1 if not seen else max(1, min(_MAX_RUNS_A_ROUND, int(mean_ns / max(seen[-1].total_ns, 1))))

    def _run(self, curve: Curve, case: Case, way: str) -> None:
        self.records.add_timing(f"{case.name} {way}", self._bench.run(curve.name, case.size, way))
        self._show(case.name)

    def _mean_ns(self) -> float:
        seen = [self.records.timings[name][-1].total_ns for name, _ in self._wanted()]
        return statistics.fmean(seen) if seen else 0.0

    def _wanted(self) -> list[tuple[str, int]]:
        """Each case and way that has runs, with the least number of runs that it must get."""
        found = []
        for curve in self.curves:
            for case in curve.cases.values():
                for way in case.ways:
                    name = f"{case.name} {way}"
                    seen = self.records.timings[name]
                    if seen:
                        is_large = seen[-1].total_ns * 1e-9 > _LARGE_RATIO * self._budget_s
                        few = is_large or way != JOINT
                        found.append((name, MIN_REPEATS_OTHER if few else MIN_REPEATS))
        return found

    def _least_ratio(self) -> float:
        """Runs of the case and way that is furthest behind, relative to its least number of runs."""
        total = sum(len(case.ways) for curve in self.curves for case in curve.cases.values())
        wanted = self._wanted()
        if len(wanted) < total:
            return 0.5 * len(wanted) / total
        return min(len(self.records.timings[name]) / least for name, least in wanted)

    def _is_done(self) -> bool:
        self.records.add_number(f"{self.label}spent_ms", round(1e3 * self._spent_ratio() * self._budget_s))
        return self._least_ratio() >= 1.0 and (self._spent_ratio() >= 1.0 or self._is_precise())

    def _is_precise(self) -> bool:
        """Whether neither more runs nor more sizes would change much."""
        samples = [sample for curve in self.curves for sample in curve.samples(self.records).values()]
        return self._is_explored and all(
            sample.repeats >= MAX_REPEATS or sample.noise_ns < PRECISE_RATIO * sample.time_ns
            for sample in samples
        )

    def _show(self, name: str) -> None:
        if self.progress is None:
            return
        ratio = min(self._spent_ratio(), self._least_ratio(), 1.0)
        self._shown = max(self._shown, ratio)
        label = f"{name}, error up to {100 * self._error:.0f} %" if name else ""
        self.progress(self._done_ratio + self._share * self._shown, label)


def neighbour_work(curves: Iterable[Curve], sums: Sums | None = None) -> list[Callable[[], None]]:
    """Work for busy neighbours: each module at a middle size, as another rank would run it.

    Args:
        curves: with their cases.
        sums: collectives of the modules, silent in a neighbour, which has no other ranks.

    Returns:
        Functions to call.
    """
    chosen = [curve.cases for curve in curves if curve.part == LINEAR]
    middles: list[Case] = [cases[sorted(cases)[len(cases) // 2]] for cases in chosen]

    def run(case: Case) -> None:
        with nullcontext() if sums is None else sums.silent():
            case.run_untimed()

    return [functools.partial(run, case) for case in middles]
