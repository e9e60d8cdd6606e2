"""Qwen2-Audio: a Whisper encoder over windows of 30 seconds, pooling by two, a linear projector.

    encoder_embedding   mel_NBF    -> hidden_NPV      two convolutions; 3,000 mel frames give 1,500 tokens
    encoder_layer       hidden_NPV -> hidden_NPV      attention within a window
    projector           hidden_NPV -> features_ED     pool of two, norm, linear map

The window is read whole, silence included, as the data profile counts it, and attention is measured with the
mask that hides silence as keys. Shape letters: N windows, B mel bins, F mel frames, P encoder tokens, V
and D widths of encoder and backbone. Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from dflop.models.families.qwen2_audio import Qwen2Audio
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.source import Source
from dflop.profiling.families.tiles import Modules, TileEncoder, project_by, tile_pieces

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def _set_layers(audio: Any, count: int) -> None:
    # Another name for the same field in some versions.
    audio.encoder_layers = audio.num_hidden_layers = count


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Qwen2-Audio model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    # Its rules are those of the training.
    family = Qwen2Audio(model_dir)
    source = Source(model_dir, Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, _set_layers)
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
            ("audio_tower.avg_pooler", "audio_tower.layer_norm", "multi_modal_projector"),
            project_by(family),
        ),
        # Of a window without silence: which kernel runs depends on whether there is a mask.
        arguments=(torch.ones(1, 1, window, window, dtype=torch.bool),),
    )
    return [*tile_pieces(source, encoder), *backbone_pieces(source)]
