"""Measuring with real collectives: one session on rank 0, whose cases run on all ranks of a group.

    rank 0    Session --> SharedBench --try, run--> its own Workbench, and the others' (`Follower`)

A new size is first tried by each rank alone, without collectives: if that fails, no other rank waits. Where
one rank runs out of memory, the curve ends on all of them. A measured time is that of the slowest rank, phase
by phase; bytes are the most of any rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dflop.models.sums import Sums
from dflop.models.tensor import add_collectives
from dflop.profiling.cases import Gradients
from dflop.profiling.curves import Built, build_curves
from dflop.profiling.network import measure_network
from dflop.profiling.pieces import PieceSettings
from dflop.profiling.request import DTYPES
from dflop.profiling.timer import Timing
from dflop.profiling.workbench import Workbench

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dflop.profiling.curves import Curve
    from dflop.profiling.pieces import Piece
    from dflop.profiling.request import Request
    from dflop.profiling.team import Team

# All-reduces of these sizes come first, so that the buffers of links exist before memory is measured.
_FIRST_BYTES = {"cpu": (1 << 10,), "cuda": (1 << 10, 1 << 20, 64 << 20)}


def build_together(
    built: Sequence[Built], curves: Sequence[Curve], label: str, team: Team, degree: int
) -> SharedBench:
    """Makes the other ranks build what rank 0 has built, with collectives in it. Only rank 0 calls it.

    Args:
        built: pieces cut over the ranks, at least one.
        curves: of these pieces.
        label: of the variant.
        team: all ranks.
        degree: how many of them take part.

    Returns:
        The bench on which the curves run.

    Raises:
        ProfileError: a rank failed or is gone.
    """
    settings = built[0].settings
    what = f"tensor parallel degree {degree}, LoRA rank {settings.lora_rank}"
    team.do(team.num_ranks, "make_group", [degree], lambda: team.group(degree), what, together=True)
    sums = Sums(team.group(degree))
    for one in built:
        add_collectives(one.module, sums)
    names = [one.piece.name for one in built]
    team.do(degree, "build", [degree, settings.lora_rank, label, names], lambda: None, what)
    team.do(degree, "connect", [], lambda: connect(sums, settings.device), what, together=True)
    return SharedBench(Workbench(curves, settings.device, sums), sums, team, degree)


def connect(sums: Sums, device: torch.device) -> None:
    """Runs the first all-reduces; all ranks of the group must call it at the same time.

    Args:
        sums: over the ranks.
        device: of this rank.
    """
    for num_bytes in _FIRST_BYTES[device.type]:
        sums.add(torch.zeros(num_bytes, dtype=torch.uint8, device=device))


class SharedBench:
    """Runs the curves of one session on the first ranks of a team; only rank 0 has one."""

    def __init__(self, own: Workbench, sums: Sums, team: Team, degree: int) -> None:
        """To be made when the other ranks have built the same curves.

        Args:
            own: the workbench of rank 0.
            sums: over the ranks that take part.
            team: all ranks.
            degree: how many of them take part.
        """
        self._own, self._team, self._degree = own, team, degree
        self.sums = sums

    def _do(
        self, act: str, arguments: Sequence[Any], own: Callable[[], Any], what: str, *, together: bool
    ) -> list[Any]:
        return self._team.do(self._degree, act, arguments, own, what, together=together)

    def try_size(
        self, name: str, size: int, *, with_recompute: bool, known: Mapping[str, int]
    ) -> dict[str, int] | None:
        """See `Workbench.try_size`.

        Args:
            name: of the curve.
            size: one that is allowed.
            with_recompute: whether a new case is measured with recomputation, too.
            known: bytes that were counted earlier.

        Returns:
            The most of any rank; None, on all ranks, if memory ran out on one.

        Raises:
            ProfileError: a rank failed for another reason, or is gone.
        """
        what = f"`{name}` of size {size}"
        found = self._do(
            "try_size",
            [name, size, with_recompute, dict(known)],
            lambda: self._own.try_size(name, size, with_recompute=with_recompute, known=known),
            what,
            together=False,
        )
        if any(one is None for one in found):
            self._do("drop", [name, size], lambda: self._own.drop(name, size), what, together=False)
            return None
        self._do("run_ways", [name, size], lambda: self._own.run_ways(name, size), what, together=True)
        return {number: max(one[number] for one in found) for number in found[0]}

    def collect(self) -> None:
        """See `Workbench.collect`."""
        self._do("collect", [], self._own.collect, "collecting garbage", together=False)

    def warm_up(self, name: str) -> None:
        """See `Workbench.warm_up`.

        Args:
            name: of the curve.
        """
        self._do("warm_up", [name], lambda: self._own.warm_up(name), f"`{name}`", together=True)

    def run(self, name: str, size: int, way: str) -> Timing:
        """See `Workbench.run`.

        Args:
            name: of the curve.
            size: one that was tried.
            way: as in `cases.WAYS`.

        Returns:
            Of each phase, the time of the slowest rank.

        Raises:
            ProfileError: a rank failed or is gone.
        """
        found = self._do(
            "run",
            [name, size, way],
            lambda: self._own.run(name, size, way).phases_ns,
            f"`{name}` of size {size}, {way}",
            together=True,
        )
        return Timing(tuple(max(phases) for phases in zip(*found, strict=True)))


class Follower:
    """What a rank above 0 can do when rank 0 says so: a method for each act, with its arguments."""

    def __init__(
        self, request: Request, facts: Mapping[str, Any], pieces: Sequence[Piece], team: Team
    ) -> None:
        """Nothing is built yet.

        Args:
            request: what was asked for.
            facts: facts of this rank that must be equal on all ranks.
            pieces: of the model.
            team: all ranks.
        """
        self._request, self._facts, self._team = request, facts, team
        self._pieces = {piece.name: piece for piece in pieces}
        self._device = torch.device(request.device)
        self._bench: Workbench | None = None
        self._sums: Sums | None = None

    @property
    def bench(self) -> Workbench:
        """The workbench of the variant that was built last."""
        assert self._bench is not None, "rank 0 has a variant built before it runs it"
        return self._bench

    def differences(self, facts: Mapping[str, Any]) -> list[str]:
        """What differs from rank 0, in words."""
        return [
            f"`{name}` is {self._facts.get(name)}, on rank 0 {value}"
            for name, value in facts.items()
            if self._facts.get(name) != value
        ]

    def measure_network(self, num_neighbours: int, is_quick: bool, budget_s: float) -> None:
        """Does this rank's part in measuring the links; rank 0 keeps the numbers."""
        measure_network(self._request.device, num_neighbours, is_quick=is_quick, budget_s=budget_s)

    def make_group(self, degree: int) -> None:
        """Takes part in making the group of the first ranks, even if this rank is not in it."""
        group = self._team.group(degree)
        self._sums = Sums(group) if self._team.rank < degree else None

    def build(self, degree: int, lora_rank: int, label: str, names: Sequence[str]) -> None:
        """Builds pieces as rank 0 has built them."""
        # Frees the workbench of the last variant first.
        self._bench = None
        compiles = self._request.compiles_layers
        settings = PieceSettings(self._device, DTYPES[self._request.dtype], degree, lora_rank, compiles)
        built = [Built(self._pieces[name], settings, label) for name in names]
        assert self._sums is not None, "rank 0 makes the group first"
        for one in built:
            add_collectives(one.module, self._sums)
        self._bench = Workbench(build_curves(built, self._request, Gradients()), self._device, self._sums)

    def connect(self) -> None:
        """See the function."""
        assert self._sums is not None, "rank 0 makes the group first"
        connect(self._sums, self._device)

    def try_size(
        self, name: str, size: int, with_recompute: bool, known: Mapping[str, int]
    ) -> dict[str, int] | None:
        """See `Workbench.try_size`."""
        return self.bench.try_size(name, size, with_recompute=with_recompute, known=known)

    def drop(self, name: str, size: int) -> None:
        """See `Workbench.drop`."""
        self.bench.drop(name, size)

    def run_ways(self, name: str, size: int) -> None:
        """See `Workbench.run_ways`."""
        self.bench.run_ways(name, size)

    def collect(self) -> None:
        """See `Workbench.collect`."""
        self.bench.collect()

    def warm_up(self, name: str) -> None:
        """See `Workbench.warm_up`."""
        self.bench.warm_up(name)

    def run(self, name: str, size: int, way: str) -> tuple[int, ...]:
        """See `Workbench.run`; the times of the phases."""
        return self.bench.run(name, size, way).phases_ns
