"""LLaVA 1.5: one CLIP or SigLIP square an image, an MLP projector; Vicuna, Llama, Mistral or Qwen2.

    encoder_embedding   pixels_NCHW -> hidden_NPV       P = patches of an image, + 1 with CLIP
    encoder_layer       hidden_NPV  -> hidden_NPV       attention within an image; only layers that are read
    projector           hidden_NPV  -> features_ED      the first token dropped if the strategy is `default`

Encoder tokens include the CLS, as in the data profile. Shape letters: N images, V and D widths of encoder and
backbone. Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dflop.models.families.llava import Llava
from dflop.models.towers import inner_tower
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.source import Source, set_hidden_layers
from dflop.profiling.families.tiles import Modules, TileEncoder, project_by, tile_pieces

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


class _Embedding(Modules):
    """Pixels to hidden states. It also holds the parts of the tower that take memory but never run."""

    def __init__(self, whole: Any, family: Llava) -> None:
        tower = inner_tower(whole.model.vision_tower)
        # This is a buffer, so it is not filled along with the parameters.
        tower.embeddings.position_ids = torch.arange(tower.embeddings.num_positions).expand((1, -1))
        path = "vision_tower" if tower is whole.model.vision_tower else "vision_tower.vision_model"
        parts = ("embeddings", "pre_layrnorm", "post_layernorm", "head")
        names = [f"{path}.{name}" for name in parts if isinstance(getattr(tower, name, None), nn.Module)]
        super().__init__(whole, names, family.embed)
        layer, unread = type(tower.encoder.layers[0]), family.num_encoder_layers - max(family.feature_layers)
        with torch.device("meta"):
            self.unread = nn.ModuleList([layer(family.vision) for _ in range(unread)])


def pieces_of(family: Llava) -> list[Piece]:
    """The pieces of a model of the kind.

    Args:
        family: its adapter of training, which has checked the configuration.

    Returns:
        Six pieces.
    """
    source = Source(family.model_dir, family.config_class, family.model_class, set_hidden_layers)
    # The tower comes first; what follows it makes features of its hidden states.
    projector = family.encoder_modules[1:]
    encoder = TileEncoder(
        num_layers=max(family.feature_layers),
        tokens=family.encoder_tokens_per_tile,
        width=family.encoder_width,
        shape=family.input_shape,
        plan=family.encoder_plan(),
        embedding=lambda whole: _Embedding(whole, family),
        layers=lambda whole: inner_tower(whole.model.vision_tower).encoder.layers,
        projector=lambda whole: Modules(whole, projector, project_by(family)),
        # The attention mask: none.
        arguments=(None,),
    )
    return [*tile_pieces(source, encoder), *backbone_pieces(source)]


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a LLaVA 1.5 model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(Llava(model_dir))
