"""What samples of EasyR1 cost: the model that it makes of its configuration, without values (`meta`).

worker.actor.model -> the model, where the trainer runs    \
a rank's policy    -> the same model, of the policy's class | -> verl_costs.Counted -> work of a sample
"""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from dflop.integrations.backbone import unwrapped
from dflop.integrations.verl_costs import Counted

if TYPE_CHECKING:
    from collections.abc import Callable


def counted_by_settings(model: Any) -> Counted:
    """Costs of a model that is not in this process.

    Args:
        model: EasyR1's settings of it, `worker.actor.model`.

    Returns:
        The costs, with its adapters, and without gradients of a vision tower that is frozen.

    Raises:
        ValueError: transformers knows no such model, or its parameters cannot be counted.
    """
    transformers: Any = import_module("transformers")
    is_trusted = model.trust_remote_code
    config = transformers.AutoConfig.from_pretrained(
        model.model_path, trust_remote_code=is_trusted, **model.override_config
    )
    kind = transformers.AutoModelForCausalLM
    if type(config) in transformers.AutoModelForImageTextToText._model_mapping.keys():  # noqa: SIM118
        kind = transformers.AutoModelForImageTextToText
    adapter = None
    if model.lora.rank > 0:
        targets = model.lora.target_modules
        adapter = import_module("peft").LoraConfig(
            r=model.lora.rank,
            target_modules=targets
            if targets == "all-linear"
            else [one.strip() for one in targets.split(",")],
            exclude_modules=model.lora.exclude_modules,
        )
    empty = _empty(
        lambda: kind.from_config(config, attn_implementation="eager", trust_remote_code=is_trusted),
        adapter,
        is_frozen=model.freeze_vision_tower,
    )
    return Counted.of_model(empty)


def counted_of_policy(policy: Any) -> Counted:
    """Costs of the model of a rank: its parameters are parts of flat ones there.

    Args:
        policy: EasyR1's `DataParallelPPOActor`, of the actor or of the reference model.

    Returns:
        The costs, as above.

    Raises:
        ValueError: its parameters cannot be counted.
    """
    held = unwrapped(policy.actor_module)
    adapters = getattr(policy.actor_module, "peft_config", None) or {}
    settings = getattr(policy.config, "model", None)
    empty = _empty(
        lambda: type(held)._from_config(deepcopy(held.config), attn_implementation="eager"),
        deepcopy(next(iter(adapters.values()), None)),
        is_frozen=settings is not None and settings.freeze_vision_tower,
    )
    return Counted.of_model(empty)


def _empty(make: Callable[[], Any], adapter: Any, *, is_frozen: bool) -> Any:
    """The model without values, as EasyR1 trains it."""
    # How attention is computed changes no parameter, and flash attention need not be installed for it.
    with torch.device("meta"):
        model = make()
        if adapter is not None:
            model = import_module("peft").get_peft_model(model, adapter)
    whole = unwrapped(model)
    tower = getattr(getattr(whole, "model", None), "visual", None) or getattr(whole, "visual", None)
    if is_frozen and tower is not None:
        tower.requires_grad_(False)
    return model
