"""What a shared encoder must know of Gemma 4: pictures of their own size, and sounds of their own length."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from dflop.integrations.encoder_tiles import Media, NormedTower, refuse_computed

if TYPE_CHECKING:
    from torch import nn


class GemmaTower(NormedTower):
    """Gemma 4: a unit is a picture or a frame of a video, without padding; calls pad them to the largest."""

    projector = "embed_vision"
    has_grids = True
    is_optional = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        if "num_frames_per_video" not in inspect.signature(type(model).forward).parameters:
            message = "this transformers has videos of Gemma 4 in another form, 5.23 or newer is needed"
            raise ValueError(message)
        self._pool = int(self.config.vision_config.pooling_kernel_size)

    def media(self, rows: torch.Tensor, extra: dict[str, Any]) -> Media:
        """As of the base class; the padding of pictures is left out.

        Args:
            rows: patches, [n, most patches, values].
            extra: `pixel_position_ids` [n, most patches, 2] and all others.

        Returns:
            The media, a unit a picture, a row a patch.

        Raises:
            ValueError: patches lie otherwise than row by row with padding behind them, or an argument was
                computed for the media of this rank alone.
        """
        extra = dict(extra)
        given: Any = extra.pop("pixel_position_ids")
        refuse_computed(extra)
        positions: torch.Tensor = given.cpu()
        columns, lines = (positions.amax(dim=1) + 1).unbind(dim=1)
        expected = _positions(lines, columns, positions.shape[1])
        is_odd = (expected != positions).flatten(1).any(dim=1) | (lines == 0)
        is_odd |= (lines % self._pool != 0) | (columns % self._pool != 0)
        if bool(is_odd.any()):
            message = (
                f"patches of picture {int(is_odd.nonzero()[0])} must lie row by row, {self._pool} or a "
                "multiple of it each way, with padding (-1) behind them: `pixel_position_ids` says otherwise"
            )
            raise ValueError(message)
        grids = list(zip(lines.tolist(), columns.tolist(), strict=True))
        patches = [picture[: h * w] for picture, (h, w) in zip(rows, grids, strict=True)]
        return Media(torch.cat(patches) if patches else rows.new_empty(0), grids, extra)

    def cost(self, grid: tuple[int, int] | None) -> float:
        """Multiplications, forward; of the picture alone, without the padding of its call."""
        vision, num_tokens = self.config.vision_config, self.rows_in(grid)
        width, heads = int(vision.hidden_size), int(vision.num_attention_heads)
        queries, keys = (int(vision.head_dim) * n for n in (heads, int(vision.num_key_value_heads)))
        linear = 2 * width * (queries + keys) + 3 * width * int(vision.intermediate_size)
        return float(vision.num_hidden_layers) * num_tokens * (linear + 2 * queries * num_tokens)

    def rows_in(self, grid: tuple[int, int] | None) -> int:
        """Patches."""
        assert grid is not None
        return grid[0] * grid[1]

    def rows_out(self, grid: tuple[int, int] | None) -> int:
        """Squares of patches."""
        return self.rows_in(grid) // self._pool**2

    def encode(self, forward: Any, media: Media) -> Any:
        """As of the base class; the pictures padded to the largest of them."""
        grids = media.grids or []
        counts = [self.rows_in(grid) for grid in grids]
        most = max(counts)
        padded = [pad(patches, (0, 0, 0, most - len(patches))) for patches in media.rows.split(counts)]
        lines, columns = torch.tensor(grids).unbind(dim=1)
        positions = _positions(lines, columns, most).to(media.rows.device)
        return forward(pixel_values=torch.stack(padded), pixel_position_ids=positions, **media.extra)


class GemmaSoundTower(NormedTower):
    """Gemma 4 E2B, E4B: a unit is a whole sound, without padding; calls pad sounds to the longest.

    A token sees those before it alone, in attention and convolutions, so padding behind a sound changes
    nothing of it. What it sees through all layers is several seconds long: a part of a sound cannot be
    encoded alone.
    """

    tower = "audio_tower"
    projector = "embed_audio"
    has_grids = True
    is_of_patches = False
    is_optional = True
    positional = ("attention_mask",)
    methods = ("get_audio_features",)

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # Features of each sound of the call that is under way, and of the longest with its padding.
        self._counts: list[int] = []
        self._most = 0

    def media(self, rows: torch.Tensor, extra: dict[str, Any]) -> Media:
        """As of the base class; the padding of sounds is left out.

        Args:
            rows: mel frames, [n, most frames, mel bins].
            extra: `attention_mask` [n, most frames] and all others.

        Returns:
            The media, a unit a sound, a row a mel frame.

        Raises:
            ValueError: a sound has no frame or padding before one, or an argument was computed for the media
                of this rank alone.
        """
        extra = dict(extra)
        mask: Any = extra.pop("attention_mask", None)
        refuse_computed(extra)
        kept = torch.ones(rows.shape[:2], dtype=torch.bool) if mask is None else mask.cpu() != 0
        lengths = kept.sum(dim=1)
        is_odd = (kept != (torch.arange(kept.shape[1]) < lengths[:, None])).any(dim=1) | (lengths == 0)
        if bool(is_odd.any()):
            sound = int(is_odd.nonzero()[0])
            message = (
                f"`input_features_mask` of sound {sound} shows {int(lengths[sound])} mel frames, must show "
                "one at least, and padding behind them alone"
            )
            raise ValueError(message)
        grids = [(length, 1) for length in lengths.tolist()]
        self._counts = [self.rows_out(grid) for grid in grids]
        self._most = self.rows_out((kept.shape[1], 1))
        frames = [sound[:length] for sound, (length, _) in zip(rows, grids, strict=True)]
        return Media(torch.cat(frames) if frames else rows.new_empty(0), grids, extra)

    def cost(self, grid: tuple[int, int] | None) -> float:
        """Multiplications of the layers, forward."""
        audio, width = self.config.audio_config, int(self.config.audio_config.hidden_size)
        context = int(audio.attention_chunk_size + audio.attention_context_left - 1)
        context += int(audio.attention_context_right)
        # Two MLPs that are four times as wide, four maps of attention, three of the convolution; attention
        # reads the context of its chunk whole, and its distances.
        maps = (2 * 2 * 4 + 4 + 3) * width * width + int(audio.conv_kernel_size) * width
        read = (2 * context + context // 2 + 1) * width
        return float(audio.num_hidden_layers) * self.rows_out(grid) * (maps + read)

    def rows_in(self, grid: tuple[int, int] | None) -> int:
        """Mel frames."""
        assert grid is not None
        return grid[0]

    def rows_out(self, grid: tuple[int, int] | None) -> int:
        """Features: two convolutions halve the frames, and round up."""
        assert grid is not None
        return -(-grid[0] // 4)

    def encode(self, forward: Any, media: Media) -> Any:
        """As of the base class; the sounds padded to the longest of them."""
        counts = [length for length, _ in media.grids or []]
        most, device = max(counts), media.rows.device
        padded = [pad(frames, (0, 0, 0, most - len(frames))) for frames in media.rows.split(counts)]
        mask = torch.arange(most)[None] < torch.tensor(counts)[:, None]
        return forward(torch.stack(padded), mask.to(device), **media.extra)

    def features(self, output: Any) -> torch.Tensor:
        """Those of all sounds, one after the other."""
        return output.last_hidden_state[output.attention_mask]

    def output(self, features: torch.Tensor) -> Any:
        """As of the base class; the model reads sounds that are padded to the longest of its own."""
        from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioModelOutput

        sounds, most = features.split(self._counts), self._most
        padded = torch.stack([pad(sound, (0, 0, 0, most - len(sound))) for sound in sounds])
        mask = torch.arange(most)[None] < torch.tensor(self._counts)[:, None]
        return Gemma4AudioModelOutput(
            last_hidden_state=padded,  # type: ignore[arg-type]
            attention_mask=mask.to(features.device),  # type: ignore[arg-type]
        )


def _positions(lines: torch.Tensor, columns: torch.Tensor, most: int) -> torch.Tensor:
    """Column and row of each patch, row by row, and -1 behind them: [n, most, 2]."""
    place, across = torch.arange(most)[None], columns.clamp(min=1)[:, None]
    found = torch.stack([place % across, place // across], dim=2)
    return found.masked_fill((place >= (lines * columns)[:, None])[..., None], -1)
