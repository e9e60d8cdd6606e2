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

from dflop.models.backbone import backbone_rules
from dflop.models.rules import Rule
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.source import Source
from dflop.profiling.families.tiles import TileEncoder, tile_pieces, tile_plan

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


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
    norm = vision.use_qk_norm
    encoder = TileEncoder(
        num_layers=vision.num_hidden_layers,
        tokens=tile_tokens,
        width=vision.hidden_size,
        shape=(vision.num_channels, height, width),
        plan=tile_plan(
            "attention",
            "projection_layer",
            ("mlp.fc1", "mlp.fc2", "mlp"),
            ("vision_config.num_attention_heads", vision.num_attention_heads),
            ("vision_config.intermediate_size", vision.intermediate_size),
            ("num_heads", "embed_dim"),
        ),
        embedding=lambda whole: whole.model.vision_tower.embeddings,
        layers=lambda whole: whole.model.vision_tower.encoder.layer,
        projector=lambda whole: Projector(whole, config.downsample_ratio),
        # The norm is over all heads of a token, which no rank has.
        cut_rules=(Rule("vision_config.use_qk_norm", norm, not norm, "false with tensor parallelism"),),
    )
    return [*tile_pieces(source, encoder), *backbone_pieces(source)]
