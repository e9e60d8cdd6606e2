"""What is run under the clock: each module of a model at each size of a grid, as the training runs it.

    encoder         tiles                  -> features       whole, over encoder tokens
    llm_embedding   token ids, features    -> hidden_TD      over LLM tokens
    llm_layer       hidden_TD, segments    -> hidden_TD      a few layers at once, over LLM tokens
    llm_layer attn  one segment            -> out            attention alone, over the tokens of the segment
    llm_head        hidden_TD, targets     -> loss           final norm, logits, loss, over label tokens

Backward is `torch.autograd.backward` from an incoming gradient, into parameter gradients that are already
there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dflop.models.adapter import EncoderInput, LlmInput
from dflop.models.packing import attend_packed, attend_segment, uses_varlen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from dflop.models.adapter import ModelAdapter

LINEAR, ATTENTION = "linear", "attention"

# The sizes at which PyTorch's CPU flash attention changes its block of queries (32 -> 64 -> 256), each with
# the size before it: the time jumps there, and a curve through other points would smear the jump (aten
# FlashAttentionKernel, torch 2.15).
_CPU_ATTENTION_STEPS = (191, 192, 767, 768)
# Attention alone is timed over about so many tokens a run: short segments many at a time.
_ATTENTION_RUN_TOKENS = 2048
_MAX_ATTENTION_COPIES = 32
# Packs for the linear part are of segments of this many tokens.
_PACK_SEGMENT_TOKENS = 128
# Layers run at once: on a CPU as many as a small stage has, since one alone would keep its weights in cache.
_MAX_LAYERS, _MAX_LAYERS_LARGE, _LARGE_LAYER_PARAMETERS = 4, 2, 50_000_000
# Of the tokens of a pack, those that features fill; of the tokens of a pack with labels, those with a label.
_FEATURE_RATIO, _TOKENS_PER_LABEL = 0.75, 3


@dataclass
class Case:
    """One module at one size."""

    module: str
    """As in `ModelProfile.MODULES`."""
    part: str
    """`linear` or `attention`."""
    size: int
    """In the unit of its curve."""
    copies: int
    """How many times one run does it: layers at once, or segments at once."""
    forward: Callable[[], Any]
    """Gives what `backward` starts from."""
    backward: Callable[[Any], None]
    """Runs the backward."""
    inputs: tuple[torch.Tensor, ...] = ()
    """Buffers it reads a part of."""
    segments: tuple[int, ...] = ()
    """Of a pack: the segments whose attention is to be subtracted."""
    reset: Callable[[], None] = field(default=lambda: None)
    """Called before each run, not timed."""

    @property
    def name(self) -> str:
        """Identity among the records: sizes and all that changes the time at a size."""
        return f"{self.module} {self.part} {self.size} x{self.copies}"


@dataclass
class Modules:
    """The pieces that are measured."""

    encoder: nn.Module
    embedding: nn.Module
    layers: nn.Module
    head: nn.Module
    num_layers: int
    """Layers in `layers`."""

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, each once."""
        pieces = (self.encoder, self.embedding, self.layers, self.head)
        return [parameter for piece in pieces for parameter in piece.parameters()]


def build_modules(adapter: ModelAdapter, device: torch.device, dtype: torch.dtype) -> Modules:
    """The pieces of a model, with gradients of zeros in place.

    Args:
        adapter: of the model.
        device: to measure on.
        dtype: of the parameters.

    Returns:
        The pieces.
    """
    last = adapter.num_llm_layers
    one = adapter.build_llm_layers(1, device, dtype, 0)
    is_large = sum(p.numel() for p in one.parameters()) > _LARGE_LAYER_PARAMETERS
    num_layers = min(last, _MAX_LAYERS_LARGE if is_large else _MAX_LAYERS)
    modules = Modules(
        adapter.build_encoder(device, dtype, 0),
        adapter.build_llm_stage(0, 0, device, dtype, 0),
        one if num_layers == 1 else adapter.build_llm_layers(num_layers, device, dtype, 0),
        adapter.build_llm_stage(last, 0, device, dtype, 0),
        num_layers,
    )
    for parameter in modules.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return modules


