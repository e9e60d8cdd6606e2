"""The pieces of the model that a rank holds: built, filled, and frozen where the recipe says so.

adapter -> memory -> values (train.init: read from model.dir, or drawn) -> what trains (train.recipe)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dflop.models.adapters import add_adapters
from dflop.models.compiled import LAYERS, compile_layers
from dflop.models.expert_ranks import add_exchange
from dflop.models.load import Weights
from dflop.models.recipes import freeze, trains_tower
from dflop.models.recompute import FULL, SELECTIVE
from dflop.models.sums import Sums
from dflop.models.tensor import add_collectives
from dflop.parallel.shard import layers_of
from dflop.runtime.progress import say
from dflop.runtime.sharded import is_cut
from dflop.runtime.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from dflop._native import Plan
    from dflop.models.adapter import ModelAdapter
    from dflop.runtime.gradients import Gradients
    from dflop.runtime.mesh import Mesh
    from dflop.runtime.options import Options
    from dflop.runtime.sharded import JoinedGradients, ShardedGradients


def build_pieces(
    adapter: ModelAdapter,
    mesh: Mesh,
    options: Options,
    compute_dtype: torch.dtype,
    *,
    is_resumed: bool = False,
) -> dict[int, nn.Module]:
    """The pieces of this rank, ready for gradients: in training mode, with `requires_grad` by the recipe.

    Args:
        adapter: Of the model.
        mesh: This rank's coordinates.
        options: Of the run.
        compute_dtype: That layers compute in. Of what is cut among replicas the parameters are float32.
        is_resumed: Whether a checkpoint replaces the parameters afterwards.

    Returns:
        By stage, on the device of the rank.

    Raises:
        Error: The weights of `model.dir` cannot be used, or layers cannot be cut over the ranks of the plan.
    """
    seed = options.seed if options.init == "random" else None
    pieces: dict[int, nn.Module] = {}
    for stage in mesh.stages:
        tensor = mesh.tensor_rank(stage)
        dtype = torch.float32 if is_cut(mesh, stage) else compute_dtype
        if mesh.is_encoder_stage(stage):
            first_layer, num_layers = mesh.plan.encoder_layers(stage, adapter.num_run_layers)
            layers = range(first_layer, first_layer + num_layers)
            pieces[stage] = adapter.build_encoder(mesh.device, dtype, seed, layers, tensor=tensor)
        else:
            first_layer, num_layers = mesh.plan.llm_layers(stage, adapter.num_llm_layers)
            run = (first_layer, num_layers)
            experts = mesh.expert_rank
            pieces[stage] = adapter.build_llm_stage(
                *run, mesh.device, dtype, seed, tensor=tensor, experts=experts
            )
    if seed is None:
        weights = Weights(options.model_dir, adapter.build_whole()[0])
        say(f"reading weights from `{options.model_dir}` (files: {weights.num_files})")
        for piece in pieces.values():
            weights.fill(piece)
    elif not is_resumed:
        say(f"the parameters are drawn at random from seed {seed} (`train.init: random`)")
    for stage, piece in pieces.items():
        if options.recipe == "lora":
            add_adapters(piece, options.lora_rank, options.lora_alpha, options.seed)
        freeze(piece, options.recipe)
        piece.train()
        group = mesh.group_of(stage)
        if group is not None:
            add_collectives(piece, Sums(group))
        if mesh.expert_group is not None:
            add_exchange(piece, Sums(mesh.expert_group))
        if options.compile == LAYERS:
            compile_layers(piece, layers_of(piece))
    if options.compile == LAYERS:
        _say_compiled(mesh.plan)
    if options.recipe != "full":
        say(f"training `{options.recipe}`, all else is frozen (`train.recipe`)")
    return pieces


def _say_compiled(plan: Plan) -> None:
    say("layers are compiled as they first run, which takes a while (`train.compile: layers`)")
    modes = {mode.partition(":") for mode in (plan.encoder_recompute, plan.llm_recompute)}
    # `full:K` recomputes the layers after the first K selectively.
    if any(mode == SELECTIVE or (mode == FULL and first) for mode, _, first in modes):
        say("layers that recompute selectively run uncompiled: that needs their operators one by one")


def border_widths(plan: Plan, adapter: ModelAdapter) -> list[int]:
    """How many values a row has that leaves each stage; the last stage sends none.

    Args:
        plan: The layout.
        adapter: Of the model.

    Returns:
        By stage.
    """
    within = range(1, plan.encoder_stages)
    first_layers = [plan.encoder_layers(stage, adapter.num_run_layers)[0] for stage in within]
    of_encoder = [adapter.row_width(layer) for layer in first_layers]
    width = adapter.feature_width
    of_llm = [width]
    for stage in range(plan.encoder_stages, plan.num_stages - 1):
        # As `LlmStage.outgoing_width`: each layer uses up one D of what features bring for later layers.
        _, num_layers = plan.llm_layers(stage, adapter.num_llm_layers)
        width = max(adapter.hidden_size, width - adapter.hidden_size * num_layers)
        of_llm.append(width)
    return of_encoder + of_llm


def stages_of(
    pieces: Mapping[int, nn.Module],
    mesh: Mesh,
    gradients: Gradients | ShardedGradients | JoinedGradients,
    recipe: str,
) -> dict[int, Stage]:
    """The pieces of this rank at work, by stage.

    Args:
        pieces: Frozen where the recipe says so.
        mesh: This rank's coordinates.
        gradients: Of the pieces.
        recipe: What trains.

    Returns:
        Ready for the first step.
    """
    plan = mesh.plan
    last, last_encoder = plan.num_stages - 1, plan.encoder_stages - 1
    return {
        stage: Stage(
            piece,
            stage == last,
            mesh.device,
            gradients.nothing(stage),
            gives_features=stage == last_encoder,
            needs_gradient=not mesh.is_encoder_stage(stage) or trains_tower(recipe),
            recompute=plan.encoder_recompute if mesh.is_encoder_stage(stage) else plan.llm_recompute,
            sums=Sums(mesh.group_of(stage)),
        )
        for stage, piece in pieces.items()
    }
