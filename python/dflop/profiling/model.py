"""`dflop profile model`: time and memory of each module over sizes chosen as it goes.

    request --> pieces of the model --> curves --session under the clock--> records --> ModelProfile

The model as it trains, whole, comes first; then each variant (one rank's part under tensor parallelism,
LoRA), of which only the modules that differ are measured.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import platform
import statistics
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from dflop.profiling.artifact import hash_config
from dflop.profiling.assemble import assemble
from dflop.profiling.cases import Gradients
from dflop.profiling.curves import Built, build_curves
from dflop.profiling.families import family_of, load_pieces
from dflop.profiling.memory import touch_heap
from dflop.profiling.neighbour import busy_neighbours
from dflop.profiling.network import measure_network
from dflop.profiling.pieces import PieceSettings
from dflop.profiling.records import Records, key_of
from dflop.profiling.request import DTYPES, Request
from dflop.profiling.session import Session, neighbour_work
from dflop.profiling.timer import timer_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dflop.profiling.pieces import Piece
    from dflop.profiling.progress import Progress

_LOG = logging.getLogger("dflop")

METHOD = 3
"""Raised when a change to the measuring makes older records incomparable."""
# Of the time, what the whole model has where there are variants, too.
_WHOLE_SHARE = 0.6
_OPTIMIZER_STEPS = 20
_HEAP_BYTES = 512 << 20


def profile_model(request: Mapping[str, Any], progress: Progress | None = None) -> dict[str, Any]:
    """Measures a model and returns the fields of `ModelProfile`, in order.

    On a CPU it uses one thread and, beside it, as many busy processes as training will have other ranks. Runs
    that `partial` already holds are not run again; an interruption loses the run it strikes, no more.

    Args:
        request: see `Request`.
        progress: told after each run.

    Returns:
        The profile, ready for `write_artifact`.

    Raises:
        FileNotFoundError: there is no model.
        ProfileError: the model cannot be built, or not even the smallest size of a module fits the device.
        ValueError: the request is not sound.
    """
    asked = Request.parse(request)
    family = family_of(asked.model_dir)
    device = torch.device(asked.device)
    is_cpu = device.type == "cpu"
    facts = _device_facts(asked, device)
    reserve = {"context_bytes": _context_bytes(device), "allocator_overhead_permille": 0}
    config_hash = hash_config(asked.model_dir)
    records = Records(asked.partial, key_of({**facts, "model_config": config_hash, "method": METHOD}))
    with _one_thread(is_cpu), _no_collection():
        # First: its ranks are forked, and this process has no threads of its own yet.
        network = _network(asked, records, facts["num_neighbours"])
        if is_cpu:
            touch_heap(_HEAP_BYTES)
        pieces = load_pieces(asked.model_dir)
        modules, variants = _Measuring(asked, records, progress, facts["num_neighbours"]).run(pieces)
    return {
        "made_from": {"model_config": config_hash},
        "family": family,
        "model": asked.model_dir.resolve().name,
        "is_estimated": False,
        "device": facts,
        "hidden_bytes": _hidden_size(asked) * DTYPES[asked.dtype].itemsize,
        "network": network,
        "modules": modules,
        "variants": variants,
        "optimizer_ns_per_million": records.numbers["optimizer_ns_per_million"],
        "memory": reserve,
    }


def _network(request: Request, records: Records, num_neighbours: int) -> dict[str, Any]:
    """The links between ranks, measured unless the records have them."""
    name = "network" if request.network else "network quick"
    if name not in records.facts:
        measured = measure_network(
            request.device, num_neighbours, is_quick=not request.network, budget_s=request.budget_s
        )
        if not measured["links"]:
            # Perhaps the ranks can talk the next time.
            return measured
        records.add_fact(name, measured)
    return records.facts[name]


class _Measuring:
    """The sessions of one request, one after the other."""

    def __init__(
        self, request: Request, records: Records, progress: Progress | None, num_neighbours: int
    ) -> None:
        self.request, self.records, self.progress = request, records, progress
        self.num_neighbours = num_neighbours
        self.gradients = Gradients()
        self.whole = PieceSettings(torch.device(request.device), DTYPES[request.dtype])

    def run(self, pieces: Sequence[Piece]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Measures all; gives the modules and the variants of the profile."""
        wanted = self._variants()
        share = _WHOLE_SHARE if wanted else 1.0
        built = [Built(piece, self.whole, "") for piece in pieces]
        signatures = {one.piece.name: one.signature for one in built}
        modules = self._measure(built, "", 0.0, share)
        del built
        variants = []
        for index, settings in enumerate(wanted):
            part = (1.0 - share) / len(wanted)
            label = f"tp{settings.tensor_parallel_degree} lora{settings.lora_rank} "
            made = self._build_variant(pieces, settings, label, signatures)
            if made is None:
                continue
            variants.append(
                {
                    "tensor_parallel_degree": settings.tensor_parallel_degree,
                    "lora_rank": settings.lora_rank,
                    "has_collectives": False,
                    "modules": self._measure(made, label, share + index * part, part) if made else {},
                }
            )
        return modules, variants

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
        """The pieces that differ from those of the whole; None, with a warning, if one cannot be built."""
        from dflop._native import ProfileError

        try:
            made = [Built(piece, settings, label) for piece in pieces]
        except ProfileError as error:
            _LOG.warning(
                "not measured: tensor parallel degree %d, LoRA rank %d: %s",
                settings.tensor_parallel_degree,
                settings.lora_rank,
                error,
            )
            return None
        return [one for one in made if one.signature != signatures[one.piece.name]]

    def _measure(self, built: Sequence[Built], label: str, done: float, share: float) -> dict[str, Any]:
        """One session: its modules as the profile has them."""
        curves = build_curves(built, self.request, self.gradients)
        budget_s = self.request.budget_s * share
        session = Session(curves, self.request, budget_s, self.records, self.progress, label)
        session.prepare()
        with busy_neighbours(self.num_neighbours, neighbour_work(curves)):
            session.measure(done, share)
            if not label and "optimizer_ns_per_million" not in self.records.numbers:
                self.records.add_number("optimizer_ns_per_million", _time_optimizer(built, self.whole.device))
        return assemble(curves, self.records)


