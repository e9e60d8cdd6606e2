"""LLaVA-OneVision: SigLIP tiles, an MLP projector, anyres packing, a Qwen2 backbone; all from Hugging Face.

This file reads the configuration, builds the pieces (`llava_onevision_pieces.py`) and decodes pixels.

NOTE: with `tie_word_embeddings` the embedding and the head are one tensor, so a cut of the backbone into
several stages is refused.
"""

from __future__ import annotations

import json
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration
from transformers.models.llava_onevision import modeling_llava_onevision as hf

from dflop.models import media as decoding
from dflop.models.adapter import EXAMPLE_SIZE, AttentionShape, MediaGrid
from dflop.models.errors import profile_error
from dflop.models.llava_onevision_pieces import LlavaOnevisionEncoder, LlavaOnevisionLlmStage
from dflop.models.packing import PACKED
from dflop.models.parameters import materialise
from dflop.models.rules import Rule, check_rules, dropout_rules, rope_rule
from dflop.models.towers import inner_tower

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import LlavaOnevisionImageProcessorPil

    from dflop.models.media import MediaFile

_TEXT_MODELS = ("qwen2",)
_VISION_MODELS = ("siglip_vision_model",)


class LlavaOnevisionAdapter:
    """`ModelAdapter` of LLaVA-OneVision."""

    family = "llava_onevision"

    def __init__(self, model_dir: Path) -> None:
        """Reads `config.json` of `model_dir`.

        Args:
            model_dir: folder with `config.json` and `preprocessor_config.json`.

        Raises:
            FileNotFoundError: there is no `config.json`.
            ProfileError: the configuration asks for what this adapter does not do; the message names the
                field.
        """
        self.model_dir = model_dir
        self.config = self._read_config()
        text, vision = self.config.text_config, self.config.vision_config
        self._check()
        self.num_encoder_layers: int = vision.num_hidden_layers
        self.num_llm_layers: int = text.num_hidden_layers
        self.hidden_size: int = text.hidden_size
        self.image_size: int = vision.image_size
        self.encoder_tokens_per_tile: int = (vision.image_size // vision.patch_size) ** 2
        self._patch_size: int = vision.patch_size
        self.vocab_size: int = text.vocab_size
        head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self.attention = AttentionShape(text.num_attention_heads, text.num_key_value_heads, head_size)

    def _read_config(self) -> Any:
        """A fresh configuration: the models built from one write into it. Its fields are untyped upstream."""
        return LlavaOnevisionConfig.from_dict(json.loads((self.model_dir / "config.json").read_bytes()))

    def _check(self) -> None:
        text, vision = self.config.text_config, self.config.vision_config
        is_one_number = isinstance(vision.image_size, int) and isinstance(vision.patch_size, int)
        rules = [
            Rule(
                "text_config.model_type",
                text.model_type,
                text.model_type in _TEXT_MODELS,
                f"one of {_TEXT_MODELS}",
            ),
            Rule(
                "vision_config.model_type",
                vision.model_type,
                vision.model_type in _VISION_MODELS,
                f"one of {_VISION_MODELS}",
            ),
            Rule("text_config.use_sliding_window", True, not text.use_sliding_window, "false"),
            rope_rule(text),
            Rule(
                "vision_config.image_size",
                vision.image_size,
                is_one_number,
                "one number, as is `patch_size`",
            ),
            *dropout_rules(self.config.to_dict()),
        ]
        check_rules(self.model_dir / "config.json", rules)

    def build_whole(self, attention: str = PACKED) -> tuple[nn.Module, Any]:
        """The whole model on the meta device, but for its buffers, which are real and on the CPU.

        Args:
            attention: name of the backbone's attention function.

        Returns:
            The model, to take pieces from, and the configuration it was built with.
        """
        config = self._read_config()
        with torch.device("meta"):
            whole: Any = LlavaOnevisionForConditionalGeneration(config)
        # The layers look the function up by this name at each call.
        config.text_config._attn_implementation = attention
        config.vision_config._attn_implementation = "sdpa"
        backbone = whole.model.language_model
        backbone.rotary_emb = type(backbone.rotary_emb)(config=config.text_config)
        tower = whole.model.vision_tower
        embeddings = inner_tower(tower).embeddings
        embeddings.position_ids = torch.arange(embeddings.num_positions).expand((1, -1))
        if config.tie_word_embeddings:
            whole.lm_head.weight = backbone.embed_tokens.weight
        return whole, config

    def std(self, name: str) -> float:
        """Standard deviation that the parameter of this full name is drawn with."""
        part = self.config.vision_config if ".vision_tower." in name else self.config.text_config
        return float(getattr(part, "initializer_range", 0.02))

    def build_encoder(
        self, device: torch.device, dtype: torch.dtype, seed: int | None
    ) -> LlavaOnevisionEncoder:
        """The encoder with its projector; see `ModelAdapter.build_encoder`.

        Args:
            device: where its parameters shall live.
            dtype: of its parameters.
            seed: the values depend on it and on the parameters' names alone; none: no values yet.

        Returns:
            `forward(EncoderInput) -> features_ED` [E, D].
        """
        whole, config = self.build_whole(PACKED)
        encoder = LlavaOnevisionEncoder(whole, config)
        materialise(encoder, device, dtype, seed, self.std)
        return encoder

    def build_llm_stage(
        self, first_layer: int, num_layers: int, device: torch.device, dtype: torch.dtype, seed: int | None
    ) -> LlavaOnevisionLlmStage:
        """A run of layers of the backbone; see `ModelAdapter.build_llm_stage`.

        A run of no layers is the embedding alone (`first_layer` 0), or norm and head alone (`first_layer` is
        `num_llm_layers`): so they are measured.

        Args:
            first_layer: from 0.
            num_layers: layers of the run.
            device: where its parameters shall live.
            dtype: of its parameters.
            seed: the values depend on it and on the parameters' names alone; none: no values yet.

        Returns:
            `forward(LlmInput, incoming) -> hidden_TD`, or the summed loss from the last stage.

        Raises:
            ValueError: there are no such layers.
            ProfileError: the embedding is tied to the head of another stage.
        """
        last = first_layer + num_layers
        if not 0 <= first_layer <= last <= self.num_llm_layers:
            message = f"layers {first_layer} to {last} of a backbone of {self.num_llm_layers}"
            raise ValueError(message)
        is_whole = first_layer == 0 and last == self.num_llm_layers
        if self.config.tie_word_embeddings and num_layers > 0 and not is_whole:
            message = (
                f"layers {first_layer} to {last} of {self.num_llm_layers} are one stage of several, but the "
                "embedding is tied to the head: set `tie_word_embeddings` to false, or use one LLM stage"
            )
            raise profile_error(message)
        whole, _ = self.build_whole(PACKED)
        layers = range(first_layer, last)
        # A run of no layers at either end is that end alone.
        is_first = first_layer == 0
        is_last = last == self.num_llm_layers
        stage = LlavaOnevisionLlmStage(whole, layers, is_first, is_last)
        materialise(stage, device, dtype, seed, self.std)
        return stage

    def build_llm_layers(
        self, num_layers: int, device: torch.device, dtype: torch.dtype, seed: int
    ) -> LlavaOnevisionLlmStage:
        """Layers alone; see `ModelAdapter.build_llm_layers`.

        Args:
            num_layers: at least 1, at most `num_llm_layers`.
            device: where its parameters shall live.
            dtype: of its parameters.
            seed: the values depend on it and on the parameters' names alone.

        Returns:
            `forward(LlmInput, hidden_TD) -> hidden_TD`.
        """
        whole, _ = self.build_whole(PACKED)
        stage = LlavaOnevisionLlmStage(whole, range(num_layers), is_first=False, is_last=False)
        materialise(stage, device, dtype, seed, self.std)
        return stage

    def num_features(self, kind: str, height: int, width: int, num_tiles: int) -> int:
        """Features of one image or video, counted by Hugging Face's processor.

        Args:
            kind: as in `MediaGrid`.
            height: of an `image`, in pixels, as displayed.
            width: likewise.
            num_tiles: frames of a `video`.

        Returns:
            LLM tokens it fills.
        """
        side = self.image_size // self._patch_size
        if kind == "video":
            return num_tiles * ((side + 1) // 2) ** 2 + 1
        if kind == "multi_image":
            return side * side + 1
        from transformers import LlavaOnevisionProcessor

        # Its counting methods read these fields; a whole processor would need a tokenizer.
        shell = cast("Any", object.__new__(LlavaOnevisionProcessor))
        shell.num_image_tokens = side * side
        shell.vision_aspect_ratio = self.config.vision_aspect_ratio
        shell.image_processor = SimpleNamespace(image_grid_pinpoints=self.config.image_grid_pinpoints)
        return shell._get_number_of_features(height, width, self.image_size, self.image_size)

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Photographs as tiled by anyres, and one video of what is left; see `ModelAdapter.example_media`.

        Args:
            num_tiles: at least 1.

        Returns:
            Media of `num_tiles` tiles in all.
        """
        height, width = EXAMPLE_SIZE
        pinpoints = self.config.image_grid_pinpoints
        tiles = hf.image_size_to_num_patches([height, width], pinpoints, self.image_size)
        image = MediaGrid("image", tiles, height, width, self.num_features("image", height, width, tiles))
        media = [image] * (num_tiles // tiles)
        frames = num_tiles % tiles
        if frames:
            media.append(MediaGrid("video", frames, height, width, self.num_features("video", 0, 0, frames)))
        return media

    def reference_model(
        self, seed: int, dtype: torch.dtype = torch.float32
    ) -> LlavaOnevisionForConditionalGeneration:
        """Hugging Face's whole model on the CPU, with the parameters that the pieces get: the tests' oracle.

        Args:
            seed: as for the pieces.
            dtype: of its parameters.

        Returns:
            The model in training mode, with Hugging Face's own attention.
        """
        whole, _ = self.build_whole("sdpa")
        materialise(whole, torch.device("cpu"), dtype, seed, self.std)
        return cast("LlavaOnevisionForConditionalGeneration", whole)

    @cached_property
    def processor(self) -> LlavaOnevisionImageProcessorPil:
        """The image processor of `preprocessor_config.json`, without torchvision."""
        from transformers import LlavaOnevisionImageProcessorPil

        path = self.model_dir / "preprocessor_config.json"
        processor: Any = LlavaOnevisionImageProcessorPil.from_dict(json.loads(path.read_bytes()))
        size = (processor.size.height, processor.size.width)
        if size != (self.image_size, self.image_size):
            message = (
                f"`{path}` has tiles of {size[1]} x {size[0]} pixels, `config.json` of {self.image_size}"
            )
            raise profile_error(message)
        pinpoints = [list(pair) for pair in processor.image_grid_pinpoints]
        if pinpoints != [list(pair) for pair in self.config.image_grid_pinpoints]:
            message = f"`{path}` has other `image_grid_pinpoints` than `config.json`"
            raise profile_error(message)
        return processor

    def pixels(self, file: MediaFile, kind: str, frame_indices: Sequence[int]) -> torch.Tensor:
        """Decodes one image, or the named frames of one video; see `ModelAdapter.pixels`.

        Args:
            file: the file, or its bytes.
            kind: `image`, `multi_image` or `video`.
            frame_indices: frames of a video, from 0; unused for images.

        Returns:
            Normalised tiles [n, 3, S, S], float32.

        Raises:
            FileNotFoundError: there is no such file.
            ProfileError: the file cannot be decoded; the message names it.
            ValueError: there is no such kind.
        """
        if kind == "video":
            frames = decoding.decode_frames(file, frame_indices)
            tiles = [self._frame_tile(frame) for frame in frames]
            return torch.stack(tiles) if tiles else torch.empty(0, 3, self.image_size, self.image_size)
        if kind not in ("image", "multi_image"):
            message = f"`{kind}` is no kind of media, known are `image`, `multi_image` and `video`"
            raise ValueError(message)
        image = decoding.decode_image(file)
        if kind == "image":
            batch: Any = [image]
        else:
            # The processor pads an image to a square tile when its sample has another beside it: one of one
            # pixel.
            batch = [[image, image.resize((1, 1))]]
        pixels_BnCHW = self.processor.preprocess(batch, return_tensors="pt")["pixel_values"]
        return pixels_BnCHW[0].to(torch.float32)

    def _frame_tile(self, frame: Any) -> torch.Tensor:
        """One frame as Hugging Face's video processor has it: resized whole, never padded or tiled."""
        import numpy as np

        processor: Any = self.processor
        pixels_CHW = np.asarray(frame).transpose(2, 0, 1)
        resized = processor.resize(pixels_CHW, size=processor.size, resample=processor.resample)
        scaled = processor.rescale(resized, scale=processor.rescale_factor)
        normed = processor.normalize(scaled, mean=processor.image_mean, std=processor.image_std)
        return torch.from_numpy(np.ascontiguousarray(normed)).to(torch.float32)


ADAPTER = LlavaOnevisionAdapter
"""The adapter of the family that this module is named for: `load_adapter` looks for it."""
