"""What a model family must tell us: how to build its pieces and what passes between them.

    inputs_N, media ------> encoder ---> features_ED --(boundary)--+
    input_ids_T, feature_mask_T -----------------------------------+--> LLM stage --> hidden_TD --> loss

Shape letters, here and in every file of `models/`:
    N inputs: tiles, patches or windows of sound
    P encoder tokens    E feature tokens   T LLM tokens
    D width             V vocabulary       M samples

Parallelism is applied from outside: nothing here knows a rank. A parameter has the name that it has in the
whole Hugging Face model, so that weights and checkpoints name the same tensors in every layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dflop.models.expert_ranks import ALL_EXPERTS
from dflop.models.tensor import WHOLE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.expert_ranks import ExpertRank
    from dflop.models.media import MediaFile
    from dflop.models.tensor import TensorRank


IGNORED = -100
"""Target of a position that carries no loss, as everywhere in PyTorch."""
EXAMPLE_SIZE = (480, 640)
"""Height and width in pixels of a usual photograph (the commonest size of COCO), for measuring."""


@dataclass(frozen=True)
class MediaGrid:
    """One medium, or the part of it that this rank reads: its tiles and features. Sizes are as displayed."""

    kind: str
    """`image`, `multi_image` (one of several of its sample), `video` or `audio`."""
    num_tiles: int
    """Tiles of an image (base tile included), frames of a video, or windows of a sound. In families where
    pictures keep their own resolution: 1 for an image, and the number of frame pairs of a video."""
    height: int
    """Height of the image, in pixels; 0 for a sound."""
    width: int
    """Width of the image, in pixels; 0 for a sound."""
    num_features: int
    """How many LLM tokens it fills; the encoder must give exactly so many rows."""
    is_end: bool = True
    """Whether the last tile of the medium is among these; false where another rank encodes the last tile."""
    is_start: bool = True
    """The same of the first tile."""
    patches: tuple[int, int] | None = None
    """Rows and columns of patches of a tile, where pictures keep their own resolution; beside
    such pictures, of a window of sound, how many rows it is to the encoder, and 1."""
    first_patches: tuple[int, int] | None = None
    """The same of the first tile of the whole medium, where it may differ: a whole picture before slices."""
    last_patches: tuple[int, int] | None = None
    """The same of the last tile, where it may differ: a thumbnail."""
    last_segment_tokens: int | None = None
    """Encoder tokens of the last segment of the whole medium: the last window of a sound may be short."""
    sampled_fps: float | None = None
    """Frames read a second of video; none for images and sounds, and where the file does not tell."""

    @property
    def num_inputs(self) -> int:
        """How many rows of `EncoderInput.inputs_N` belong to it."""
        return sum(math.prod(sides) for sides in self.tile_patches())

    def inputs_before(self, tile: int) -> int:
        """How many of its rows stand before those of one of its tiles, by its number from 0."""
        return sum(math.prod(sides) for sides in self.tile_patches()[:tile])

    def tile_patches(self) -> list[tuple[int, ...]]:
        """Rows and columns of patches of each of its tiles; (1,) where a tile is one row."""
        sides: list[tuple[int, ...]] = [self.patches or (1,)] * self.num_tiles
        if self.first_patches is not None and self.is_start:
            sides[0] = self.first_patches
        if self.last_patches is not None and self.is_end:
            sides[-1] = self.last_patches
        return sides


@dataclass(frozen=True)
class EncoderInput:
    """What the encoder reads for the samples it has of one microbatch."""

    inputs_N: torch.Tensor
    """[N, *input_shape], dtype of the model, this rank's device; N may be 0. Before the forward it is on the
    CPU, or on the meta device where another rank of the tensor group has the values and sends them."""
    media: Sequence[MediaGrid]
    """In the order of the inputs."""


@dataclass(frozen=True)
class LlmInput:
    """Packed samples of one microbatch, as every LLM stage sees them; T may be 0."""

    input_ids_T: torch.Tensor
    """[T] int64; placeholder ids where features go."""
    feature_mask_T: torch.Tensor
    """[T] bool; true where a feature row takes the place of the embedding, in order."""
    positions_T: torch.Tensor
    """[T] int64; restarts at 0 with each sample. With M-RoPE [3, T]: time, height and width; float32 where
    positions in time are no whole numbers (Qwen3-Omni)."""
    cu_seqlens: torch.Tensor
    """[M + 1] int32; sample m holds rows cu_seqlens[m]:cu_seqlens[m + 1]."""
    targets_T: torch.Tensor
    """[T] int64; the id that position t must predict (the next token), -100 where there is no loss."""
    # What a forward must know on the host. To read it from the device would wait for all its earlier work.
    # So these fields are computed when the batch is packed, and go along.
    segment_tokens: tuple[int, ...] = ()
    """Rows of each sample; computed from `cu_seqlens`."""
    num_features: int = -1
    """How many places `feature_mask_T` has; computed from it."""
    target_rows_K: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[K] int64; positions with a target, ascending; computed from `targets_T`."""
    feature_rows_E: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[E] int64; positions of features, ascending; computed from `feature_mask_T`."""

    def __post_init__(self) -> None:
        if self.num_features < 0:
            rows_E = self.feature_mask_T.nonzero().squeeze(1)
            found = {
                "segment_tokens": tuple(self.cu_seqlens.diff().tolist()),
                "num_features": len(rows_E),
                "feature_rows_E": rows_E,
                "target_rows_K": (self.targets_T != IGNORED).nonzero().squeeze(1),
            }
            for name, value in found.items():
                object.__setattr__(self, name, value)


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of the backbone's attention, one layer."""

    num_heads: int
    """Heads of the queries."""
    num_key_value_heads: int
    """Heads of keys and values; divides `num_heads`."""
    head_size: int
    """Width of a head."""


