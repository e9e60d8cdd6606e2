"""What a shared encoder must know of families whose units have one size: tiles, frames, sound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.functional import pad
from transformers.modeling_outputs import BaseModelOutputWithPooling

if TYPE_CHECKING:
    from torch import nn


@dataclass
class Media:
    """The media of one call of the tower, as rows of units."""

    rows: torch.Tensor
    """What the tower reads, unit after unit."""
    grids: list[tuple[int, int]] | None = None
    """Height and width in patches of each unit, where units differ."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other arguments of the call, equal on all ranks."""


def refuse_computed(extra: dict[str, Any]) -> None:
    """Refuses arguments that were computed for the media of this rank.

    Args:
        extra: those of a call of the tower, but for its media and their sizes.

    Raises:
        ValueError: there is a tensor among them.
    """
    computed = sorted(name for name, value in extra.items() if isinstance(value, torch.Tensor))
    if computed:
        message = (
            f"{', '.join(f'`{name}`' for name in computed)} are of this rank's media alone; a shared "
            "encoder reads others, leave them out"
        )
        raise ValueError(message)


class TileTower:
    """Every row of `pixel_values` is a unit: a tile or a frame, all of one size (SigLIP, InternViT)."""

    tower: ClassVar[str] = "vision_tower"
    backbone: ClassVar[str] = "language_model"
    projector: ClassVar[str | None] = "multi_modal_projector"
    parameters: ClassVar[tuple[str, ...]] = ("image_newline",)
    blocks: ClassVar[str] = "encoder.layers"
    """Path of the layers in the tower."""
    called_first: ClassVar[tuple[str, ...]] = ()
    """Names of what the tower calls first, in order, where it registers something else before."""
    after_blocks: ClassVar[tuple[str, ...]] = ("post_layernorm", "head")
    """What comes after all layers, if it is there, and is not read."""
    has_grids: ClassVar[bool] = False
    """Whether units differ in height and width."""
    is_of_patches: ClassVar[bool] = True
    """Whether a user's cost, which goes by patches, is asked where units differ."""
    methods: ClassVar[tuple[str, ...]] = ("get_image_features", "get_video_features")
    """Those that call the tower once each, in the order in which the model calls them."""
    positional: ClassVar[tuple[str, ...]] = ()
    """Names of what the model gives the tower by place, behind its media."""
    is_optional: ClassVar[bool] = False
    """Whether there are models of the family without the tower."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config: Any = model.config

    def media(self, rows: torch.Tensor, extra: dict[str, Any]) -> Media:
        """The arguments of a call: what the tower reads, and all others."""
        return Media(rows, None, extra)

    def cost(self, grid: tuple[int, int] | None) -> float:
        """Predicted work of a unit, in any one unit."""
        del grid
        return 1.0

    def rows_in(self, grid: tuple[int, int] | None) -> int:
        """Rows that the tower reads of a unit."""
        del grid
        return 1

    def rows_out(self, grid: tuple[int, int] | None) -> int:
        """Rows of features of a unit."""
        del grid
        return 1

    def encode(self, forward: Any, media: Media) -> Any:
        """The tower's own output."""
        # A rank without media of its own was not told which layers are read.
        return forward(media.rows, **{"output_hidden_states": True, **media.extra})

    def check_shards(self) -> None:
        """Refuses shards whose ranks would wait for each other."""

    def unread(self, tower: nn.Module) -> list[nn.Module]:
        """Modules that run whenever the tower does, and that no feature depends on.

        Args:
            tower: as the model holds it.

        Returns:
            The layers after the last that is read, and what comes after all layers.
        """
        inner: Any = getattr(tower, "vision_model", tower)
        layers = list(inner.get_submodule(self.blocks))
        last = max(layer % (len(layers) + 1) for layer in self.layers())
        after = [module for name, module in inner.named_children() if name in self.after_blocks]
        return [*layers[last:], *after]

    def layers(self) -> list[int]:
        """Of which layers the model reads the output."""
        layers = self.config.vision_feature_layer
        return [layers] if isinstance(layers, int) else list(layers)

    def features(self, output: Any) -> torch.Tensor:
        """What the model reads of the output: [rows, patches, width], of several layers side by side."""
        return torch.cat([output.hidden_states[layer] for layer in self.layers()], dim=-1)

    def output(self, features: torch.Tensor) -> Any:
        """An output in which the model finds these features."""
        layers = self.layers()
        num_layers = max(layer + 1 if layer >= 0 else -layer for layer in layers)
        # Read by positive and by negative positions: as many as the tower has.
        num_layers = max(num_layers, int(self.config.vision_config.num_hidden_layers) + 1)
        hidden: list[torch.Tensor | None] = [None] * num_layers
        for layer, part in zip(layers, features.chunk(len(layers), dim=-1), strict=True):
            hidden[layer] = part
        return BaseModelOutputWithPooling(hidden_states=tuple(hidden))  # type: ignore[arg-type]


