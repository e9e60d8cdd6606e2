"""Qwen2.5-Omni's thinker: the pieces of two encoders.

    encoder_embedding, encoder_layer, encoder_window_layer, projector    of pictures, as in Qwen2.5-VL

    sound_embedding   rows_NC   -> hidden_SV      two convolutions, window by window
    sound_layer       hidden_SV -> hidden_SV      attention within a window, of at most 2 seconds
    sound_projector   hidden_SV -> features_ED    means of two tokens, norm, linear map

Full windows are measured, and attention for windows of every length. The embedding computes the last window
of a sound as if it were full. Shape letters: see `models/mel_windows.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dflop.models import mel_windows
from dflop.models.families.qwen2_5_omni import Qwen25Omni
from dflop.models.mel_windows import Windows, embed_windows, project_sounds, run_sound_layer
from dflop.models.tensor import cut_layer
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.qwen2_vl import vision_pieces
from dflop.profiling.families.source import Fed, ModelPiece, Source, layers_at_once, random_states
from dflop.profiling.pieces import AttentionKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dflop.models.omni import OmniFamily
    from dflop.models.patches import Bounds
    from dflop.profiling.pieces import Piece, PieceSettings

_UNIT = 2
"""Tokens of a feature."""


class _Embedding(nn.Module):
    """Mel frames to hidden states."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.conv1, self.conv2 = tower.conv1, tower.conv2
        made = tower.positional_embedding
        # A buffer, so it is not filled along with the parameters.
        self.positional_embedding = type(made)(made.length, made.channels, made.max_timescale)
        # Held by the tower and never read, as in training.
        self.unread = tower.audio_bos_eos_token

    def forward(self, rows_NC: torch.Tensor, windows: Windows) -> torch.Tensor:
        """See `embed_windows`."""
        return embed_windows(self, rows_NC, windows)


class _Layers(nn.Module):
    """A run of layers."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.layers = tower.layers

    def forward(self, hidden_SV: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        """Hidden states after the layers."""
        for layer in self.layers:
            hidden_SV = run_sound_layer(layer, hidden_SV, bounds)
        return hidden_SV


class _Projector(nn.Module):
    """Hidden states to features."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.ln_post, self.proj = tower.ln_post, tower.proj

    def forward(self, hidden_SV: torch.Tensor, windows: Windows) -> torch.Tensor:
        """See `project_sounds`."""
        return project_sounds(self, hidden_SV, windows)


def sound_pieces(
    source: Source,
    family: OmniFamily,
    embedding: Callable[[Any], nn.Module],
    projector: Callable[[Any], nn.Module],
    units: tuple[int, int],
) -> list[ModelPiece]:
    """The pieces of the encoder of sounds.

    Args:
        source: of the model.
        family: its adapter of training.
        embedding: what stands before the layers, of Hugging Face's tower; called with rows and `Windows`.
        projector: what stands behind them; called with hidden states and `Windows`.
        units: tokens that sizes are multiples of: of the embedding, and of layers and projector.

    Returns:
        Embedding, layers, projector.
    """
    audio, rows = family.audio, family.window_rows
    plan = family.sound_plan()

    def windows_of(segments: Sequence[int]) -> Windows:
        """Each segment as a sound of its own, cut into windows."""
        cut = [[rows] * (tokens // rows) + [tokens % rows] * (tokens % rows > 0) for tokens in segments]
        return Windows(tuple(own for sound in cut for own in sound), tuple(segments), rows)

    def feed_rows(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        windows = windows_of(segments)
        rows_NC = random_states(settings, len(windows.tokens) * rows, family.input_shape[0])
        frames = family.frames_per_row * audio.num_mel_bins
        # All frames are there.
        rows_NC[:, frames : frames + family.frames_per_row] = 1
        return Fed(rows_NC, (windows,))

    def feed_layers(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        leaf = random_states(settings, sum(segments), audio.d_model)
        return Fed(leaf, (mel_windows.bounds_of_windows(windows_of(segments), leaf.device),))

    def feed_projector(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        return Fed(random_states(settings, sum(segments), audio.d_model), (windows_of(segments),))

    def take_layers(whole: Any, settings: PieceSettings) -> nn.Module:
        for layer in whole.model.audio_tower.layers:
            cut_layer(layer, plan, settings.tensor_parallel_degree)
        return _Layers(whole.model.audio_tower)

    def kind(settings: PieceSettings) -> AttentionKind:
        heads = audio.encoder_attention_heads
        own = heads // settings.tensor_parallel_degree
        return AttentionKind(own, own, audio.d_model // heads, is_causal=False)

    one = source.whole(1).model.audio_tower.layers[0]
    return [
        ModelPiece(
            "sound_embedding",
            1,
            source,
            lambda whole, _: embedding(whole.model.audio_tower),
            feed_rows,
            wants_input_gradient=False,
            size_unit=units[0],
        ),
        ModelPiece(
            "sound_layer",
            audio.encoder_layers,
            source,
            take_layers,
            feed_layers,
            num_layers=layers_at_once(audio.encoder_layers, one),
            max_segment_tokens=rows,
            kind=kind,
            size_unit=units[1],
        ),
        ModelPiece(
            "sound_projector",
            1,
            source,
            lambda whole, _: projector(whole.model.audio_tower),
            feed_projector,
            size_unit=units[1],
        ),
    ]


def set_layers(encoder: Any, count: int) -> None:
    """Sets the number of layers of either encoder.

    Args:
        encoder: its configuration.
        count: layers.
    """
    if hasattr(encoder, "depth"):
        encoder.depth = count
    else:
        encoder.encoder_layers = count


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Qwen2.5-Omni model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Ten pieces; nine where no layer has windows.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    family = Qwen25Omni(model_dir)
    encoders = ("vision_config", "audio_config")
    source = Source(
        model_dir, family.config_class, family.model_class, set_layers, mel_windows.ATTENTION, encoders
    )
    full = len(family.full_layers)
    counts = {"encoder_layer": full, "encoder_window_layer": family.vision.depth - full}
    sounds = sound_pieces(source, family, _Embedding, _Projector, (_UNIT, _UNIT))
    return [*vision_pieces(source, family, counts), *sounds, *backbone_pieces(source)]
