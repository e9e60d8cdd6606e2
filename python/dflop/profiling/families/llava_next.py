"""LLaVA-NeXT: CLIP tiles with a CLS each, an MLP projector, anyres packing; Vicuna, Mistral or Llama.

    encoder_embedding   pixels_NCHW -> hidden_NPV       P = patches of a tile + 1
    encoder_layer       hidden_NPV  -> hidden_NPV       attention within a tile; only layers that are read
    projector           hidden_NPV  -> features_ED      CLS dropped, padding cut off, newlines put in

Encoder tokens include the CLS, as in the data profile. Shape letters: N tiles, V and D widths of encoder and
backbone. Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.families.llava_next import LlavaNext
from dflop.profiling.families.llava import pieces_of

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a LLaVA-NeXT model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(LlavaNext(model_dir))
