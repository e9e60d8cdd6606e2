"""A curve: times of one part of one piece over its sizes; any allowed size can be run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dflop.profiling.adaptive import Sample, split_of
from dflop.profiling.cases import (
    ATTENTION,
    JOINT,
    LINEAR,
    SPLIT,
    Case,
    Gradients,
    attention_case,
    attention_copies,
    find_layers,
    piece_case,
)
from dflop.profiling.timer import Summary, summarise

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from dflop.profiling.pieces import AttentionKind, Piece, PieceSettings
    from dflop.profiling.records import Records
    from dflop.profiling.request import Request

# PyTorch's CPU flash attention changes its block of queries (32 -> 64 -> 256) at 192 and 768 tokens, and the
# time jumps there. The sizes just before and at each jump are measured, since a line through other points
# would smear it (aten FlashAttentionKernel, torch 2.15).
_CPU_ATTENTION_STEPS = (191, 192, 767, 768)
# On a GPU a curve has points at so many halves of its largest size.
_GPU_HALVES = 4
# Packs for the linear part consist of segments of about this many tokens.
_PACK_SEGMENT_TOKENS = 128
# The smallest size of a curve over hidden states, in tokens: fewer are not worth a point.
_FIRST_TOKENS = 8
LAYERS = ("encoder_layer", "encoder_window_layer", "sound_layer", "llm_layer")
"""Pieces that can recompute."""


class Built:
    """A piece that is built by some settings, with its parameters."""

    def __init__(self, piece: Piece, settings: PieceSettings, label: str, *, is_tied: bool = False) -> None:
        """Builds the piece and sets gradients of zeros.

        Args:
            piece: what to build.
            settings: how.
            label: of the variant: empty, or ending in a space. The names of its cases begin with it.
            is_tied: whether the model's head shares the matrix of its embedding.

        Raises:
            ProfileError: it cannot be built by these settings.
        """
        import torch

        from dflop.models.compiled import compile_layers
        from dflop.models.wide_gradients import sum_gradients, used_once

        self.piece, self.settings, self.label = piece, settings, label
        self.module: nn.Module = piece.build(settings)
        if settings.compiles_layers and piece.name in LAYERS:
            compile_layers(self.module, find_layers(self.module, piece.num_layers))
        once = used_once([self.module])
        # The matrix of a tied head is used again, by another piece.
        is_shared = is_tied and piece.name == "llm_embedding"
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                # As in training, which sums gradients in float32 for weights of any type.
                total = torch.zeros_like(parameter, dtype=torch.float32)
                is_used_once = parameter in once and not is_shared
                sum_gradients(parameter, total, is_used_once=is_used_once)

    @property
    def signature(self) -> tuple[tuple[str, tuple[int, ...], bool], ...]:
        """Shapes of the parameters, and which of them train. Variants with equal ones cost the same."""
        named = self.module.named_parameters()
        return tuple((name, tuple(value.shape), value.requires_grad) for name, value in named)


class Curve:
    """One part of one built piece."""

    def __init__(
        self,
        built: Built,
        kind: AttentionKind | None,
        part: str,
        request: Request,
        gradients: Gradients,
    ) -> None:
        """A curve without points.

        Args:
            built: the piece.
            kind: its attention, where that is timed separately.
            part: `linear` or `attention`; the latter only with `kind`.
            request: says the largest sizes.
            gradients: incoming gradients, shared by all curves.
        """
        self.built, self.kind, self.part, self.gradients = built, kind, part, gradients
        piece = built.piece
        self.name = f"{built.label}{piece.name} {part}"
        self.unit = piece.unit()
        largest, segment = _limits(piece.name, request)
        segment = min(segment, piece.max_segment_tokens or segment)
        segment = max(self._on_unit(min(segment, largest)), self.unit)
        self.pack_tokens = min(max(self._on_unit(_PACK_SEGMENT_TOKENS), self.unit), segment)
        self.last = segment if part == ATTENTION else self.allowed_up(largest)
        is_counted = piece.name == "llm_head" or part == ATTENTION
        self.first = min(self.unit if self.unit > 1 or is_counted else _FIRST_TOKENS, self.last)
        self.recompute = request.recompute if part == LINEAR and piece.name in LAYERS else ()
        self.cases: dict[int, Case] = {}
        self.out_of_memory_at: int | None = None
        """The smallest size that did not fit into memory; None: all sizes fitted so far."""

    def _on_unit(self, size: int) -> int:
        return max(1, round(size / self.unit)) * self.unit

    def allowed(self, size: int) -> int:
        """The size nearest to `size` that can be measured.

        Args:
            size: any.

        Returns:
            A multiple of the unit or, for a pack of several segments, of the tokens of a segment.
        """
        if self.part == LINEAR and self.kind is not None and size >= self.pack_tokens:
            return round(size / self.pack_tokens) * self.pack_tokens
        return self._on_unit(size)

    def allowed_up(self, size: int) -> int:
        """The smallest size that can be measured and is not below `size`.

        Args:
            size: any.

        Returns:
            As `allowed`.
        """
        step = self.unit
        if self.part == LINEAR and self.kind is not None and size >= self.pack_tokens:
            step = self.pack_tokens
        return max(1, math.ceil(size / step)) * step

    def first_sizes(self, is_cpu: bool) -> list[int]:
        """The sizes to begin with: both ends, the middle, and where the curve is known to bend.

        Args:
            is_cpu: whether it runs on a CPU.

        Returns:
            Ascending.
        """
        sizes = {self.first, self.last}
        if not is_cpu:
            # The time is flat as long as starting kernels takes longer than running them, then it rises: a
            # line across that bend would be half too high.
            halves = (self.allowed(self.last >> power) for power in range(1, _GPU_HALVES + 1))
            sizes |= {size for size in halves if self.first < size < self.last}
        middle = split_of(self.first, self.last, self.allowed)
        if middle is not None:
            sizes.add(middle)
        if self.part == ATTENTION:
            sizes.add(self.pack_tokens)
            if is_cpu:
                sizes |= {size for size in _CPU_ATTENTION_STEPS if size % self.unit == 0}
        return sorted(size for size in sizes if size <= self.last)

    def segments(self, size: int) -> list[int]:
        """Into which segments the tokens of a size are split.

        Args:
            size: of the point.

        Returns:
            Tokens of each.
        """
        fixed = self.built.piece.segment_tokens
        if fixed is not None:
            return [fixed] * (size // fixed)
        if self.kind is not None and size >= self.pack_tokens:
            return [self.pack_tokens] * (size // self.pack_tokens)
        return [size]

    def case(self, size: int, *, with_recompute: bool) -> Case:
        """The case of a size, made at its first use.

        Args:
            size: one that is allowed.
            with_recompute: whether a new case is measured with recomputation, too.

        Returns:
            The case.
        """
        if size not in self.cases:
            self.cases[size] = self._make(size, with_recompute)
        return self.cases[size]

    def case_name(self, size: int) -> str:
        """Name of the case of a size in the records.

        Args:
            size: one that is allowed.

        Returns:
            The `Case.name` that the case has or will have.
        """
        copies = self.built.piece.num_layers
        if self.part == ATTENTION:
            assert self.kind is not None, "a curve of attention has its kind"
            copies = attention_copies(size, self.kind, self.built.settings)
        return f"{self.name} {size} x{copies}"

    def _make(self, size: int, with_recompute: bool) -> Case:
        piece, settings, module = self.built.piece, self.built.settings, self.built.module
        if self.part == ATTENTION:
            assert self.kind is not None, "a curve of attention has its kind"
            return attention_case(self.case_name(size), self.kind, size, settings)
        segments = self.segments(size)
        prepared = piece.prepare(module, segments, settings)
        ways = [JOINT]
        if piece.wants_input_gradient and any(p.requires_grad for p in module.parameters()):
            ways.append(SPLIT)
        ways += self.recompute if with_recompute else ()
        return piece_case(
            self.case_name(size),
            prepared.forward,
            self.gradients,
            size=size,
            copies=piece.num_layers,
            inputs=prepared.inputs,
            segments=tuple(segments) if self.kind is not None else (),
            ways=tuple(ways),
            module=module,
            layers=find_layers(module, piece.num_layers) if self.recompute else (),
        )

    def summary(self, size: int, way: str, records: Records) -> Summary | None:
        """Statistics of the runs of one size, for one layer or segment.

        Args:
            size: of the point.
            way: as in `cases.WAYS`.
            records: the runs.

        Returns:
            Medians and spread; None without runs.
        """
        case = self.cases[size]
        timings = records.timings.get(f"{case.name} {way}")
        if not timings:
            return None
        whole = summarise(timings)
        return Summary(
            tuple(phase / case.copies for phase in whole.phases_ns),
            whole.total_ns / case.copies,
            whole.spread_ns / case.copies,
            whole.repeats,
        )

    def samples(self, records: Records) -> dict[int, Sample]:
        """Times of forward and backward together, by size.

        Args:
            records: the runs.

        Returns:
            A sample for each size that has runs.
        """
        found = {size: self.summary(size, JOINT, records) for size in sorted(self.cases)}
        return {
            size: Sample(summary.total_ns, summary.spread_ns, summary.repeats)
            for size, summary in found.items()
            if summary is not None
        }

    def step_ns(self, records: Records, request: Request) -> float:
        """The time that this curve contributes to a large microbatch through the whole model.

        Args:
            records: the runs.
            request: has the size of the microbatch.

        Returns:
            Nanoseconds; 0 without runs.
        """
        samples = self.samples(records)
        if not samples:
            return 0.0
        last = max(samples)
        largest, _ = _limits(self.built.piece.name, request)
        return samples[last].time_ns * self.built.piece.count * max(largest, 1) / last


def _limits(name: str, request: Request) -> tuple[int, int]:
    """Tokens of the largest microbatch, and of its largest segment, for a piece."""
    if name == "llm_head":
        return request.max_label_tokens, request.max_label_tokens
    if name.startswith("llm_"):
        return request.max_llm_tokens, request.max_segment_tokens
    return request.max_encoder_tokens, request.max_encoder_segment_tokens


def build_curves(built: Iterable[Built], request: Request, gradients: Gradients) -> list[Curve]:
    """The curves of some pieces. Attention comes before the linear part that it is subtracted from.

    Args:
        built: the pieces.
        request: says the largest sizes.
        gradients: incoming gradients, shared by all curves.

    Returns:
        Curves without points.
    """
    curves: list[Curve] = []
    for one in built:
        kind = one.piece.attention(one.settings)
        parts: Sequence[str] = (LINEAR,) if kind is None else (ATTENTION, LINEAR)
        curves += [Curve(one, kind, part, request, gradients) for part in parts]
    return curves
