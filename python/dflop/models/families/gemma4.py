"""Gemma 4 (31B, 26B-A4B): pictures scaled to a budget of patches, videos frame by frame.

    patches_NC --linear, positions of both axes--> hidden_NV --layers--> hidden_NV
               --means of squares, scale--> hidden_EV --norm, product--> features_ED

A picture, or a frame of a video, is a segment, and attention stays within it. In the LLM most layers see a
window and, of a picture in it, what is behind too; the others have other heads, whose keys are values too.
Shape letters: see `models/adapter.py`; C values of a patch, V width of the encoder. An input is one patch.
"""

from __future__ import annotations

import functools
import inspect
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from dflop.models import media as decoding
from dflop.models.adapter import EXAMPLE_SIZE, MediaGrid
from dflop.models.encoder import numbered
from dflop.models.errors import hinted, profile_error
from dflop.models.family import FamilyAdapter
from dflop.models.packing import PACKED
from dflop.models.patch_layout import Geometry, sent
from dflop.models.patches import Bounds, bounds_of_patches
from dflop.models.processor_files import processor_fields, processor_of_videos, stacked
from dflop.models.rules import Rule
from dflop.models.tensor import Cut, LayerPlan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.adapter import EncoderInput
    from dflop.models.encoder import EncoderRun
    from dflop.models.media import MediaFile

_BUDGET = 280
"""Features of an image, at most, where the processor's file does not say it."""


# Cached: recomputation in a backward, and each encoder stage of a rank, need the same microbatch again.
@functools.lru_cache(maxsize=16)
def _positions(pictures: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
    """Column and row of each patch, [1, T, 2], on the CPU."""
    grids = [
        torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1).repeat(count, 1)
        for count, rows, columns in pictures
    ]
    return torch.cat(grids)[None]


