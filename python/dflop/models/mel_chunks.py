"""Sounds in chunks of a hundred mel frames, beside pictures: the encoder of Qwen3-Omni.

    rows_NC --three convolutions, in chunks--> hidden_SV --layers, in windows--> hidden_SV --> features_ED

A row of `EncoderInput.inputs_N` is as wide as a patch, so that pictures and sounds lie in one tensor. A row
of a sound stands for one encoder token. It holds eight mel frames, then for each of the eight whether the
convolutions compute it (1 or 0), then zeros. A chunk is thirteen rows; of their 104 places for frames the
last four stay empty. Windows, of so many chunks, have the same number of rows each. The last of a sound is
filled up with rows of zeros, which are not computed.

transformers fills the last chunk of a sound with zeros, up to the longest chunk of its call. What the
convolutions make of these zeros reaches the tokens beside them. So it is here where a sound has a whole
chunk. A shorter sound ends where its frames end, as in a call of its own, whatever other sounds there are.

Shape letters: see `adapter.py`; here C values of a row, B mel bins, F mel frames of a chunk, G chunks, P
tokens of a chunk, S tokens of all sounds, V width of the encoder.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from dflop.models.patch_layout import sent

if TYPE_CHECKING:
    from dflop.models.mel_windows import Windows

FRAMES_PER_ROW = 8
"""The stride of three convolutions: so many frames give one encoder token, and one row."""
CHUNK_FRAMES = 100
"""Mel frames of a chunk: a second. transformers' count of tokens knows no other."""
CHUNK_TOKENS = 13
"""Encoder tokens of a chunk, and its rows."""


def tokens_of(num_frames: int) -> int:
    """Encoder tokens of a sound.

    Args:
        num_frames: its mel frames.

    Returns:
        Thirteen for each chunk; of the last chunk one for every eight frames.
    """
    whole, rest = divmod(num_frames, CHUNK_FRAMES)
    return whole * CHUNK_TOKENS + -(-rest // FRAMES_PER_ROW)


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
    num_chunks = -(-num_frames // CHUNK_FRAMES)
    frames_GFB = torch.zeros(num_chunks, CHUNK_TOKENS * FRAMES_PER_ROW, bins)
    filled_BF = F.pad(mel_BF, (0, num_chunks * CHUNK_FRAMES - num_frames))
    frames_GFB[:, :CHUNK_FRAMES] = filled_BF.T.reshape(num_chunks, CHUNK_FRAMES, bins)
    computed = num_frames if num_chunks == 1 else CHUNK_FRAMES
    is_computed_F = (torch.arange(CHUNK_TOKENS * FRAMES_PER_ROW) < computed).float()
    num_rows = num_chunks * CHUNK_TOKENS
    of_frames = FRAMES_PER_ROW * bins
    rows_NC = torch.zeros(-(-num_rows // window_rows) * window_rows, width)
    rows_NC[:num_rows, :of_frames] = frames_GFB.reshape(num_rows, -1)
    flags_NF = is_computed_F.view(CHUNK_TOKENS, -1).repeat(num_chunks, 1)
    rows_NC[:num_rows, of_frames : of_frames + FRAMES_PER_ROW] = flags_NF
    return rows_NC


def frames_of(rows_NC: torch.Tensor, bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `to_rows` has put into rows.

    Args:
        rows_NC: of whole chunks.
        bins: B.

    Returns:
        Mel frames [G, F, B], and which of them the convolutions compute, [G, F] 1 or 0.
    """
    of_frames = FRAMES_PER_ROW * bins
    each = CHUNK_TOKENS * FRAMES_PER_ROW
    frames = rows_NC[:, :of_frames].reshape(-1, each, bins)[:, :CHUNK_FRAMES]
    flags = rows_NC[:, of_frames : of_frames + FRAMES_PER_ROW].reshape(-1, each)[:, :CHUNK_FRAMES]
    return frames, flags


def embed_chunks(tower: Any, rows_NC: torch.Tensor, windows: Windows) -> torch.Tensor:
    """Hidden states before the first layer; the same lines as in the forward of Hugging Face's tower.

    Args:
        tower: Hugging Face's.
        rows_NC: of all windows.
        windows: which they are.

    Returns:
        hidden_SV.
    """
    # Chunks behind the end of a sound are not computed.
    chunks = [-(-tokens // CHUNK_TOKENS) for tokens in windows.tokens]
    read = [count * CHUNK_TOKENS for count in chunks]
    rows_NC = _first_of_each(read, windows.window_rows, rows_NC)
    frames_GFB, is_computed_GF = frames_of(rows_NC, tower.num_mel_bins)
    hidden = frames_GFB.transpose(1, 2)[:, None]
    split = getattr(tower, "conv_chunksize", len(hidden))
    found = []
    # In parts of so many chunks, as Hugging Face's tower does it: there is much between the convolutions.
    for part, flags in zip(hidden.split(split), is_computed_GF.split(split), strict=True):
        for conv in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            # A column is computed where the first of the frames that it stands for is. Behind a short sound
            # the next convolution then reads zeros, as it does behind the end of its input.
            flags = flags[:, ::2]  # noqa: PLW2901
            part = F.gelu(conv(part)) * flags[:, None, None]  # noqa: PLW2901
        found.append(part)
    hidden_GCBP = torch.cat(found)
    hidden_GPV = tower.conv_out(hidden_GCBP.permute(0, 3, 1, 2).flatten(2))
    positions_PV = tower.positional_embedding.positional_embedding[:CHUNK_TOKENS]
    hidden_NV = (hidden_GPV + positions_PV.to(hidden_GPV.dtype)).flatten(0, 1)
    if sum(windows.tokens) == hidden_NV.shape[0]:
        return hidden_NV
    # Of each window the chunks that are computed, of which the last may have fewer tokens.
    firsts = list(accumulate(read, initial=0))[:-1]
    kept = torch.cat([torch.arange(n) + first for n, first in zip(windows.tokens, firsts, strict=True)])
    return hidden_NV.index_select(0, sent(kept, hidden_NV.device))


def _first_of_each(counts: list[int], each: int, rows_NC: torch.Tensor) -> torch.Tensor:
    """The first `counts[k]` of each run of `each` rows."""
    if sum(counts) == rows_NC.shape[0]:
        return rows_NC
    return torch.cat([run[:count] for run, count in zip(rows_NC.split(each), counts, strict=True)])


def project_sounds(tower: Any, hidden_SV: torch.Tensor) -> torch.Tensor:
    """Features of all sounds, one after the other: one of each token.

    Args:
        tower: Hugging Face's.
        hidden_SV: after the last layer.

    Returns:
        features_ED.
    """
    return tower.proj2(tower.act(tower.proj1(tower.ln_post(hidden_SV))))
