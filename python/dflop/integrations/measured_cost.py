"""What a sample costs by times of the model that trains, on its device: for models of any family.

model, batches of one sample -> times of encoder and LLM -> a line or a parabola each -> cost(tokens)
"""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dflop._native import profile_shapes
from dflop.integrations.backbone import backbone_of
from dflop.integrations.loader import of_first_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# What a component's time may consist of: a constant, tokens, tokens squared. Each has tokens, as else all
# samples would cost the same.
_FORMS = ((1,), (0, 1), (1, 2), (0, 1, 2))


class Curve(NamedTuple):
    """Nanoseconds of forward and backward of one component on one sample, by its tokens."""

    start_ns: float
    """Whatever the sample: launches."""
    token_ns: float
    pair_ns: float
    """By tokens squared."""
    error: float
    """Mean relative error of times that are each predicted from the others; NaN where these are too few."""
    tokens_max: int
    """The most that was measured."""

    def added_ns(self, tokens: int) -> float:
        """What a sample adds to a microbatch, which pays for launches once.

        Args:
            tokens: of the sample.

        Returns:
            Nanoseconds.
        """
        return (self.token_ns + self.pair_ns * tokens) * tokens


@dataclass(frozen=True)
class MeasuredCost:
    """Nanoseconds of a sample in forward and backward, as measured; `dflop.costs` takes it as `cost`."""

    encoder: Curve
    """All that comes before the LLM backbone, the projector too."""
    llm: Curve
    """Backbone, head and loss."""
    num_samples: int
    """Samples that were measured."""

    def __call__(self, tokens: Any) -> tuple[float, float]:
        """The cost of a sample.

        Args:
            tokens: Its encoder tokens and its LLM tokens.

        Returns:
            Nanoseconds that it adds to a microbatch, of encoder and LLM.
        """
        encoder, llm = tokens
        for name, curve, found in (("encoder", self.encoder, encoder), ("LLM", self.llm, llm)):
            if found > curve.tokens_max:
                # Python shows the same words at the same line once.
                most = f"{curve.tokens_max}, the most that was measured"
                message = f"samples have more {name} tokens than {most}: extrapolated"
                warnings.warn(message, stacklevel=2)
        return self.encoder.added_ns(encoder), self.llm.added_ns(llm)

    def __str__(self) -> str:
        parts = []
        for name, curve in (("encoder", self.encoder), ("LLM", self.llm)):
            if curve.tokens_max == 0:
                parts.append(f"{name}: no sample has tokens for it")
                continue
            of_most = curve.added_ns(curve.tokens_max) / curve.tokens_max
            known = not math.isnan(curve.error)
            off = f"predicted from the others: {curve.error:.0%} off" if known else "too few to be tried"
            parts.append(
                f"{name} {curve.token_ns / 1e3:.4g} us a token, {of_most / 1e3:.4g} us in a sample of "
                f"{curve.tokens_max:,} ({off})"
            )
        return f"measured on {self.num_samples} samples: {'; '.join(parts)}"


class _Sample(NamedTuple):
    """A sample to be measured."""

    position: int
    encoder_tokens: int
    llm_tokens: int


class _Times(NamedTuple):
    """What one run took, and what the backbone read."""

    encoder_ns: float
    llm_ns: float
    llm_tokens: int


