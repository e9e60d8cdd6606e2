"""What the encoder reads of a medium, by the tensors that a processor makes of it.

| tensors | encoder tokens |
|---|---|
| rows of patches with `image_grid_thw`, `video_grid_thw` | a segment of h x w patches for each t |
| patches with a mask, `spatial_shapes` or positions | a segment of the patches there are, for each tile |
| `pixel_values` (.., n, c, h, w) | n segments of (h / patch) x (w / patch), cut by a mask or `image_sizes` |
| `input_features` (n, mels, frames) of an encoder like Whisper's | n segments of frames / 2 |

A class token beside the patches counts where `vision_config` is of a kind that has one (`_CLASS_TOKENS`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_PIXELS = {"image": ("pixel_values",), "video": ("pixel_values_videos", "video_pixel_values", "pixel_values")}
_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_PATCH_MASKS = ("pixel_attention_mask", "pixel_mask", "patch_attention_mask")
_POSITIONS = {"image": ("image_position_ids", "pixel_position_ids"), "video": ("video_position_ids",)}

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

_LIKE_WHISPER = (
    "audioflamingo3_encoder",
    "glmasr_encoder",
    "qwen2_audio_encoder",
    "voxtral_encoder",
    "whisper",
)
"""Kinds of `audio_config` whose encoder reads a token for two mel frames, silence of the window included."""
_CONV_STRIDE = 2


class UnknownLayoutError(Exception):
    """The tensors are of no layout in the list."""


def segments(kind: str, tensors: Mapping[str, Any], config: Any, count: int) -> list[tuple[int, int]]:
    """What the encoder reads of one of `count` equal media.

    Args:
        kind: `image`, `video` or `audio`.
        tensors: What the processor made of all of them.
        config: The model's configuration, as transformers has it.
        count: Media.

    Returns:
        (how many, tokens) for each run of equal segments.

    Raises:
        UnknownLayoutError: It is not in the list, with names and shapes of the tensors.
    """
    found = _sound(tensors, config) if kind == "audio" else _picture(kind, tensors, config)
    if not found or len(found) % count or min(found) < 1:
        raise UnknownLayoutError(_words(kind, tensors, config, count))
    found = found[: len(found) // count]
    runs: list[tuple[int, int]] = []
    for tokens in found:
        if runs and runs[-1][1] == tokens:
            runs[-1] = (runs[-1][0] + 1, tokens)
        else:
            runs.append((1, tokens))
    return runs


def _picture(kind: str, tensors: Mapping[str, Any], config: Any) -> list[int]:
    """Tokens of each segment of all media; empty where the layout is unknown."""
    if (grid := tensors.get(_GRIDS[kind])) is not None:
        return [height * width for times, height, width in _list(grid) for _ in range(times)]
    name = next((name for name in _PIXELS[kind] if name in tensors), None)
    if name is None:
        return []
    pixels, vision = tensors[name], _section(config, "vision_config")
    patch = _side(getattr(vision, "patch_size", None) or getattr(config, "patch_size", None))
    extra = _CLASS_TOKENS.get(getattr(vision, "model_type", ""), 0)
    if isinstance(pixels, (list, tuple)):
        # Tiles of several sizes: a list with the tiles of each image.
        flat = [tile for one in pixels for tile in (one if len(_shape(one)) == 4 else [one])]
        return [tokens for tile in flat for tokens in _tiles(_shape(tile), None, None, patch, extra)]
    shape = _shape(pixels)
    if (shapes := tensors.get("spatial_shapes")) is not None:
        return [rows * columns + extra for rows, columns in _list(shapes)]
    mask = next((tensors[name] for name in _PATCH_MASKS if name in tensors), None)
    positions = next((tensors[name] for name in _POSITIONS[kind] if name in tensors), None)
    if positions is not None and len(shape) >= 3 and _shape(positions)[:-1] == shape[:-1]:
        rows = positions.reshape(-1, shape[-2], _shape(positions)[-1])
        return [int((one >= 0).all(-1).sum()) + extra for one in rows]
    if len(shape) in (3, 4) and mask is not None and _shape(mask) == shape[:-1]:
        return [int(one.sum()) + extra for one in mask.reshape(-1, mask.shape[-1])]
    return _tiles(shape, mask, tensors.get("image_sizes"), patch, extra)


def _tiles(
    shape: tuple[int, ...], mask: Any, sizes: Any, patch: tuple[int, int] | None, extra: int
) -> list[int]:
    """Tokens of tiles (.., channels, height, width), of which a mask or sizes may cut off what is padding."""
    if patch is None or not 3 <= len(shape) <= 5 or shape[-3] not in (1, 3):
        return []
    count = 1
    for side in shape[:-3]:
        count *= side
    height, width = shape[-2:]
    if mask is not None and _shape(mask)[-2:] == (height, width):
        per_tile = [_patches_of_mask(one, patch) for one in mask.reshape(-1, height, width)]
        return [tokens + extra for tokens in per_tile if tokens]
    # Of tiles with one more axis the sizes are those of the picture before it was cut.
    if sizes is not None and len(shape) == 4 and len(_list(sizes)) == count:
        found = _list(sizes)
        if all(rows <= height and columns <= width for rows, columns in found):
            return [(rows // patch[0]) * (columns // patch[1]) + extra for rows, columns in found]
    tokens = (height // patch[0]) * (width // patch[1])
    return [tokens + extra] * count if tokens else []


def _patches_of_mask(mask: Any, patch: tuple[int, int]) -> int:
    """Patches of which the mask leaves something."""
    rows, columns = mask.any(-1).sum(), mask.any(-2).sum()
    return -(-int(rows) // patch[0]) * -(-int(columns) // patch[1])


def _sound(tensors: Mapping[str, Any], config: Any) -> list[int]:
    """Tokens of each window of sound; empty where the layout is unknown."""
    audio = _section(config, "audio_config")
    features = tensors.get("input_features")
    kind = getattr(audio, "model_type", "")
    if features is None or kind not in _LIKE_WHISPER or len(_shape(features)) != 3:
        return []
    windows, _, frames = _shape(features)
    return [frames // _CONV_STRIDE] * windows


def _section(config: Any, name: str) -> Any:
    """A section of the configuration, of omni models that of the thinker."""
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
    section = _section(config, "audio_config" if kind == "audio" else "vision_config")
    model_type = getattr(section, "model_type", None)
    size = getattr(section, "patch_size", None)
    known = (
        "`input_features` (windows, mels, frames) of an encoder like Whisper's"
        if kind == "audio"
        else "`pixel_values` (.., tiles, channels, height, width) with `patch_size`, patches with a mask, "
        "and patches with `image_grid_thw` or `video_grid_thw`"
    )
    return (
        f"the encoder tokens of {count} {kind} are not known from what the processor gives: {shapes} "
        f"(encoder `{model_type}`, `patch_size` {size}); known are {known}"
    )
