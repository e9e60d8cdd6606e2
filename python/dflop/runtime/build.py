"""The pieces of the model that a rank holds: built, filled, and frozen where the recipe says so.

adapter -> memory -> values (train.init: read from model.dir, or drawn) -> what trains (train.recipe)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.adapters import add_adapters
from dflop.models.load import Weights
from dflop.models.recipes import freeze
from dflop.runtime.progress import say

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dflop.models.adapter import ModelAdapter
    from dflop.runtime.mesh import Mesh
    from dflop.runtime.options import Options


def build_pieces(
    adapter: ModelAdapter, mesh: Mesh, options: Options, dtype: torch.dtype
) -> dict[int, nn.Module]:
    """The pieces of this rank, ready for gradients: in training mode, with `requires_grad` by the recipe.

    Args:
        adapter: Of the model.
        mesh: This rank's place.
        options: Of the run.
        dtype: Of the parameters.

    Returns:
        By stage, on the device of the rank.

    Raises:
        Error: The weights of `model.dir` cannot be used.
    """
    seed = options.seed if options.init == "random" else None
    pieces: dict[int, nn.Module] = {}
    for stage in mesh.stages:
        if stage == 0:
            pieces[stage] = adapter.build_encoder(mesh.device, dtype, seed)
        else:
            first_layer, num_layers = mesh.plan.llm_layers(stage, adapter.num_llm_layers)
            pieces[stage] = adapter.build_llm_stage(first_layer, num_layers, mesh.device, dtype, seed)
    if seed is None:
        weights = Weights(options.model_dir, adapter.build_whole()[0])
        say(f"reading weights from `{options.model_dir}` (files: {weights.num_files})")
        for piece in pieces.values():
            weights.fill(piece)
    else:
        say(f"the parameters are drawn at random from seed {seed} (`train.init: random`)")
    for piece in pieces.values():
        if options.recipe == "lora":
            add_adapters(piece, options.lora_rank, options.lora_alpha, options.seed)
        freeze(piece, options.recipe)
        piece.train()
    if options.recipe != "full":
        say(f"training `{options.recipe}`, all else is frozen (`train.recipe`)")
    return pieces
