"""`dflop profile model`: time and memory of each module over a grid of sizes.

    request --> pieces of the model --> cases --rounds under the clock--> records --> ModelProfile

Sizes take turns in every round, so that drift (clock rate, other load) strikes all of them alike. The part
linear in tokens is what a pack of short segments takes less the attention of those segments, timed apart:

    linear(T) = layer(T as n segments of s) - n * attention(s)
"""

from __future__ import annotations

import gc
import logging
import platform
import random
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflop.models import load_adapter
from dflop.profiling.artifact import hash_config
from dflop.profiling.cases import ATTENTION, LINEAR, Case, Modules, build_cases, build_modules
from dflop.profiling.memory import activation_bytes, touch_heap
from dflop.profiling.neighbour import busy_neighbours
from dflop.profiling.network import measure_network
from dflop.profiling.records import Records, key_of
from dflop.profiling.timer import Summary, Timing, summarise, timer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dflop.profiling.progress import Progress

_LOG = logging.getLogger("dflop")

METHOD = 1
"""Raised when a change to the measuring makes older records incomparable."""
MIN_REPEATS = 5
"""Runs of each case, however long they take."""
MIN_REPEATS_LARGE = 3
"""Likewise, of cases that take more than a hundredth of the budget."""
MAX_REPEATS = 400
DEFAULT_BUDGET_S = 20.0
_LARGE_RATIO = 0.01
# Of a round, a cheap case takes up to so many runs: its median costs little to make better.
_MAX_RUNS_A_ROUND = 6
_OPTIMIZER_STEPS = 20
# Part of a pack's time that is left to `linear` at least, should noise make the attention alone longer.
_LINEAR_FLOOR_RATIO = 0.05
_HEAP_BYTES = 512 << 20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    model_dir: Path
    """Folder with `config.json`."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    device: str
    """`cpu` or `cuda`."""
    num_neighbours: int
    """Ranks that will work beside one on this machine; ignored on a GPU."""
    budget_s: float
    """Time under the clock, in seconds; exceeded where `MIN_REPEATS` take longer."""
    max_encoder_tokens: int
    """Largest microbatch to measure, in encoder tokens."""
    max_llm_tokens: int
    """Likewise, in LLM tokens."""
    max_segment_tokens: int
    """Largest sample, in LLM tokens."""
    max_label_tokens: int
    """Largest microbatch, in label tokens."""
    partial: Path | None
    """File of the measurements so far; None keeps none."""
    network: bool = False
    """Whether all links are measured, or only point to point."""

    @staticmethod
    def parse(fields: Mapping[str, Any]) -> Request:
        """The request in `fields`.

        Args:
            fields: as the command line writes them; `out` is for the caller.

        Returns:
            The request.

        Raises:
            ValueError: a field is missing or out of range; the message names it.
        """
        missing = [name for name in ("model_dir", "max_llm_tokens") if name not in fields]
        if missing:
            message = f"request of `profile model`: `{missing[0]}` is missing"
            raise ValueError(message)
        max_llm_tokens = int(fields["max_llm_tokens"])
        request = Request(
            model_dir=Path(fields["model_dir"]),
            dtype=str(fields.get("dtype", "float32")),
            device=str(fields.get("device", "cpu")),
            num_neighbours=int(fields.get("num_neighbours", 0)),
            budget_s=float(fields.get("budget_s") or DEFAULT_BUDGET_S),
            max_encoder_tokens=int(fields.get("max_encoder_tokens", 0)),
            max_llm_tokens=max_llm_tokens,
            max_segment_tokens=int(fields.get("max_segment_tokens") or max_llm_tokens),
            max_label_tokens=int(fields.get("max_label_tokens") or max_llm_tokens),
            partial=Path(fields["partial"]) if fields.get("partial") else None,
            network=bool(fields.get("network", False)),
        )
        rules = [
            ("dtype", request.dtype, request.dtype in _DTYPES, f"one of {', '.join(_DTYPES)}"),
            ("device", request.device, request.device in ("cpu", "cuda"), "`cpu` or `cuda`"),
            ("max_llm_tokens", max_llm_tokens, max_llm_tokens > 0, "above 0"),
            ("num_neighbours", request.num_neighbours, request.num_neighbours >= 0, "0 or more"),
        ]
        for name, value, holds, rule in rules:
            if not holds:
                message = f"request of `profile model`: `{name}` is {value}, must be {rule}"
                raise ValueError(message)
        return request


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
    adapter = load_adapter(asked.model_dir)
    device = torch.device(asked.device)
    is_cpu = device.type == "cpu"
    neighbours = asked.num_neighbours if is_cpu else 0
    facts = {
        "kind": device.type,
        "name": _device_name(device),
        "num_threads": 1 if is_cpu else 0,
        "num_neighbours": neighbours,
        "dtype": asked.dtype,
        "torch": torch.__version__,
    }
    config_hash = hash_config(asked.model_dir)
    records = Records(asked.partial, key_of({**facts, "model_config": config_hash, "method": METHOD}))
    with _one_thread(is_cpu), _no_collection():
        # First, while this process has no threads of its own.
        network = measure_network(asked.device, neighbours, is_quick=not asked.network)
        modules = build_modules(adapter, device, _DTYPES[asked.dtype])
        curves = build_cases(
            adapter,
            modules,
            device,
            _DTYPES[asked.dtype],
            max_encoder_tokens=asked.max_encoder_tokens,
            max_llm_tokens=asked.max_llm_tokens,
            max_segment_tokens=asked.max_segment_tokens,
            max_label_tokens=asked.max_label_tokens,
        )
        if is_cpu:
            touch_heap(_HEAP_BYTES)
        with busy_neighbours(neighbours, _neighbour_work(curves)):
            curves = _warm_up(curves, modules, records)
            _measure(curves, records, timer_of(device), asked.budget_s, progress)
            if "optimizer_ns_per_million" not in records.numbers:
                records.add_number("optimizer_ns_per_million", _time_optimizer(modules, device))
    return {
        "made_from": {"model_config": config_hash},
        "family": adapter.family,
        "device": facts,
        "num_llm_layers": adapter.num_llm_layers,
        "num_encoder_layers": adapter.num_encoder_layers,
        "hidden_bytes": adapter.hidden_size * _DTYPES[asked.dtype].itemsize,
        "network": network,
        "modules": _assemble(curves, modules, records),
        "optimizer_ns_per_million": records.numbers["optimizer_ns_per_million"],
    }


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
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _run(case: Case) -> None:
    case.reset()
    case.backward(case.forward())


def _neighbour_work(curves: Sequence[Sequence[Case]]) -> list[Callable[[], None]]:
    """The middle of each whole module: what another rank does most of the time."""
    chosen = [curve[len(curve) // 2] for curve in curves if curve[0].part == LINEAR]
    return [lambda case=case: _run(case) for case in chosen]


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The CPU allocator has no class of its own for it.
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def _warm_up(curves: Sequence[list[Case]], modules: Modules, records: Records) -> list[list[Case]]:
    """Runs each case once, smallest first, and counts its activations; a curve ends where memory does."""
    kept: list[list[Case]] = []
    parameters = modules.parameters()
    for curve in curves:
        fitting: list[Case] = []
        for case in curve:
            try:
                if f"{case.name} bytes" not in records.numbers:
                    records.add_number(
                        f"{case.name} bytes", activation_bytes(case.forward, parameters, case.inputs)
                    )
                _run(case)
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                records.add_number(f"{case.name} out_of_memory", 1)
                _LOG.warning("%s %s: out of memory at size %d, measured up to the size before", *_names(case))
                break
            fitting.append(case)
        if not fitting:
            from dflop._native import ProfileError

            message = f"`{curve[0].module}` does not fit the device even at size {curve[0].size}"
            raise ProfileError(message)
        kept.append(fitting)
    return kept


def _names(case: Case) -> tuple[str, str, int]:
    return case.module, case.part, case.size


def _measure(
    curves: Sequence[Sequence[Case]],
    records: Records,
    timer: Callable[[Callable[[], Any], Callable[[Any], None]], Timing],
    budget_s: float,
    progress: Progress | None,
) -> None:
    """Rounds over all cases until the budget is spent and each case has its runs."""
    order = random.Random(0)
    cases = [case for curve in curves for case in curve]
    start, spent_before = time.monotonic(), records.spent_ns * 1e-9

    def wanted(case: Case) -> int:
        seen = records.timings[case.name]
        is_large = bool(seen) and seen[-1].total_ns * 1e-9 > _LARGE_RATIO * budget_s
        return MIN_REPEATS_LARGE if is_large else MIN_REPEATS

    def ratio() -> float:
        spent = (spent_before + time.monotonic() - start) / budget_s
        return min(spent, min(len(records.timings[case.name]) / wanted(case) for case in cases), 1.0)

    shown = ratio()
    while ratio() < 1.0 and min(len(records.timings[case.name]) for case in cases) < MAX_REPEATS:
        mean_ns = _mean_ns(cases, records)
        for curve in order.sample(curves, len(curves)):
            # The module is in cache when it is timed, as it is on a rank that runs nothing else.
            _run(curve[0])
            for case in order.sample(curve, len(curve)):
                for _ in range(_runs(case, records, mean_ns)):
                    case.reset()
                    records.add_timing(case.name, timer(case.forward, case.backward))
                if progress is not None:
                    shown = max(shown, ratio())
                    progress(shown, f"{case.module} {case.part} {case.size}")


def _mean_ns(cases: Sequence[Case], records: Records) -> float:
    last = [records.timings[case.name][-1].total_ns for case in cases if records.timings[case.name]]
    return statistics.fmean(last) if last else 0.0


def _runs(case: Case, records: Records, mean_ns: float) -> int:
    """Runs of this case in this round: more where they are cheap."""
    seen = records.timings[case.name]
    return 1 if not seen else max(1, min(_MAX_RUNS_A_ROUND, int(mean_ns / max(seen[-1].total_ns, 1))))


def _time_optimizer(modules: Modules, device: torch.device) -> int:
    """Median time of the end of a step, in nanoseconds for each 1,000,000 parameters.

    Norm of the gradients, AdamW and zeroing, the gradients being views of one tensor as in training. What
    replicas send each other to sum them is not measured.
    """
    parameters = modules.parameters()
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
    timings = [timer(end_step, lambda _: None) for _ in range(_OPTIMIZER_STEPS)]
    # The first steps make the states.
    median_ns = statistics.median(timing.total_ns for timing in timings[3:])
    return max(1, round(median_ns * 1e6 / flat.numel()))


def _assemble(curves: Sequence[Sequence[Case]], modules: Modules, records: Records) -> dict[str, Any]:
    """The `modules` of the profile, by name."""
    layer_parameters = list(modules.layers.parameters())
    counted = {
        "encoder": (list(modules.encoder.parameters()), 1),
        "llm_embedding": (list(modules.embedding.parameters()), 1),
        "llm_head": (list(modules.head.parameters()), 1),
        "llm_layer": (layer_parameters, modules.num_layers),
    }
    attention = {
        case.size: _per_copy(case, records) for curve in curves for case in curve if case.part == ATTENTION
    }
    points: dict[tuple[str, str], list[dict[str, int]]] = {}
    for curve in curves:
        for case in curve:
            if all(size in attention for size in case.segments):
                measured = _less_attention(
                    _per_copy(case, records), [attention[size] for size in case.segments]
                )
                points.setdefault((case.module, case.part), []).append(_point(case, measured))
    return {
        name: {
            LINEAR: {"points": points.get((name, LINEAR), [])},
            ATTENTION: {"points": points.get((name, ATTENTION), [])},
            "num_parameters": sum(p.numel() for p in parameters) // copies,
            "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters) // copies,
        }
        for name, (parameters, copies) in counted.items()
    }


@dataclass(frozen=True)
class _Measured:
    summary: Summary
    activation_bytes: float


def _per_copy(case: Case, records: Records) -> _Measured:
    summary = summarise(records.timings[case.name])
    return _Measured(
        Summary(
            summary.forward_ns / case.copies,
            summary.backward_ns / case.copies,
            summary.spread_ns / case.copies,
            summary.repeats,
        ),
        records.numbers[f"{case.name} bytes"] / case.copies,
    )


def _less_attention(pack: _Measured, segments: Sequence[_Measured]) -> _Measured:
    def less(whole: float, parts: float) -> float:
        return max(whole - parts, _LINEAR_FLOOR_RATIO * whole)

    return _Measured(
        Summary(
            less(pack.summary.forward_ns, sum(s.summary.forward_ns for s in segments)),
            less(pack.summary.backward_ns, sum(s.summary.backward_ns for s in segments)),
            pack.summary.spread_ns,
            pack.summary.repeats,
        ),
        max(pack.activation_bytes - sum(s.activation_bytes for s in segments), 0.0),
    )


def _point(case: Case, measured: _Measured) -> dict[str, int]:
    return {
        "size": case.size,
        # A time of 0 would be free work: the clock's own grain is the least.
        "forward_ns": max(1, round(measured.summary.forward_ns)),
        "backward_ns": max(1, round(measured.summary.backward_ns)),
        "spread_ns": max(0, round(measured.summary.spread_ns)),
        "activation_bytes": round(measured.activation_bytes),
        "repeats": measured.summary.repeats,
    }
