"""What a model family must tell us: how to build its pieces and what passes between them.

    inputs_N, media ------> encoder ---> features_ED --(boundary)--+
    input_ids_T, feature_mask_T -----------------------------------+--> LLM stage --> hidden_TD --> loss

Shape letters, here and in every file of `models/`:
    N inputs: tiles, patches or windows of sound
    P encoder tokens    E feature tokens   T LLM tokens
    D width             V vocabulary       M samples

Parallelism is applied from outside: nothing here knows a rank. Parameter names are those of the Hugging Face
model as a whole, so that weights, references and checkpoints speak of the same tensors in every layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dflop.models.tensor import WHOLE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.media import MediaFile
    from dflop.models.tensor import TensorRank


IGNORED = -100
"""Target of a position that carries no loss, as everywhere in PyTorch."""
EXAMPLE_SIZE = (480, 640)
"""Height and width in pixels of a usual photograph (the commonest size of COCO), for measuring."""


@dataclass(frozen=True)
class MediaGrid:
    """How what is read of one medium becomes features; sizes are in pixels, as displayed."""

    kind: str
    """`image`, `multi_image` (one of several of its sample), `video` or `audio`."""
    num_tiles: int
    """Its tiles: those of an image (base tile included), a video's frames, windows of a sound. Where pictures
    keep their own resolution: 1 an image, and the frame pairs of a video."""
    height: int
    """Height of the image, in pixels; 0 for a sound."""
    width: int
    """Width of the image, in pixels; 0 for a sound."""
    num_features: int
    """LLM tokens it fills; the encoder must give exactly as many rows."""
    is_end: bool = True
    """Whether its last tile is here; false for tiles of a medium whose rest another rank encodes."""
    patches: tuple[int, int] | None = None
    """Rows and columns of patches of a tile, where pictures keep their own resolution."""
    sampled_fps: float | None = None
    """Frames read a second of video; none for images and sounds, and where the file does not tell."""

    @property
    def num_inputs(self) -> int:
        """Rows of `EncoderInput.inputs_N` that are its own."""
        return self.num_tiles * math.prod(self.patches or (1,))


@dataclass(frozen=True)
class EncoderInput:
    """What the encoder reads for the samples it has of one microbatch."""

    inputs_N: torch.Tensor
    """[N, *input_shape], dtype of the model, this rank's device; N may be 0."""
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
    """[T] int64; restarts at 0 with each sample. With M-RoPE [3, T]: time, height and width."""
    cu_seqlens: torch.Tensor
    """[M + 1] int32; sample m holds rows cu_seqlens[m]:cu_seqlens[m + 1]."""
    targets_T: torch.Tensor
    """[T] int64; the id that position t must predict (the next token), -100 where there is no loss."""
    # What a forward must know on the host. A device that is asked answers when all before it is done:
    # it is found where the batch is packed, and goes along.
    segment_tokens: tuple[int, ...] = ()
    """Rows of each sample; found from `cu_seqlens`."""
    num_features: int = -1
    """Places of `feature_mask_T`; found from it."""
    target_rows_K: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[K] int64; positions with a target, in order; found from `targets_T`."""

    def __post_init__(self) -> None:
        if self.num_features < 0:
            found = {
                "segment_tokens": tuple(self.cu_seqlens.diff().tolist()),
                "num_features": int(self.feature_mask_T.sum()),
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
    num_encoder_layers: int
    num_run_layers: int
    """Layers of the encoder that a forward runs: its last ones may rest."""
    runs_read_inputs: bool
    """Whether every run of the encoder's layers needs `inputs_N`; else the first alone."""
    num_llm_layers: int
    hidden_size: int
    """D of features and hidden states at the boundary."""
    input_shape: tuple[int, ...]
    """Of one input: a tile of pixels (3, S, S), values of a patch (C,), a window of sound (B + 1, F)."""
    encoder_tokens_per_tile: int
    """Encoder tokens of the example's tile; with tiles and windows, P of every one."""
    vocab_size: int
    """V."""
    attention: AttentionShape
    """What the profiler times alone."""

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
        memory and no values yet. With `layers` (of `num_run_layers`) it is that run of layers, with what
        stands before them where they are the first, and with the projector where they are the last:
        `forward(EncoderInput, hidden_RU) -> hidden_RU`, hidden_RU being nothing before the first run.
        `tensor` says whose part of the layers it is: `add_collectives` then makes the ranks give the whole
        together.
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
    ) -> nn.Module:
        """A run of layers of the LLM backbone.

        Holds the embedding if `first_layer` is 0; final norm and head if the run ends at the last layer.
        Without a seed as in `build_encoder`.
        `forward(batch: LlmInput, incoming: Tensor) -> Tensor`: `incoming` is features_ED [E, D] for the first
        stage and hidden_TD [T, D] for the others; the result is hidden_TD, or, from the last stage, the sum
        of the cross entropy over all targets (a scalar, float32), not divided by anything.
        """
        ...

    def row_width(self, layer: int) -> int:
        """Values of a row that pass to a run of the encoder's layers which begins with `layer`."""
        ...

    def num_rows(self, media: Sequence[MediaGrid]) -> int:
        """Rows of media between two runs of the encoder's layers."""
        ...

    def build_llm_layers(
        self, num_layers: int, device: torch.device, dtype: torch.dtype, seed: int
    ) -> nn.Module:
        """The first `num_layers` layers without embedding, norm and head, called as a stage in the middle."""
        ...

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Media of a usual kind with `num_tiles` tiles in all, for measuring the encoder."""
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
            grid: the medium as profiled, or the part of it that the frames are; families whose frames' size
                depends on how many are read need it.

        Returns:
            [n, *input_shape], normalised, float32, CPU.

        Raises:
            dflop.ProfileError: the file cannot be decoded, or is not what `grid` says; the message names it.
        """
        ...
