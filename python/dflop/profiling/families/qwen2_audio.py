"""Qwen2-Audio: a Whisper encoder over windows of 30 seconds, pooling by two, a linear projector.

    encoder_embedding   mel_NBF    -> hidden_NPV      two convolutions; 3,000 mel frames give 1,500 tokens
    encoder_layer       hidden_NPV -> hidden_NPV      attention within a window
    projector           hidden_NPV -> features_ED     pool of two, norm, linear map

The window is read whole, silence included, as the data profile counts it, and attention is measured without
the mask that hides silence as keys. Shape letters: N windows, B mel bins, F mel frames, P encoder tokens, V
and D widths of encoder and backbone. Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from dflop.models.backbone import backbone_rules
from dflop.models.rules import Rule
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.source import Source
from dflop.profiling.families.tiles import TileEncoder, tile_pieces, tile_plan

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece

# The stride of the second convolution.
_FRAMES_PER_TOKEN = 2


class SoundEmbedding(nn.Module):
    """Mel frames to hidden states."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.conv1, self.conv2, self.embed_positions = tower.conv1, tower.conv2, tower.embed_positions

    def forward(self, mel_NBF: torch.Tensor) -> torch.Tensor:
        """Hidden states before the first layer; Hugging Face has these lines in its tower.

        Args:
            mel_NBF: windows.

        Returns:
            hidden_NPV.
        """
        hidden_NVF = F.gelu(self.conv1(mel_NBF))
        hidden_NVP = F.gelu(self.conv2(hidden_NVF))
        return hidden_NVP.permute(0, 2, 1) + self.embed_positions.weight


class Projector(nn.Module):
    """The tower's pool and last norm, and the projector."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.avg_pooler, self.layer_norm = model.audio_tower.avg_pooler, model.audio_tower.layer_norm
        self.multi_modal_projector = model.multi_modal_projector

    def forward(self, hidden_NPV: torch.Tensor) -> torch.Tensor:
        """Features of all windows, those of silence included.

        Args:
            hidden_NPV: after the last layer.

        Returns:
            features_ED.
        """
        pooled_NQV = self.avg_pooler(hidden_NPV.permute(0, 2, 1)).permute(0, 2, 1)
        return self.multi_modal_projector(self.layer_norm(pooled_NQV)).flatten(0, 1)


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
    source = Source(model_dir, Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, _set_layers)
    audio = source.encoder
    drop = audio.encoder_layerdrop
    source.check(
        [
            *backbone_rules(source.text),
            Rule("audio_config.encoder_layerdrop", drop, drop == 0.0, "0: its layers are left out at random"),
        ]
    )
    window: int = audio.max_source_positions
    encoder = TileEncoder(
        num_layers=audio.encoder_layers,
        tokens=window,
        width=audio.d_model,
        shape=(audio.num_mel_bins, _FRAMES_PER_TOKEN * window),
        plan=tile_plan(
            "self_attn",
            "out_proj",
            ("fc1", "fc2", "fc1"),
            ("audio_config.encoder_attention_heads", audio.encoder_attention_heads),
            ("audio_config.encoder_ffn_dim", audio.encoder_ffn_dim),
            ("num_heads",),
        ),
        embedding=lambda whole: SoundEmbedding(whole.model.audio_tower),
        layers=lambda whole: whole.model.audio_tower.layers,
        projector=lambda whole: Projector(whole.model),
        # No mask.
        arguments=(None,),
    )
    return [*tile_pieces(source, encoder), *backbone_pieces(source)]
