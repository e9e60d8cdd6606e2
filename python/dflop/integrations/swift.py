"""Balanced batches in ms-swift's `swift sft`, and `swift rlhf` with `dpo` or `grpo`: a plugin of two lines.

plugin.py:   from dflop.integrations.swift import register
             register()

swift sft ... --external_plugins plugin.py --callbacks dflop
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.data_loader import prepare_data_loader

# Of ms-swift, whose own versions of everything stand apart from ours.
from swift.callbacks import TrainerCallback, callbacks_map  # pyright: ignore[reportMissingImports]

import dflop
from dflop.integrations.generations import is_generating
from dflop.integrations.pair_loss import is_of_pairs
from dflop.integrations.row_costs import costs_of_answers, costs_of_rows
from dflop.integrations.transformers import is_known_late
from dflop.integrations.yaml_options import balance_as_asked, checked

if TYPE_CHECKING:
    import os

_OF_BATCHES = ("aot", "aot_pair", "aot_unpaired", "bco_pair", "sft")
"""Losses that sort a microbatch, are a mean over its tokens, or keep a mean over microbatches."""

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
            With `--streaming`, as with GRPO, neither is given: samples are counted when they are there.
        **options: `balance_encoder=True` and `remove_padding=True` take the second and the third line too;
            others are those of `balance`, as `giant_llm_cost`.

    Returns:
        The callback's class. When training starts it raises ValueError for what cannot be balanced: packing,
        `--group_by_length`, sequence parallel beside `remove_padding`, pairs or a stream, a stream of pairs
        or of GRPO's prompts, and what `balance` refuses.

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
                _check(trainer, asked)
                pads = not trainer.template.padding_free
                if is_known_late(trainer):
                    if not is_generating(trainer):
                        _read_as_accelerate(trainer)
                    # What is generated or read is counted when it is there: `balance` refuses both.
                    balance_as_asked(trainer, asked, costs, pads=pads, model_dir=model_dir)
                    return theirs(*given, **named)
                shuffle = {"shuffle": trainer.args.train_dataloader_shuffle}
                found = _costs(trainer, costs, model_dir)
                balance_as_asked(trainer, {**shuffle, **asked}, found, pads=pads)
                return theirs(*given, **named)

            trainer.train = train

    callbacks_map[NAME] = Balanced
    return Balanced


def _read_as_accelerate(trainer: Any) -> None:
    """Gives a stream the loader of accelerate in place of ms-swift's: rank 0 reads for all in both.

    `balance` knows accelerate's: samples leave rank 0 once, for where they are computed, and those behind the
    last full round of batches, which ms-swift leaves out, are trained too.
    """
    theirs = trainer.get_train_dataloader

    def get_train_dataloader() -> Any:
        loader = theirs().base_dataloader
        # ms-swift's is of batches of one rank, and here a batch is one of all ranks.
        loader.prefetch_factor = trainer.args.dataloader_prefetch_factor if loader.num_workers else None
        device = trainer.accelerator.device
        return prepare_data_loader(loader, device, put_on_device=True, dispatch_batches=True)

    trainer.get_train_dataloader = get_train_dataloader


def _costs(trainer: Any, given: Any, model_dir: str | os.PathLike[str] | None) -> dflop.Costs:
    if given is not None:
        return dflop.costs(given)
    # Below what encodes a row when it is asked for.
    rows = getattr(trainer.train_dataset, "dataset", trainer.train_dataset)
    if not is_of_pairs(trainer):
        return costs_of_rows(rows, trainer.model, trainer.template.processor, model_dir)
    return costs_of_answers(*_answers(rows), trainer.model, trainer.template.processor, model_dir)


def _answers(rows: Any) -> tuple[Any, Any]:
    """The chosen and the rejected chats of pairs, as ms-swift's columns say them."""
    from datasets import concatenate_datasets

    names = [name for name in rows.column_names if name.startswith("rejected_")]
    chosen = rows.remove_columns(names)
    given = {name: name.removeprefix("rejected_") for name in names if name != "rejected_response"}
    own = rows.select_columns(list(given)).rename_columns(given)
    if "messages" in own.column_names:
        return chosen, own

    def rejected(row: dict[str, Any]) -> dict[str, Any]:
        answer = row["rejected_response"]
        turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        return {"messages": _before_answer(row["messages"]) + turns}

    texts = rows.select_columns(["messages", "rejected_response"])
    texts = texts.map(rejected, remove_columns=["rejected_response"])
    # All that has no other for the rejected answer is that of the chosen one.
    shared = chosen.remove_columns(
        ["messages", *(name for name in own.column_names if name in chosen.column_names)]
    )
    return chosen, concatenate_datasets([part for part in (texts, own, shared) if part.column_names], axis=1)


def _before_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat up to what the last question is answered with."""
    end = len(messages)
    while end and messages[end - 1]["role"] != "user":
        end -= 1
    return messages[:end]


def _check(trainer: Any, asked: dict[str, Any]) -> None:
    """What of ms-swift's own has no place beside balanced batches."""
    template, args = trainer.template, trainer.args
    wrong = None
    if getattr(template, "packing", False):
        wrong = (
            "`--packing` makes one row of several samples: take `--padding_free true`, which keeps them apart"
        )
    elif not hasattr(trainer.train_dataset, "__len__") and (is_of_pairs(trainer) or is_generating(trainer)):
        wrong = "`--streaming` is set, leave it out: of streams those of `swift sft` alone are balanced"
    elif (size := getattr(template, "sequence_parallel_size", 1)) > 1 and (
        why := _wrong_of_parts(trainer, asked)
    ):
        wrong = f"`--sequence_parallel_size` is {size}, must be 1 {why}"
    elif getattr(args, "group_by_length", False):
        wrong = "`--group_by_length` is set, leave it out: samples are chosen here"
    elif is_of_pairs(trainer):
        wrong = _wrong_of_pairs(trainer)
    if wrong is not None:
        raise ValueError(wrong)


def _wrong_of_parts(trainer: Any, asked: dict[str, Any]) -> str | None:
    """Where ranks that hold parts of the same rows cannot be."""
    if asked.get("remove_padding"):
        return "for `remove_padding=True`, which needs whole rows: leave one of them out"
    if is_of_pairs(trainer):
        return "for pairs"
    if is_known_late(trainer):
        return "where samples are balanced when they are there, which ranks would read several times"
    return None


def _wrong_of_pairs(trainer: Any) -> str | None:
    """What a mean over pairs has no place for."""
    kinds = trainer.loss_type if isinstance(trainer.loss_type, list) else [trainer.loss_type]
    unfit = [kind for kind in kinds if kind in _OF_BATCHES]
    if unfit:
        return f"`--loss_type` has `{unfit[0]}`, in which a pair depends on others: leave it out"
    if trainer.args.rpo_alpha is not None:
        return (
            f"`--rpo_alpha` is {trainer.args.rpo_alpha}, a mean over the tokens of a microbatch: leave it out"
        )
    if trainer.template.padding_free:
        return "`--padding_free` hides which rows are pairs: take `register(remove_padding=True)` instead"
    return None
