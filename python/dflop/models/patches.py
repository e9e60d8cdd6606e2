"""Encoders that read pictures at their own resolution, in patches; M-RoPE (positions in time, height, width).

    patches_NC --embed--> hidden_NV --layers--> hidden_NV --merge--> features_ED

Frames of a video come in pairs. A picture or a frame pair is a segment, and attention stays within a segment.
Where layers attend within windows, patches are sorted window by window, from the embedding to the projector.
Shape letters: see `adapter.py`; C values of a patch, V width of the encoder. An input is one encoder token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers

from dflop.models import media as decoding
from dflop.models.adapter import EXAMPLE_SIZE, MediaGrid
from dflop.models.encoder import numbered
from dflop.models.errors import profile_error
from dflop.models.family import FamilyAdapter
from dflop.models.packing import PACKED_ENCODER
from dflop.models.patch_layout import Geometry, lay_out, reorder, sent
from dflop.models.processor_files import processor_fields, processor_of_videos, stacked
from dflop.models.tensor import Cut, LayerPlan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.adapter import EncoderInput
    from dflop.models.encoder import EncoderRun
    from dflop.models.media import MediaFile
    from dflop.models.patch_layout import Patches


def embed_patches(tower: Any, inputs_NC: torch.Tensor, patches: Patches, geometry: Geometry) -> torch.Tensor:
    """Hidden states before the first layer, in the order that patches have in the layers.

    Args:
        tower: Hugging Face's.
        inputs_NC: pixels.
        patches: where they lie.
        geometry: of the model.

    Returns:
        hidden_NV.
    """
    hidden_NV = tower.patch_embed(inputs_NC)
    if patches.places_T4 is not None and patches.shares_T4 is not None:
        learnt_NV = (tower.pos_embed(patches.places_T4) * patches.shares_T4[:, :, None]).sum(1)
        hidden_NV = hidden_NV + learnt_NV.to(hidden_NV.dtype)
    return reorder(hidden_NV, patches.order, geometry.feature_patches)


@dataclass(frozen=True)
class Bounds:
    """Who sees whom in a layer."""

    cu_seqlens: torch.Tensor
    """[M + 1] int32."""
    segment_tokens: tuple[int, ...]
    """Tokens of each segment or window: the differences of `cu_seqlens`."""
    angles: tuple[torch.Tensor, ...]
    """Cosine and sine of the rotary embedding."""


def rotate_patches(
    rotary: Any, patches: Patches, geometry: Geometry, like: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Cosine and sine of the rotary embedding of patches, in the order that patches have in the layers."""
    angles = rotary(like, patches.positions_T2)
    return tuple(reorder(angle, patches.order, geometry.feature_patches) for angle in angles)


def bounds_of_patches(
    tokens: Sequence[int], angles: tuple[torch.Tensor, ...], device: torch.device
) -> Bounds:
    """What layers must know of segments or windows, given the tokens of each."""
    ends = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32)
    return Bounds(sent(ends, device), tuple(tokens), angles)


