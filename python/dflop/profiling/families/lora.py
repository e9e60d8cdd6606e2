"""LoRA: a frozen linear map with a trained one of low rank beside it.

y = W x + b + scaling B A x      W, b frozen; A [r, in], B [out, r]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

_ALPHA_PER_RANK = 2.0
"""A usual value of `lora_alpha / r`; the time does not depend on it."""


class LoraLinear(nn.Linear):
    """A frozen `nn.Linear` with adapters; parameters on the meta device until they are materialised."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        # The constructor of `nn.Linear` is skipped, since it would make a second weight.
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        options = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.lora_A = nn.Linear(self.in_features, rank, bias=False, **options)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False, **options)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The sum of both maps.

        Args:
            input: [..., in].

        Returns:
            [..., out].
        """
        adapted = self.lora_B(self.lora_A(input))
        return F.linear(input, self.weight, self.bias) + adapted * _ALPHA_PER_RANK


def add_adapters(module: nn.Module, rank: int) -> None:
    """Freezes all parameters of `module` and puts adapters on all its linear maps.

    Args:
        module: changed in place.
        rank: of the adapters, at least 1.
    """
    module.requires_grad_(False)
    for path, child in list(module.named_modules()):
        owner, _, name = path.rpartition(".")
        # A router that is a linear map has none, as in training.
        if type(child) is nn.Linear and owner.rpartition(".")[2] != "router":
            setattr(module.get_submodule(owner), name, LoraLinear(child, rank))
