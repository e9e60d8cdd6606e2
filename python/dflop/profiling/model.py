"""`dflop profile model`: time and memory of each module over sizes chosen as it goes.

    request --> pieces of the model --> curves --session under the clock--> records --> ModelProfile

The whole model, with all parameters training, comes first. Then come variants: one rank's part under tensor
parallelism, and LoRA. Of a variant, only modules that differ from the whole model are measured.

Under torchrun rank 0 measures, keeps the records and tells the other ranks what to do: nothing, or their part
of a layer that is cut over them (`together.py`).
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import statistics
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dflop.device import take_device
from dflop.models.errors import profile_error
from dflop.models.parameters import squared_norm
from dflop.models.rules import trained_part
from dflop.models.sums import Sums
from dflop.models.tensor import add_collectives
from dflop.profiling.artifact import hash_config
from dflop.profiling.assemble import assemble
from dflop.profiling.cases import Gradients
from dflop.profiling.curves import Built, build_curves
from dflop.profiling.device import context_bytes, device_facts
from dflop.profiling.families import family_of, feature_width, load_pieces
from dflop.profiling.memory import touch_heap
from dflop.profiling.neighbour import busy_neighbours
from dflop.profiling.network import measure_network
from dflop.profiling.pieces import PieceSettings
from dflop.profiling.records import Records, key_of
from dflop.profiling.request import DTYPES, Request
from dflop.profiling.session import Session, neighbour_work
from dflop.profiling.team import Team, is_started
from dflop.profiling.timer import timer_of
from dflop.profiling.together import Follower, build_together

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dflop.profiling.pieces import Piece
    from dflop.profiling.progress import Progress

_LOG = logging.getLogger("dflop")

METHOD = 6
"""Version of the way of measuring. It is raised when older records are no longer comparable."""
# Share of the time budget for the whole model, if there are variants.
_WHOLE_SHARE = 0.6
_OPTIMIZER_STEPS = 20
# So many parameters are enough to time the optimizer: with their states they take 4 GB, many times any cache.
_OPTIMIZER_PARAMETERS = 256_000_000
_HEAP_BYTES = 512 << 20


def profile_model(request: Mapping[str, Any], progress: Progress | None = None) -> dict[str, Any]:
    """Measures a model and returns the fields of `ModelProfile`, in order.

    On a CPU it uses one thread. Beside it, as many processes are kept busy as training will have other ranks.
    Runs that `partial` already holds are not run again. An interruption loses only the run that it strikes.

    Args:
        request: see `Request`.
        progress: called after each run.

    Returns:
        The profile, ready for `write_artifact`; on every rank.

    Raises:
        FileNotFoundError: there is no model.
        LeaderStoppedError: on ranks above 0, where another rank has failed and said why.
        Error: there is no GPU where one was asked for.
        ProfileError: the model cannot be built, or not even the smallest size of a module fits the device; or
            a rank failed, which the message names.
        ValueError: the request is not sound.
    """
    asked = Request.parse(request)
    take_device(asked.device)
    if not is_started():
        return _profile(asked, progress, None)
    with Team(asked.device) as team:
        if team.rank > 0:
            return _follow(asked, team)
        profile = _profile(asked, progress, team)
        team.finish(profile)
        return profile


def _follow(asked: Request, team: Team) -> dict[str, Any]:
    """Does what rank 0 says, and gives the profile that rank 0 has made."""
    device = torch.device(asked.device)
    facts = _shared_facts(asked, device_facts(asked, device))
    with _one_thread(device.type == "cpu"), _no_collection():
        if device.type == "cpu":
            touch_heap(_HEAP_BYTES)
        return team.serve(Follower(asked, facts, load_pieces(asked.model_dir), team))


def _shared_facts(asked: Request, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that must be equal on all ranks."""
    limits = {name: value for name, value in dataclasses.asdict(asked).items() if name.startswith("max_")}
    return {**facts, **limits, "config.json": hash_config(asked.model_dir)}


def _check_alike(team: Team, facts: Mapping[str, Any]) -> None:
    found = team.do(team.num_ranks, "differences", [facts], list, "comparing what it is and has")
    problems = [f"rank {rank}: {text}" for rank, differs in enumerate(found) for text in differs]
    if problems:
        raise profile_error("ranks that differ cannot be measured together: " + "; ".join(problems))


