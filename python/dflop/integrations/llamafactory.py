"""LLaMA-Factory with balanced batches: its own command, its own YAML.

    torchrun --nproc-per-node 8 -m dflop.integrations.llamafactory train.yaml

train.yaml, key=value ... --> options under `dflop` --> `balance` of the trainer of `sft` or `dpo`
                          --> all others            --> `run_exp`, which is LLaMA-Factory's whole training
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dflop.integrations.yaml_options import balance_as_asked, checked

_TRAINERS = (
    ("llamafactory.train.sft.workflow", "CustomSeq2SeqTrainer"),
    ("llamafactory.train.dpo.trainer", "CustomDPOTrainer"),
)
"""Where the stages `sft` and `dpo` find the class of their trainer."""

_REFUSED = (
    # (attribute of LLaMA-Factory's arguments, values that are taken, why no other)
    ("stage", ("sft", "dpo"), "the other stages compare or generate samples of a microbatch"),
    ("pref_loss", ("sigmoid", "hinge", "ipo", "orpo", "simpo"), "a pair would depend on its microbatch"),
    ("pref_bco_weight", (0.0,), "a pair would depend on the microbatches before it"),
    ("packing", (False, None), "it makes rows of several samples before they are balanced"),
    ("neat_packing", (False, None), "it makes rows of several samples before they are balanced"),
    ("use_mca", (False, None), "Megatron has another trainer"),
    ("use_hyper_parallel", (False, None), "HyperParallel has another trainer"),
    ("use_ray", (False, None), "Ray starts its ranks without dflop: start them with torchrun"),
    ("use_asft_loss", (False, None), "its loss is a mean of each microbatch, not of the step"),
    (
        "ignore_pad_token_for_loss",
        (True,),
        "padding would be learnt, and balanced batches have other padding",
    ),
    ("shift_attn", (False, None), "its groups of tokens depend on the padding of the batch"),
    ("mixture_of_depths", (None,), "which tokens a layer leaves out depends on the padding of the batch"),
)


def train(arguments: dict[str, Any]) -> None:
    """Runs LLaMA-Factory's training; call it on every rank.

    Costs are counted from the rows that the trainer holds, after LLaMA-Factory dropped, cut, mixed and
    tokenized them, so each cost is that of its row. With `streaming` they are counted when they are read.

    Args:
        arguments: what the YAML says; under `dflop` the options of `yaml_options.checked`.

    Raises:
        ModuleNotFoundError: LLaMA-Factory is not installed.
        RuntimeError: its version is another than those that were tried, and has no such trainer.
        ValueError: the YAML asks for what cannot be balanced; the message says which key.
    """
    tuner: Any = import_module("llamafactory.train.tuner")
    places = [import_module(module) for module, _ in _TRAINERS]
    arguments = dict(arguments)
    options = checked(arguments.pop("dflop", None))
    kinds = [getattr(place, name, None) for place, (_, name) in zip(places, _TRAINERS, strict=True)]
    read = getattr(tuner, "get_train_args", None)
    if None in kinds or read is None:
        message = (
            "this version of LLaMA-Factory has no `CustomSeq2SeqTrainer` in `train/sft/workflow.py`, no "
            "`CustomDPOTrainer` in `train/dpo/trainer.py` or no `get_train_args` in `train/tuner.py`: pip "
            "install llamafactory==0.9.5"
        )
        raise RuntimeError(message)

    def get_train_args(given: Any = None) -> Any:
        groups = read(given)
        _check(groups, options)
        return groups

    tuner.get_train_args = get_train_args
    for place, (_, name), kind in zip(places, _TRAINERS, kinds, strict=True):
        setattr(place, name, _balanced(kind, options))
    try:
        tuner.run_exp(arguments)
    finally:
        tuner.get_train_args = read
        for place, (_, name), kind in zip(places, _TRAINERS, kinds, strict=True):
            setattr(place, name, kind)


def _balanced(theirs: Any, options: dict[str, Any]) -> type:
    """A trainer of LLaMA-Factory, on balanced batches."""

    class BalancedTrainer(theirs):
        def train(self, *given: Any, **named: Any) -> Any:
            from dflop.integrations.transformers import is_known_late

            # A stream has an order of its own, whatever is said of shuffling.
            keeps_order = self.finetuning_args.disable_shuffling and not is_known_late(self)
            shuffle = {"shuffle": False} if keeps_order else {}
            balance_as_asked(self, {**shuffle, **options})
            return super().train(*given, **named)

    return BalancedTrainer


def _check(groups: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Refuses what cannot be balanced; `groups` are the arguments of model, data, training and so on."""
    given = {name: value for group in groups for name, value in vars(group).items()}
    for name, taken, why in _REFUSED:
        if (value := given.get(name, taken[0])) not in taken:
            allowed = " or ".join(repr(one) for one in taken if one is not None)
            message = f"`{name}` is {value!r}, must be {allowed} for balanced batches: {why}"
            raise ValueError(message)
    if given["streaming"] and given["stage"] != "sft":
        message = (
            f"`streaming` is True and `stage` is {given['stage']!r}: pairs are balanced before they are "
            "read, leave `streaming` out"
        )
        raise ValueError(message)
    is_reentrant = given["use_reentrant_gc"] and not given["disable_gradient_checkpointing"]
    if options.get("balance_encoder") and is_reentrant and not given["freeze_vision_tower"]:
        message = (
            "`use_reentrant_gc` is True, must be False for `dflop.balance_encoder` with a trained encoder: "
            "DDP would see the encoder's gradients twice"
        )
        raise ValueError(message)


def main() -> None:
    """The command: reads the YAML and what follows it as `llamafactory-cli train` does."""
    try:
        parser = import_module("llamafactory.hparams.parser")
    except ModuleNotFoundError as error:
        if error.name != "llamafactory":
            raise
        message = "`llamafactory` is not installed beside dflop: pip install llamafactory==0.9.5"
        raise SystemExit(message) from None
    arguments = parser.read_args()
    if not isinstance(arguments, dict):
        message = (
            f"the arguments are {arguments}, must begin with a file: torchrun --nproc-per-node 8 -m "
            "dflop.integrations.llamafactory train.yaml [key=value ...]"
        )
        raise SystemExit(message)
    train(arguments)


if __name__ == "__main__":
    main()