class OneKindTower(TileTower):
    """LLaVA-NeXT: a tower of tiles that reads no videos."""

    methods = ("get_image_features",)


class SquareTower(OneKindTower):
    """LLaVA 1.5 and Aya Vision: tiles among whose features no newline stands."""

    parameters = ()

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        kind, known = self.config.vision_config.model_type, ("clip_vision_model", "siglip_vision_model")
        if kind not in known:
            names = " or ".join(f"`{name}`" for name in known)
            message = f"the encoder of a `{self.config.model_type}` is `{kind}`, must be {names}"
            raise ValueError(message)


class InternTower(TileTower):
    """InternVL: of its last layer it reads what is after the norm."""

    blocks = "encoder.layer"
    after_blocks = ("layernorm",)
    parameters = ()
    methods = ("get_image_features",)

    def unread(self, tower: nn.Module) -> list[nn.Module]:
        """As of the base class."""
        return [] if self.layers() == [-1] else super().unread(tower)

    def features(self, output: Any) -> torch.Tensor:
        """As of the base class."""
        return output.last_hidden_state if self.layers() == [-1] else super().features(output)

    def output(self, features: torch.Tensor) -> Any:
        """As of the base class."""
        if self.layers() == [-1]:
            return BaseModelOutputWithPooling(last_hidden_state=features)  # type: ignore[arg-type]
        return super().output(features)


class NormedTower(TileTower):
    """A tower of which the model reads what is after the last norm."""

    parameters = ()

    def unread(self, tower: nn.Module) -> list[nn.Module]:
        """All is read."""
        del tower
        return []

    def features(self, output: Any) -> torch.Tensor:
        """After the norm."""
        return output.last_hidden_state

    def output(self, features: torch.Tensor) -> Any:
        """As of the base class."""
        return BaseModelOutputWithPooling(last_hidden_state=features)  # type: ignore[arg-type]


class SquaresTower(NormedTower):
    """Gemma 3, PaliGemma, Cohere2 Vision: an image is squares, each a row of one call."""

    methods = ("get_image_features",)

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        kind = self.config.vision_config.model_type
        if kind != "siglip_vision_model":
            family = self.config.model_type
            message = f"the encoder of a `{family}` is `{kind}`, must be `siglip_vision_model`"
            raise ValueError(message)

    def unread(self, tower: nn.Module) -> list[nn.Module]:
        """The pooling head, where there is one."""
        inner: Any = getattr(tower, "vision_model", tower)
        return [module for name, module in inner.named_children() if name == "head"]


class AdaptedTower(NormedTower):
    """Llama 4: a tile is a row of one call; what is read is behind the adapter that merges patches."""

    tower = "vision_model"
    methods = ("get_image_features",)


class ShuffledTower(NormedTower):
    """Idefics3 and SmolVLM: tiles and frames are rows of one call; what is read is after the last norm."""

    tower = "vision_model"
    backbone = "text_model"
    projector = "connector"
    methods = ("get_image_features",)

    def media(self, rows: torch.Tensor, extra: dict[str, Any]) -> Media:
        """As of the base class.

        Args:
            rows: tiles.
            extra: `patch_attention_mask` and all others.

        Returns:
            The media, a unit a tile.

        Raises:
            ValueError: a part of a tile is hidden, so that tiles are not all alike.
        """
        extra = dict(extra)
        mask: Any = extra.pop("patch_attention_mask", None)
        # transformers leaves out images that are wholly hidden, but for the first of a batch of them.
        if mask is not None and not bool((mask.flatten(1).all(1) | ~mask.flatten(1).any(1)).all()):
            message = (
                "`pixel_attention_mask` hides a part of a tile, must show tiles whole or not at all: "
                "`do_image_splitting` is off, and sizes differ"
            )
            raise ValueError(message)
        return Media(rows, None, extra)

    def encode(self, forward: Any, media: Media) -> Any:
        """As of the base class."""
        return forward(media.rows, **media.extra)


