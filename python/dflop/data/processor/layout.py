"""What the encoder reads of a medium, by the tensors that a processor makes of it.

| tensors | encoder tokens |
|---|---|
| rows of patches with `image_grid_thw`, `video_grid_thw` | a segment of h x w patches for each t |
| patches with a mask, `spatial_shapes`, `target_sizes`, positions | a segment of the patches, for each tile |
| patches (n, p, c x patch x patch) | n segments of p |
| `pixel_values` (.., n, c, h, w) | n segments of (h / patch) x (w / patch), cut by a mask or `image_sizes` |
| `pixel_values` (.., tiles, c, h, w) of Mllama | a segment of all tiles of an image, filled up to eights |
| sounds | see `sound.py` |

A class token beside the patches counts where `vision_config` is of a kind that has one (`_CLASS_TOKENS`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dflop.data.processor import sound

if TYPE_CHECKING:
    from collections.abc import Mapping

_PIXELS = {
    "image": ("pixel_values", "pixel_values_images", "image_pixel_values"),
    "video": ("pixel_values_videos", "video_pixel_values", "pixel_values"),
}
_MORE_TILES = ("pixel_values_local",)
"""Tensors with further tiles: the encoder of `pixel_values` reads them too, at another size."""
_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_PATCH_MASKS = ("pixel_attention_mask", "patch_attention_mask")
"""Of padding that depends on the other pictures of a call. A tile of one size for all is read whole."""
_SHAPES = ("spatial_shapes", "target_sizes", "target_sizes_videos")
"""(patches down, patches across) of each tile."""
_POSITIONS = {"image": ("image_position_ids", "pixel_position_ids"), "video": ("video_position_ids",)}

_CHANNELS = 3
_CLASS_TOKENS = {
    "altclip_vision_model": 1,
    "blip_2_vision_model": 1,
    "chinese_clip_vision_model": 1,
    "clip_vision_model": 1,
    "instructblip_vision_model": 1,
    "internvl_vision": 1,
    "llama4_vision_model": 1,
    "mllama_vision_model": 1,
}
"""Tokens of an encoder's own beside the patches of a tile, by `model_type` of `vision_config`."""

_JOINED_TILES = ("mllama_vision_model",)
"""Encoders whose tiles of one image attend to each other. Each tile is filled up to `_FILLED_TO` tokens."""
_FILLED_TO = 8

_OTHERWISE = {
    "chameleon_vqgan": "its encoder is a stack of convolutions, which reads no tokens",
    "emu3_vqgan": "its encoder is a stack of convolutions, which reads no tokens",
    "gemma3n_vision": "its encoder (MobileNet) is a stack of convolutions, which reads no tokens",
    "inkling2_vision": "the grid that its processor gives is not that of the patches that the encoder reads",
}
"""Encoders for which the list above does not hold, by `model_type` of their section; and why."""


class UnknownLayoutError(Exception):
    """The tensors are of no layout in the list."""


