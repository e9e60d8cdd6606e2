"""Axolotl with balanced batches: a plugin that its YAML names.

plugins:
  - dflop.integrations.axolotl.BalancePlugin
dflop: {remove_padding: true}   # if anything is asked for
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

# Of Axolotl, whose own versions of everything stand apart from ours.
from axolotl.core.trainers.base import AxolotlTrainer  # pyright: ignore[reportMissingImports]
from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel

from dflop.integrations.pair_loss import is_of_pairs
from dflop.integrations.row_costs import costs_of_rows
from dflop.integrations.text_alone import unused_in_ddp
from dflop.integrations.transformers import is_known_late
from dflop.integrations.yaml_options import balance_as_asked, checked

_REFUSED = {
    "sample_packing": "it makes batches of tokens, and these are of samples",
    "pretraining_dataset": "its rows have one length by default: take `datasets` with `streaming`",
    "group_by_length": "samples are chosen here",
    "orpo_alpha": "the loss is no sum over label tokens",
    "process_reward_model": "its loss is a mean over the label tokens of a microbatch",
}
_RL = ("dpo", "ipo", "orpo", "simpo")
"""Values of `rl` whose loss is a mean over pairs, or has a part that is one over tokens."""
_GENERATED = "samples are generated in training, and of those only TRL's own trainers are balanced"
_RL_REFUSED = {
    "kto": "an answer is compared with the mean of its microbatch",
    "grpo": _GENERATED,
    "gdpo": _GENERATED,
    "ebft": _GENERATED,
}
_FUSED = ("cut_cross_entropy", "liger_fused_linear_cross_entropy", "chunked_cross_entropy")
"""Losses inside the model, which Axolotl does not give the label tokens of a step."""


_OF_ENCODER = (
    "Set `ddp_find_unused_parameters: true`, or `dflop: {balance_encoder: true}`, or freeze it "
    "(`freeze_mm_modules: true`)"
)


class BalanceArgs(BaseModel):
    """What the plugin adds to the keys of the YAML."""

    dflop: dict[str, Any] | None = None
    """Options of `yaml_options.checked`."""


class BalancePlugin(BasePlugin):
    """Takes the lines for the trainer that Axolotl has made."""

    def get_input_args(self) -> str:
        """Where Axolotl finds the key `dflop`.

        Returns:
            The name of the class.
        """
        return f"{__name__}.BalanceArgs"

    def register(self, cfg: Any) -> None:
        """Looks at the options before anything is loaded.

        Args:
            cfg: what the YAML says.

        Raises:
            ValueError: the YAML asks for what cannot be balanced; the message says which key.
        """
        checked(cfg.get("dflop"))
        _check_keys(cfg)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Balances the trainer.

        Costs are counted from the rows that the trainer holds. Rows that its collation tokenizes are counted
        by the processor and the chat template of that collation; pairs cost both answers. With `streaming`
        rows are counted by their tokens when they are read.

        Args:
            cfg: what the YAML says.
            trainer: that Axolotl will run.

        Raises:
            ValueError: the YAML asks for what cannot be balanced; the message says which key.
        """
        _check(cfg, trainer)
        options = checked(cfg.get("dflop"))
        # Axolotl sets it to false, and has no key for it: its loss is a mean of each rank's means.
        trainer.args.average_tokens_across_devices = True
        # Its trainers of pairs know neither key.
        is_plain = not is_of_pairs(trainer)
        pads = not (is_plain and cfg.get("batch_flattening"))
        if is_known_late(trainer):
            balance_as_asked(trainer, options, pads=pads)
            return
        if is_plain and cfg.get("curriculum_sampling"):
            options = {"shuffle": False, **options}
        costs = costs_of_rows(
            trainer.train_dataset,
            trainer.model,
            _processor(trainer),
            max_length=getattr(trainer.args, "max_length", None),
        )
        if not options.get("balance_encoder"):
            num_alone = sum(not cost for cost in costs.encoder_ns)
            if fact := unused_in_ddp(trainer, (num_alone, len(costs))):
                message = f"{fact}. {_OF_ENCODER}"
                raise ValueError(message)
        balance_as_asked(trainer, options, costs, pads=pads)


def _check_keys(cfg: Any) -> None:
    rl = cfg.get("rl")
    for name, why in _REFUSED.items():
        # Beside `rl` it is another name of `rl_beta`.
        if (value := cfg.get(name)) and not (rl and name == "orpo_alpha"):
            message = f"`{name}` is {value!r}, leave it out for balanced batches: {why}"
            raise ValueError(message)
    if cfg.get("streaming") and (rl or cfg.get("reward_model")):
        message = (
            "`streaming` is True, leave it out for balanced batches: pairs are balanced before they are read"
        )
        raise ValueError(message)
    if rl and (name := str(getattr(rl, "value", rl))) not in _RL:
        why = _RL_REFUSED.get(name, "nobody knows what its loss is a mean over")
        allowed = ", ".join(f"`{one}`" for one in _RL)
        message = f"`rl` is `{name}`, must be one of {allowed} for balanced batches: {why}"
        raise ValueError(message)
    if (degree := cfg.get("context_parallel_size") or 1) > 1:
        message = f"`context_parallel_size` is {degree}, must be 1 for balanced batches: ranks share samples"
        raise ValueError(message)


def _check(cfg: Any, trainer: Any) -> None:
    # Once more: Axolotl has given old keys their new names, and a plugin may have set others.
    _check_keys(cfg)
    theirs = type(trainer).compute_loss
    # `balance` looks at what these compute.
    is_known = is_of_pairs(trainer) and theirs.__module__.startswith("trl.")
    if theirs is not AxolotlTrainer.compute_loss and not is_known:
        message = (
            f"the trainer is a `{type(trainer).__name__}`, must be Axolotl's own for balanced batches: the "
            "loss of another (`trainer_cls`, plugins) may be neither a sum over the step's label tokens "
            "nor a mean over its pairs"
        )
        raise ValueError(message)
    if (size := cfg.get("image_size")) and "images" in getattr(trainer.train_dataset, "column_names", ()):
        warnings.warn(
            f"`image_size` is {size}: costs are those of the pictures before they are resized", stacklevel=3
        )
    for name in _FUSED:
        if cfg.get(name) and not is_of_pairs(trainer):
            warnings.warn(
                f"`{name}` does not take effect: the loss over the label tokens of the whole step is taken "
                "from the logits, which need their memory",
                stacklevel=3,
            )


def _processor(trainer: Any) -> Any:
    """What the collation makes of rows with pictures; None where rows are tokenized."""
    strategy = getattr(trainer.data_collator, "processing_strategy", None)
    if strategy is None:
        return None
    processor = copy.copy(strategy.processor)
    processor.chat_template = strategy.chat_template or processor.chat_template
    return processor