def fill_grid(sizes: Iterable[int], ratio: float) -> list[int]:
    """The sizes, with more between them so that each is at most about `ratio` times the one before.

    Args:
        sizes: at least one, each at least 1.
        ratio: above 1.

    Returns:
        Strictly ascending sizes.
    """
    given = sorted(set(sizes))
    filled = set(given)
    for low, high in zip(given, given[1:], strict=False):
        steps = math.ceil(math.log(high / low) / math.log(ratio) - 1e-9)
        filled |= {round(low * (high / low) ** (step / steps)) for step in range(1, steps)}
    return sorted(filled)


def geometric_grid(first: int, last: int, ratio: float) -> list[int]:
    """Sizes from `first` to `last`, both included, each at most about `ratio` times the one before.

    Args:
        first: at least 1.
        last: if below `first`, the only size (but at least 1).
        ratio: above 1.

    Returns:
        Strictly ascending sizes.
    """
    return [max(last, 1)] if last <= first else fill_grid([first, last], ratio)


def build_cases(
    adapter: ModelAdapter,
    modules: Modules,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_encoder_tokens: int,
    max_llm_tokens: int,
    max_segment_tokens: int,
    max_label_tokens: int,
) -> list[list[Case]]:
    """All cases, curve by curve, each by ascending size.

    Args:
        adapter: of the model.
        modules: its pieces.
        device: they are on.
        dtype: of their parameters.
        max_encoder_tokens: of a microbatch, over all its tiles; 0 if the data has none.
        max_llm_tokens: of a microbatch.
        max_segment_tokens: of a sample.
        max_label_tokens: of a microbatch.

    Returns:
        Curves of cases.
    """
    max_segment_tokens = max(1, min(max_segment_tokens, max_llm_tokens))
    pack_tokens = min(_PACK_SEGMENT_TOKENS, max_segment_tokens)
    below = [size for size in geometric_grid(8, pack_tokens, 2.0) if size < pack_tokens]
    packs = [1] if max_llm_tokens < pack_tokens else geometric_grid(1, -(-max_llm_tokens // pack_tokens), 1.7)
    pack_sizes = [*below, *(count * pack_tokens for count in packs)]
    makers = _Makers(
        adapter, modules, device, dtype, max(pack_sizes[-1], _TOKENS_PER_LABEL * max_label_tokens)
    )

    segment_sizes = [1, *below, pack_tokens, max_segment_tokens]
    if device.type == "cpu":
        segment_sizes += _CPU_ATTENTION_STEPS
    segment_sizes = fill_grid([size for size in segment_sizes if size <= max_segment_tokens], 1.6)
    tile = adapter.encoder_tokens_per_tile
    tiles = geometric_grid(1, max(1, -(-max_encoder_tokens // tile)), 1.6)
    return [
        makers.encoder(tiles),
        [makers.attention(size) for size in segment_sizes],
        [makers.layers(size, pack_tokens) for size in pack_sizes],
        [makers.embedding(size) for size in pack_sizes],
        [makers.head(size) for size in geometric_grid(1, max_label_tokens, 1.8)],
    ]


class _Makers:
    """Makes cases; inputs of all sizes are views of the largest."""

    def __init__(
        self,
        adapter: ModelAdapter,
        modules: Modules,
        device: torch.device,
        dtype: torch.dtype,
        max_tokens: int,
    ) -> None:
        self.adapter, self.modules, self.device, self.dtype = adapter, modules, device, dtype
        self.generator = torch.Generator().manual_seed(0)
        self.hidden_TD = self._random(max_tokens, adapter.hidden_size)
        self.gradient_TD = self._random(max_tokens, adapter.hidden_size)
        self.ids_T = torch.randint(0, adapter.vocab_size, (max_tokens,), generator=self.generator).to(device)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def _leaf(self, count: int) -> torch.Tensor:
        """What arrives from the rank before: a fresh leaf that wants a gradient."""
        return self.hidden_TD[:count].detach().requires_grad_()

    def encoder(self, tiles: Iterable[int]) -> list[Case]:
        sizes = list(tiles)
        side = self.adapter.image_size
        pixels_NCHW = self._random(max(sizes), 3, side, side)
        return [self._encoder_case(pixels_NCHW[:count]) for count in sizes]

    def _encoder_case(self, pixels_NCHW: torch.Tensor) -> Case:
        count = pixels_NCHW.shape[0]
        media = self.adapter.example_media(count)
        batch = EncoderInput(pixels_NCHW, media)
        gradient_ED = self._random(sum(grid.num_features for grid in media), self.adapter.hidden_size)

        def forward() -> torch.Tensor:
            return self.modules.encoder(batch)

        def backward(features_ED: torch.Tensor) -> None:
            torch.autograd.backward(features_ED, gradient_ED)

        size = count * self.adapter.encoder_tokens_per_tile
        return Case("encoder", LINEAR, size, 1, forward, backward, inputs=(pixels_NCHW,))

    def _batch(self, segments: Sequence[int], num_features: int, num_labels: int) -> LlmInput:
        total = sum(segments)
        bounds = torch.tensor([0, *segments]).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(size) for size in segments])
        mask = torch.zeros(total, dtype=torch.bool)
        mask[:num_features] = True
        targets = torch.full((total,), -100)
        targets[total - num_labels :] = self.ids_T[total - num_labels : total].cpu()
        parts = (self.ids_T[:total], mask, positions, bounds, targets)
        return LlmInput(*(part.to(self.device) for part in parts))

    def embedding(self, size: int) -> Case:
        num_features = int(_FEATURE_RATIO * size)
        batch = self._batch([size], num_features, 0)

        def forward() -> torch.Tensor:
            return self.modules.embedding(batch, self._leaf(num_features))

        def backward(hidden_TD: torch.Tensor) -> None:
            torch.autograd.backward(hidden_TD, self.gradient_TD[:size])

        return Case("llm_embedding", LINEAR, size, 1, forward, backward, inputs=(self.hidden_TD, self.ids_T))

    def layers(self, size: int, pack_tokens: int) -> Case:
        segments = [pack_tokens] * (size // pack_tokens) if size >= pack_tokens else [size]
        batch = self._batch(segments, 0, 0)

        def forward() -> torch.Tensor:
            return self.modules.layers(batch, self._leaf(size))

        def backward(hidden_TD: torch.Tensor) -> None:
            torch.autograd.backward(hidden_TD, self.gradient_TD[:size])

        return Case(
            "llm_layer",
            LINEAR,
            size,
            self.modules.num_layers,
            forward,
            backward,
            inputs=(self.hidden_TD,),
            segments=tuple(segments),
        )

    def attention(self, size: int) -> Case:
        shape = self.adapter.attention
        copies = max(1, min(_MAX_ATTENTION_COPIES, _ATTENTION_RUN_TOKENS // size))
        scaling = shape.head_size**-0.5
        heads = (shape.num_heads, shape.num_key_value_heads, shape.num_key_value_heads)
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        # One call takes all segments where the kernel does; else each is a call of its own, as in the loop.
        fused = uses_varlen(probe)
        calls, tokens = (1, size * copies) if fused else (copies, size)
        inputs = [
            # Rows of a token lie together, as in the output of a projection.
            [
                self._random(1, tokens, count, shape.head_size).transpose(1, 2).requires_grad_()
                for count in heads
            ]
            for _ in range(calls)
        ]
        gradients = [self._random(1, tokens, shape.num_heads, shape.head_size) for _ in range(calls)]
        bounds = torch.arange(0, (copies + 1) * size, size, dtype=torch.int32, device=self.device)

        def forward() -> list[torch.Tensor]:
            if fused:
                query, key, value = inputs[0]
                return [attend_packed(query, key, value, bounds, [size] * copies, scaling)]
            return [attend_segment(q, k, v, scaling).transpose(1, 2) for q, k, v in inputs]

        def backward(outputs: list[torch.Tensor]) -> None:
            torch.autograd.backward(outputs, gradients)

        def reset() -> None:
            # In a layer these gradients are not accumulated but passed on.
            for states in inputs:
                for tensor in states:
                    tensor.grad = None

        return Case("llm_layer", ATTENTION, size, copies, forward, backward, reset=reset)

    def head(self, size: int) -> Case:
        total = _TOKENS_PER_LABEL * size
        batch = self._batch([total], 0, size)
        scale = torch.tensor(1.0 / size, device=self.device)

        def forward() -> torch.Tensor:
            return self.modules.head(batch, self._leaf(total))

        def backward(loss: torch.Tensor) -> None:
            torch.autograd.backward(loss, scale)

        return Case("llm_head", LINEAR, size, 1, forward, backward, inputs=(self.hidden_TD,))
