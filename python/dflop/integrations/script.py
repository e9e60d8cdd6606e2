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
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop.integrations.yaml_options import balance_as_asked, checked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@contextmanager
def balanced_trainers(
    options: dict[str, Any] | None = None, *, pads: bool = True, model_dir: str | None = None
) -> Iterator[list[Any]]:
    """Within it, `train` of each trainer of transformers takes dflop's lines first.

    Args:
        options: `balance_encoder` and `remove_padding`, true or false, and arguments of `balance`.
        pads: whether the collation fills the rows of a microbatch up to the longest.
        model_dir: where costs are counted, and the trainer holds no processor: the directory that has it.

    Yields:
        The trainers that were balanced.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        ValueError: an option is not known; or, in `train`, what `balance` refuses.
    """
    asked = checked(options)
    kind: Any = import_module("transformers.trainer").Trainer
    theirs = kind.train
    found: list[Any] = []

    @functools.wraps(theirs)
    def train(trainer: Any, *given: Any, **named: Any) -> Any:
        if not any(trainer is one for one in found):
            balance_as_asked(trainer, dict(asked), pads=pads, model_dir=model_dir)
            found.append(trainer)
            if trainer.args.process_index == 0:
                print(_said(trainer, asked), file=sys.stderr, flush=True)
        return theirs(trainer, *given, **named)

    kind.train = train
    try:
        yield found
    finally:
        kind.train = theirs


def _said(trainer: Any, asked: dict[str, Any]) -> str:
    lines = ["balanced batches", *(name for name in ("balance_encoder", "remove_padding") if asked.get(name))]
    rows = trainer.train_dataset
    size = f"{len(rows):,} samples" if hasattr(rows, "__len__") else "a stream of samples"
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
    pads = not asked.no_padding
    try:
        with balanced_trainers(options, pads=pads, model_dir=asked.model_dir) as found:
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
