"""What a fine-tuning framework is told of dflop, in its YAML or its plugin, and the lines that this asks for.

dflop:
  remove_padding: true      # the third line
  balance_encoder: true     # the second line
  giant_llm_cost: 3e15      # all others are arguments of `balance`: the first line, which is always taken
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from dflop.data.sampler import BalancedBatchSampler

if TYPE_CHECKING:
    import os

    from dflop.data.costs import Costs

_LINES = ("balance_encoder", "remove_padding")
"""Keys that are true or false, by the names of the functions that they call."""

_NOT_OF_YAML = ("self", "source", "batch_size", "num_replicas", "rank", "num_buckets", "num_samples")
"""Arguments of the sampler that the trainer decides."""


def checked(options: Any, *, beside: tuple[str, ...] = ()) -> dict[str, Any]:
    """The options, before anything is loaded.

    Args:
        options: what stands under `dflop:`; None where there is no such key.
        beside: keys that this framework knows alone.

    Returns:
        A copy.

    Raises:
        ValueError: it is no mapping, or has a key that is not known, or a line is neither true nor false.
    """
    if options is None:
        return {}
    known = [
        *_LINES,
        *beside,
        *sorted(inspect.signature(BalancedBatchSampler.__init__).parameters.keys() - {*_NOT_OF_YAML}),
    ]
    allowed = ", ".join(f"`{name}`" for name in known)
    if not isinstance(options, dict):
        message = f"`dflop` is {options!r}, must have keys of its own: {allowed}"
        raise ValueError(message)
    for name, value in options.items():
        if name not in known:
            message = f"`dflop.{name}` is not known, must be one of {allowed}"
            raise ValueError(message)
        if name in _LINES and not isinstance(value, bool):
            message = f"`dflop.{name}` is {value!r}, must be true or false"
            raise ValueError(message)
    return dict(options)


def split_lines(options: dict[str, Any]) -> tuple[set[str], dict[str, Any]]:
    """The lines beside the first that are asked for, and the arguments of the first.

    Args:
        options: from `checked`.

    Returns:
        Names of functions, and all that is none of them.
    """
    lines = {name for name in _LINES if options.get(name)}
    return lines, {name: value for name, value in options.items() if name not in _LINES}


def balance_as_asked(
    trainer: Any,
    options: dict[str, Any],
    costs: Costs | None = None,
    *,
    pads: bool | None = True,
    model_dir: str | os.PathLike[str] | None = None,
    when_loaded: bool | None = None,
) -> None:
    """Takes the lines that the options ask for; call it on every rank, before the trainer wraps its model.

    Where padding is computed, batches of even work in real tokens lose: then they are made of samples of like
    length (`is_padded`), unless the options say otherwise.

    Args:
        trainer: of `transformers`, or made of it.
        options: from `checked`.
        costs: of the rows of `train_dataset`. None: they are counted from what the trainer holds, or
            from what it generates or reads.
        pads: whether the collation fills the rows of a microbatch up to the longest; None: unless its type
            says otherwise.
        model_dir: where costs are counted, and the trainer holds no processor: the directory that has it.
        when_loaded: as of `balance`.
    """
    from dflop.integrations.loaded import pads_nothing
    from dflop.integrations.transformers import balance, is_known_late

    lines, of_batches = split_lines(options)
    pads = not pads_nothing(trainer) if pads is None else pads
    of_batches = {"is_padded": pads and "remove_padding" not in lines, **of_batches}
    if "balance_encoder" in lines:
        from dflop.integrations.encoder import balance_encoder
        from dflop.integrations.row_costs import costs_of_rows

        # Of the whole model: what the second line makes even already is none of the first one's.
        if costs is None and not when_loaded and not is_known_late(trainer):
            costs = costs_of_rows(
                trainer.train_dataset,
                trainer.model,
                trainer.processing_class,
                model_dir,
                max_length=getattr(trainer.args, "max_length", None),
            )
            model_dir = None
        costs = None if costs is None else costs.llm_alone()
        balance_encoder(trainer.model)
    if "remove_padding" in lines:
        from dflop.integrations.padding import remove_padding

        remove_padding(trainer.model)
    balance(trainer, costs, model_dir=model_dir, when_loaded=when_loaded, **of_batches)