def _profile(asked: Request, progress: Progress | None, team: Team | None) -> dict[str, Any]:
    family = family_of(asked.model_dir)
    device = torch.device(asked.device)
    is_cpu = device.type == "cpu"
    facts = device_facts(asked, device)
    config_hash = hash_config(asked.model_dir)
    records = Records(asked.partial, key_of({**facts, "model_config": config_hash, "method": METHOD}))
    if team is not None:
        _check_alike(team, _shared_facts(asked, facts))
    with _one_thread(is_cpu), _no_collection():
        # Links come first: their ranks are forked, and this process has no threads of its own yet.
        network = _network(asked, records, facts["num_neighbours"], team)
        if is_cpu:
            touch_heap(_HEAP_BYTES)
        pieces = load_pieces(asked.model_dir)
        measuring = _Measuring(asked, records, progress, facts["num_neighbours"], team)
        modules, variants = measuring.run(pieces)
    # Counted at the end: kernels are loaded, and libraries make their handles, when they are first used.
    reserve = {"context_bytes": context_bytes(device), "allocator_overhead_permille": 0}
    return {
        "made_from": {"model_config": config_hash},
        "family": family,
        "model": asked.model_dir.resolve().name,
        "is_estimated": False,
        "device": facts,
        **_row_bytes(asked),
        "is_tied": _is_tied(pieces),
        "network": network,
        "modules": modules,
        "variants": variants,
        "optimizer_ns_per_million": records.numbers["optimizer_ns_per_million"],
        "memory": reserve,
    }


def _network(request: Request, records: Records, num_neighbours: int, team: Team | None) -> dict[str, Any]:
    """The links between ranks, measured unless the records have them."""
    name = "network" if request.network else "network quick"
    if name not in records.facts:
        quick, budget_s = not request.network, request.budget_s

        def measure() -> dict[str, Any]:
            return measure_network(request.device, num_neighbours, is_quick=quick, budget_s=budget_s)

        if team is None:
            measured = measure()
        else:
            asked = [num_neighbours, quick, budget_s]
            what = "measuring the links"
            measured = team.do(team.num_ranks, "measure_network", asked, measure, what, together=True)[0]
        if not measured["links"]:
            # Not kept in the records: perhaps the ranks can talk the next time.
            return measured
        records.add_fact(name, measured)
    return records.facts[name]


