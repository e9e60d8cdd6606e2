"""Sounds in windows that do not see each other, beside pictures: the encoder of Qwen2.5-Omni.

    rows_NC --two convolutions, in windows--> hidden_SV --layers--> hidden_SV --means of two--> features_ED

A row of `EncoderInput.inputs_N` is as wide as a patch, so that pictures and sounds lie in one tensor. A row
of a sound holds the two mel frames that become one encoder token, then for each of the two whether there is
such a frame (1 or 0), then zeros. All windows have the same number of rows. The last of a sound may be
shorter: it is filled up with rows of zeros, which are cut off before the layers.

Shape letters: see `adapter.py`; here C values of a row, B mel bins, F mel frames of a window, W windows,
S tokens of all sounds, V width of the encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from dflop.models.encoder import numbered
from dflop.models.packing import PACKED_ENCODER
from dflop.models.patch_layout import sent
from dflop.models.patches import bounds_of_patches
from dflop.models.tensor import Cut, LayerPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.models.adapter import MediaGrid
    from dflop.models.patches import Bounds

FRAMES_PER_ROW = 2
"""The stride of the second convolution: so many frames give one encoder token, and one row."""
ATTENTION = PACKED_ENCODER
"""The attention function of its layers."""


def to_rows(mel_BF: torch.Tensor, window_rows: int, width: int) -> torch.Tensor:
    """A sound as the encoder reads it.

    Args:
        mel_BF: its mel frames.
        window_rows: rows of a window.
        width: of a row.

    Returns:
        [N, C] float32; N is a multiple of `window_rows`.
    """
    bins, num_frames = mel_BF.shape
    num_rows = -(-num_frames // (FRAMES_PER_ROW * window_rows)) * window_rows
    frames_FB = torch.zeros(num_rows * FRAMES_PER_ROW, bins)
    frames_FB[:num_frames] = mel_BF.T
    rows_NC = torch.zeros(num_rows, width)
    rows_NC[:, : FRAMES_PER_ROW * bins] = frames_FB.reshape(num_rows, -1)
    is_frame_F = torch.arange(num_rows * FRAMES_PER_ROW) < num_frames
    rows_NC[:, FRAMES_PER_ROW * bins : FRAMES_PER_ROW * (bins + 1)] = is_frame_F.view(num_rows, -1).float()
    return rows_NC


def frames_of(rows_NC: torch.Tensor, bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `to_rows` has put into rows.

    Args:
        rows_NC: of whole windows.
        bins: B.

    Returns:
        Mel frames [N x 2, B], and which of them there are, [N x 2] 1 or 0.
    """
    of_frames = FRAMES_PER_ROW * bins
    is_frame = rows_NC[:, of_frames : of_frames + FRAMES_PER_ROW]
    return rows_NC[:, :of_frames].reshape(-1, bins), is_frame.reshape(-1)


@dataclass(frozen=True)
class Windows:
    """The windows of the sounds of a microbatch, known on the host."""

    tokens: tuple[int, ...]
    """Encoder tokens of each."""
    of_sounds: tuple[int, ...]
    """Encoder tokens of each sound, or of the part of it that is read here."""
    window_rows: int
    """Rows of each window: tokens of a full one."""


def windows_of(media: Sequence[MediaGrid], window_rows: int) -> Windows:
    """How sounds are cut.

    Args:
        media: sounds, or parts of them; at least one.
        window_rows: rows of a window.

    Returns:
        The windows.
    """
    tokens: list[int] = []
    of_sounds: list[int] = []
    for grid in media:
        last = window_rows if grid.last_segment_tokens is None else grid.last_segment_tokens
        own = [window_rows] * grid.num_tiles
        if grid.is_end:
            own[-1] = last
        tokens += own
        of_sounds.append(sum(own))
    return Windows(tuple(tokens), tuple(of_sounds), window_rows)


def _first_of_each(counts: Sequence[int], each: int, device: torch.device) -> torch.Tensor:
    """Positions of the first `counts[k]` of each run of `each` rows."""
    kept = torch.cat([torch.arange(count) + run * each for run, count in enumerate(counts)])
    return sent(kept, device)


