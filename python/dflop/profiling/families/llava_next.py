"""LLaVA-NeXT: CLIP tiles with a CLS each, an MLP projector, anyres packing; Vicuna, Mistral or Llama.

    encoder_embedding   pixels_NCHW -> hidden_NPV       P = patches of a tile + 1
    encoder_layer       hidden_NPV  -> hidden_NPV       attention within a tile; none that nothing reads
    projector           hidden_NPV  -> features_ED      CLS dropped, padding cut off, newlines put in

Encoder tokens count the CLS, as the data profile does. Shape letters: N tiles, V and D widths of encoder and
backbone. Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration
from transformers.models.llava_next import modeling_llava_next as hf

from dflop.models.adapter import EXAMPLE_SIZE
from dflop.models.backbone import backbone_rules
from dflop.models.rules import Rule
from dflop.models.towers import inner_tower
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.source import Source
from dflop.profiling.families.tiles import TileEncoder, tile_pieces, tile_plan

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.families.shards import LayerPlan
    from dflop.profiling.pieces import Piece


class TileEmbedding(nn.Module):
    """Pixels to hidden states."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        tower = inner_tower(whole.model.vision_tower)
        # A buffer, which is not filled with the parameters.
        tower.embeddings.position_ids = torch.arange(tower.embeddings.num_positions).expand((1, -1))
        self.embeddings, self.pre_layrnorm = tower.embeddings, tower.pre_layrnorm

    def forward(self, pixels_NCHW: torch.Tensor) -> torch.Tensor:
        """Hidden states before the first layer.

        Args:
            pixels_NCHW: tiles.

        Returns:
            hidden_NPV.
        """
        return self.pre_layrnorm(self.embeddings(pixels_NCHW))


class Projector(nn.Module):
    """The projector and the packing of photographs; tiles that are left are images of their own."""

    def __init__(self, whole: Any, config: Any) -> None:
        super().__init__()
        self.multi_modal_projector, self.image_newline = (
            whole.model.multi_modal_projector,
            whole.model.image_newline,
        )
        self.config = config
        side = config.vision_config.image_size
        self.photo_tiles = hf.image_size_to_num_patches(list(EXAMPLE_SIZE), config.image_grid_pinpoints, side)

    def forward(self, hidden_NPV: torch.Tensor) -> torch.Tensor:
        """Features of all images, one after the other.

        Args:
            hidden_NPV: after the last layer that is read.

        Returns:
            features_ED.
        """
        features_NPD = self.multi_modal_projector(hidden_NPV[:, 1:])
        photos, left = divmod(features_NPD.shape[0], self.photo_tiles)
        images = features_NPD.split([self.photo_tiles] * photos + [1] * left)
        packed, _ = hf.LlavaNextModel.pack_image_features(
            # A method that reads nothing but the configuration of its model.
            cast("Any", SimpleNamespace(config=self.config)),
            list(images),
            torch.tensor([EXAMPLE_SIZE] * len(images)),
            vision_feature_select_strategy="default",
            image_newline=self.image_newline,
        )
        return torch.cat(packed)


def layer_plan(vision: Any) -> LayerPlan:
    """How an encoder layer is cut.

    Args:
        vision: configuration of the encoder.

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


def _set_layers(vision: Any, count: int) -> None:
    vision.num_hidden_layers = count


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a LLaVA-NeXT model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    source = Source(model_dir, LlavaNextConfig, LlavaNextForConditionalGeneration, _set_layers)
    config, vision = source.config, source.encoder
    layer, select = config.vision_feature_layer, config.vision_feature_select_strategy
    depth: int = vision.num_hidden_layers
    source.check(
        [
            *backbone_rules(source.text),
            Rule(
                "vision_config.model_type",
                vision.model_type,
                vision.model_type == "clip_vision_model",
                "clip_vision_model",
            ),
            Rule(
                "vision_feature_layer",
                layer,
                isinstance(layer, int) and layer % (depth + 1) > 0 and -depth <= layer <= depth,
                f"the index of one of {depth} layers",
            ),
            Rule("vision_feature_select_strategy", select, select == "default", "default"),
        ]
    )
    side: int = vision.image_size
    tile_tokens = (side // vision.patch_size) ** 2 + 1
    encoder = TileEncoder(
        # Hidden state k is that after k layers; later layers are not run.
        num_layers=layer % (depth + 1),
        tokens=tile_tokens,
        width=vision.hidden_size,
        shape=(vision.num_channels, side, side),
        plan=layer_plan(vision),
        embedding=TileEmbedding,
        layers=lambda whole: inner_tower(whole.model.vision_tower).encoder.layers,
        projector=lambda whole: Projector(whole, config),
        # No mask.
        arguments=(None,),
    )
    return [*tile_pieces(source, encoder), *backbone_pieces(source)]