class _Measuring:
    """The sessions of one request, one after the other."""

    def __init__(
        self,
        request: Request,
        records: Records,
        progress: Progress | None,
        num_neighbours: int,
        team: Team | None,
    ) -> None:
        self.request, self.records, self.progress = request, records, progress
        self.num_neighbours, self.team = num_neighbours, team
        self.gradients = Gradients()
        self.whole = PieceSettings(
            torch.device(request.device), DTYPES[request.dtype], compiles_layers=request.compiles_layers
        )

    def run(self, pieces: Sequence[Piece]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Measures everything, and gives the modules and the variants of the profile."""
        wanted = self._variants()
        share = _WHOLE_SHARE if wanted else 1.0
        built = [Built(piece, self.whole, "", is_tied=_is_tied(pieces)) for piece in pieces]
        signatures = {one.piece.name: one.signature for one in built}
        modules = self._measure(built, "", 0.0, share)
        del built
        variants = []
        for index, settings in enumerate(wanted):
            part = (1.0 - share) / len(wanted)
            num_ranks = self._ranks_for(settings.tensor_parallel_degree)
            label = f"tp{settings.tensor_parallel_degree} lora{settings.lora_rank} "
            if num_ranks > 1:
                # In the records, times with collectives must not be taken for times without.
                label += "collectives "
            # Python's own collector is off while this measures, and a device has no room for two models.
            gc.collect()
            made = self._build_variant(pieces, settings, label, signatures)
            if made is None:
                continue
            if settings.tensor_parallel_degree > num_ranks:
                self._say_alone(settings.tensor_parallel_degree)
            if num_ranks == 1 and settings.tensor_parallel_degree > 1:
                # Silent collectives give all tensors the shapes that they have on a rank, also between the
                # cut maps. The time of the messages is added later, from the links.
                for one in made:
                    add_collectives(one.module, Sums(None, settings.tensor_parallel_degree))
            done = share + index * part
            variants.append(
                {
                    "tensor_parallel_degree": settings.tensor_parallel_degree,
                    "lora_rank": settings.lora_rank,
                    "has_collectives": num_ranks > 1,
                    "modules": self._measure(made, label, done, part, num_ranks) if made else {},
                }
            )
        return modules, variants

    def _ranks_for(self, degree: int) -> int:
        """How many ranks measure a layer cut over `degree`: so many if a node has them, else one alone."""
        is_whole = self.team is not None and degree <= self.team.ranks_per_node
        return degree if is_whole else 1

    def _say_alone(self, degree: int) -> None:
        _LOG.warning(
            "tensor parallel degree %d: %s; one rank's part is measured alone, and what the ranks sum up is "
            "added from the network",
            degree,
            "not run under torchrun" if self.team is None else f"{self.team.ranks_per_node} ranks a node",
        )

    def _variants(self) -> list[PieceSettings]:
        ranks = [0, self.request.lora_rank] if self.request.lora_rank else [0]
        degrees = [1, *self.request.tensor_parallel_degrees]
        return [
            dataclasses.replace(self.whole, tensor_parallel_degree=degree, lora_rank=rank)
            for rank in ranks
            for degree in degrees
            if (degree, rank) != (1, 0)
        ]

    def _build_variant(
        self,
        pieces: Sequence[Piece],
        settings: PieceSettings,
        label: str,
        signatures: Mapping[str, tuple[Any, ...]],
    ) -> list[Built] | None:
        """The pieces that differ from the whole model's; None, with a warning, if one cannot be built."""
        from dflop._native import ProfileError

        try:
            made = [Built(piece, settings, label, is_tied=_is_tied(pieces)) for piece in pieces]
        except ProfileError as error:
            _LOG.warning(
                "not measured: tensor parallel degree %d, LoRA rank %d: %s",
                settings.tensor_parallel_degree,
                settings.lora_rank,
                error,
            )
            return None
        return [one for one in made if one.signature != signatures[one.piece.name]]

    def _measure(
        self, built: Sequence[Built], label: str, done: float, part: float, num_ranks: int = 1
    ) -> dict[str, Any]:
        """Runs one session, and gives its modules as the profile has them."""
        curves = build_curves(built, self.request, self.gradients)
        bench = None
        if num_ranks > 1:
            assert self.team is not None, "without a team one rank measures"
            bench = build_together(built, curves, label, self.team, num_ranks)
        budget_s = self.request.budget_s * part
        session = Session(curves, self.request, budget_s, self.records, self.progress, label, bench)
        session.prepare()
        # Ranks that take part are busy neighbours themselves.
        beside = max(0, self.num_neighbours + 1 - num_ranks)
        with busy_neighbours(beside, neighbour_work(curves, bench.sums if bench else None)):
            session.measure(done, part)
            if not label and "optimizer_ns_per_million" not in self.records.numbers:
                self.records.add_number("optimizer_ns_per_million", _time_optimizer(built, self.whole.device))
        return assemble(curves, self.records)


def _is_tied(pieces: Sequence[Piece]) -> bool:
    """Whether the model's head shares the matrix of its embedding."""
    return any(piece.is_tied for piece in pieces)


def _row_bytes(request: Request) -> dict[str, int]:
    """Bytes of a hidden state, and of a feature where it is wider, as they pass between ranks."""
    config, _ = trained_part(json.loads((request.model_dir / "config.json").read_bytes()))
    # The width of the text model.
    hidden, size = int(config.get("text_config", config)["hidden_size"]), DTYPES[request.dtype].itemsize
    wide = feature_width(request.model_dir)
    return {"hidden_bytes": hidden * size, **({"feature_bytes": wide * size} if wide > hidden else {})}


@contextmanager
def _one_thread(is_wanted: bool) -> Iterator[None]:
    before = torch.get_num_threads()
    if is_wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turns Python's garbage collector off: otherwise it would run at random moments, and be timed."""
    was_enabled = gc.isenabled()
    gc.disable()
    # Existing objects are frozen, so that collections between the runs need not look at them.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _time_optimizer(built: Sequence[Built], device: torch.device) -> int:
    """Median time of the end of a step, in nanoseconds for each 1,000,000 parameters.

    As training ends a step: the norm of the gradients, which are views of one float32 tensor, AdamW in
    float32, on a copy of the weights where they have another type, their rounding, and zeroing. Of a large
    model some of the parameters are enough. Summing gradients over replicas is not measured here.
    """
    weights = _some_parameters(built)
    sizes = [weight.numel() for weight in weights]
    flat = torch.zeros(sum(sizes), device=device)
    masters = [
        torch.nn.Parameter(weight.detach().to(torch.float32, copy=True), requires_grad=True)
        for weight in weights
    ]
    for master, part in zip(masters, flat.split(sizes), strict=True):
        master.grad = part.view_as(master)
    rounded = [pair for pair in zip(weights, masters, strict=True) if pair[0].dtype != torch.float32]
    # With a learning rate of 0 the values stay, and the time is the same.
    optimizer = torch.optim.AdamW(masters, lr=0.0, fused=True)

    @torch.no_grad()
    def end_step() -> None:
        squared_norm(flat)
        optimizer.step()
        for weight, master in rounded:
            weight.copy_(master)
        flat.zero_()

    timer = timer_of(device)
    timings = [timer([lambda _: end_step()]) for _ in range(_OPTIMIZER_STEPS)]
    # The first steps, which allocate the states, do not count.
    median_ns = statistics.median(timing.total_ns for timing in timings[3:])
    return max(1, round(median_ns * 1e6 / flat.numel()))


def _some_parameters(built: Sequence[Built]) -> list[torch.Tensor]:
    """Parameters of the pieces, the small ones first, until there are enough; at least one."""
    named = [parameter for one in built for parameter in one.module.parameters()]
    found: list[torch.Tensor] = []
    total = 0
    for parameter in sorted(named, key=lambda parameter: parameter.numel()):
        if found and total + parameter.numel() > _OPTIMIZER_PARAMETERS:
            break
        found.append(parameter)
        total += parameter.numel()
    return found
