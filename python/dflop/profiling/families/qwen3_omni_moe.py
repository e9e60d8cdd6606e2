"""Qwen3-Omni's thinker: the pieces of Qwen3-VL with experts, and of an encoder of sounds.

    encoder_embedding, encoder_layer, projector    of pictures, as in Qwen3-VL

    sound_embedding   rows_NC   -> hidden_SV      three convolutions and a linear map, chunk by chunk
    sound_layer       hidden_SV -> hidden_SV      attention within a window, of at most 8 seconds
    sound_projector   hidden_SV -> features_ED    norm, two linear maps

Whole chunks are measured. The embedding computes the last chunk of a sound as if it were whole. What makes
the features of a sound as wide as those of a picture is not measured. Shape letters: see
`models/mel_chunks.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from dflop.models import mel_chunks, mel_windows
from dflop.models.families.qwen3_omni_moe import Qwen3OmniMoe
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.qwen2_5_omni import set_layers, sound_pieces
from dflop.profiling.families.qwen2_vl import vision_pieces
from dflop.profiling.families.source import Source

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from dflop.models.mel_windows import Windows
    from dflop.profiling.pieces import Piece


class _Embedding(nn.Module):
    """Mel frames to hidden states."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.conv2d1, self.conv2d2, self.conv2d3 = tower.conv2d1, tower.conv2d2, tower.conv2d3
        self.conv_out = tower.conv_out
        self.num_mel_bins, self.conv_chunksize = tower.num_mel_bins, tower.conv_chunksize
        made = tower.positional_embedding
        # A buffer, so it is not filled along with the parameters.
        self.positional_embedding = type(made)(made.length, made.channels, made.max_timescale)

    def forward(self, rows_NC: torch.Tensor, windows: Windows) -> torch.Tensor:
        """See `embed_chunks`."""
        return mel_chunks.embed_chunks(self, rows_NC, windows)


class _Projector(nn.Module):
    """Hidden states to features."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.ln_post, self.proj1, self.act, self.proj2 = tower.ln_post, tower.proj1, tower.act, tower.proj2

    def forward(self, hidden_SV: torch.Tensor, _: Windows) -> torch.Tensor:
        """See `project_sounds`."""
        return mel_chunks.project_sounds(self, hidden_SV)


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Qwen3-Omni model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Nine pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    family = Qwen3OmniMoe(model_dir)
    encoders = ("vision_config", "audio_config")
    source = Source(
        model_dir, family.config_class, family.model_class, set_layers, mel_windows.ATTENTION, encoders
    )
    counts = {"encoder_layer": source.encoder.depth}
    return [
        *vision_pieces(source, family, counts),
        *sound_pieces(source, family, _Embedding, _Projector, (mel_chunks.CHUNK_TOKENS, 1)),
        *backbone_pieces(source, family.feature_width),
    ]