class SoundTower(NormedTower):
    """Qwen2-Audio: every window of sound is padded to one length."""

    tower = "audio_tower"
    methods = ()

    def media(self, rows: torch.Tensor, extra: dict[str, Any]) -> Media:
        """As of the base class; the mask of each window joins its row.

        Args:
            rows: windows of sound.
            extra: `attention_mask` and all others.

        Returns:
            The media, a unit a window.

        Raises:
            ValueError: a mask of another form than the model makes.
        """
        extra = dict(extra)
        attention_mask: Any = extra.pop("attention_mask", None)
        if attention_mask is None:
            allowed = rows.new_ones(rows.shape[0], self._num_positions())
        elif attention_mask.dim() == 4:
            row = attention_mask[:, 0, 0, :]
            allowed = (row if row.dtype == torch.bool else row == 0).to(rows.dtype)
        else:
            message = f"`attention_mask` of {attention_mask.dim()} dimensions, the audio tower takes 4"
            raise ValueError(message)
        flat = torch.cat([rows.flatten(1), allowed.expand(rows.shape[0], -1)], dim=1)
        return Media(flat, None, extra)

    def encode(self, forward: Any, media: Media) -> Any:
        """As of the base class."""
        positions, config = self._num_positions(), self.config.audio_config
        sound = media.rows[:, :-positions].reshape(media.rows.shape[0], config.num_mel_bins, -1)
        allowed = media.rows[:, -positions:] > 0.5
        mask = allowed[:, None, None, :].expand(-1, 1, positions, -1)
        if config._attn_implementation != "sdpa":
            mask = torch.zeros_like(mask, dtype=sound.dtype).masked_fill(~mask, torch.finfo(sound.dtype).min)
        return forward(sound, attention_mask=mask, **media.extra)

    def _num_positions(self) -> int:
        return int(self.config.audio_config.max_source_positions)


class LongSoundTower(SoundTower):
    """Audio Flamingo 3: a sound may be several windows; the mask says which mel frames are sound."""

    def media(self, rows: torch.Tensor, extra: dict[str, Any]) -> Media:
        """As of the base class.

        Args:
            rows: windows of sound, [n, mel bins, frames].
            extra: `input_features_mask` [n, frames] and all others.

        Returns:
            The media, a unit a window.

        Raises:
            ValueError: there is no mask, which the tower needs.
        """
        extra = dict(extra)
        mask: Any = extra.pop("input_features_mask", None)
        if mask is None:
            message = "`input_features_mask` is missing, the audio tower needs it"
            raise ValueError(message)
        flat = torch.cat([rows, mask[:, None].to(rows)], dim=1).flatten(1)
        return Media(flat, None, extra)

    def encode(self, forward: Any, media: Media) -> Any:
        """As of the base class."""
        bins = self.config.audio_config.num_mel_bins
        windows = media.rows.reshape(media.rows.shape[0], bins + 1, -1)
        return forward(windows[:, :bins], input_features_mask=(windows[:, bins] > 0.5).long(), **media.extra)


class WindowTower(NormedTower):
    """Voxtral: every window of sound is read whole, silence included."""

    tower = "audio_tower"
    methods = ("get_audio_features",)


