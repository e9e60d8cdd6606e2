"""Which of lmms-engine's patches took effect on a model: it skips some, and logs where one fails.

use_rmpad: true -> most models: by the patch of `use_liger_kernel: true`; Qwen3.5-MoE: by its own
"""

from __future__ import annotations

import inspect
from typing import Any

_OURS = "lmms_engine."


def _forward(module: Any) -> Any:
    """The function that computes a module, without what is wrapped around it."""
    forward = module.forward
    return inspect.unwrap(getattr(forward, "__func__", forward))


def is_flat(model: Any) -> bool:
    """Looks whether rows have no padding (`use_rmpad`) in a model, not whether that was asked.

    Args:
        model: of lmms-engine's trainer.

    Returns:
        Whether lmms-engine computes its LLM on the tokens of all rows behind each other.
    """
    for module in model.modules():
        forward = _forward(module)
        # A model with a head takes these in padded rows, too; towers of pictures or sounds take none.
        if getattr(forward, "__module__", "").startswith(_OURS) and not hasattr(module, "lm_head"):
            taken = inspect.signature(forward).parameters
            if {"cu_seq_lens", "inputs_embeds"} <= taken.keys():
                return True
    return False


def computes_loss(model: Any) -> bool:
    """Looks whether a patch computes the loss in a model's `forward`, from labels and without logits.

    Args:
        model: of lmms-engine's trainer.

    Returns:
        Whether one does.
    """
    module = getattr(_forward(model), "__module__", "")
    return module.startswith(_OURS) and module != type(model).__module__


def takes_num_items(model: Any) -> bool:
    """Looks whether that loss is a sum over `num_items_in_batch`, where it is given.

    Args:
        model: one of which `computes_loss` is true.

    Returns:
        Whether it is.
    """
    return "num_items_in_batch" in inspect.getsource(_forward(model))
