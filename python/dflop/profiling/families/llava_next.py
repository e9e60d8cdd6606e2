"""LLaVA-NeXT: CLIP tiles with a CLS each, an MLP projector, anyres packing; Vicuna, Mistral or Llama.

    encoder_embedding   pixels_NCHW -> hidden_NPV       P = patches of a tile + 1
    encoder_layer       hidden_NPV  -> hidden_NPV       attention within a tile; only layers that are read
    projector           hidden_NPV  -> features_ED      CLS dropped, padding cut off, newlines put in

Encoder tokens include the CLS, as in the data profile. Shape letters: N tiles, V and D widths of encoder and
backbone. Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

from dflop.models.families.llava_next import LlavaNext
from dflop.models.towers import inner_tower
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.source import Source, set_hidden_layers
from dflop.profiling.families.tiles import Modules, TileEncoder, project_by, tile_pieces

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


class _Embedding(Modules):
    """Pixels to hidden states. It also holds the parts of the tower that take memory but never run."""

    def __init__(self, whole: Any, family: LlavaNext) -> None:
        tower = inner_tower(whole.model.vision_tower)
        # This is a buffer, so it is not filled along with the parameters.
        tower.embeddings.position_ids = torch.arange(tower.embeddings.num_positions).expand((1, -1))
        path = "vision_tower" if tower is whole.model.vision_tower else "vision_tower.vision_model"
        names = [f"{path}.{name}" for name in ("embeddings", "pre_layrnorm", "post_layernorm")]
        super().__init__(whole, names, family.embed)
        layer, unread = type(tower.encoder.layers[0]), family.num_encoder_layers - max(family.feature_layers)
        with torch.device("meta"):
            self.unread = nn.ModuleList([layer(family.vision) for _ in range(unread)])


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a LLaVA-NeXT model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    # The adapter of training checks the configuration.
    family = LlavaNext(model_dir)
    source = Source(model_dir, LlavaNextConfig, LlavaNextForConditionalGeneration, set_hidden_layers)
    vision = source.encoder
    side: int = vision.image_size
    tile_tokens = (side // vision.patch_size) ** 2 + 1
    encoder = TileEncoder(
        num_layers=max(family.feature_layers),
        tokens=tile_tokens,
        width=vision.hidden_size,
        shape=(vision.num_channels, side, side),
        plan=family.encoder_plan(),
        embedding=lambda whole: _Embedding(whole, family),
        layers=lambda whole: inner_tower(whole.model.vision_tower).encoder.layers,
        projector=lambda whole: Modules(
            whole, ("multi_modal_projector", "image_newline"), project_by(family)
        ),
        # The attention mask: none.
        arguments=(None,),
    )
    return [*tile_pieces(source, encoder), *backbone_pieces(source)]
