"""dflop's lines in other people's trainers; importing this imports neither torch nor any trainer.

    batches   loader.balanced_loader    plain PyTorch (DDP, FSDP2); loss.py: over the global label tokens
              transformers.balance      transformers.Trainer, TRL; trainer_steps.py: resuming
                                        generations.py: what GRPO and RLOO generate; spread.py: who has it
              accelerate.balanced       accelerate
              lightning.BalancedData    Lightning
              swift.register            ms-swift; swift_generations.py: what its GRPO generates
              llamafactory.train        LLaMA-Factory, as a command
              axolotl.BalancePlugin     Axolotl
              nemo.recipe               NeMo Automodel
              veomni.balance_batches    VeOmni, as a command; read_rows.py: samples that wait for collation,
                                        read_spread.py: who has them, under a limit on tokens
              lmms_engine.balance_batches  lmms-engine, as a command, in the same way
              verl.balance_batches      verl, by its own option; verl_costs.py: by tokens of its samples
              easyr1.balance_batches    EasyR1, by an option of Ray
              torchtitan, energon
    encoder   encoder.balance_encoder   any of them, for Hugging Face models with images, videos or sound
              encoder.attend_encoder    alone: text alone hangs nobody under FSDP2; text_alone.py takes it
    costs     measured_cost.measure_cost          for `dflop.costs`: times of a model of any family
              parameter_cost.cost_of_parameters   for `dflop.costs`, of a model that nobody measured
              row_costs.costs_of_rows             of the rows that a trainer holds: no data profile is needed
    padding   padding.remove_padding    any of them, where batches are padded
              padded_rows.watched       says where they are and nothing was done

Each name of `__all__` loads its module when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflop.integrations.encoder import BalancedEncoder, attend_encoder, balance_encoder
    from dflop.integrations.loader import balanced_loader
    from dflop.integrations.loss import num_label_tokens, token_loss
    from dflop.integrations.measured_cost import MeasuredCost, measure_cost
    from dflop.integrations.padding import Unpadded, remove_padding
    from dflop.integrations.parameter_cost import ParameterCost, cost_of_parameters
    from dflop.integrations.row_costs import costs_of_rows

_HOMES = {
    "BalancedEncoder": "encoder",
    "MeasuredCost": "measured_cost",
    "ParameterCost": "parameter_cost",
    "Unpadded": "padding",
    "attend_encoder": "encoder",
    "balance_encoder": "encoder",
    "balanced_loader": "loader",
    "cost_of_parameters": "parameter_cost",
    "costs_of_rows": "row_costs",
    "measure_cost": "measured_cost",
    "num_label_tokens": "loss",
    "remove_padding": "padding",
    "token_loss": "loss",
}

__all__ = [
    "BalancedEncoder",
    "MeasuredCost",
    "ParameterCost",
    "Unpadded",
    "attend_encoder",
    "balance_encoder",
    "balanced_loader",
    "cost_of_parameters",
    "costs_of_rows",
    "measure_cost",
    "num_label_tokens",
    "remove_padding",
    "token_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        message = f"module `dflop.integrations` has no attribute `{name}`"
        raise AttributeError(message)
    import_module("dflop.data.needs_torch")
    return getattr(import_module(f"dflop.integrations.{_HOMES[name]}"), name)
