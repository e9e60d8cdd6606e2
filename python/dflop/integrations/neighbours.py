"""What makes the gradient of a sample depend on the others of its microbatch, with dflop and without."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch.nn.modules.batchnorm import _BatchNorm

from dflop.integrations.backbone import unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

_PARTS = {
    "output_router_logits": "the router's loss",
    "dsa_indexer_loss_coef": "the indexer's loss",
}
"""Fields of a model's configuration that add a loss that is a mean over a microbatch."""


def has_router_loss(config: Any) -> bool:
    """Looks whether a model adds the loss of its routers, a product of means over a microbatch.

    Args:
        config: of the model; None: it has none.

    Returns:
        Whether it does.
    """
    text = _of_text(config)
    is_asked = bool(getattr(text, "output_router_logits", False))
    return is_asked and getattr(text, "router_aux_loss_coef", 1) != 0


def warn_of_parts(config: Any) -> None:
    """Warns of parts of the loss that are means over a microbatch; call it on one rank.

    Args:
        config: of the model; None: it has none.
    """
    for fact in _parts_of(config):
        _warn_of_part(fact, stacklevel=3)


def warn_of_neighbours(trainer: Any) -> None:
    """Says on rank 0 that a model's gradients depend on which samples share a microbatch, if they do.

    Args:
        trainer: of transformers; of one that has no model yet nothing is said.
    """
    model = getattr(trainer, "model", None)
    if model is None or trainer.args.process_index:
        return
    config = getattr(unwrapped(model), "config", None)
    facts = list(_parts_of(config))
    if getattr(trainer, "aux_loss_enabled", False):
        # TRL asks for it with each call.
        facts = [f"`router_aux_loss_coef` is {trainer.router_aux_loss_coef}: the router's loss"]
    for fact in facts:
        _warn_of_part(fact, stacklevel=4)
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if norms:
        fact = f"`{norms[0]}` is a BatchNorm, one of {len(norms)}, which takes means over a microbatch"
        advice = "Keep these layers in evaluation mode"
    elif getattr(config, "model_type", None) == "hunyuan_vl":
        fact = "`hunyuan_vl` numbers the images of all rows of a microbatch together in their positions"
        advice = "Give `position_ids` that number those of each row"
    else:
        return
    warnings.warn(
        f"{fact}: the gradient of a sample depends on those beside it, with balanced batches and without. "
        f"{advice} to have the gradient of single samples",
        stacklevel=3,
    )


def _of_text(config: Any) -> Any:
    """The part of a configuration that its LLM reads."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _parts_of(config: Any) -> Iterator[str]:
    text = _of_text(config)
    for name, what in _PARTS.items():
        if getattr(text, name, False) and (name != "output_router_logits" or has_router_loss(config)):
            yield f"`{name}` is {getattr(text, name)!r}: {what}"


def _warn_of_part(fact: str, stacklevel: int) -> None:
    warnings.warn(
        f"{fact} is a mean over a microbatch. So the gradient depends on how samples are divided, with dflop "
        "and without",
        stacklevel=stacklevel,
    )
