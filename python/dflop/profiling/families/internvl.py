"""InternVL 2.5 and 3: InternViT tiles with a CLS each, pixel shuffle, an MLP projector.

    encoder_embedding   pixels_NCHW -> hidden_NPV       P = patches of a tile + 1
    encoder_layer       hidden_NPV  -> hidden_NPV       attention within a tile
    projector           hidden_NPV  -> features_ED      CLS dropped, 1 / downsample_ratio^2 patches a feature

Encoder tokens include the CLS, as in the data profile. Shape letters: N tiles, V and D widths of encoder and
backbone. Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import InternVLConfig, InternVLForConditionalGeneration

from dflop.models.families.internvl import InternVl
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.source import Source, set_hidden_layers
from dflop.profiling.families.tiles import Modules, TileEncoder, project_by, tile_pieces

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of an InternVL model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    # The adapter of training checks the configuration.
    family = InternVl(model_dir)
    source = Source(model_dir, InternVLConfig, InternVLForConditionalGeneration, set_hidden_layers)
    vision = source.encoder
    height, width = vision.image_size
    tile_tokens = (height // vision.patch_size[0]) * (width // vision.patch_size[1]) + 1
    encoder = TileEncoder(
        num_layers=vision.num_hidden_layers,
        tokens=tile_tokens,
        width=vision.hidden_size,
        shape=(vision.num_channels, height, width),
        plan=family.encoder_plan(),
        embedding=lambda whole: Modules(whole, ("vision_tower.embeddings",), family.embed),
        layers=lambda whole: whole.model.vision_tower.encoder.layer,
        projector=lambda whole: Modules(
            whole, ("vision_tower.layernorm", "multi_modal_projector"), project_by(family)
        ),
        check_cut=family.check_cut,
    )
    return [*tile_pieces(source, encoder), *backbone_pieces(source)]