def segments(
    kind: str, tensors: Mapping[str, Any], config: Any, count: int, patch_size: int | None = None
) -> list[tuple[int, int]]:
    """What the encoder reads of one of `count` equal media.

    Args:
        kind: `image`, `video` or `audio`.
        tensors: What the processor made of all of them.
        config: The model's configuration, as transformers has it.
        count: Media.
        patch_size: What the processor says, for encoders of timm, whose configuration does not say it.

    Returns:
        (how many, tokens) for each run of equal segments.

    Raises:
        UnknownLayoutError: It is not in the list, with names and shapes of the tensors.
    """
    if kind == "audio":
        groups = [sound.segments(tensors, _section(config, "audio_config"))]
    else:
        why = _OTHERWISE.get(getattr(_vision(config), "model_type", ""))
        groups = [] if why else _pictures(kind, tensors, config, patch_size)
    if not groups or any(not group or len(group) % count or min(group) < 1 for group in groups):
        raise UnknownLayoutError(_words(kind, tensors, config, count))
    found = [tokens for group in groups for tokens in group[: len(group) // count]]
    runs: list[tuple[int, int]] = []
    for tokens in found:
        if runs and runs[-1][1] == tokens:
            runs[-1] = (runs[-1][0] + 1, tokens)
        else:
            runs.append((1, tokens))
    return runs


def _pictures(kind: str, tensors: Mapping[str, Any], config: Any, patch_size: int | None) -> list[list[int]]:
    """Tokens of each segment of all media, a list for each tensor; empty where the layout is unknown."""
    name = next((name for name in _PIXELS[kind] if name in tensors), None)
    pictures = {other for other in tensors if "pixel_values" in other and not other.endswith("mask")}
    if name is None or pictures - {name, *_MORE_TILES}:
        # What else it makes of a picture is for another encoder.
        return []
    vision = _vision(config)
    patch = _side(getattr(vision, "patch_size", None) or getattr(config, "patch_size", None))
    extra = _CLASS_TOKENS.get(getattr(vision, "model_type", ""), 0)
    if getattr(vision, "model_type", "") == "timm_wrapper":
        patch, extra = _side(patch_size), int(bool(getattr(config, "vision_use_cls_token", False)))
    groups = [_picture(kind, tensors, name, patch, extra)]
    groups += [
        _tiles(_shape(tensors[more]), None, None, patch, extra) for more in _MORE_TILES if more in tensors
    ]
    shape = _shape(tensors[name])
    if getattr(vision, "model_type", "") in _JOINED_TILES and len(shape) == 6:
        filled = [-(-tokens // _FILLED_TO) * _FILLED_TO for tokens in groups[0]]
        tiles = shape[2]
        groups[0] = [sum(filled[at : at + tiles]) for at in range(0, len(filled), tiles)]
    return groups


def _picture(
    kind: str, tensors: Mapping[str, Any], name: str, patch: tuple[int, int] | None, extra: int
) -> list[int]:
    """Tokens of each segment of all media; empty where the layout is unknown."""
    if (grid := tensors.get(_GRIDS[kind])) is not None:
        return [height * width for times, height, width in _list(grid) for _ in range(times)]
    pixels = tensors[name]
    if (shapes := next((tensors[one] for one in _SHAPES if one in tensors), None)) is not None:
        return [rows * columns + extra for rows, columns in _list(shapes)]
    if isinstance(pixels, (list, tuple)):
        # Tiles of several sizes: a list with the tiles of each image.
        flat = [tile for one in pixels for tile in (one if len(_shape(one)) == 4 else [one])]
        return [tokens for tile in flat for tokens in _tiles(_shape(tile), None, None, patch, extra)]
    shape = _shape(pixels)
    mask = next((tensors[name] for name in _PATCH_MASKS if name in tensors), None)
    positions = next((tensors[name] for name in _POSITIONS[kind] if name in tensors), None)
    if positions is not None and len(shape) >= 3 and _shape(positions)[:-1] == shape[:-1]:
        rows = positions.reshape(-1, shape[-2], _shape(positions)[-1])
        return [int((one >= 0).all(-1).sum()) + extra for one in rows]
    if len(shape) in (3, 4) and mask is not None and _shape(mask) == shape[:-1]:
        return [int(one.sum()) + extra for one in mask.reshape(-1, mask.shape[-1])]
    if len(shape) == 3 and mask is None and patch and shape[-1] == _CHANNELS * patch[0] * patch[1]:
        return [shape[1] + extra] * shape[0]
    return _tiles(shape, mask, tensors.get("image_sizes"), patch, extra)


def _tiles(
    shape: tuple[int, ...], mask: Any, sizes: Any, patch: tuple[int, int] | None, extra: int
) -> list[int]:
    """Tokens of tiles (.., channels, height, width), of which a mask or sizes may cut off what is padding."""
    if patch is None or not 3 <= len(shape) <= 6 or shape[-3] not in (1, _CHANNELS):
        return []
    count = math.prod(shape[:-3])
    height, width = shape[-2:]
    rows, columns = height // patch[0], width // patch[1]
    if mask is not None and _shape(mask)[-2:] == (height, width):
        per_tile = [_patches_of_mask(one, patch) for one in mask.reshape(-1, height, width)]
        return [tokens + extra for tokens in per_tile if tokens]
    # Of tiles with one more axis the sizes are those of the picture before it was cut.
    if sizes is not None and len(shape) == 4 and len(_list(sizes)) == count:
        found = _list(sizes)
        if all(down <= height and across <= width for down, across in found):
            return [(down // patch[0]) * (across // patch[1]) + extra for down, across in found]
    return [rows * columns + extra] * count if rows * columns else []


def _patches_of_mask(mask: Any, patch: tuple[int, int]) -> int:
    """Patches of which the mask leaves something."""
    rows, columns = mask.any(-1).sum(), mask.any(-2).sum()
    return -(-int(rows) // patch[0]) * -(-int(columns) // patch[1])


def _vision(config: Any) -> Any:
    """The part of the configuration that is of the picture encoder; `None` where it has no such part."""
    config = getattr(config, "thinker_config", config)
    return next(
        (
            found
            for name in ("vision_config", "vq_config")
            if (found := getattr(config, name, None)) is not None
        ),
        None,
    )


def _section(config: Any, name: str) -> Any:
    """A part of the configuration; omni models have it below `thinker_config`."""
    config = getattr(config, "thinker_config", config)
    return getattr(config, name, None)


def _side(size: Any) -> tuple[int, int] | None:
    """Height and width of a patch."""
    if isinstance(size, (list, tuple)) and len(size) == 2:
        return int(size[0]), int(size[1])
    return (size, size) if isinstance(size, int) and size > 0 else None


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(getattr(tensor, "shape", ()))


def _list(tensor: Any) -> list[Any]:
    return tensor.tolist() if hasattr(tensor, "tolist") else [list(map(int, one)) for one in tensor]


def _words(kind: str, tensors: Mapping[str, Any], config: Any, count: int) -> str:
    """The error: names, shapes, and what is known."""
    shapes = ", ".join(
        f"`{name}` {_shape(tensor) or type(tensor).__name__}" for name, tensor in sorted(tensors.items())
    )
    section = _section(config, "audio_config") if kind == "audio" else _vision(config)
    model_type = getattr(section, "model_type", None)
    size = getattr(section, "patch_size", None)
    known = (
        f"`input_features` of {', '.join(sound.KNOWN)}"
        if kind == "audio"
        else "`pixel_values` (.., tiles, channels, height, width) with `patch_size`, patches with a mask, "
        "and patches with `image_grid_thw` or `video_grid_thw`"
    )
    why = f": {_OTHERWISE[model_type]}" if model_type in _OTHERWISE else ""
    return (
        f"the encoder tokens of {count} {kind} are not known from what the processor gives{why}: {shapes} "
        f"(encoder `{model_type}`, `patch_size` {size}); known are {known}"
    )
