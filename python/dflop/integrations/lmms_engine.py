"""lmms-engine on batches of even work: its own command, its own YAML.

    torchrun --nproc-per-node 8 -m dflop.integrations.lmms_engine config_yaml=train.yaml

its loader -> samples of a step, not collated -> costs of all ranks -> samples travel -> its own collation
                                                                    -> its own loss, times label tokens

lmms-engine takes the mean of the mean losses of microbatches. Here each counts by its label tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import sys
import warnings
from functools import wraps
from hashlib import sha256
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.utils.data import IterableDataset

from dflop.integrations.encoder import balance_encoder
from dflop.integrations.lmms_labels import Learnt, LearntCollation
from dflop.integrations.lmms_loader import BalancedLoader
from dflop.integrations.lmms_patches import computes_loss, is_flat, takes_num_items
from dflop.integrations.neighbours import warn_of_parts
from dflop.integrations.parameter_cost import cost_of_parameters
from dflop.integrations.read_spread import ReadSpread
from dflop.integrations.row_costs import media_tokens, warn_of_unknown
from dflop.integrations.text_alone import meet_in_encoder
from dflop.integrations.yaml_options import balance_as_asked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.integrations.read_spread import Sizes
    from dflop.integrations.sent_rows import Row
    from dflop.integrations.spread import Parts

_TRIED = "0.1.4"

_TRAINERS = ("fsdp2_trainer", "hf_trainer")

_DEGREES = ("sp_ulysses_degree", "tp_degree", "ep_degree")

_SEED = 42
"""By which lmms-engine draws the order of a dataset with positions."""

_NUM_COMPARED = 256
"""So many rows of a dataset, about, are compared between ranks."""

_is_balanced = False


def balance_batches(*, shares_encoder: bool = False) -> None:
    """Makes lmms-engine's trainers balance each step; the command of this module does it.

    Call it before a trainer is made. A sample costs what an encoder token and an LLM token cost in the model
    that trains (`cost_of_parameters`), counted from its own tokens. A second call does nothing.

    Args:
        shares_encoder: whether all ranks share the encoder's work, too (`balance_encoder`).

    Raises:
        RuntimeError: this version of lmms-engine lacks what is changed here.
    """
    kind: Any = getattr(import_module("lmms_engine.train.fsdp2.fsdp2_trainer"), "FSDP2SFTTrainer", None)
    runner: Any = getattr(import_module("lmms_engine.train.runner"), "TrainRunner", None)
    # It draws by Python's `random`, of which the log of rank 0 takes numbers: ranks had other orders.
    drawing: Any = import_module("lmms_engine.datasets.naive.multimodal_dataset")
    names = (
        (kind, ("prepare_model", "prepare_dataloader", "compute_loss", "training_step", "should_stop")),
        (runner, ("__init__", "_build_train_dataset", "_build_trainer")),
        (drawing, ("random",)),
    )
    if lacking := [name for place, known in names for name in known if not hasattr(place, name)]:
        message = (
            f"this version of lmms-engine has no `{lacking[0]}` where dflop looks for it: pip install "
            f"lmms-engine=={_TRIED}"
        )
        raise RuntimeError(message)
    if hasattr(runner.__init__, "__wrapped__"):
        return
    begin, read, build = runner.__init__, runner._build_train_dataset, runner._build_trainer
    prepare, load = kind.prepare_model, kind.prepare_dataloader

    @wraps(begin)
    def init(self: Any, config: Any) -> None:
        _check(config)
        begin(self, config)

    @wraps(read)
    def build_train_dataset(self: Any) -> Any:
        of_all, drawing.random = drawing.random, random.Random(_SEED)
        try:
            return read(self)
        finally:
            drawing.random = of_all

    @wraps(build)
    def build_trainer(self: Any) -> Any:
        trainer = build(self)
        _check_order(trainer.train_dataset)
        _check_padding(trainer)
        if self.config.trainer_type == "hf_trainer":
            _balance_hf(trainer, shares_encoder=shares_encoder)
        return trainer

    @wraps(prepare)
    def prepare_model(trainer: Any) -> None:
        # Before the model is sharded, which makes parameters smaller.
        trainer.dflop_spread = _Spread(trainer, shares_encoder=shares_encoder)
        prepare(trainer)

    @wraps(load)
    def prepare_dataloader(trainer: Any, dataset: Any, is_training: bool = True) -> Any:
        loader = load(trainer, dataset, is_training)
        if not is_training:
            return loader
        balanced = BalancedLoader(trainer, loader)
        _say(trainer.dflop_spread.num_ranks)
        return balanced

    runner.__init__, runner._build_train_dataset = init, build_train_dataset
    runner._build_trainer = build_trainer
    kind.prepare_model, kind.prepare_dataloader = prepare_model, prepare_dataloader


def _check(config: Any) -> None:
    """Refuses what cannot be balanced, before anything is loaded."""
    args, wrong = config.trainer_args, None
    patches = (config.model_config.monkey_patch_kwargs or {}).get("patch_type") or []
    if config.trainer_type not in _TRAINERS:
        wrong = (
            f"`trainer_type` is {config.trainer_type!r}, must be {' or '.join(map(repr, _TRAINERS))}: other "
            "trainers have losses that are no mean over label tokens"
        )
    elif degrees := [name for name in _DEGREES if (getattr(args, name, 1) or 1) > 1]:
        wrong = (
            f"`{degrees[0]}` is {getattr(args, degrees[0])}, must be 1: samples travel between ranks that "
            "read their own"
        )
    elif "vit_frame_parallel" in patches:
        wrong = (
            "`patch_type` has 'vit_frame_parallel', leave it out: `--balance-encoder` of this command shares "
            "the encoder's work out, too"
        )
    elif config.trainer_type == "hf_trainer" and config.dataset_config.packing:
        wrong = (
            "`packing` is True and `trainer_type` is 'hf_trainer', whose samples must be single ones: set "
            "it to False, or take 'fsdp2_trainer'"
        )
    if wrong is not None:
        raise ValueError(wrong)


def _check_order(dataset: Any) -> None:
    """Refuses ranks that have a dataset in other orders: samples would be trained twice, and others never."""
    if isinstance(dataset, IterableDataset):
        return
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, _order(dataset))
    if other := [rank for rank, order in enumerate(found) if order != found[0]]:
        message = (
            f"rank {other[0]} has the samples of the dataset in another order than rank 0, must be the same: "
            "set `dataset_config.shuffle` to False, each epoch is shuffled anyway"
        )
        raise ValueError(message)


def _order(dataset: Any) -> str:
    """A name of the order of samples: of the lengths of all, which may be equal, and of some hundred rows."""
    rows: Any = getattr(dataset, "data_list", None) or []
    # As they are stored: pictures would be read.
    stored = rows.with_format("arrow") if hasattr(rows, "with_format") else rows
    step = max(1, len(rows) // _NUM_COMPARED)
    some = [stored[at] for at in range(0, len(rows), step)]
    some = [row.to_pylist() if hasattr(row, "to_pylist") else row for row in some]
    # Not `repr`: of some objects it has an address.
    told = json.dumps([list(getattr(dataset, "data_lengths", None) or []), some], default=_as_told)
    return sha256(told.encode()).hexdigest()


def _as_told(one: Any) -> str:
    """What JSON does not know."""
    return one.hex() if isinstance(one, bytes) else type(one).__name__


def _check_padding(trainer: Any) -> None:
    """Says where rows are padded though the YAML asks for none; lmms-engine says so in its log alone."""
    if trainer.args.use_rmpad and not is_flat(trainer.model) and distributed.get_rank() == 0:
        warnings.warn(
            "`use_rmpad` is True, and no patch of lmms-engine that removes padding took effect on this model "
            "(its log says which was skipped or failed): rows are padded, so microbatches have samples of "
            "like length. Most models need `use_liger_kernel: true`, too, and Liger installed; a "
            "`patch_type` of your own stands in the place of both",
            stacklevel=2,
        )


def _balance_hf(trainer: Any, *, shares_encoder: bool) -> None:
    """The trainer made of transformers' has dflop's lines for that one."""
    if isinstance(trainer.train_dataset, IterableDataset):
        message = (
            f"the dataset is a stream (`{type(trainer.train_dataset).__name__}`) and `trainer_type` is "
            "'hf_trainer', must be 'fsdp2_trainer' for a stream"
        )
        raise ValueError(message)
    theirs = trainer.train
    if computes_loss(trainer.model):
        if not takes_num_items(trainer.model):
            message = (
                "`trainer_type` is 'hf_trainer', must be 'fsdp2_trainer' where `use_liger_kernel` or "
                "`use_rmpad` changes the loss of this model: it is a mean over a microbatch. Or set both "
                "to False"
            )
            raise ValueError(message)
        # transformers asks the model's own class, whose `forward` this is no more.
        trainer.model_accepts_loss_kwargs = True
    # Not all versions of transformers leave first labels out when they count those of a step.
    trainer.data_collator = LearntCollation(trainer.data_collator, Learnt(trainer))

    def train(*given: Any, **named: Any) -> Any:
        # Here, because modules are frozen after the trainer is made.
        options = {"balance_encoder": shares_encoder}
        balance_as_asked(trainer, options, pads=not is_flat(trainer.model), when_loaded=True)
        _say(trainer.args.world_size)
        return theirs(*given, **named)

    trainer.train = train


def _say(num_ranks: int) -> None:
    global _is_balanced  # noqa: PLW0603 of this process
    _is_balanced = True
    if distributed.get_rank() == 0:
        print(f"dflop: balanced batches over {num_ranks} ranks", file=sys.stderr, flush=True)


class _Spread:
    """Who computes which samples of a step, and what a sample costs."""

    def __init__(self, trainer: Any, *, shares_encoder: bool) -> None:
        args = trainer.args
        # Of an omni model the thinker trains.
        model = getattr(trainer.model, "thinker", trainer.model)
        self.learnt, self.weight = Learnt(trainer), 1.0
        # FSDP2 rounds what its root returns (`output_dtype`), in a hook of its own that runs behind this one.
        trainer.model.register_forward_hook(self._weigh)
        self._model, self.rank = model, distributed.get_rank()
        self._cost = cost_of_parameters(model)
        self._media = media_tokens(model, self._cost)
        self._is_told = False
        if self.rank == 0:
            warn_of_unknown(model)
            warn_of_parts(model.config)
        if shares_encoder:
            balance_encoder(model)
        # Text alone hangs nobody; where that cannot be had, the first step that has some says so.
        meet_in_encoder(model, (0, 0), self.rank, is_fsdp2=True)
        packed, world = trainer.train_dataset.config, distributed.group.WORLD
        assert world is not None
        self._spread = ReadSpread(
            "lmms-engine",
            distributed.get_world_size(),
            world,
            torch.device(args.device),
            "phase",
            args.seed,
            is_padded=not is_flat(trainer.model),
            is_shared=shares_encoder,
            max_tokens=packed.packing_length * args.train_batch_size if packed.packing else 0,
        )
        self.num_ranks = self._spread.num_ranks

    def split(self, read: Sequence[Sequence[Row]]) -> tuple[Parts, list[float]]:
        """Who computes which samples of all ranks, and label tokens of each; each rank calls it."""
        parts, sizes = self._spread.split([[self._sizes(row) for row in batch] for batch in read], 1)
        if not self._is_told and 0 < (num_alone := int((sizes[:, 0] == 0).sum())) < len(sizes):
            self._is_told = True
            meet_in_encoder(self._model, (num_alone, len(sizes)), self.rank, is_fsdp2=True)
        return parts, sizes[:, 3].tolist()

    def _sizes(self, row: Row) -> Sizes:
        """Encoder cost, LLM cost, tokens and label tokens of a sample."""
        ids = row["input_ids"]
        encoder = sum(count * float((ids == token).sum()) for token, count in self._media.items())
        return (*self._cost((encoder, len(ids))), len(ids), self.learnt.count(row))

    def _weigh(self, model: Any, _: Any, outputs: Any) -> Any:
        """The loss of a microbatch, times what it counts."""
        if not model.training:
            return outputs
        if isinstance(outputs, dict):
            outputs["loss"] = outputs["loss"].float() * self.weight
            return outputs
        return (outputs[0].float() * self.weight, *outputs[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command.

    Args:
        arguments: behind it; None: those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 8 -m dflop.integrations.lmms_engine",
        description="Trains with lmms-engine on balanced batches. Its YAML and its own arguments stay.",
        epilog="example: torchrun --nproc-per-node 8 -m dflop.integrations.lmms_engine "
        "config_yaml=examples/qwen3_vl/example_config.yaml",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--balance-encoder", action="store_true", help="the second line: all ranks share the encoder"
    )
    asked, theirs = parser.parse_known_args(arguments)
    try:
        balance_batches(shares_encoder=asked.balance_encoder)
    except ModuleNotFoundError as error:
        if error.name != "lmms_engine":
            raise
        message = f"`lmms_engine` is not installed beside dflop: pip install lmms-engine=={_TRIED}"
        raise SystemExit(message) from None
    before = sys.argv
    sys.argv = ["lmms_engine", *theirs]
    try:
        runpy.run_module("lmms_engine.launch.cli", run_name="__main__", alter_sys=True)
        if not _is_balanced and os.environ.get("RANK", "0") == "0":
            print("dflop: lmms-engine trained nothing: nothing was balanced", file=sys.stderr)
    finally:
        sys.argv = before


if __name__ == "__main__":
    # By its name: workers of a loader look for its types there, and `__main__` is lmms-engine's.
    import_module("dflop.integrations.lmms_engine").main()