def measure_cost(
    model: nn.Module,
    batch_of: Callable[[int], Mapping[str, Any]],
    shapes: str | os.PathLike[str] | Iterable[tuple[int, int]],
    *,
    loss: Callable[[nn.Module, Mapping[str, Any]], torch.Tensor] | None = None,
    num_samples: int = 16,
    repeats: int = 3,
) -> MeasuredCost:
    """Times forward and backward of single samples in the model that you train, on the device where it is.

    The samples are those with fewest and most tokens, of encoder and LLM, and others evenly between them.
    Each runs once to warm up, and `repeats` times for the median. The encoder's time is all before the LLM
    backbone begins, and what remains of the backward when the gradient of the backbone's input is there.
    Call it before DDP or FSDP wraps the model, with everything switched on that training uses (gradient
    checkpointing, frozen parts, adapters), and on every rank: rank 0 measures, the others take its numbers.
    Parameters, gradients, modes and random states are afterwards what they were.

    Not measured: collectives, the optimizer, and how much faster a sample is beside others in a microbatch.

    Args:
        model: of transformers, with or without adapters of peft; its parameters fit the device, with their
            gradients.
        batch_of: gives the model's inputs of the sample at a position, alone in its batch, as your collation
            makes them; tensors are moved to the model's device.
        shapes: the path of the data profile of these samples, or (encoder tokens, LLM tokens) of each.
        loss: gives the loss of a batch; by default `model(**batch).loss`. Autocast belongs into it.
        num_samples: samples to measure, at least 4.
        repeats: runs of each, at least 1.

    Returns:
        A function for `dflop.costs("data_profile.parquet", cost=...)`. A warning tells where the backbone
        reads other numbers of tokens than `shapes` says.

    Raises:
        ValueError: no LLM backbone that `get_decoder` finds, a model that is wrapped or on the `meta` device,
            gradients that are there already, no samples, or a loss without gradient.
        torch.OutOfMemoryError: the largest sample does not fit; the message says how large it is.
    """
    if num_samples < 4 or repeats < 1:
        message = f"`num_samples` is {num_samples}, must be at least 4; `repeats` is {repeats}, at least 1"
        raise ValueError(message)
    _check(model)
    return of_first_rank(
        lambda: _measured(model, batch_of, shapes, loss or _loss_of_model, num_samples, repeats),
        "measure the costs",
    )


def _check(model: nn.Module) -> None:
    """A ValueError if it cannot be measured as it is."""
    backbone_of(model)
    wrappers = (nn.parallel.DistributedDataParallel, FullyShardedDataParallel)
    # DeepSpeed's ZeRO-3 gives each parameter an `ds_id`.
    if any(isinstance(module, wrappers) for module in model.modules()) or any(
        isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()
    ):
        message = (
            "the model is wrapped (DDP, FSDP or ZeRO-3): measure it before that, as rank 0 alone runs it"
        )
        raise ValueError(message)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            message = f"`{name}` is on the `meta` device: `cost_of_parameters` needs no values, times do"
            raise ValueError(message)
        if parameter.grad is not None:
            message = f"`{name}` has a gradient: measure before training, or after `zero_grad()`"
            raise ValueError(message)
    device = next(model.parameters()).device
    if device.type == "cpu" and torch.accelerator.is_available():
        message = "the model is on the CPU, and this machine has an accelerator: costs hold for the CPU alone"
        warnings.warn(message, stacklevel=3)


def _measured(
    model: nn.Module, batch_of: Any, shapes: Any, loss: Any, num_samples: int, repeats: int
) -> MeasuredCost:
    samples = _chosen(_samples_of(shapes), num_samples)
    device = next(model.parameters()).device
    measured = []
    with _as_it_was(model, device):
        for sample in _shown(samples):
            batch = _moved(batch_of(sample.position), device)
            try:
                # The first run warms up: kernels are chosen, memory is taken.
                runs = [_run(model, batch, loss, device) for _ in range(1 + repeats)][1:]
            except torch.OutOfMemoryError as error:
                size = f"{sample.encoder_tokens} encoder tokens and {sample.llm_tokens} LLM tokens"
                message = f"sample {sample.position} with {size}: {error}"
                raise torch.OutOfMemoryError(message) from error
            measured.append(
                _Times(
                    statistics.median(run.encoder_ns for run in runs),
                    statistics.median(run.llm_ns for run in runs),
                    runs[0].llm_tokens,
                )
            )
    _warn_of_others(samples, measured)
    encoder = [
        (s.encoder_tokens, t.encoder_ns) for s, t in zip(samples, measured, strict=True) if s.encoder_tokens
    ]
    llm = [(s.llm_tokens, t.llm_ns) for s, t in zip(samples, measured, strict=True)]
    return MeasuredCost(_fitted(encoder), _fitted(llm), len(samples))


