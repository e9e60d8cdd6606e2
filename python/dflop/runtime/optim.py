"""AdamW in float32 over weights of any type, with a learning rate for each component and step.

    gradients (float32, summed, clipped) --> AdamW on the masters --> weights

A weight that is not float32 has a master: a float32 copy. AdamW updates the master, and the weight is the
master rounded. Without masters most updates would be lost: near 1 the next bfloat16 number is 0.008 away, so
an update of 1e-5 would change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from dflop.models.parameters import component_of
from dflop.parallel.shard import local

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from dflop.runtime.rates import Rates

BETAS = (0.9, 0.999)
"""AdamW's; PyTorch's default."""
_STATES = ("exp_avg", "exp_avg_sq")
"""States that AdamW keeps for a parameter, each as large as the parameter."""


def undecayed(modules: Iterable[nn.Module]) -> set[str]:
    """Names of parameters without weight decay: biases, and all of norms; as in transformers' `Trainer`.

    The `Trainer` finds norms by their names and as `nn.LayerNorm`, so it decays the RMS norms of Qwen2.5-VL's
    encoder, `norm1`, `norm2` and `ln_q`. Here a norm is found by the name of its class.

    Args:
        modules: The pieces of a rank.

    Returns:
        Full names.
    """
    names: set[str] = set()
    for piece in modules:
        for prefix, module in piece.named_modules():
            is_norm = "norm" in type(module).__name__.lower()
            for name, _ in module.named_parameters(recurse=False):
                if is_norm or name.endswith("bias"):
                    names.add(f"{prefix}.{name}" if prefix else name)
    return names


class Optimizer:
    """AdamW over the parameters of one rank. Its states exist from the start, before the first step."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        rates: Rates,
        weight_decay: float,
        without_decay: set[str],
    ) -> None:
        """Makes masters and states.

        Args:
            parameters: All that train, by full name: plain tensors or DTensors.
            rates: Learning rates of the run.
            weight_decay: Of all parameters but those of `without_decay`.
            without_decay: Names of parameters, from `undecayed`.
        """
        self._rates = rates
        self.masters: dict[str, torch.Tensor] = {}
        """What AdamW updates, by full name: a parameter that is float32 itself, else its float32 copy."""
        self._rounded: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, parameter in parameters.items():
            master = parameter
            if parameter.dtype != torch.float32:
                master = torch.nn.Parameter(parameter.detach().float())
                self._rounded.append((parameter, master))
            self.masters[name] = master
        # AdamW goes number by number, so it gets what this rank has of a master, on the same memory. Over
        # DTensors PyTorch first asks for each of them how a result is cut: of 72, the first step took 118 ms
        # instead of 1, and each further step 2.8 instead of 1.3 (one CPU rank).
        self._shards: list[tuple[torch.Tensor, torch.Tensor]] = []
        groups: dict[tuple[str, bool], list[torch.Tensor]] = {}
        owned: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            owned[name] = master
            if isinstance(master, DTensor):
                owned[name] = torch.nn.Parameter(local(master.detach()))
                self._shards.append((master, owned[name]))
            groups.setdefault((component_of(name), name not in without_decay), []).append(owned[name])
        self._adamw = torch.optim.AdamW(
            [
                {"params": members, "component": component, "weight_decay": weight_decay * decays}
                for (component, decays), members in groups.items()
            ]
            # AdamW refuses an empty list, as a rank with nothing to train would give.
            or [{"params": [torch.nn.Parameter(torch.empty(0))], "component": "llm", "weight_decay": 0.0}],
            lr=1.0,
            betas=BETAS,
            fused=True,
        )
        self._states: dict[str, dict[str, torch.Tensor]] = {
            name: {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                **{kind: torch.zeros_like(master, requires_grad=False) for kind in _STATES},
            }
            for name, master in self.masters.items()
        }
        """AdamW's, by parameter and kind; cut as the masters are."""
        for name, own in owned.items():
            self._adamw.state[own] = {kind: local(value) for kind, value in self._states[name].items()}

    def step(self, step: int, norm: torch.Tensor | None = None) -> None:
        """Updates all parameters by their gradients; changes nothing where the norm is not finite.

        The device itself decides that: the host reads nothing back.

        Args:
            step: From 0; it decides the learning rates.
            norm: Of the gradients of the whole model, on the device; none: it is known to be finite.
        """
        # The attribute by which a gradient scaler of PyTorch makes AdamW skip a step.
        self._adamw.found_inf = None if norm is None else (~norm.isfinite()).float()  # pyright: ignore[reportAttributeAccessIssue]
        rates = self._rates.at(step)
        for group in self._adamw.param_groups:
            group["lr"] = rates[group["component"]]
        for parameter, master in self._rounded:
            assert parameter.grad is not None, "reduced before"
            master.grad = parameter.grad.float()
        for master, shard in self._shards:
            shard.grad = None if master.grad is None else local(master.grad)
        self._adamw.step()
        for _, shard in self._shards:
            # The master's own is dropped later, and this must not keep it.
            shard.grad = None
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Sets each weight that has a master to the rounded master."""
        for weight, master in self._rounded:
            weight.copy_(master)

    def rates(self, step: int) -> dict[str, float]:
        """The learning rate of each component at a step."""
        return self._rates.at(step)

    def states(self) -> dict[str, torch.Tensor]:
        """AdamW's states as they are, not copied: `NAME.exp_avg`, `NAME.exp_avg_sq` and `NAME.step`."""
        return {
            f"{name}.{kind}": value for name, states in self._states.items() for kind, value in states.items()
        }

    def tensors(self) -> list[torch.Tensor]:
        """All that this holds beside the parameters: masters and states."""
        return [*(master for _, master in self._rounded), *self.states().values()]