class ModelAdapter(Protocol):
    """The answers a family gives. One instance per process; it holds configuration, never parameters."""

    family: str
    field_prefix: str
    """What stands before the names of its fields in `config.json`: the section of a thinker, or nothing."""
    num_encoder_layers: int
    num_run_layers: int
    """How many layers of the encoder a forward runs; the tower may have further layers that nothing reads."""
    runs_read_inputs: bool
    """Whether every run of the encoder's layers needs `inputs_N`; if false, only the first run does."""
    num_llm_layers: int
    hidden_size: int
    """D of hidden states."""
    feature_width: int
    """W of a feature: D, or a multiple of it where layers of the backbone add features too (DeepStack)."""
    input_shape: tuple[int, ...]
    """Tensor shape of one input: a tile (3, S, S), a patch (C,), or a window of sound (B + 1, F)."""
    encoder_tokens_per_tile: int
    """Encoder tokens of a tile of `example_media`; where all tiles have one size, of every tile (P)."""
    vocab_size: int
    """V."""
    attention: AttentionShape
    """The attention of a backbone layer, which the profiler times by itself."""

    def __init__(self, model_dir: Path) -> None:
        """Reads `config.json` (Hugging Face form) of `model_dir`."""
        ...

    def build_whole(self) -> tuple[nn.Module, Any]:
        """The whole Hugging Face model on the meta device (buffers apart), and its configuration.

        The parameters of all pieces together are its parameters, by the same names.
        """
        ...

    def build_encoder(
        self,
        device: torch.device,
        dtype: torch.dtype,
        seed: int | None,
        layers: range | None = None,
        *,
        tensor: TensorRank = WHOLE,
    ) -> nn.Module:
        """The encoder with its projector; `forward(EncoderInput) -> features_ED` [E, D].

        With no inputs it returns [0, D] without running the encoder. Without a seed its parameters have
        memory but no values yet. With `layers` (of `num_run_layers`) it is only that run of layers. The first
        run also has what stands before the layers, and the last run has the projector. Its forward is
        `forward(EncoderInput, hidden_RU) -> hidden_RU`, with no hidden_RU for the first run. `tensor` says
        for which rank of a tensor group to build. `add_collectives` then makes the ranks give the whole
        result together.
        """
        ...

    def build_llm_stage(
        self,
        first_layer: int,
        num_layers: int,
        device: torch.device,
        dtype: torch.dtype,
        seed: int | None,
        *,
        tensor: TensorRank = WHOLE,
        experts: ExpertRank = ALL_EXPERTS,
    ) -> nn.Module:
        """A run of layers of the LLM backbone.

        Holds the embedding if `first_layer` is 0; final norm and head if the run ends at the last layer.
        Without a seed as in `build_encoder`.
        `forward(batch: LlmInput, incoming: Tensor) -> Tensor`: `incoming` is features_ED [E, D] for the first
        stage and hidden_TD [T, D] for the others; the result is hidden_TD, or, from the last stage, the sum
        of the cross entropy over all targets (a scalar, float32), not divided by anything. `experts` says for
        which rank of an expert group to build; `add_exchange` then makes the ranks give the whole result.
        """
        ...

    def row_width(self, layer: int) -> int:
        """How many values a row has that passes to a run of the encoder's layers beginning with `layer`."""
        ...

    def num_rows(self, media: Sequence[MediaGrid]) -> int:
        """How many rows media have between two runs of the encoder's layers."""
        ...

    def build_llm_layers(
        self, num_layers: int, device: torch.device, dtype: torch.dtype, seed: int
    ) -> nn.Module:
        """The first `num_layers` layers, without embedding, norm and head; called like a middle stage."""
        ...

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Usual media with `num_tiles` tiles in all, to measure the encoder with."""
        ...

    def positions(
        self, input_ids_T: torch.Tensor, feature_mask_T: torch.Tensor, media: Sequence[MediaGrid]
    ) -> torch.Tensor:
        """Positions of the tokens of one sample: [T], from 0; with M-RoPE [3, T]."""
        ...

    def pixels(
        self, file: MediaFile, kind: str, frame_indices: Sequence[int], grid: MediaGrid | None = None
    ) -> torch.Tensor:
        """Decodes one image, frames of one video or one sound, as the family's Hugging Face processor does.

        Args:
            file: the file, or its bytes; its EXIF rotation is applied.
            kind: that of `MediaGrid`.
            frame_indices: frames of a video, ascending from 0; empty for others.
            grid: the medium as profiled, or the part of it with these frames. Needed by families in which the
                size of a frame depends on how many are read.

        Returns:
            [n, *input_shape], normalised, float32, CPU.

        Raises:
            dflop.ProfileError: the file cannot be decoded, or is not what `grid` says; the message names it.
        """
        ...
