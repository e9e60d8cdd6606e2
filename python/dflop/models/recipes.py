"""What trains: all of a model or parts of it, by `train.recipe`. The projector always trains.

full            encoder, projector, LLM
projector       projector alone
frozen-encoder  projector, LLM
frozen-llm      encoder, projector
lora            projector (its modules), and low-rank adapters beside the linear maps of the LLM
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.adapters import is_adapter, is_of_projector
from dflop.models.parameters import component_of

if TYPE_CHECKING:
    from torch import nn

_TRAINED = {
    "full": ("encoder", "projector", "llm"),
    "projector": ("projector",),
    "frozen-encoder": ("projector", "llm"),
    "frozen-llm": ("encoder", "projector"),
}


def freeze(module: nn.Module, recipe: str) -> int:
    """Freezes the parameters that a recipe does not train, before gradients and optimizer are made.

    Args:
        module: a piece, with full names of its parameters; changed in place.
        recipe: as in `train.recipe`.

    Returns:
        Number of parameters (scalars) that train.
    """
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(_trains(name, recipe))
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def trains_tower(recipe: str) -> bool:
    """Whether a recipe trains the encoder before its projector."""
    return "encoder" in _TRAINED.get(recipe, ())


def goes_on(then: str, now: str) -> bool:
    """Whether what a run has saved under one recipe has all that a run under another one needs.

    A checkpoint has AdamW's moments of what was trained, and names adapters as `lora` does.

    Args:
        then: The recipe of the checkpoint, as in `train.recipe`.
        now: That of the run that would go on.

    Returns:
        True where `now` trains nothing that `then` left frozen.
    """
    if then == now:
        return True
    return set(_TRAINED.get(now, (now,))) <= set(_TRAINED.get(then, ()))


def _trains(name: str, recipe: str) -> bool:
    """Whether a parameter trains."""
    if recipe == "lora":
        # Of the projector only modules train here, since peft cannot save single parameters.
        return is_adapter(name) or is_of_projector(name)
    return component_of(name) in _TRAINED[recipe]