def _hidden_size(request: Request) -> int:
    """Width of what passes between ranks: of the text model, from the configuration."""
    config = json.loads((request.model_dir / "config.json").read_bytes())
    text = config.get("text_config", config)
    return int(text["hidden_size"])


def _device_facts(request: Request, device: torch.device) -> dict[str, Any]:
    """`Device` of the profile."""
    is_cpu = device.type == "cpu"
    return {
        "kind": device.type,
        "name": _device_name(device),
        "num_threads": 1 if is_cpu else 0,
        "num_neighbours": request.num_neighbours if is_cpu else 0,
        "dtype": request.dtype,
        "torch": torch.__version__,
        "driver": "" if is_cpu else _driver_version(),
        # Ranks on a CPU share what there is.
        "memory_bytes": 0 if is_cpu else torch.cuda.get_device_properties(device).total_memory,
    }


def _driver_version() -> str:
    """Version of the GPU's driver, as `nvidia-smi` says it; else the newest CUDA that the driver knows."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return answer.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return f"CUDA {cast('Any', torch._C)._cuda_getDriverVersion()}"


def _context_bytes(device: torch.device) -> int:
    """Bytes of the device that are taken before the first tensor; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info(device)
    return max(total - free - torch.cuda.memory_reserved(device), 0)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
    """Python's garbage collector strikes at random; here it would strike under the clock."""
    was_enabled = gc.isenabled()
    gc.disable()
    # What is there now stays: collections in between need not look at it.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _time_optimizer(built: Sequence[Built], device: torch.device) -> int:
    """Median time of the end of a step, in nanoseconds for each 1,000,000 parameters.

    Norm of the gradients, AdamW and zeroing, the gradients being views of one tensor as in training. What
    replicas send each other to sum them is not measured.
    """
    parameters = [parameter for one in built for parameter in one.module.parameters()]
    before = [parameter.grad for parameter in parameters]
    dtype = parameters[0].dtype
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=dtype, device=device)
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    # A learning rate of 0 leaves the values and costs the same.
    optimizer = torch.optim.AdamW(parameters, lr=0.0, foreach=True)

    def end_step() -> None:
        torch.linalg.vector_norm(flat, dtype=torch.float64)
        optimizer.step()
        flat.zero_()

    timer = timer_of(device)
    timings = [timer([lambda _: end_step()]) for _ in range(_OPTIMIZER_STEPS)]
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
    # The first steps make the states.
    median_ns = statistics.median(timing.total_ns for timing in timings[3:])
    return max(1, round(median_ns * 1e6 / flat.numel()))