def _samples_of(shapes: Any) -> list[_Sample]:
    """The samples of a data profile, or of pairs in order."""
    if isinstance(shapes, (str, os.PathLike)):
        rows, _ = profile_shapes(os.fspath(shapes))
    else:
        rows = [(index, *pair) for index, pair in enumerate(shapes)]
    if not rows:
        message = "there are no samples to measure"
        raise ValueError(message)
    return [_Sample(*map(int, row)) for row in rows]


def _chosen(samples: Sequence[_Sample], num_samples: int) -> list[_Sample]:
    """The largest and the smallest of each component, and others in even steps; largest first."""
    by_llm = sorted(samples, key=lambda s: (s.llm_tokens, s.encoder_tokens, s.position))
    by_encoder = sorted(
        (s for s in by_llm if s.encoder_tokens), key=lambda s: (s.encoder_tokens, s.llm_tokens, s.position)
    )
    ends = [by_llm[0], by_llm[-1], *by_encoder[:1], *by_encoder[-1:]]
    chosen = dict.fromkeys(ends + _evenly(by_encoder, num_samples // 2 - 2))
    others = [sample for sample in by_llm if sample not in chosen]
    chosen |= dict.fromkeys(_evenly(others, num_samples - len(chosen)))
    # What does not fit the device fails first.
    return sorted(chosen, key=lambda s: (s.llm_tokens, s.encoder_tokens), reverse=True)


def _evenly(samples: Sequence[_Sample], num: int) -> list[_Sample]:
    """`num` of an order, or all where it has fewer, in even steps."""
    num = max(0, min(num, len(samples)))
    return [samples[(2 * place + 1) * len(samples) // (2 * num)] for place in range(num)]


def _shown(samples: Sequence[_Sample]) -> Iterable[_Sample]:
    """A bar on a terminal."""
    from tqdm.auto import tqdm

    return tqdm(samples, desc="measuring what samples cost", unit="sample", disable=None)


def _loss_of_model(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    loss = model(**batch).loss
    if loss is None:
        message = "the model gave no loss: the batch needs `labels`, or give `loss`"
        raise ValueError(message)
    return loss


def _run(model: nn.Module, batch: Mapping[str, Any], loss: Any, device: torch.device) -> _Times:
    """One forward and backward, the gradients thrown away."""
    marks = Marks(device)
    num_tokens = 0

    def begins(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal num_tokens
        read = [kwargs.get("inputs_embeds"), kwargs.get("input_ids"), *args[:1]]
        inputs = next((tensor for tensor in read if tensor is not None), None)
        if inputs is None:
            return
        num_tokens = inputs.shape[:2].numel()
        marks.mark("llm")
        if inputs.requires_grad:
            # Called when the gradient of what the backbone reads is whole: the encoder's backward remains.
            inputs.register_hook(lambda _: marks.mark("encoder backward"))

    hook = backbone_of(model).register_forward_pre_hook(begins, with_kwargs=True)
    try:
        marks.mark("start")
        value = loss(model, batch)
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            message = "the loss has no gradient: nothing of the model trains, or `loss` gives no tensor"
            raise ValueError(message)
        if num_tokens == 0:
            message = (
                "the LLM backbone was not run with `inputs_embeds` or `input_ids`: its time is not known"
            )
            raise ValueError(message)
        value.backward()
        marks.mark("end")
    finally:
        hook.remove()
        for parameter in model.parameters():
            parameter.grad = None
    # At least a nanosecond each: times are divided by.
    whole, llm = marks.ns("start", "end"), marks.ns("llm", "encoder backward", "end")
    return _Times(max(whole - llm, 1.0), max(llm, 1.0), num_tokens)


class Marks:
    """Moments of a run: events of the device's queue, or of the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._at: dict[str, Any] = {}

    def mark(self, name: str) -> None:
        """Now, or when the device gets there."""
        if self._device.type == "cpu":
            self._at[name] = time.perf_counter_ns()
            return
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._at[name] = event

    def ns(self, start: str, *ends: str) -> float:
        """From one moment to the first of the others that came."""
        end = self._at[next(name for name in ends if name in self._at)]
        if self._device.type == "cpu":
            return float(end - self._at[start])
        torch.accelerator.synchronize(self._device)
        return float(self._at[start].elapsed_time(end)) * 1e6


@contextmanager
def _as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """In training mode; modes, buffers and random states are what they were afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [] if device.type == "cpu" else [device.index or 0]
    kind = device.type if devices else "cuda"
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            model.train()
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _moved(batch: Any, device: torch.device) -> Any:
    """All tensors of a batch on a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_moved(value, device) for value in batch)
    return batch


def _warn_of_others(samples: Sequence[_Sample], measured: Sequence[_Times]) -> None:
    """Warns where a measured sample is not as long as `shapes` says."""
    other = [(s, t) for s, t in zip(samples, measured, strict=True) if s.llm_tokens != t.llm_tokens]
    if other:
        sample, times = other[0]
        message = (
            f"{len(other)} of {len(samples)} measured samples are not as long as `shapes` says: sample "
            f"{sample.position} has {sample.llm_tokens} LLM tokens there, and the LLM read "
            f"{times.llm_tokens}. "
            "Is the dataset in the order of the data profile, with its chat template, and is nothing padded?"
        )
        warnings.warn(message, stacklevel=4)


def _fitted(points: Sequence[tuple[int, float]]) -> Curve:
    """The form whose predictions of each point from all others are the best; simpler ones at a tie."""
    if not points:
        return Curve(0.0, 0.0, 0.0, float("nan"), 0)
    num_sizes = len({tokens for tokens, _ in points})
    best, best_error = _solved(points, (1,)), float("inf")
    for form in _FORMS:
        # One size fewer is left when one is predicted from the others.
        if num_sizes <= len(form) or (fit := _solved(points, form)) is None:
            continue
        error = _left_out(points, form)
        # A term more must be worth it.
        if error < 0.99 * best_error:
            best, best_error = fit, error
    assert best is not None
    error = best_error if best_error < float("inf") else float("nan")
    return Curve(*best, error, max(tokens for tokens, _ in points))


def _left_out(points: Sequence[tuple[int, float]], form: tuple[int, ...]) -> float:
    """Mean relative error of points that are each predicted from the points of other sizes."""
    errors = []
    for tokens, ns in points:
        fit = _solved([point for point in points if point[0] != tokens], form)
        if fit is None:
            return float("inf")
        errors.append(abs(sum(factor * tokens**power for power, factor in enumerate(fit)) / ns - 1))
    return statistics.fmean(errors)


def _solved(points: Sequence[tuple[int, float]], form: tuple[int, ...]) -> tuple[float, float, float] | None:
    """Factors of 1, tokens and tokens squared, nearest in relative terms; None where one is negative."""
    scale = max(tokens for tokens, _ in points)
    # Rows are divided by their time: a small sample counts as much as a large one.
    rows = [[(tokens / scale) ** power / ns for power in form] for tokens, ns in points]
    system = torch.tensor(rows, dtype=torch.float64)
    solution = torch.linalg.lstsq(system, torch.ones(len(points), 1, dtype=torch.float64)).solution
    factors = [0.0, 0.0, 0.0]
    for power, factor in zip(form, solution.flatten().tolist(), strict=True):
        if factor < 0:
            return None
        factors[power] = factor / scale**power
    return factors[0], factors[1], factors[2]
