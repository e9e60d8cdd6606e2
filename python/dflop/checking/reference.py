"""One sample as Hugging Face's own model takes it, by Hugging Face's own processors.

    files of a sample --decoded--> pictures, frames, sounds --the processors--> arguments of `forward`

The processors are made from the files of the model directory, by the classes that need no torchvision where
there are such; those of videos need it. They give the model's arguments under the model's own names.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from dflop.models.adapter import IGNORED
from dflop.models.media import decode_frames, decode_image
from dflop.models.processor_files import processor_fields, stacked
from dflop.models.sound import decode_sound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    from PIL import Image

    from dflop.data.sample import Sample
    from dflop.models.media import MediaFile


@dataclass(frozen=True)
class Medium:
    """One medium of a sample, decoded."""

    kind: str
    """`image`, `video` or `audio`."""
    pictures: Sequence[Image.Image] = ()
    """The image; or the frames of a video that are read, in order."""
    sound: np.ndarray | None = None
    """[samples] float32, at the rate that the processor reads."""
    sampled_fps: float | None = None
    """Frames read a second of video, where the file tells."""


def media_of(
    adapter: Any, files: Sequence[tuple[MediaFile, str, Sequence[int], float | None]]
) -> list[Medium]:
    """The media of a sample, decoded from their files.

    Args:
        adapter: Of the family; a `ModelAdapter`.
        files: For each medium the file, its kind as in `MediaGrid`, the frames that are read, and their rate.

    Returns:
        In the order of the files.

    Raises:
        FileNotFoundError: A file is missing.
        ProfileError: A file cannot be decoded; the message names it.
    """
    found = []
    for file, kind, frames, fps in files:
        if kind == "audio":
            found.append(Medium(kind, sound=decode_sound(file, _extractor(adapter).sampling_rate)))
        elif kind == "video":
            found.append(Medium(kind, decode_frames(file, frames), sampled_fps=fps))
        else:
            found.append(Medium("image", [decode_image(file)]))
    return found


def arguments_of(adapter: Any, sample: Sample, media: Sequence[Medium]) -> dict[str, torch.Tensor]:
    """The arguments of Hugging Face's own model for one sample.

    Args:
        adapter: Of the family; a `ModelAdapter`.
        sample: Its tokens and labels.
        media: Its media, in the order of their features.

    Returns:
        By name, for a batch of one sample; `labels` among them.

    Raises:
        FileNotFoundError: The model directory lacks a processor's file.
        ImportError: A processor needs a package that is not installed, such as torchvision.
    """
    labels_T = torch.cat([torch.full((1,), IGNORED), sample.targets_T[:-1]])
    arguments = {"input_ids": sample.input_ids_T[None], "labels": labels_T[None]}
    if adapter.family == "gemma3":
        # Tells its model which tokens see the rest of their picture.
        arguments["token_type_ids"] = sample.feature_mask_T.long()[None]
    if not media:
        return arguments
    arguments.update(_READERS[adapter.family](adapter, media))
    if "attention_mask" in arguments:
        arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    if "mm_token_type_ids" in arguments:
        # 1 where an image's features go, 2 where a video's do. GLM writes videos with the token of images.
        has_videos = "video_grid_thw" in arguments or "pixel_values_videos" in arguments
        kinds = [1 + (m.kind == "video" and has_videos) for m in media]
        counts = torch.tensor([grid.num_features for grid in sample.media])
        types_T = torch.zeros_like(sample.input_ids_T)
        types_T[sample.feature_mask_T] = torch.tensor(kinds).repeat_interleave(counts)
        arguments["mm_token_type_ids"] = types_T[None]
    return arguments


# `Any`: transformers declares fewer forms of media than it takes.
def _images(media: Sequence[Medium]) -> Any:
    return [medium.pictures[0] for medium in media if medium.kind == "image"]


def _videos(media: Sequence[Medium]) -> Any:
    return [stacked(medium.pictures) for medium in media if medium.kind == "video"]


def _fields(adapter: Any, part: str = "image_processor") -> dict[str, Any]:
    model_dir: Path = adapter.model_dir
    return processor_fields(model_dir, part)


def _llava_onevision(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    from transformers import LlavaOnevisionImageProcessorPil, LlavaOnevisionVideoProcessor

    found = {}
    if images := _images(media):
        # A list of one sample's images: those of several are not cut into tiles.
        nested: Any = [images]
        found.update(LlavaOnevisionImageProcessorPil(**_fields(adapter))(nested, return_tensors="pt"))
    if videos := _videos(media):
        fields = {k: v for k, v in _fields(adapter, "video_processor").items() if k != "image_grid_pinpoints"}
        processor = LlavaOnevisionVideoProcessor(**fields)
        found.update(processor(videos, return_tensors="pt", do_sample_frames=False))
    return found


def _llava(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil

    fields = _fields(adapter)
    is_siglip = fields.pop("image_processor_type", "CLIPImageProcessor").startswith("Siglip")
    processor = (SiglipImageProcessorPil if is_siglip else CLIPImageProcessorPil)(**fields)
    return dict(processor(_images(media), return_tensors="pt"))


def _llava_next(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    from transformers import LlavaNextImageProcessorPil

    return dict(LlavaNextImageProcessorPil(**_fields(adapter))(_images(media), return_tensors="pt"))


def _gemma3(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    # Its file leaves out what only crops need.
    found = adapter.processor(_images(media), return_tensors="pt")
    return {"pixel_values": found["pixel_values"]}


def _gemma4(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    from transformers import Gemma4VideoProcessor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    # Tells its model which tokens see the rest of their picture.
    found: dict[str, Any] = {"mm_token_type_ids": None}
    if images := _images(media):
        made = Gemma4ImageProcessorPil(**_fields(adapter))(images, return_tensors="pt")
        found.update({name: made[name] for name in ("pixel_values", "image_position_ids")})
    if videos := _videos(media):
        processor = Gemma4VideoProcessor(**_fields(adapter, "video_processor"))
        made = processor(videos, return_tensors="pt", do_sample_frames=False)
        found.update({name: made[name] for name in ("pixel_values_videos", "video_position_ids")})
        found["num_frames_per_video"] = torch.as_tensor(made["num_frames_per_video"])
    return found


def _idefics3(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images: Any = [_images(media)]
    return dict(Idefics3ImageProcessorPil(**_fields(adapter))(images, return_tensors="pt"))


def _smolvlm(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    from transformers import SmolVLMVideoProcessor
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    found = []
    for medium in media:
        if medium.kind == "video":
            processor = SmolVLMVideoProcessor(**_fields(adapter, "video_processor"))
            made = processor(_videos([medium]), return_tensors="pt", do_sample_frames=False)
        else:
            images: Any = [_images([medium])]
            made = SmolVLMImageProcessorPil(**_fields(adapter))(images, return_tensors="pt")
        found.append(made["pixel_values"])
    # Of one sample, tiles and frames in the order of its media.
    return {"pixel_values": torch.cat(found, dim=1)}


def _internvl(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    from transformers import InternVLVideoProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    found = []
    for medium in media:
        if medium.kind == "video":
            processor = InternVLVideoProcessor(**_fields(adapter, "video_processor"))
            made = processor(_videos([medium]), return_tensors="pt", do_sample_frames=False)
            found.append(made["pixel_values_videos"][0])
        else:
            # As InternVL's own processor calls it, whatever its file says.
            processor = GotOcr2ImageProcessorPil(**{**_fields(adapter), "crop_to_patches": True})
            found.append(processor(_images([medium]), return_tensors="pt")["pixel_values"])
    return {"pixel_values": torch.cat(found)}


def _mistral3(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    side = adapter.config.vision_config.patch_size * adapter.config.spatial_merge_size
    processor = PixtralImageProcessorPil(**_fields(adapter))
    return dict(processor(_images(media), patch_size=side, return_tensors="pt"))


def _lighton_ocr(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    return dict(PixtralImageProcessorPil(**_fields(adapter))(_images(media), return_tensors="pt"))


def _paddleocr_vl(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    from transformers import PaddleOCRVLImageProcessorPil

    found = PaddleOCRVLImageProcessorPil(**_fields(adapter))(_images(media), return_tensors="pt")
    return {**found, "mm_token_type_ids": None}


def _patches(adapter: Any, media: Sequence[Medium], name: str, image_class: Any = None) -> dict[str, Any]:
    """Arguments of a model of the Qwen-VL kind; `name` is that of the class that reads its videos."""
    import transformers

    found: dict[str, Any] = {}
    if images := _images(media):
        processor = (image_class or transformers.Qwen2VLImageProcessorPil)(**_fields(adapter))
        found.update(processor(images, return_tensors="pt"))
    if videos := _videos(media):
        processor = getattr(transformers, name)(**_fields(adapter, "video_processor"))
        found.update(processor(videos, return_tensors="pt", do_sample_frames=False))
    return {**found, "mm_token_type_ids": None}


def _qwen2_vl(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    return _patches(adapter, media, "Qwen2VLVideoProcessor")


def _qwen2_5_vl(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    # Where the file does not tell, transformers takes 24 frames a second.
    frames = adapter.config.vision_config.temporal_patch_size
    seconds = [frames / (medium.sampled_fps or 24) for medium in media if medium.kind == "video"]
    found = _qwen2_vl(adapter, media)
    return {**found, "second_per_grid_ts": torch.tensor(seconds)} if seconds else found


def _omni(
    adapter: Any, media: Sequence[Medium], hear: Callable[[Any, Sequence[np.ndarray]], tuple[Any, Any]]
) -> dict[str, Any]:
    """Arguments of a model with two encoders; `hear` gives mel frames of sounds, and which are no padding."""
    from transformers import Qwen2VLImageProcessorPil, Qwen2VLVideoProcessor

    # Without it its model gives all tokens the positions of text.
    found: dict[str, Any] = {"attention_mask": None}
    if images := _images(media):
        found.update(Qwen2VLImageProcessorPil(**_fields(adapter))(images, return_tensors="pt"))
    if videos := _videos(media):
        # As its own processor calls it, whatever the file says.
        own: Any = adapter.processor_class.videos_kwargs
        processor = Qwen2VLVideoProcessor(**_fields(adapter, "video_processor"))
        found.update(processor(videos, return_tensors="pt", do_sample_frames=False, size=own["size"]))
        frames = adapter.config.vision_config.temporal_patch_size
        # Its processor takes one rate for all videos, where it is not told.
        untold = adapter.untold_fps
        seconds = [frames / (m.sampled_fps or untold) for m in media if m.kind == "video"]
        found["video_second_per_grid"] = torch.tensor(seconds)
    if sounds := _sounds(media):
        features, mask = hear(_extractor(adapter), sounds)
        found.update({"input_features": features, "feature_attention_mask": mask})
    return found


def _qwen2_5_omni(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    return _omni(adapter, media, _mel)


def _qwen3_omni_moe(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    def each_alone(extractor: Any, sounds: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        # As its processor reads a sound alone: several would be padded to the longest first.
        options = {
            "padding": True,
            "truncation": False,
            "return_attention_mask": True,
            "return_tensors": "pt",
        }
        rate = extractor.sampling_rate
        found = [extractor(sound, sampling_rate=rate, **options) for sound in sounds]
        longest = max(one["input_features"].shape[-1] for one in found)
        pads = [(0, longest - one["input_features"].shape[-1]) for one in found]

        def joined(name: str) -> torch.Tensor:
            each = zip(found, pads, strict=True)
            return torch.cat([torch.nn.functional.pad(one[name], size) for one, size in each])

        return joined("input_features"), joined("attention_mask")

    return _omni(adapter, media, each_alone)


def _lfm2_vl(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    from transformers import Lfm2VlImageProcessor

    processor = Lfm2VlImageProcessor(**_fields(adapter))
    return {**processor(_images(media), return_tensors="pt")}


def _minicpmv4_6(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
        MiniCPMV4_6ImageProcessorPil,
    )

    found = MiniCPMV4_6ImageProcessorPil(**_fields(adapter))(_images(media), return_tensors="pt")
    return {name: found[name] for name in ("pixel_values", "target_sizes")}


def _qwen3_vl(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    return _patches(adapter, media, "Qwen3VLVideoProcessor")


def _glm4v(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    from transformers import Glm4vImageProcessorPil

    def read(media: Sequence[Medium]) -> dict[str, Any]:
        return _patches(adapter, media, "Glm4vVideoProcessor", Glm4vImageProcessorPil)

    if len({medium.kind for medium in media}) == 1:
        return read(media)
    # Its model takes images or videos. A frame pair is to it as an image, at the same positions.
    parts = [list(read([medium]).values())[:2] for medium in media]
    grids = [[1, h, w] for _, grid in parts for t, h, w in grid.tolist() for _ in range(t)]
    pixels = torch.cat([pixels for pixels, _ in parts])
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": None}


def _extractor(adapter: Any) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(**_fields(adapter, "feature_extractor"))


def _mel(extractor: Any, sounds: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mel frames of sounds of one window each, and which of them are no padding."""
    options = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "pt"}
    found = extractor(list(sounds), sampling_rate=extractor.sampling_rate, **options)
    return found["input_features"], found["attention_mask"]


