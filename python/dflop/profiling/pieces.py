"""What the profiler runs: the pieces of a model, each alone, at any size, on the code path of the training.

    encoder_embedding      pixels or sound -> hidden        over encoder tokens
    encoder_layer          hidden          -> hidden        one layer of the stack
    encoder_window_layer   hidden          -> hidden        the same, with attention within windows
    projector              hidden          -> features      over encoder tokens
    sound_embedding, sound_layer, sound_projector           the same of a second encoder, which reads sounds
    llm_embedding          ids, features   -> hidden        over LLM tokens
    llm_layer              hidden          -> hidden        one layer of the stack
    llm_head               hidden, targets -> loss          final norm, logits, loss, over label tokens

A family's file (`profiling/families/NAME.py`) gives the pieces; `profiling/cases.py` times them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch
    from torch import nn


@dataclass(frozen=True)
class PieceSettings:
    """How a piece is built."""

    device: torch.device
    """The device to measure on."""
    dtype: torch.dtype
    """Dtype of parameters and activations."""
    tensor_parallel_degree: int = 1
    """How many ranks a layer is cut over. What is built is the part of one rank, without collectives."""
    lora_rank: int = 0
    """Rank of the LoRA adapters on the frozen linear maps; 0: none, all parameters train."""
    compiles_layers: bool = False
    """Whether layers are compiled, as `train.compile: layers` asks; `build` does not do it."""


@dataclass(frozen=True)
class AttentionKind:
    """The attention of a layer, to be timed alone; sizes are those of one rank's part."""

    num_heads: int
    """Heads of the queries."""
    num_key_value_heads: int
    """Heads of keys and values; divides `num_heads`."""
    head_size: int
    """Width of a head."""
    is_causal: bool
    """Whether a token sees only those before it."""
    layers_with: float = 1.0
    """Share of the layers that have it; others have linear attention, which is part of their linear time."""
    windows: tuple[int | None, ...] = ()
    """Of the layers that are run at once the window of each, where some see a window; None: all tokens."""
    picture_tokens: int | None = None
    """Features of a picture, where it is seen whole; only with `windows`."""
    whole: tuple[int | None, ...] | None = None
    """Windows of the layers that see pictures whole; None: all. Only with `windows`."""
    heads_of_layers: tuple[tuple[int, int], ...] = ()
    """Of each of `windows` heads of keys and values and width of a head, where these differ."""


@dataclass(frozen=True)
class Prepared:
    """A piece with its inputs for one size."""

    forward: Callable[[], torch.Tensor]
    """Runs the piece on fresh leaves made of `inputs`; gives what the backward starts from."""
    inputs: tuple[torch.Tensor, ...]
    """Buffers of which it reads all or a part."""


class Piece(Protocol):
    """One piece of a model."""

    name: str
    """One of the names at the top of this file."""
    count: int
    """How many such layers, or other modules, the model has."""
    num_layers: int
    """How many of them `build` stacks and runs at once, at least 1. Times and bytes are divided by it."""
    segment_tokens: int | None
    """Tokens of each segment, if the model has segments of one size only; None: of any size. If they have
    one size, attention is part of the linear time."""
    max_segment_tokens: int | None
    """The longest segment that the model has, whatever the data; None: there is no such limit."""
    wants_input_gradient: bool
    """False for a piece that reads pixels, sound or ids: its backward ends there."""
    is_tied: bool
    """Whether it shares its matrix with `llm_embedding`; only `llm_head` may."""

    def attention(self, settings: PieceSettings) -> AttentionKind | None:
        """The attention to be timed alone; None where there is none, or it is part of the linear time."""
        ...

    def unit(self) -> int:
        """Sizes are multiples of this: tokens of a tile, or patches of a feature; 1 if any size will do."""
        ...

    def build(self, settings: PieceSettings) -> nn.Module:
        """The layers of Hugging Face's model, with random values, in training mode, `.grad` unset.

        With `lora_rank`, only the adapters require gradients.
        """
        ...

    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        """The piece with inputs of these segments (tokens each; label tokens for `llm_head`), seeded.

        What arrives from the piece before is a leaf; it requires a gradient if `wants_input_gradient`.
        """
        ...


class PiecesOfModel(Protocol):
    """The function `pieces` that each family's file has."""

    def __call__(self, model_dir: Path) -> list[Piece]:
        """The pieces of the model in `model_dir` (`config.json` in Hugging Face form)."""
        ...