def run_layer(layer: Any, hidden_TV: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    """One layer of the encoder.

    Args:
        layer: Hugging Face's.
        hidden_TV: before it.
        bounds: who sees whom.

    Returns:
        hidden_TV after it.
    """
    return layer(
        hidden_TV,
        cu_seqlens=bounds.cu_seqlens,
        max_seqlen=max(bounds.segment_tokens),
        position_embeddings=bounds.angles,
        segment_tokens=bounds.segment_tokens,
    )


def merge(
    mergers: Sequence[Any], states_TV: Sequence[torch.Tensor], order: torch.Tensor | None
) -> torch.Tensor:
    """Features of all pictures, one after the other.

    Args:
        mergers: Hugging Face's: that of the last layer, then those of deeper features.
        states_TV: hidden states, one for each of `mergers`.
        order: that of `Patches`.

    Returns:
        features_EW, in their own order; the results of the mergers stand side by side.
    """
    found = [merger(hidden_TV) for merger, hidden_TV in zip(mergers, states_TV, strict=True)]
    features_EW = found[0] if len(found) == 1 else torch.cat(found, dim=1)
    return features_EW if order is None else features_EW[order.argsort()]


def mergers_of(tower: Any) -> list[Any]:
    """The modules that make features: of the last layer, then of those before it that give features too."""
    return [tower.merger, *getattr(tower, "deepstack_merger_list", ())]


def patch_plan(num_heads: int, hidden: tuple[str, ...], output: str, width: tuple[str, int]) -> LayerPlan:
    """How tensor parallelism cuts an encoder layer.

    Args:
        num_heads: of the layer.
        hidden: names of the MLP's first maps.
        output: name of its last map.
        width: name of the configuration's field for the width of the MLP, and that width.

    Returns:
        The plan.
    """
    heads = ("vision_config.num_heads", num_heads)
    return LayerPlan(
        cuts=(
            Cut("attn.qkv", *heads, num_blocks=3),
            Cut("attn.proj", *heads, by_input=True),
            *(Cut(f"mlp.{name}", *width) for name in hidden),
            Cut(f"mlp.{output}", *width, by_input=True),
        ),
        entries=("attn", "mlp"),
        counts=(("attn", "num_heads"),),
    )


class PatchFamily(FamilyAdapter):
    """A family of the Qwen-VL kind: patches in, M-RoPE in the backbone."""

    encoder_modules = ("visual",)
    encoder_attention = PACKED_ENCODER
    model_methods: Any
    """Hugging Face's class of the model without its head, whose `get_rope_index` gives positions."""
    has_time: bool = False
    """Whether positions in time count seconds of video."""
    is_bicubic: bool = False
    """Whether learnt positions between those of the grid come of sixteen of them, not of four."""
    embed: Any = staticmethod(embed_patches)
    """(tower, inputs_NC, patches, geometry) -> hidden_NV before the first layer."""
    mergers: Any = staticmethod(mergers_of)
    """(tower) -> what makes features: of the last layer, then of those before it that give features too."""
    image_processor_class = "Qwen2VLImageProcessorPil"
    """Of transformers; it needs no torchvision."""
    video_processor_class = "Qwen2VLVideoProcessor"
    """Of transformers."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        vision = self.vision
        self.num_encoder_layers = self.depth
        self.geometry = Geometry(
            vision.spatial_merge_size, vision.patch_size, self.window_size, self.grid_side, self.is_bicubic
        )
        self.input_shape = (self.patch_values,)
        self.encoder_tokens_per_tile = self.example_media(1)[0].num_inputs

    @property
    def depth(self) -> int:
        """Layers of the encoder."""
        return self.vision.depth

    @property
    def patch_values(self) -> int:
        """C: channels of the pixels of a patch, in all frames that share it."""
        vision = self.vision
        return getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2

    @property
    def window_size(self) -> int | None:
        """Side of a window in pixels; None where no layer has windows."""
        return None

    @property
    def full_layers(self) -> frozenset[int]:
        """Layers that attend within a whole segment, not within windows."""
        return frozenset(range(self.depth))

    @property
    def grid_side(self) -> int | None:
        """Rows, and columns, of the grid of learnt positions; None where positions are only rotations."""
        return None

    @property
    def deep_layers(self) -> tuple[int, ...]:
        """Layers, ascending, after which the hidden states become features too (DeepStack)."""
        return ()

    @property
    def feature_width(self) -> int:
        """See `FamilyAdapter.feature_width`."""
        return self.hidden_size * (1 + len(self.deep_layers))

    @property
    def num_run_layers(self) -> int:
        """See `FamilyAdapter.num_run_layers`: all of them."""
        return self.depth

    def row_width(self, layer: int) -> int:
        """See `FamilyAdapter.row_width`."""
        # Hidden states that become features go along to the last run, which has all mergers.
        return self.encoder_width * (1 + sum(deep < layer for deep in self.deep_layers))

    @property
    def encoder_width(self) -> int:
        """Values of a patch between two layers."""
        return self.vision.embed_dim

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        return [model.visual.patch_embed]

    def tower_layers(self, model: Any) -> Any:
        """See `FamilyAdapter.tower_layers`."""
        return model.visual.blocks

    def encode_run(
        self, model: Any, batch: EncoderInput, run: EncoderRun, incoming_RU: torch.Tensor | None
    ) -> torch.Tensor:
        """See `FamilyAdapter.encode_run`; between runs patches stay in the order that the layers use."""
        tower = model.visual
        device = batch.inputs_N.device if incoming_RU is None else incoming_RU.device
        sides = [cast("tuple[int, int]", grid.patches) for grid in batch.media]
        pictures = [(grid.num_tiles, *each) for grid, each in zip(batch.media, sides, strict=True)]
        patches = lay_out(pictures, self.geometry, device)
        if incoming_RU is None:
            hidden_NV, *deep_NV = [self.embed(tower, batch.inputs_N, patches, self.geometry)]
        else:
            # Copies, where there are several: Hugging Face's merger views its input in another shape.
            hidden_NV, *deep_NV = [s.contiguous() for s in incoming_RU.split(self.encoder_width, dim=1)]
        angles = rotate_patches(tower.rotary_pos_emb, patches, self.geometry, hidden_NV)
        whole = bounds_of_patches(patches.segments, angles, device)
        windows = bounds_of_patches(patches.windows, angles, device) if patches.windows else whole
        for index, layer in numbered(tower.blocks):
            hidden_NV = run_layer(layer, hidden_NV, whole if index in self.full_layers else windows)
            if index in self.deep_layers:
                deep_NV.append(hidden_NV)
        states = [hidden_NV, *deep_NV]
        if run.is_last:
            return merge(self.mergers(tower), states, patches.order)
        return hidden_NV if not deep_NV else torch.cat(states, dim=1)

    def positions(
        self, input_ids_T: torch.Tensor, feature_mask_T: torch.Tensor, media: Sequence[MediaGrid]
    ) -> torch.Tensor:
        """Positions in time, height and width, by Hugging Face's `get_rope_index`.

        Args:
            input_ids_T: of the sample.
            feature_mask_T: where features go.
            media: of the sample, in order.

        Returns:
            [3, T].

        Raises:
            ValueError: media follow each other without text between, which Hugging Face's model refuses too.
        """
        if not media:
            return torch.arange(input_ids_T.shape[0]).expand(3, -1)
        # 1 where an image's features go, 2 where a video's do, as Hugging Face's processor marks them.
        codes = torch.cat([torch.full((g.num_features,), 1 + (g.kind == "video")) for g in media])
        types_T = torch.zeros_like(input_ids_T).masked_scatter(feature_mask_T, codes)
        grids: dict[int, list[list[int]]] = {1: [], 2: []}
        for grid in media:
            grids[1 + (grid.kind == "video")].append([grid.num_tiles, *(grid.patches or ())])
        # Hugging Face's `VideoMetadata` assumes 24 frames a second where the file does not say it.
        seconds = [
            self.vision.temporal_patch_size / (g.sampled_fps or 24) for g in media if g.kind == "video"
        ]
        # These methods read only the configuration of their model, so an object with just that is enough.
        shell: Any = SimpleNamespace(config=self.config)
        shell.get_vision_position_ids = MethodType(self.model_methods.get_vision_position_ids, shell)
        try:
            positions_31T, _ = self.model_methods.get_rope_index(
                shell,
                input_ids_T[None],
                types_T[None],
                image_grid_thw=torch.tensor(grids[1]) if grids[1] else None,
                video_grid_thw=torch.tensor(grids[2]) if grids[2] else None,
                **({"second_per_grid_ts": torch.tensor(seconds)} if self.has_time and seconds else {}),
            )
        except (RuntimeError, StopIteration) as error:
            message = "two media follow each other without text between: they have no positions"
            raise ValueError(message) from error
        return positions_31T[:, 0]

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Photographs, one a tile; see `ModelAdapter.example_media`."""
        side = self.geometry.patch_size * self.geometry.merge
        patches = tuple(round(pixels / side) * self.geometry.merge for pixels in EXAMPLE_SIZE)
        features = math.prod(patches) // self.geometry.feature_patches
        rows, columns = patches
        return [MediaGrid("image", 1, *EXAMPLE_SIZE, features, patches=(rows, columns))] * num_tiles

    @cached_property
    def image_processor(self) -> Any:
        """Hugging Face's image processor of this model, the one that needs no torchvision."""
        made = getattr(transformers, self.image_processor_class)
        return made.from_dict(processor_fields(self.model_dir, "image_processor"))

    @cached_property
    def video_processor(self) -> Any:
        """Hugging Face's video processor of this model; a `ProfileError` where torchvision is missing."""
        return processor_of_videos(self.model_dir, self.video_processor_class)

    def pixels(
        self, file: MediaFile, kind: str, frame_indices: Sequence[int], grid: MediaGrid | None = None
    ) -> torch.Tensor:
        """See `ModelAdapter.pixels`."""
        if kind != "video":
            found = self.image_processor.preprocess([decoding.decode_image(file)], return_tensors="pt")
            sizes = tuple(found["image_grid_thw"][0].tolist())
            self._check(file, sizes, grid)
            return found["pixel_values"].to(torch.float32)
        frames = stacked(decoding.decode_frames(file, frame_indices))
        if grid is None or grid.patches is None:
            found = self.video_processor.preprocess([frames], do_sample_frames=False, return_tensors="pt")
            return found["pixel_values_videos"].to(torch.float32)
        return self._part(frames, grid, file)

    def _part(self, frames: torch.Tensor, grid: MediaGrid, file: MediaFile) -> torch.Tensor:
        """Some frames of a video, at the size that they have in the whole video, by the processor's steps."""
        from transformers.image_utils import SizeDict
        from transformers.video_processing_utils import BaseVideoProcessor

        p, side = self.video_processor, self.geometry.patch_size
        rows, columns = cast("tuple[int, int]", grid.patches)
        size = SizeDict(height=rows * side, width=columns * side)
        # The processor's `resize` would choose the size by the number of frames, which are not all here.
        resized = BaseVideoProcessor.resize(p, image=frames[None], size=size, resample=p.resample)
        normed = p.rescale_and_normalize(
            resized, p.do_rescale, p.rescale_factor, p.do_normalize, p.image_mean, p.image_std
        )
        patches_1NC, *sizes = p.patchify(normed, p.patch_size, p.merge_size, p.temporal_patch_size)
        self._check(file, tuple(sizes), grid)
        return patches_1NC[0].to(torch.float32)

    def _check(self, file: MediaFile, sizes: tuple[int, ...], grid: MediaGrid | None) -> None:
        """Refuses a picture of another size than profiled."""
        if grid is not None and grid.patches is not None and sizes != (grid.num_tiles, *grid.patches):
            wanted = (grid.num_tiles, *grid.patches)
            message = f"`{file}` is {sizes} patches (time, rows, columns), profiled as {wanted}"
            raise profile_error(message)