def embed_windows(tower: Any, rows_NC: torch.Tensor, windows: Windows) -> torch.Tensor:
    """Hidden states before the first layer; the same lines as in the forward of Hugging Face's tower.

    Args:
        tower: Hugging Face's.
        rows_NC: of all windows.
        windows: which they are.

    Returns:
        hidden_SV.
    """
    frames, is_frame = frames_of(rows_NC, tower.conv1.in_channels)
    num_windows = len(windows.tokens)
    mel_WBF = frames.view(num_windows, -1, frames.shape[1]).transpose(1, 2)
    is_frame_W1F = is_frame.view(num_windows, 1, -1)
    hidden_WVF = F.gelu(tower.conv1(mel_WBF)) * is_frame_W1F
    hidden_WPV = F.gelu(tower.conv2(hidden_WVF)).transpose(1, 2)
    positions_PV = tower.positional_embedding.positional_embedding[: windows.window_rows]
    hidden_NV = (hidden_WPV + positions_PV.to(hidden_WPV.dtype)).flatten(0, 1)
    if sum(windows.tokens) == hidden_NV.shape[0]:
        return hidden_NV
    return hidden_NV.index_select(0, _first_of_each(windows.tokens, windows.window_rows, hidden_NV.device))


def bounds_of_windows(windows: Windows, device: torch.device) -> Bounds:
    """What the layers must know of windows: each sees itself alone."""
    return bounds_of_patches(windows.tokens, (), device)


def run_sound_layer(layer: Any, hidden_SV: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    """One layer of the encoder of sounds.

    Args:
        layer: Hugging Face's, which gives a tuple.
        hidden_SV: before it.
        bounds: who sees whom.

    Returns:
        hidden_SV after it.
    """
    found = layer(
        hidden_SV,
        cu_seqlens=bounds.cu_seqlens,
        max_seqlen=max(bounds.segment_tokens),
        segment_tokens=bounds.segment_tokens,
    )
    return found[0] if isinstance(found, tuple) else found


def run_sound_layers(tower: Any, hidden_SV: torch.Tensor, windows: Windows) -> torch.Tensor:
    """The layers of the encoder of sounds that a rank has.

    Args:
        tower: Hugging Face's; or with a run of its layers.
        hidden_SV: before the first.
        windows: which do not see each other.

    Returns:
        hidden_SV after the last.
    """
    bounds = bounds_of_windows(windows, hidden_SV.device)
    for _, layer in numbered(tower.layers):
        hidden_SV = run_sound_layer(layer, hidden_SV, bounds)
    return hidden_SV


def project_sounds(tower: Any, hidden_SV: torch.Tensor, windows: Windows) -> torch.Tensor:
    """Features of all sounds, one after the other.

    Args:
        tower: Hugging Face's.
        hidden_SV: after the last layer.
        windows: which they are.

    Returns:
        features_ED: each of two tokens; of an odd number the last token of a sound gives none.
    """
    if any(tokens % 2 for tokens in windows.of_sounds):
        parts = hidden_SV.split(windows.of_sounds)
        hidden_SV = torch.cat([own[: own.shape[0] // 2 * 2] for own in parts])
    pooled_EV = (hidden_SV[0::2] + hidden_SV[1::2]) / 2
    return tower.proj(tower.ln_post(pooled_EV))


def sound_plan(audio: Any) -> LayerPlan:
    """How tensor parallelism cuts a layer.

    Args:
        audio: configuration of the tower.

    Returns:
        The plan.
    """
    heads = ("audio_config.encoder_attention_heads", audio.encoder_attention_heads)
    width = ("audio_config.encoder_ffn_dim", audio.encoder_ffn_dim)
    return LayerPlan(
        cuts=(
            *(Cut(f"self_attn.{name}_proj", *heads) for name in "qkv"),
            Cut("self_attn.out_proj", *heads, by_input=True),
            Cut("fc1", *width),
            Cut("fc2", *width, by_input=True),
        ),
        entries=("self_attn", "fc1"),
        counts=(("self_attn", "num_heads"),),
    )