def _sounds(media: Sequence[Medium]) -> list[np.ndarray]:
    return [medium.sound for medium in media if medium.sound is not None]


def _qwen2_audio(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    features, mask = _mel(_extractor(adapter), _sounds(media))
    return {"input_features": features, "feature_attention_mask": mask}


def _audioflamingo3(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    extractor = _extractor(adapter)
    # As its processor cuts them; a longer sound than it reads is refused when the data are profiled.
    length = extractor.n_samples
    windows = [s[first : first + length] for s in _sounds(media) for first in range(0, len(s), length)]
    features, mask = _mel(extractor, windows)
    return {"input_features": features, "input_features_mask": mask}


def _voxtral(adapter: Any, media: Sequence[Medium]) -> dict[str, Any]:
    from transformers import VoxtralProcessor

    extractor = _extractor(adapter)
    # As it calls this itself, with windows of 30 s; those of a model for tests are shorter. A processor needs
    # a tokenizer, which has no part in this.
    processor: Any = SimpleNamespace(feature_extractor=extractor)
    features = VoxtralProcessor._retrieve_input_features(
        processor,
        _sounds(media),
        extractor.nb_max_frames,
        sampling_rate=extractor.sampling_rate,
        padding=True,
        truncation=False,
        pad_to_multiple_of=extractor.n_samples,
        return_tensors="pt",
    )
    return {"input_features": features}


_READERS: dict[str, Callable[[Any, Sequence[Medium]], dict[str, Any]]] = {
    "audioflamingo3": _audioflamingo3,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm46v": _glm4v,
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v,
    "glm_ocr": _glm4v,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "lfm2_vl": _lfm2_vl,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "lighton_ocr": _lighton_ocr,
    "minicpmv4_6": _minicpmv4_6,
    "mistral3": _mistral3,
    "paddleocr_vl": _paddleocr_vl,
    "qwen2_5_omni": _qwen2_5_omni,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_audio": _qwen2_audio,
    "qwen2_vl": _qwen2_vl,
    "qwen3_5": _qwen3_vl,
    "qwen3_5_moe": _qwen3_vl,
    "qwen3_omni_moe": _qwen3_omni_moe,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "smolvlm": _smolvlm,
    "voxtral": _voxtral,
}
"""How each family reads its media. A family that trains and stands not here cannot be checked."""
