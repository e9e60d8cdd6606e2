"""InternVL 2.5 and 3: InternViT tiles with a CLS each, pixel shuffle, an MLP projector.

    encoder_embedding   pixels_NCHW -> hidden_NPV       P = patches of a tile + 1
    encoder_layer       hidden_NPV  -> hidden_NPV       attention within a tile
    projector           hidden_NPV  -> features_ED      CLS dropped, 1 / downsample_ratio^2 patches a feature

Encoder tokens count the CLS, as the data profile does. Shape letters: N tiles, V and D widths of encoder and
backbone. Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import InternVLConfig, InternVLForConditionalGeneration
from transformers.models.internvl import modeling_internvl as hf

from dflop.profiling.families.backbone import backbone_pieces, backbone_rules
from dflop.profiling.families.shards import Cut, LayerPlan, cut_layer
from dflop.profiling.families.source import Fed, ModelPiece, Rule, Source, layers_at_once, random_states

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dflop.profiling.pieces import Piece, PieceSettings


class Layers(nn.Module):
    """A run of encoder layers."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden_NPV: torch.Tensor) -> torch.Tensor:
        """Hidden states after the layers.

        Args:
            hidden_NPV: before.

        Returns:
            hidden_NPV.
        """
        for layer in self.layers:
            hidden_NPV = layer(hidden_NPV)
        return hidden_NPV


class Projector(nn.Module):
    """The encoder's last norm, the pixel shuffle and the projector."""

    def __init__(self, whole: Any, ratio: float) -> None:
        super().__init__()
        self.layernorm = whole.model.vision_tower.layernorm
        self.multi_modal_projector = whole.model.multi_modal_projector
        self.ratio = ratio

    def forward(self, hidden_NPV: torch.Tensor) -> torch.Tensor:
        """Features of all tiles, one after the other.

        Args:
            hidden_NPV: after the last layer.

        Returns:
            features_ED.
        """
        patches_NPV = self.layernorm(hidden_NPV)[:, 1:]
        tiles, patches, width = patches_NPV.shape
        side = int(patches**0.5)
        grid = patches_NPV.reshape(tiles, side, side, width)
        # A method that reads nothing of its model.
        shuffled = hf.InternVLModel.pixel_shuffle(cast("Any", None), grid, scale_factor=self.ratio)
        features = self.multi_modal_projector(shuffled.reshape(tiles, -1, shuffled.shape[-1]))
        return features.flatten(0, 1)


def layer_plan(vision: Any) -> LayerPlan:
    """How an encoder layer is cut.

    Args:
        vision: configuration of the encoder.

    Returns:
        The plan.
    """
    heads = ("vision_config.num_attention_heads", vision.num_attention_heads)
    width = ("vision_config.intermediate_size", vision.intermediate_size)
    return LayerPlan(
        cuts=(
            *(Cut(f"attention.{name}_proj", *heads) for name in "qkv"),
            Cut("attention.projection_layer", *heads, by_input=True),
            Cut("mlp.fc1", *width),
            Cut("mlp.fc2", *width, by_input=True),
        ),
        entries=("attention", "mlp"),
        counts=(("attention", "num_heads"), ("attention", "embed_dim")),
    )


def _set_layers(vision: Any, count: int) -> None:
    vision.num_hidden_layers = count


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of an InternVL model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    source = Source(model_dir, InternVLConfig, InternVLForConditionalGeneration, _set_layers)
    config, vision = source.config, source.encoder
    layer = config.vision_feature_layer
    select = config.vision_feature_select_strategy
    source.check(
        [
            *backbone_rules(source.text),
            Rule("vision_feature_layer", layer, layer == -1, "-1"),
            Rule("vision_feature_select_strategy", select, select == "default", "default"),
        ]
    )
    height, width = vision.image_size
    tile_tokens = (height // vision.patch_size[0]) * (width // vision.patch_size[1]) + 1
    plan = layer_plan(vision)

    def take_embedding(whole: Any, _: PieceSettings) -> nn.Module:
        return whole.model.vision_tower.embeddings

    def take_layers(whole: Any, settings: PieceSettings) -> nn.Module:
        degree = settings.tensor_parallel_degree
        if degree > 1:
            norm = vision.use_qk_norm
            # It is over all heads of a token, which no rank has.
            source.check([Rule("vision_config.use_qk_norm", norm, not norm, "false with tensor parallelism")])
        layers = list(whole.model.vision_tower.encoder.layer)
        for one in layers:
            cut_layer(one, plan, degree)
        return Layers(layers)

    def take_projector(whole: Any, _: PieceSettings) -> nn.Module:
        return Projector(whole, config.downsample_ratio)

    def feed_pixels(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        tiles = sum(segments) // tile_tokens
        return Fed(random_states(settings, tiles, vision.num_channels, height, width))

    def feed_hidden(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        tiles = sum(segments) // tile_tokens
        return Fed(random_states(settings, tiles, tile_tokens, vision.hidden_size))

    count: int = vision.num_hidden_layers
    at_once = layers_at_once(count, source.whole(1).model.vision_tower.encoder.layer[0])
    tile: dict[str, Any] = {"segment_tokens": tile_tokens, "size_unit": tile_tokens}
    return [
        ModelPiece(
            "encoder_embedding", 1, source, take_embedding, feed_pixels, wants_input_gradient=False, **tile
        ),
        ModelPiece("encoder_layer", count, source, take_layers, feed_hidden, num_layers=at_once, **tile),
        ModelPiece("projector", 1, source, take_projector, feed_hidden, **tile),
        *backbone_pieces(source),
    ]
