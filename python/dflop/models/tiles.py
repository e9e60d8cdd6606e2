"""Encoders whose inputs all have one size: tiles of pixels or windows of sound. Attention stays within each.

    inputs_N --embed--> hidden_NPV --layers--> hidden_NPV --project, by media--> features_ED

Shape letters: see `adapter.py`; V is the width of the encoder.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from dflop.models import media as decoding
from dflop.models.encoder import numbered
from dflop.models.errors import profile_error
from dflop.models.family import FamilyAdapter
from dflop.models.processor_files import processor_of_videos, stacked
from dflop.models.tensor import Cut, LayerPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.models.adapter import EncoderInput, MediaGrid
    from dflop.models.encoder import EncoderRun
    from dflop.models.media import MediaFile


def tile_plan(
    attention: str,
    output: str,
    mlp: tuple[str, str, str],
    heads: tuple[str, int],
    width: tuple[str, int],
    counts: Sequence[str],
) -> LayerPlan:
    """How a layer is cut that has separate maps for queries, keys and values, and an MLP of two maps.

    Args:
        attention: path of the attention in the layer.
        output: name of its output projection.
        mlp: paths of the first map of the MLP, of its last map, and of the module in which the MLP begins.
        heads: name of the configuration's field for the number of heads, and that number.
        width: the same for the width of the MLP.
        counts: numbers that the attention's code reads, to be divided by the degree.

    Returns:
        The plan.
    """
    first, last, entry = mlp
    return LayerPlan(
        cuts=(
            *(Cut(f"{attention}.{name}_proj", *heads) for name in "qkv"),
            Cut(f"{attention}.{output}", *heads, by_input=True),
            Cut(first, *width),
            Cut(last, *width, by_input=True),
        ),
        entries=(attention, entry),
        counts=tuple((attention, count) for count in counts),
    )


def clip_plan(vision: Any) -> LayerPlan:
    """How a layer of CLIP or SigLIP is cut; both have the same names of modules.

    Args:
        vision: `vision_config`, with `num_attention_heads` and `intermediate_size`.

    Returns:
        The plan.
    """
    return tile_plan(
        "self_attn",
        "out_proj",
        ("mlp.fc1", "mlp.fc2", "mlp"),
        ("vision_config.num_attention_heads", vision.num_attention_heads),
        ("vision_config.intermediate_size", vision.intermediate_size),
        ("num_heads", "embed_dim"),
    )


class TileFamily(FamilyAdapter):
    """A family whose encoder reads tiles or windows."""

    feature_layers: tuple[int, ...]
    """Which hidden states the projector reads, side by side: k is the one after k layers. Layers after the
    last of them never run."""

    @abstractmethod
    def embed(self, model: Any, inputs_N: torch.Tensor) -> torch.Tensor:
        """Hidden states before the first layer.

        Args:
            model: `encoder_modules`, under their names.
            inputs_N: tiles or windows, at least one.

        Returns:
            hidden_NPV.
        """

    def layer_arguments(self, inputs_N: torch.Tensor) -> tuple[Any, ...]:
        """Arguments of a layer after its hidden states."""
        del inputs_N
        # The attention mask: none.
        return (None,)

    @abstractmethod
    def project(self, model: Any, hidden_NPV: torch.Tensor, media: Sequence[MediaGrid]) -> torch.Tensor:
        """Features of all media.

        Args:
            model: as in `embed`.
            hidden_NPV: the hidden states of `feature_layers`, side by side.
            media: in the order of the tiles.

        Returns:
            features_ED.
        """

    @property
    def num_run_layers(self) -> int:
        """See `FamilyAdapter.num_run_layers`: the layers that the features need."""
        return max(self.feature_layers)

    def carried(self, layer: int) -> list[int]:
        """Hidden states from before `layer` that the projector reads, so that they are carried along."""
        return [index for index in sorted(set(self.feature_layers)) if index < layer]

    @property
    def encoder_width(self) -> int:
        """V."""
        return self.vision.hidden_size

    def row_width(self, layer: int) -> int:
        """See `FamilyAdapter.row_width`: hidden states, and older ones that the projector reads."""
        return self.encoder_width * (1 + len(self.carried(layer)))

    def num_rows(self, media: Sequence[MediaGrid]) -> int:
        """See `FamilyAdapter.num_rows`."""
        return sum(grid.num_inputs for grid in media) * self.encoder_tokens_per_tile

    def encode_run(
        self, model: Any, batch: EncoderInput, run: EncoderRun, incoming_RU: torch.Tensor | None
    ) -> torch.Tensor:
        """See `FamilyAdapter.encode_run`.

        Runs the layers one by one, as far as needed: the tower's own forward runs all, also unused ones.

        Args:
            model: `encoder_modules`, under their names.
            batch: at least one input.
            run: which layers.
            incoming_RU: from the run before: hidden states, then those of `carried`; none for the first run.

        Returns:
            features_ED from the last run; else what the next run takes as `incoming_RU`.
        """
        kept: dict[int, torch.Tensor] = {}
        if incoming_RU is None:
            hidden_NPV = self.embed(model, batch.inputs_N)
        else:
            num_inputs = sum(grid.num_inputs for grid in batch.media)
            incoming_NPU = incoming_RU.view(num_inputs, -1, incoming_RU.shape[1])
            hidden_NPV, *older = incoming_NPU.split(self.encoder_width, dim=-1)
            kept = dict(zip(self.carried(run.first_layer), older, strict=True))
        arguments = self.layer_arguments(batch.inputs_N)
        kept[run.first_layer] = hidden_NPV
        for index, layer in numbered(self.tower_layers(model)):
            if run.first_layer <= index < run.end_layer:
                hidden_NPV = layer(hidden_NPV, *arguments)
                kept[index + 1] = hidden_NPV
        if not run.is_last:
            leaving = [hidden_NPV, *(kept[index] for index in self.carried(run.end_layer))]
            return torch.cat(leaving, dim=-1).flatten(0, 1)
        selected = [kept[index] for index in self.feature_layers]
        hidden_NPV = selected[0] if len(selected) == 1 else torch.cat(selected, dim=-1)
        return self.project(model, hidden_NPV, batch.media)

    def read_layers(self, named: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
        """`feature_layers` as a configuration says it.

        Args:
            named: its `vision_feature_layer`: indices of hidden states; negative ones count from the end.
            num_layers: layers of the tower.

        Returns:
            Indices from 0.
        """
        return tuple(index % (num_layers + 1) for index in ([named] if isinstance(named, int) else named))

    def tiles_of(
        self, file: MediaFile, kind: str, frame_indices: Sequence[int], several: bool
    ) -> torch.Tensor:
        """Tiles of one image, or of the named frames of one video, by the processors of the family.

        Args:
            file: the file, or its bytes.
            kind: `image`, `multi_image` or `video`.
            frame_indices: frames of a video, from 0; unused for images.
            several: whether the processor is told that an image is one of several.

        Returns:
            Normalised tiles [n, 3, S, S], float32.

        Raises:
            ValueError: there is no such kind.
        """
        if kind == "video":
            frames = decoding.decode_frames(file, frame_indices)
            return self.frame_tiles(frames) if frames else torch.empty(0, *self.input_shape)
        if kind not in ("image", "multi_image"):
            message = f"`{kind}` is no kind of media, known are `image`, `multi_image` and `video`"
            raise ValueError(message)
        image = decoding.decode_image(file)
        # Some processors pad an image to a square if its sample has several: here the other has one pixel.
        batch: Any = [[image, Image.new("RGB", (1, 1))]] if several else [image]
        return self.image_tiles(batch).to(torch.float32)

    video_processor_class: str = ""
    """Name of the class in transformers; empty where the family reads no videos."""

    @abstractmethod
    def make_processor(self) -> Any:
        """Hugging Face's image processor of this model, the one that needs no torchvision."""

    @cached_property
    def processor(self) -> Any:
        """The processor of `make_processor`, made once."""
        return self.make_processor()

    @cached_property
    def video_processor(self) -> Any:
        """Hugging Face's video processor of this model; a `ProfileError` where torchvision is missing."""
        return processor_of_videos(self.model_dir, self.video_processor_class)

    def pixels(
        self, file: MediaFile, kind: str, frame_indices: Sequence[int], grid: MediaGrid | None = None
    ) -> torch.Tensor:
        """See `ModelAdapter.pixels`: one of several images is read like a single image."""
        del grid
        return self.tiles_of(file, kind, frame_indices, several=False)

    def image_tiles(self, batch: Any) -> torch.Tensor:
        """Tiles of the first image of `batch`, from the processor: [n, 3, S, S]."""
        return self.processor.preprocess(batch, return_tensors="pt")["pixel_values"][0]

    def frame_tiles(self, frames: Sequence[Any]) -> torch.Tensor:
        """Frames from Hugging Face's video processor, a tile each: frames are resized whole, never cut."""
        found = self.video_processor.preprocess(
            [stacked(frames)], do_sample_frames=False, return_tensors="pt"
        )
        return found["pixel_values_videos"][0].to(torch.float32)