class ChunkTower(NormedTower):
    """Sounds of Qwen2.5-Omni: a unit is a chunk of two seconds, the last of a sound what is left of it.

    Chunks attend to nothing else. A chunk has an even number of tokens, so no feature, the mean of two, is
    made of two chunks: each may be encoded as a sound of its own.
    """

    tower = "audio_tower"
    projector = None
    has_grids = True
    is_of_patches = False
    methods = ("get_audio_features",)

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        tokens = int(self.config.audio_config.n_window)
        self._unit = 2 * tokens
        if tokens % 2:
            message = f"`audio_config.n_window` is {tokens}, must be even: a feature is made of two tokens"
            raise ValueError(message)

    def media(self, rows: torch.Tensor, extra: dict[str, Any]) -> Media:
        """As of the base class.

        Args:
            rows: mel frames of all sounds, [mel bins, frames].
            extra: `feature_lens`, `aftercnn_lens` and all others.

        Returns:
            The media, a unit a chunk, a row a mel frame.

        Raises:
            ValueError: an argument was computed for the sounds of this rank alone.
        """
        extra = dict(extra)
        lengths: Any = extra.pop("feature_lens")
        extra.pop("aftercnn_lens", None)
        refuse_computed(extra)
        whole = self._unit
        grids: list[tuple[int, int]] = []
        for length in lengths.tolist():
            grids += [(whole, 1)] * (length // whole)
            if length % whole:
                grids.append((length % whole, 1))
        return Media(rows.T, grids, extra)

    def cost(self, grid: tuple[int, int] | None) -> float:
        """Multiplications of the layers, forward."""
        assert grid is not None
        config, num_tokens = self.config.audio_config, -(-grid[0] // 2)
        width = int(config.d_model)
        linear = 4 * width * width + 2 * width * int(config.encoder_ffn_dim)
        return float(config.encoder_layers) * num_tokens * (linear + 2 * width * num_tokens)

    def rows_in(self, grid: tuple[int, int] | None) -> int:
        """Mel frames."""
        assert grid is not None
        return grid[0]

    def rows_out(self, grid: tuple[int, int] | None) -> int:
        """Features: a token for two mel frames, a feature for two tokens; half a pair gives none."""
        assert grid is not None
        return -(-grid[0] // 2) // 2

    def encode(self, forward: Any, media: Media) -> Any:
        """As of the base class."""
        lengths = torch.tensor([frames for frames, _ in media.grids or []], device=media.rows.device)
        return forward(media.rows.T, feature_lens=lengths, **media.extra)

    def output(self, features: torch.Tensor) -> Any:
        """As of the base class."""
        return BaseModelOutputWithPooling(last_hidden_state=features, pooler_output=features)  # type: ignore[arg-type]


class ConvolvedChunkTower(ChunkTower):
    """Sounds of Qwen3-Omni: a unit is a window of eight seconds, the last of a sound what is left of it.

    Convolutions read a window chunk by chunk. Chunks are filled up to their whole length, as transformers
    does it where any sound of a call has a whole chunk. Where all are shorter, it fills up to the longest.
    """

    called_first = ("conv2d1", "conv2d2", "conv2d3", "conv_out")

    def __init__(self, model: nn.Module) -> None:
        TileTower.__init__(self, model)
        audio = self.config.audio_config
        self._chunk = 2 * int(audio.n_window)
        self._unit = int(audio.n_window_infer) // self._chunk * self._chunk

    def _chunk_tokens(self, frames: int) -> int:
        """Tokens of so many mel frames: three convolutions halve a chunk each."""
        whole, rest = divmod(frames, self._chunk)
        return whole * -(-self._chunk // 8) + -(-rest // 8)

    def cost(self, grid: tuple[int, int] | None) -> float:
        """Multiplications of convolutions and layers, forward."""
        assert grid is not None
        audio, num_tokens = self.config.audio_config, self.rows_out(grid)
        width, channels = int(audio.d_model), int(audio.downsample_hidden_size)
        columns, bins = ([-(-size // by) for by in (2, 4, 8)] for size in (self._chunk, audio.num_mel_bins))
        places = [column * row for column, row in zip(columns, bins, strict=True)]
        convolved = 9 * channels * (places[0] + channels * (places[1] + places[2]))
        joined = columns[2] * bins[2] * channels * width
        linear = 4 * width * width + 2 * width * int(audio.encoder_ffn_dim)
        layers = int(audio.encoder_layers) * num_tokens * (linear + 2 * width * num_tokens)
        return float(-(-grid[0] // self._chunk) * (convolved + joined) + layers)

    def rows_out(self, grid: tuple[int, int] | None) -> int:
        """Features: one of each token."""
        assert grid is not None
        return self._chunk_tokens(grid[0])

    def encode(self, forward: Any, media: Media) -> Any:
        """As of the base class."""
        grids = [frames for frames, _ in media.grids or []]
        chunks = [chunk for unit in media.rows.split(grids) for chunk in unit.split(self._chunk)]
        device = media.rows.device
        tokens = torch.tensor([self._chunk_tokens(len(chunk)) for chunk in chunks])
        is_token = torch.arange(self._chunk_tokens(self._chunk)) < tokens[:, None]
        # What the tower would compute of the chunks that it is given.
        computed = {
            "padded_feature": torch.stack([pad(chunk.T, (0, self._chunk - len(chunk))) for chunk in chunks]),
            "chunk_lengths": torch.tensor([len(chunk) for chunk in chunks], device=device),
            "valid_indices": is_token.flatten().nonzero().squeeze(1).to(device),
            "cu_seqlens": torch.tensor([0, *(self._chunk_tokens(n) for n in grids)])
            .cumsum(0, dtype=torch.int32)
            .to(device),
        }
        lengths = torch.tensor(grids, device=device)
        return forward(media.rows.T, feature_lens=lengths, **computed, **media.extra)
