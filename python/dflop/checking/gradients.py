"""How far two gradients of a model are apart, by parameter and by module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

_LEAST = 1e-5
"""Of the whole gradient's norm: a gradient below it is mostly rounding, and is held against it instead."""
_KEY_BIAS = 10
"""Times as much for the bias of keys: without rotation a softmax does not see it."""
DECAYS = ("linear_attn.dt_bias", "linear_attn.A_log", "linear_attn.in_proj_a.weight")
"""How the names end of parameters that decide how fast the state of linear attention decays."""
_DECAY_CONDITION = 50
"""How much larger rounding is where a state's decay stands in exponents of long sums (docs/families.md)."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class ModuleError:
    """One module, or all modules of its place in the layers of a stack."""

    module: str
    """Its name in Hugging Face's model, with `*` for the numbers of layers."""
    num_parameters: int
    """Numbers in its parameters."""
    norm: float
    """Of its expected gradient."""
    error: float
    """The largest of its parameters' errors, as `errors_of` gives them."""


def errors_of(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float = 1e-5
) -> dict[str, float]:
    """Norms of differences, each over the norm of the parameter's expected gradient.

    Where that norm is so small that rounding alone makes it, the difference is held against more: 1e-5 of the
    whole gradient's norm, ten times that for the bias of keys, which a softmax does not see.

    Args:
        found: By name of the parameter.
        expected: By the same names.
        tolerance: What the errors will be compared with.

    Returns:
        By name; 0 where both are equal.

    Raises:
        ValueError: The names differ; the message names the first.
    """
    if others := sorted(set(found) ^ set(expected)):
        message = f"`{others[0]}` has a gradient in one of them only"
        raise ValueError(message)
    total = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    errors = {}
    for name, gradient in expected.items():
        norm = float(gradient.norm())
        scale = max(norm, _LEAST * total * (_KEY_BIAS if name.endswith("k_proj.bias") else 1))
        if name.endswith(DECAYS):
            # Where the state fades at once, only rounding is left, of what other parameters' gradients have.
            scale = max(
                scale, _DECAY_CONDITION * norm, 2 * torch.finfo(torch.float32).eps * total / tolerance
            )
        difference = float((found[name] - gradient).norm())
        errors[name] = difference / scale if scale else difference
    return errors


def by_module(errors: Mapping[str, float], expected: Mapping[str, torch.Tensor]) -> list[ModuleError]:
    """The errors of modules, the layers of a stack taken together.

    Args:
        errors: By name of the parameter.
        expected: Gradients, by the same names.

    Returns:
        In the order in which the modules' first parameters stand.
    """
    modules: dict[str, list[str]] = {}
    for name in errors:
        # Some parameters belong to no module of their own, such as rows of newlines.
        module = name.removesuffix(".weight").removesuffix(".bias")
        modules.setdefault(_NUMBER.sub("*", module), []).append(name)
    return [
        ModuleError(
            module,
            sum(expected[name].numel() for name in names),
            float(torch.stack([expected[name].norm() for name in names]).norm()),
            # A maximum would pass over what is no number.
            max((errors[name] if isfinite(errors[name]) else inf) for name in names),
        )
        for module, names in modules.items()
    ]
