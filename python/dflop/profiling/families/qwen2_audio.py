"""Qwen2-Audio: a Whisper encoder over windows of 30 seconds, pooling by two, a linear projector.

    encoder_embedding   mel_NBF    -> hidden_NPV      two convolutions; 3,000 mel frames give 1,500 tokens
    encoder_layer       hidden_NPV -> hidden_NPV      attention within a window
    projector           hidden_NPV -> features_ED     pool of two, norm, linear map

A window is read whole, silence included, and the data profile counts it so. Attention is measured with a
mask, as in training, where the mask hides keys of silence. Only the layers are cut by tensor parallelism.
Shape letters: N windows, B mel bins, F mel frames, P encoder tokens, V and D widths of encoder and backbone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dflop.models.families.qwen2_audio import Qwen2Audio
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.source import Source
from dflop.profiling.families.tiles import Modules, TileEncoder, project_by, tile_pieces

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def _set_layers(audio: Any, count: int) -> None:
    # Some versions of transformers have the same field under another name.
    audio.encoder_layers = audio.num_hidden_layers = count


def pieces_of(
    family: Qwen2Audio, pooling: tuple[str, ...] = ("avg_pooler",), is_masked: bool = True
) -> list[Piece]:
    """The pieces of a model of the kind.

    Args:
        family: its adapter of training, which has checked the configuration.
        pooling: modules of the tower between its layers and its norm.
        is_masked: whether its layers take a mask.

    Returns:
        Six pieces.
    """
    source = Source(family.model_dir, family.config_class, family.model_class, _set_layers)
    audio = source.encoder
    window: int = audio.max_source_positions
    encoder = TileEncoder(
        num_layers=audio.encoder_layers,
        tokens=window,
        width=audio.d_model,
        shape=family.input_shape,
        plan=family.encoder_plan(),
        embedding=lambda whole: Modules(
            whole,
            tuple(f"audio_tower.{name}" for name in ("conv1", "conv2", "embed_positions")),
            family.embed,
        ),
        layers=lambda whole: whole.model.audio_tower.layers,
        projector=lambda whole: Modules(
            whole,
            (
                *(f"audio_tower.{name}" for name in (*pooling, "layer_norm")),
                "multi_modal_projector",
            ),
            project_by(family),
        ),
        # The mask of a window without silence. It must exist, since another kernel runs without a mask.
        arguments=(torch.ones(1, 1, window, window, dtype=torch.bool) if is_masked else None,),
    )
    return [*tile_pieces(source, encoder), *backbone_pieces(source)]


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Qwen2-Audio model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(Qwen2Audio(model_dir))