class CountedOnHost(list[torch.Tensor]):
    """Features of media for Hugging Face's packing, which so leaves its counts of features on the host.

    It puts these counts, which are not used here, on the device of `features[0]`. On a GPU that would wait
    for the device. So `features[0]` of this list is an empty tensor of the host.
    """

    def __getitem__(self, index: Any) -> Any:
        """An empty tensor of the host, for every index."""
        del index
        return _OF_HOST


_OF_HOST = torch.empty(0)


def check_features(features_ED: torch.Tensor, grid: MediaGrid) -> torch.Tensor:
    """Checks that a medium has as many features as profiled.

    Args:
        features_ED: features of the medium.
        grid: the medium.

    Returns:
        The features, unchanged.

    Raises:
        ValueError: there are more or fewer.
    """
    if features_ED.shape[0] != grid.num_features:
        message = (
            f"{grid.kind} of {grid.width} x {grid.height} pixels in {grid.num_tiles} tiles gives "
            f"{features_ED.shape[0]} features, {grid.num_features} were expected"
        )
        raise ValueError(message)
    return features_ED


def check_pinpoints(path: object, processor: Any, config: Any) -> None:
    """Refuses a processor that cuts other grids of tiles than the model expects.

    Args:
        path: the processor's file.
        processor: Hugging Face's.
        config: of the model.

    Raises:
        ProfileError: their grids differ.
    """
    pinpoints = [list(pair) for pair in processor.image_grid_pinpoints]
    if pinpoints != [list(pair) for pair in config.image_grid_pinpoints]:
        message = f"`{path}` has other `image_grid_pinpoints` than `config.json`"
        raise profile_error(message)