def positions_of(pictures: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    """Where patches lie.

    Args:
        pictures: of each medium its frames, and rows and columns of patches of one.
        device: of the result.

    Returns:
        [1, T, 2]: column and row.
    """
    return sent(_positions(tuple(pictures)), device)


def embed(tower: Any, patches_NC: torch.Tensor, positions_1N2: torch.Tensor) -> torch.Tensor:
    """Hidden states before the first layer: [N, V].

    Args:
        tower: Hugging Face's, or what has its `patch_embedder`.
        patches_NC: pixels of a patch from 0 to 1, pixel by pixel.
        positions_1N2: as `positions_of` gives them.

    Returns:
        hidden_NV.
    """
    # No patch is padding.
    is_padding_1N = torch.zeros(positions_1N2.shape[:2], dtype=torch.bool, device=positions_1N2.device)
    return tower.patch_embedder(patches_NC[None], positions_1N2, is_padding_1N)[0]


def bounds_of(
    rotary: Any, pictures: Sequence[tuple[int, int, int]], positions_1N2: torch.Tensor, like: torch.Tensor
) -> Bounds:
    """What the layers must know of pictures.

    Args:
        rotary: Hugging Face's rotary embedding of the tower.
        pictures: as in `positions_of`.
        positions_1N2: theirs.
        like: hidden states; tells device and dtype.

    Returns:
        Who sees whom, with the angles of each patch.
    """
    tokens = [rows * columns for count, rows, columns in pictures for _ in range(count)]
    return bounds_of_patches(tokens, rotary(like[None], positions_1N2), like.device)


def run_layer(
    layer: Any, hidden_NV: torch.Tensor, bounds: Bounds, positions_1N2: torch.Tensor
) -> torch.Tensor:
    """One layer of the encoder.

    Args:
        layer: Hugging Face's.
        hidden_NV: before it.
        bounds: of the pictures.
        positions_1N2: of the patches.

    Returns:
        hidden_NV after it.
    """
    found_1NV = layer(
        hidden_NV[None],
        position_embeddings=bounds.angles,
        attention_mask=None,
        position_ids=positions_1N2,
        cu_seq_lens_q=bounds.cu_seqlens,
        segment_tokens=bounds.segment_tokens,
    )
    return found_1NV[0]


def project(
    model: Any, hidden_NV: torch.Tensor, pictures: Sequence[tuple[int, int, int]], pool: int
) -> torch.Tensor:
    """Features of all pictures, one after the other.

    As Hugging Face's pooler: the mean of a square of patches in float32, rounded, times the root of the
    width; standardised in float32.

    Args:
        model: holds `vision_tower` and `embed_vision`.
        hidden_NV: after the last layer.
        pictures: as in `positions_of`.
        pool: patches along each side of a square.

    Returns:
        features_ED.
    """
    tower, width, means = model.vision_tower, hidden_NV.shape[1], []
    sizes = [math.prod(picture) for picture in pictures]
    for (count, rows, columns), own_NV in zip(pictures, hidden_NV.split(sizes), strict=True):
        squares = own_NV.view(count, rows // pool, pool, columns // pool, pool, width)
        means.append(squares.float().mean(dim=(2, 4)).view(-1, width))
    pooled_EV = torch.cat(means).to(hidden_NV.dtype).float() * width**0.5
    if tower.config.standardize:
        pooled_EV = (pooled_EV - tower.std_bias.float()) * tower.std_scale.float()
    return model.embed_vision(inputs_embeds=pooled_EV.to(hidden_NV.dtype))


class Gemma4(FamilyAdapter):
    """`ModelAdapter` of Gemma 4."""

    family = "gemma4"
    config_class = Gemma4Config
    model_class = Gemma4ForConditionalGeneration
    encoder_modules = ("vision_tower", "embed_vision")
    encoder_attention = PACKED

    def __init__(self, model_dir: Path) -> None:
        told = inspect.signature(Gemma4ForConditionalGeneration.forward).parameters
        if not hasattr(Gemma4Config, "per_layer_config") or "num_frames_per_video" not in told:
            older = f"transformers is {transformers.__version__}"
            message = f"{older}, whose Gemma 4 has layers and videos of another form"
            raise hinted(profile_error(message), "pip install 'transformers>=5.23'")
        super().__init__(model_dir)
        vision = self.vision
        self.num_encoder_layers = vision.num_hidden_layers
        self.geometry = Geometry(vision.pooling_kernel_size, vision.patch_size, None)
        self.input_shape = (3 * vision.patch_size**2,)
        self.encoder_tokens_per_tile = self.example_media(1)[0].num_inputs

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        vision, sounds = self.config.vision_config, self.config.audio_config
        rules = [
            Rule(
                "audio_config", "given", sounds is None, "null: models that hear (E2B, E4B) are not trained"
            ),
            Rule(
                "vision_config", vision, vision is not None, "a section: a model of text alone has no encoder"
            ),
        ]
        if vision is None:
            return rules
        heads, wanted = vision.num_attention_heads, vision.hidden_size // vision.num_attention_heads
        few, clips = vision.num_key_value_heads, vision.use_clipped_linears
        of_heads = vision.head_dim * heads == vision.hidden_size
        return [
            *rules,
            Rule("vision_config.num_key_value_heads", few, few == heads, f"{heads}, as of queries"),
            Rule("vision_config.head_dim", vision.head_dim, of_heads, f"{wanted}"),
            Rule(
                "vision_config.use_clipped_linears", clips, not clips, "false: clipped maps are not trained"
            ),
        ]

    def fill(self, parameter: torch.Tensor, name: str, seed: int, std: float) -> None:
        """See `FamilyAdapter.fill`: the scales of a router begin at 1."""
        if name.endswith((".router.scale", ".router.per_expert_scale")):
            with torch.no_grad():
                parameter.fill_(1.0)
            return
        super().fill(parameter, name, seed, std)

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        return [model.vision_tower.patch_embedder]

    def tower_layers(self, model: Any) -> Any:
        """See `FamilyAdapter.tower_layers`."""
        return model.vision_tower.encoder.layers

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        vision = self.vision
        heads = ("vision_config.num_attention_heads", vision.num_attention_heads)
        width = ("vision_config.intermediate_size", vision.intermediate_size)
        return LayerPlan(
            cuts=(
                *(Cut(f"self_attn.{name}_proj.linear", *heads) for name in "qkv"),
                Cut("self_attn.o_proj.linear", *heads, by_input=True),
                Cut("mlp.gate_proj.linear", *width),
                Cut("mlp.up_proj.linear", *width),
                Cut("mlp.down_proj.linear", *width, by_input=True),
            ),
            entries=("self_attn", "mlp"),
            partial=("self_attn.q_norm", "self_attn.k_norm"),
        )

    def encode_run(
        self, model: Any, batch: EncoderInput, run: EncoderRun, incoming_RU: torch.Tensor | None
    ) -> torch.Tensor:
        """See `FamilyAdapter.encode_run`."""
        tower = model.vision_tower
        device = batch.inputs_N.device if incoming_RU is None else incoming_RU.device
        sides = [cast("tuple[int, int]", grid.patches) for grid in batch.media]
        pictures = [(grid.num_tiles, *each) for grid, each in zip(batch.media, sides, strict=True)]
        positions = positions_of(pictures, device)
        hidden_NV = embed(tower, batch.inputs_N, positions) if incoming_RU is None else incoming_RU
        bounds = bounds_of(tower.encoder.rotary_emb, pictures, positions, hidden_NV)
        for _, layer in numbered(tower.encoder.layers):
            hidden_NV = run_layer(layer, hidden_NV, bounds, positions)
        return project(model, hidden_NV, pictures, self.geometry.merge) if run.is_last else hidden_NV

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Photographs, one a tile; see `ModelAdapter.example_media`."""
        height, width = EXAMPLE_SIZE
        budget, pool = self._budget(), self.geometry.merge
        factor = math.sqrt(budget / (height * width))
        rows, columns = math.floor(factor * height), math.floor(factor * width)
        patches = (rows * pool, columns * pool)
        return [MediaGrid("image", 1, height, width, rows * columns, patches=patches)] * num_tiles

    def _budget(self) -> int:
        try:
            fields = processor_fields(self.model_dir, "image_processor")
        except FileNotFoundError:
            # To be measured, a model needs only `config.json`.
            return _BUDGET
        return fields.get("max_soft_tokens") or _BUDGET

    @cached_property
    def image_processor(self) -> Any:
        """Hugging Face's image processor of this model, the one that needs no torchvision."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        return Gemma4ImageProcessorPil.from_dict(processor_fields(self.model_dir, "image_processor"))

    @cached_property
    def video_processor(self) -> Any:
        """Hugging Face's video processor of this model; a `ProfileError` where torchvision is missing."""
        return processor_of_videos(self.model_dir, "Gemma4VideoProcessor")

    def pixels(
        self, file: MediaFile, kind: str, frame_indices: Sequence[int], grid: MediaGrid | None = None
    ) -> torch.Tensor:
        """See `ModelAdapter.pixels`."""
        if kind == "audio":
            message = (
                "`audio` is no kind of media that dflop reads for this family, it reads pictures and videos"
            )
            raise ValueError(message)
        if kind == "video":
            frames = stacked(decoding.decode_frames(file, frame_indices))
            found = self.video_processor.preprocess([frames], do_sample_frames=False, return_tensors="pt")
            names = ("pixel_values_videos", "video_position_ids")
        else:
            found = self.image_processor.preprocess([decoding.decode_image(file)], return_tensors="pt")
            names = ("pixel_values", "image_position_ids")
        pixels_FPC, positions_FP2 = (found[name] for name in names)
        # Frames have one size, so padding ends all of them alike.
        own_P2 = positions_FP2[0][(positions_FP2[0] >= 0).all(dim=1)]
        columns, rows = (int(last) + 1 for last in own_P2.amax(dim=0))
        if grid is not None and grid.patches is not None and (rows, columns) != tuple(grid.patches):
            message = (
                f"`{file}` is {(rows, columns)} patches (rows, columns), profiled as {tuple(grid.patches)}"
            )
            raise profile_error(message)
        return pixels_FPC[:, : rows * columns].flatten(0, 1).to(torch.float32)


ADAPTER = Gemma4
