"""What a shared encoder must know of each family: its modules, its units, and which output is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad
from transformers.modeling_outputs import BaseModelOutputWithPooling

from dflop.integrations.encoder_gemma import GemmaSoundTower, GemmaTower
from dflop.integrations.encoder_patches import (
    DeepPatchTower,
    GlmOcrTower,
    GlmTower,
    PatchTower,
    PlainPatchTower,
    UnmergedTower,
)
from dflop.integrations.encoder_relatives import AlignedTower, ProjectedTower, ResampledTower
from dflop.integrations.encoder_slices import SliceTower
from dflop.integrations.encoder_tiles import (
    AdaptedTower,
    ChunkTower,
    ConvolvedChunkTower,
    InternTower,
    LongSoundTower,
    Media,
    NormedTower,
    OneKindTower,
    ShuffledTower,
    SoundTower,
    SquaresTower,
    SquareTower,
    TileTower,
    WindowTower,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


def _multiplications(vision: Any, num_tokens: int, num_matrices: int, num_read: int) -> float:
    """Of all layers, forward: an MLP has `num_matrices`, and attention reads `num_read` tokens for each."""
    width = int(vision.hidden_size)
    linear = 4 * width * width + num_matrices * width * int(vision.intermediate_size)
    return float(vision.num_hidden_layers) * num_tokens * (linear + 2 * width * num_read)


class PagesTower(UnmergedTower):
    """PaddleOCR-VL: a unit is a page; what merges its patches stands behind the tower."""

    projector = "projector"
    methods = ("get_image_features",)

    def __init__(self, model: nn.Module) -> None:
        TileTower.__init__(self, model)

    def media(self, rows: torch.Tensor, extra: dict[str, Any]) -> Media:
        """As of the base class, of a batch of one."""
        return super().media(rows[0], extra)

    def cost(self, grid: tuple[int, int] | None) -> float:
        """Multiplications, forward."""
        num_tokens = self.rows_in(grid)
        return _multiplications(self.config.vision_config, num_tokens, 2, num_tokens)

    def encode(self, forward: Any, media: Media) -> Any:
        """As of the base class."""
        grids = [(1, *grid) for grid in media.grids or []]
        grid_thw = torch.tensor(grids, device=media.rows.device)
        return forward(pixel_values=media.rows[None], grid_thw=grid_thw, **media.extra)


class PictureTower(TileTower):
    """Mistral3 (Pixtral): a unit is a picture of its own size; calls pad pictures to the largest."""

    blocks = "transformer.layers"
    after_blocks = ()
    has_grids = True
    parameters = ()
    methods = ("get_image_features",)

    def media(self, rows: torch.Tensor, extra: dict[str, Any]) -> Media:
        """As of the base class; the padding of pictures is left out.

        Args:
            rows: pictures, [n, channels, height, width].
            extra: `image_sizes` and all others.

        Returns:
            The media, a unit a picture, a row a patch.
        """
        extra = dict(extra)
        given: Any = extra.pop("image_sizes", None)
        sizes = [tuple(rows.shape[2:])] * len(rows) if given is None else torch.as_tensor(given).tolist()
        side = self._side()
        grids = [(int(height) // side, int(width) // side) for height, width in sizes]
        patches = [
            picture[:, : h * side, : w * side]
            .reshape(-1, h, side, w, side)
            .permute(1, 3, 0, 2, 4)
            .reshape(h * w, -1)
            for picture, (h, w) in zip(rows, grids, strict=True)
        ]
        return Media(torch.cat(patches) if patches else rows.new_empty(0), grids, extra)

    def cost(self, grid: tuple[int, int] | None) -> float:
        """Multiplications, forward."""
        vision, num_tokens = self.config.vision_config, self.rows_in(grid)
        # Other kernels than flash attention read all pictures of a call as one sequence, under a mask: what
        # that costs depends on the call, not on the picture.
        read = num_tokens if "flash" in str(vision._attn_implementation) else 0
        return _multiplications(vision, num_tokens, 3, read)

    def rows_in(self, grid: tuple[int, int] | None) -> int:
        """Patches."""
        assert grid is not None
        return grid[0] * grid[1]

    def rows_out(self, grid: tuple[int, int] | None) -> int:
        """Patches: what merges them stands behind the tower."""
        return self.rows_in(grid)

    def encode(self, forward: Any, media: Media) -> Any:
        """As of the base class."""
        side, grids = self._side(), media.grids or []
        height, width = (side * max(grid[axis] for grid in grids) for axis in (0, 1))
        parts = media.rows.split([self.rows_in(grid) for grid in grids])
        pictures = []
        for (h, w), patches in zip(grids, parts, strict=True):
            picture = (
                patches.reshape(h, w, -1, side, side).permute(2, 0, 3, 1, 4).reshape(-1, h * side, w * side)
            )
            pictures.append(pad(picture, (0, width - w * side, 0, height - h * side)))
        # On the host: sizes of a tensor would be read from the device one by one.
        sizes = [(h * side, w * side) for h, w in grids]
        return super().encode(
            forward, Media(torch.stack(pictures), grids, {**media.extra, "image_sizes": sizes})
        )

    def features(self, output: Any) -> torch.Tensor:
        """As of the base class, without the batch of one."""
        # No norm stands behind the last layer. FSDP may keep transformers from recording hidden states.
        return output.last_hidden_state[0] if self.layers() == [-1] else super().features(output)[0]

    def output(self, features: torch.Tensor) -> Any:
        """As of the base class."""
        return super().output(features[None])

    def _side(self) -> int:
        return int(self.config.vision_config.patch_size)


class NaflexTower(NormedTower):
    """LFM2-VL: a unit is a tile, a thumbnail or a picture that is not cut; calls pad them to the largest."""

    has_grids = True
    methods = ("get_image_features",)

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # Patches of each unit of the call that is under way.
        self._counts: list[int] = []

    def check_shards(self) -> None:
        """As of the base class.

        Raises:
            ValueError: the projector is sharded by itself: the model calls it once a unit, and each call
                gathers it, so ranks with other numbers of units would wait for each other.
        """
        if isinstance(self.model.get_submodule("multi_modal_projector"), FSDPModule):
            message = (
                "`multi_modal_projector` is sharded by itself, and the model calls it once a tile: leave it "
                "to the `fully_shard` of the model, as ranks have not as many tiles"
            )
            raise ValueError(message)

    def unread(self, tower: nn.Module) -> list[nn.Module]:
        """The pooling head, where there is one."""
        inner: Any = getattr(tower, "vision_model", tower)
        return [module for name, module in inner.named_children() if name == "head"]

    def media(self, rows: torch.Tensor, extra: dict[str, Any]) -> Media:
        """As of the base class; the padding of units is left out.

        Args:
            rows: patches, [n, most patches, values].
            extra: `spatial_shapes`, `pixel_attention_mask` and all others.

        Returns:
            The media, a row a patch.
        """
        extra = dict(extra)
        sizes: Any = extra.pop("spatial_shapes")
        extra.pop("pixel_attention_mask")
        grids = [(int(height), int(width)) for height, width in sizes.tolist()]
        self._counts = [h * w for h, w in grids]
        patches = [unit[:count] for unit, count in zip(rows, self._counts, strict=True)]
        return Media(torch.cat(patches) if patches else rows.new_empty(0), grids, extra)

    def cost(self, grid: tuple[int, int] | None) -> float:
        """Multiplications, forward; of the unit alone, without the padding of its call."""
        num_tokens = self.rows_in(grid)
        return _multiplications(self.config.vision_config, num_tokens, 2, num_tokens)

    def rows_in(self, grid: tuple[int, int] | None) -> int:
        """Patches."""
        assert grid is not None
        return grid[0] * grid[1]

    def rows_out(self, grid: tuple[int, int] | None) -> int:
        """Patches: what merges them stands behind the tower."""
        return self.rows_in(grid)

    def encode(self, forward: Any, media: Media) -> Any:
        """As of the base class; the units padded to the largest of them."""
        grids = media.grids or []
        counts = [self.rows_in(grid) for grid in grids]
        most, device = max(counts), media.rows.device
        padded = [pad(unit, (0, 0, 0, most - len(unit))) for unit in media.rows.split(counts)]
        mask = (torch.arange(most)[None] < torch.tensor(counts)[:, None]).int()
        found = forward(
            pixel_values=torch.stack(padded),
            # On the host: transformers reads sizes one by one.
            spatial_shapes=torch.tensor(grids),
            pixel_attention_mask=mask.to(device),
            **media.extra,
        )
        units = zip(found.last_hidden_state, counts, strict=True)
        return super().output(torch.cat([unit[:count] for unit, count in units]))

    def output(self, features: torch.Tensor) -> Any:
        """As of the base class; the model reads units that are padded to the largest of its own."""
        counts = self._counts
        units = features.split(counts)
        padded = [pad(unit, (0, 0, 0, max(counts) - len(unit))) for unit in units]
        return super().output(torch.stack(padded))


class PageTower(PictureTower):
    """LightOnOCR: the tower of Mistral3 under other names."""

    tower = "vision_encoder"
    projector = "vision_projection"

    def layers(self) -> list[int]:
        """The last; its configuration has no field for it."""
        return [-1]

    def output(self, features: torch.Tensor) -> Any:
        """As of the base class; the model reads the last hidden states."""
        return BaseModelOutputWithPooling(last_hidden_state=features[None])  # type: ignore[arg-type]


TOWERS: dict[str, tuple[type[TileTower], ...]] = {
    "aya_vision": (SquareTower,),
    "llama4": (AdaptedTower,),
    "cohere2_vision": (SquaresTower,),
    "paligemma": (SquaresTower,),
    "gemma3": (SquaresTower,),
    # Large models do not hear.
    "gemma4": (GemmaTower, GemmaSoundTower),
    "cohere_compass": (DeepPatchTower,),
    "cosmos3_omni": (DeepPatchTower,),
    "deepseek_vl": (AlignedTower,),
    "ernie4_5_vl_moe": (ResampledTower,),
    "exaone4_5": (PatchTower,),
    "hyperclovax_vision_v2": (ProjectedTower,),
    "llava_next_video": (TileTower,),
    "mistral_large4": (PictureTower,),
    "qwen4_exp": (PlainPatchTower,),
    "vipllava": (SquareTower,),
    "glmga": (GlmTower,),
    "glm4v": (GlmTower,),
    "glm4v_moe": (GlmTower,),
    "glm46v": (GlmTower,),
    "glm_ocr": (GlmOcrTower,),
    "llava": (SquareTower,),
    "llava_next": (OneKindTower,),
    "llava_onevision": (TileTower,),
    "idefics3": (ShuffledTower,),
    "internvl": (InternTower,),
    "lfm2_vl": (NaflexTower,),
    "lighton_ocr": (PageTower,),
    "minicpmv4_6": (SliceTower,),
    "mistral3": (PictureTower,),
    "paddleocr_vl": (PagesTower,),
    # In the order in which the model calls them.
    "qwen2_5_omni": (ChunkTower, PatchTower),
    "qwen2_vl": (PatchTower,),
    "qwen2_5_vl": (PatchTower,),
    "qwen3_5": (PlainPatchTower,),
    "qwen3_5_moe": (PlainPatchTower,),
    "qwen3_omni_moe": (ConvolvedChunkTower, DeepPatchTower),
    "qwen3_vl": (DeepPatchTower,),
    "qwen3_vl_moe": (DeepPatchTower,),
    "qwen2_audio": (SoundTower,),
    "audioflamingo3": (LongSoundTower,),
    "smolvlm": (ShuffledTower,),
    "voxtral": (WindowTower,),
}
"""The towers of a family."""


def find_families(model: nn.Module) -> list[TileTower]:
    """What is to be known of the model, and the module of it that calls the towers.

    Args:
        model: of Hugging Face, also inside wrappers (DDP, PEFT, FSDP).

    Returns:
        Its towers, at least one; `model` of each is the module that holds the towers and the LLM backbone.

    Raises:
        ValueError: there is no such module, or of a family that is not known here.
    """
    kinds: Sequence[str] = sorted(TOWERS)
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        # The part of Qwen2.5-Omni and Qwen3-Omni that sees and hears has a configuration of its own.
        known = TOWERS.get(str(kind).removesuffix("_thinker"), ())
        held = dict(module.named_children()).keys()
        towers = [tower for tower in known if not tower.is_optional or tower.tower in held]
        if towers and {tower.tower for tower in towers} <= held:
            return [tower(module) for tower in towers]
    message = (
        f"`{type(model).__name__}` holds no model with an encoder of {', '.join(kinds)}: nothing to share out"
    )
    raise ValueError(message)
