"""Balanced batches in ms-swift's `swift sft`: a plugin of two lines, and two arguments.

plugin.py:   from dflop.integrations.swift import register
             register()

swift sft ... --external_plugins plugin.py --callbacks dflop
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Of ms-swift, whose own versions of everything stand apart from ours.
from swift.callbacks import TrainerCallback, callbacks_map  # pyright: ignore[reportMissingImports]

import dflop
from dflop.integrations.row_costs import costs_of_rows
from dflop.integrations.yaml_options import balance_as_asked, checked

if TYPE_CHECKING:
    import os

NAME = "dflop"
"""Of the callback, for `--callbacks`."""


def register(
    costs: Any = None, *, model_dir: str | os.PathLike[str] | None = None, **options: Any
) -> type[TrainerCallback]:
    """Makes `--callbacks dflop` known to ms-swift; call it in a file that `--external_plugins` names.

    Args:
        costs: of each row of the training set, in the order that ms-swift gives it (it shuffles and splits
            when it reads). None: they are counted from those rows by `costs_of_rows`, each as the chat that
            its `messages` and media are.
        model_dir: the directory whose processor counts them. None: the processor of ms-swift's template.
        **options: `balance_encoder=True` and `remove_padding=True` take the second and the third line too;
            others are those of `balance`, as `giant_llm_cost`.

    Returns:
        The callback's class. When training starts it raises ValueError for what cannot be balanced: packing,
        streaming, sequence parallelism, `--group_by_length`, and what `balance` refuses.

    Raises:
        ValueError: an option that is not known.
    """
    asked = checked(options)

    class Balanced(TrainerCallback):
        """Balances the trainer when it starts: only then it holds all that it was told."""

        def __init__(self, args: Any, trainer: Any) -> None:
            super().__init__(args, trainer)
            theirs = trainer.train

            def train(*given: Any, **named: Any) -> Any:
                _check(trainer)
                shuffle = {"shuffle": trainer.args.train_dataloader_shuffle}
                found = _costs(trainer, costs, model_dir)
                pads = not trainer.template.padding_free
                balance_as_asked(trainer, {**shuffle, **asked}, found, pads=pads)
                return theirs(*given, **named)

            trainer.train = train

    callbacks_map[NAME] = Balanced
    return Balanced


def _costs(trainer: Any, given: Any, model_dir: str | os.PathLike[str] | None) -> dflop.Costs:
    if given is not None:
        return dflop.costs(given)
    # Below what encodes a row when it is asked for.
    rows = getattr(trainer.train_dataset, "dataset", trainer.train_dataset)
    return costs_of_rows(rows, trainer.model, trainer.template.processor, model_dir)


def _check(trainer: Any) -> None:
    """What of ms-swift's own has no place beside balanced batches."""
    template, args = trainer.template, trainer.args
    wrong = None
    if getattr(template, "packing", False):
        wrong = (
            "`--packing` makes one row of several samples: take `--padding_free true`, which keeps them apart"
        )
    elif not hasattr(trainer.train_dataset, "__len__"):
        wrong = "`--streaming` gives rows that nobody has counted: leave it out"
    elif getattr(template, "sequence_parallel_size", 1) > 1:
        wrong = f"`--sequence_parallel_size` is {template.sequence_parallel_size}, must be 1"
    elif getattr(args, "group_by_length", False):
        wrong = "`--group_by_length` is set, leave it out: samples are chosen here"
    if wrong is not None:
        raise ValueError(wrong)
