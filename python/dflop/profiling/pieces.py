"""What the profiler runs: the pieces of a model, each alone, at any size, on the code path of the training.

    encoder_embedding      pixels or sound -> hidden        over encoder tokens
    encoder_layer          hidden          -> hidden        one layer of the stack
    encoder_window_layer   hidden          -> hidden        the same, with attention within windows
    projector              hidden          -> features      over encoder tokens
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
    """To measure on."""
    dtype: torch.dtype
    """Of parameters and activations."""
    tensor_parallel_degree: int = 1
    """Ranks that a layer is cut over: the piece built is the part of one rank, without its collectives."""
    lora_rank: int = 0
    """Rank of the LoRA adapters on the frozen linear maps; 0: none, all parameters train."""


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


@dataclass(frozen=True)
class Prepared:
    """A piece with its inputs for one size."""

    forward: Callable[[], torch.Tensor]
    """Runs the piece on fresh leaves made of `inputs`; gives what the backward starts from."""
    inputs: tuple[torch.Tensor, ...]
    """Buffers it reads (a part of)."""


class Piece(Protocol):
    """One piece of a model."""

    name: str
    """One of the names above."""
    count: int
    """How many of it the model has."""
    num_layers: int
    """How many of them `build` stacks, at least 1; times and bytes are divided by it."""
    segment_tokens: int | None
    """Tokens of every segment, where the model knows no other: attention is then part of the linear time."""
    wants_input_gradient: bool
    """False for what reads pixels, sound or ids: its backward stops there."""
    is_tied: bool
    """Whether its matrix is that of `llm_embedding`: so it may be with `llm_head`."""

    def attention(self, settings: PieceSettings) -> AttentionKind | None:
        """The attention to be timed apart; None where there is none, or it is part of the linear time."""
        ...

    def unit(self) -> int:
        """Sizes are multiples of this: tokens of a tile, of a merged patch; 1 where any size goes."""
        ...

    def build(self, settings: PieceSettings) -> nn.Module:
        """The layers of Hugging Face's model, with random values, in training mode, `.grad` unset.

        With `lora_rank` only the adapters want gradients.
        """
        ...

    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        """The piece with inputs of these segments (tokens each; label tokens for `llm_head`), seeded.

        The leaf that arrives from the piece before wants a gradient where `wants_input_gradient`.
        """
        ...


class PiecesOfModel(Protocol):
    """What a family's file gives: a function of this form named `pieces`."""

    def __call__(self, model_dir: Path) -> list[Piece]:
        """The pieces of the model in `model_dir` (`config.json` in Hugging Face form)."""
        ...
