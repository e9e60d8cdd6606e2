"""Qwen3.5: patches as in Qwen3-VL, no DeepStack; three of four layers of the backbone have linear attention.

    hidden_TD --linear attention, three times; attention, once--> hidden_TD, and so on

A layer with linear attention goes along the tokens with a state of fixed size (gated delta rule), which
starts from nothing with each sample: see `models/delta_rule.py`.
"""

from __future__ import annotations

import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5 import modeling_qwen3_5

from dflop.models.delta_rule import keep_samples_apart
from dflop.models.families.qwen3_vl import Qwen3Vl
from dflop.models.parameters import fill_parameter, name_seed
from dflop.models.rules import Rule

keep_samples_apart(modeling_qwen3_5)

# Decays are drawn as transformers draws them; lower ones would make the logarithm infinite.
_DECAYS = (0.01, 16.0)


@torch.no_grad()
def fill_with_decays(parameter: torch.Tensor, name: str, seed: int, std: float) -> None:
    """Draws a parameter; most norms of this backbone scale by one more than their weight.

    Args:
        parameter: filled in place.
        name: full Hugging Face name.
        seed: of the run.
        std: standard deviation of weights.
    """
    parts = name.split(".")
    is_norm = "language_model" in parts and "norm" in parts[-2]
    if is_norm and "linear_attn" not in parts:
        parameter.zero_()
    elif parts[-1] == "dt_bias":
        parameter.fill_(1.0)
    elif parts[-1] == "A_log":
        generator = torch.Generator().manual_seed(name_seed(seed, name))
        parameter.copy_(torch.empty(parameter.shape).uniform_(*_DECAYS, generator=generator).log())
    else:
        fill_parameter(parameter, name, seed, std)


class Qwen35(Qwen3Vl):
    """`ModelAdapter` of Qwen3.5."""

    family = "qwen3_5"
    config_class = Qwen3_5Config
    model_class = Qwen3_5ForConditionalGeneration
    model_methods = modeling_qwen3_5.Qwen3_5Model

    @property
    def deep_layers(self) -> tuple[int, ...]:
        """See `PatchFamily.deep_layers`: none."""
        return ()

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        out, width = self.vision.out_hidden_size, self.text.hidden_size
        wanted = f"`text_config.hidden_size`, {width}"
        return [Rule("vision_config.out_hidden_size", out, out == width, wanted)]

    def fill(self, parameter: torch.Tensor, name: str, seed: int, std: float) -> None:
        """See `FamilyAdapter.fill`."""
        fill_with_decays(parameter, name, seed, std)


ADAPTER = Qwen35
