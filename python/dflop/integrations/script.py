"""A script that trains with `transformers.Trainer`, on balanced batches, as it stands.

    torchrun --nproc-per-node 8 -m dflop.integrations.script --remove-padding train.py --its-own arguments

the script makes its trainer -> `trainer.train()` --> the lines that were asked for --> the trainer's own
"""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop.integrations.when_imported import WhenImported
from dflop.integrations.yaml_options import balance_as_asked, checked, split_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MODULE = "transformers.trainer"


@contextmanager
def balanced_trainers(
    options: dict[str, Any] | None = None,
    *,
    pads: bool | None = None,
    model_dir: str | None = None,
    when_loaded: bool | None = None,
) -> Iterator[list[str]]:
    """Within it, `train` of each trainer of transformers takes dflop's lines first.

    It imports nothing: what a script sets before it imports transformers holds. A trainer that the script
    itself has balanced is left as it is.

    Args:
        options: `balance_encoder` and `remove_padding`, true or false, and arguments of `balance`.
        pads: whether the collation fills the rows of a microbatch up to the longest; None: unless its type
            says otherwise.
        model_dir: where costs are counted, and the trainer holds no processor: the directory that has it.
        when_loaded: as of `balance`.

    Yields:
        What was balanced, a line for each call of `train`.

    Raises:
        ValueError: an option is not known; or, in `train`, what `balance` refuses.
    """
    asked = checked(options)
    said: list[str] = []
    undo: list[Callable[[], None]] = []

    def patch(module: Any) -> None:
        kind = module.Trainer
        theirs = kind.train

        @functools.wraps(theirs)
        def train(trainer: Any, *given: Any, **named: Any) -> Any:
            if getattr(trainer, "is_balanced_by_dflop", False):
                said.append("by the script")
            else:
                _check(trainer, asked)
                balance_as_asked(
                    trainer, dict(asked), pads=pads, model_dir=model_dir, when_loaded=when_loaded
                )
                said.append(_said(trainer, asked))
                if trainer.args.process_index == 0:
                    print(said[-1], file=sys.stderr, flush=True)
            return theirs(trainer, *given, **named)

        kind.train = train
        undo.append(lambda: setattr(kind, "train", theirs))

    if _MODULE in sys.modules:
        patch(sys.modules[_MODULE])
    else:
        waits = WhenImported({_MODULE: patch})
        sys.meta_path.insert(0, waits)
        undo.append(lambda: sys.meta_path.remove(waits))
    try:
        yield said
    finally:
        for one in undo:
            one()


def _check(trainer: Any, asked: dict[str, Any]) -> None:
    lines = sorted(split_lines(asked)[0])
    if lines and getattr(trainer, "model_init", None) is not None:
        message = (
            f"the trainer makes its model in `train` (`model_init`), and `{lines[0]}` is for a model that is "
            "there: leave it out, or give the trainer a `model`"
        )
        raise ValueError(message)


def _said(trainer: Any, asked: dict[str, Any]) -> str:
    lines = ["balanced batches", *sorted(split_lines(asked)[0])]
    try:
        size = f"{len(trainer.train_dataset):,} samples"
    except TypeError:
        size = "a stream of samples"
    return f"dflop: {', '.join(lines)}; `{type(trainer).__name__}`, {size}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 8 -m dflop.integrations.script",
        description="Runs a script that trains with `transformers.Trainer`, or a trainer made of it (TRL's "
        "SFT, DPO, GRPO), on balanced batches. The script stays as it is.",
        epilog="example: torchrun --nproc-per-node 8 -m dflop.integrations.script --remove-padding train.py "
        "--bf16 true",
    )
    parser.add_argument(
        "--balance-encoder", action="store_true", help="the second line: all ranks share the encoder"
    )
    parser.add_argument(
        "--remove-padding",
        action="store_true",
        help="the third line: the LLM's layers compute real tokens alone",
    )
    parser.add_argument(
        "--no-padding",
        action="store_true",
        help="the script's collation pads nothing (it packs or flattens rows)",
    )
    parser.add_argument(
        "--model-dir", metavar="DIR", help="directory of the model, where the trainer is given no processor"
    )
    parser.add_argument(
        "--when-loaded",
        action="store_true",
        help="the dataset makes its samples when they are read: count them then",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    # The launcher of DeepSpeed puts it there.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    parser.add_argument("script", metavar="SCRIPT", help="what trains")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """The command.

    Args:
        arguments: behind it; None: those of this process.
    """
    asked = _parser().parse_args(arguments)
    if not asked.is_module and not Path(asked.script).is_file():
        message = f"`{asked.script}` is no file: name the script, or a module behind `-m`"
        raise SystemExit(message)
    options = {"balance_encoder": asked.balance_encoder, "remove_padding": asked.remove_padding}
    own = [] if asked.local_rank is None else [f"--local_rank={asked.local_rank}"]
    before = sys.argv, sys.path[:]
    sys.argv = [asked.script, *own, *asked.arguments]
    how = {"pads": False if asked.no_padding else None, "when_loaded": asked.when_loaded or None}
    try:
        with balanced_trainers(options, model_dir=asked.model_dir, **how) as found:
            if asked.is_module:
                sys.path.insert(0, "")
                runpy.run_module(asked.script, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(asked.script).resolve().parent))
                runpy.run_path(asked.script, run_name="__main__")
            if not found and os.environ.get("RANK", "0") == "0":
                print(
                    f"dflop: `{asked.script}` trained with no trainer of transformers: nothing was balanced",
                    file=sys.stderr,
                )
    finally:
        sys.argv, sys.path[:] = before


if __name__ == "__main__":
    main()
