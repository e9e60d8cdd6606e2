"""lmms-engine on batches of even work: its own command, its own YAML.

    torchrun --nproc-per-node 8 -m dflop.integrations.lmms_engine config_yaml=train.yaml

its loader -> samples of a step, not collated -> costs of all ranks -> samples travel -> its own collation
                                                                    -> its own loss, times label tokens

lmms-engine takes the mean of the mean losses of microbatches. Here each counts by its label tokens.
"""

from __future__ import annotations

import argparse
import os
import random
import runpy
import sys
import warnings
from collections.abc import Mapping
from functools import wraps
from hashlib import sha256
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.utils.data import IterableDataset, Sampler

from dflop.integrations.encoder import balance_encoder
from dflop.integrations.parameter_cost import cost_of_parameters
from dflop.integrations.read_rows import ReadRows
from dflop.integrations.read_spread import ReadSpread
from dflop.integrations.row_costs import media_tokens, warn_of_unknown
from dflop.integrations.text_alone import meet_in_encoder
from dflop.integrations.yaml_options import balance_as_asked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dflop.integrations.read_spread import Sizes
    from dflop.integrations.sent_rows import Row
    from dflop.integrations.spread import Parts

_TRIED = "0.1.4"
_CPU = torch.device("cpu")
_IGNORED = -100
"""A label that is not learnt from."""

_WEIGHT = "dflop_weight"
"""Of a microbatch: what its mean loss counts."""

_IS_AT_END = "dflop_is_at_end"
"""Of the state of a loader: whether an epoch had no step left."""

_TRAINERS = ("fsdp2_trainer", "hf_trainer")

_DEGREES = ("sp_ulysses_degree", "tp_degree", "ep_degree")

_SEED = 42
"""By which lmms-engine draws the order of a dataset with positions."""

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
        return _BalancedLoader(trainer, loader) if is_training else loader

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
    lengths = getattr(dataset, "data_lengths", None)
    if lengths is None:
        return
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, sha256(repr(lengths).encode()).hexdigest())
    if other := [rank for rank, order in enumerate(found) if order != found[0]]:
        message = (
            f"rank {other[0]} has the samples of the dataset in another order than rank 0, must be the same: "
            "set `dataset_config.shuffle` to False, each epoch is shuffled anyway"
        )
        raise ValueError(message)


def _balance_hf(trainer: Any, *, shares_encoder: bool) -> None:
    """The trainer made of transformers' has dflop's lines for that one."""
    if isinstance(trainer.train_dataset, IterableDataset):
        message = (
            f"the dataset is a stream (`{type(trainer.train_dataset).__name__}`) and `trainer_type` is "
            "'hf_trainer', must be 'fsdp2_trainer' for a stream"
        )
        raise ValueError(message)
    theirs = trainer.train
    # Not all versions of transformers leave first labels out when they count those of a step.
    trainer.data_collator = _Learnt(trainer.data_collator)

    def train(*given: Any, **named: Any) -> Any:
        # Here, because modules are frozen after the trainer is made.
        options = {"balance_encoder": shares_encoder}
        balance_as_asked(trainer, options, pads=not trainer.args.use_rmpad, when_loaded=True)
        if not trainer.is_deepspeed_enabled:
            # transformers 5.5 has accelerate divide by the step's microbatches, too: later ones say 1 here.
            trainer.accelerator.gradient_accumulation_steps = 1
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
        self._model, self.rank = model, distributed.get_rank()
        self._cost = cost_of_parameters(model)
        self._media = media_tokens(model, self._cost)
        self._is_told = False
        if self.rank == 0:
            warn_of_unknown(model)
            _warn_of_routers(model.config)
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
            is_padded=not args.use_rmpad,
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
        num_labels = int((row["labels"][1:] != _IGNORED).sum())
        return (*self._cost((encoder, len(ids))), len(ids), num_labels)


def _warn_of_routers(config: Any) -> None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "output_router_logits", False):
        warnings.warn(
            "`output_router_logits` is True: the router's loss is a mean over a microbatch. So the gradient "
            "depends on how samples are divided, with dflop and without",
            stacklevel=3,
        )


class _Once(Sampler[int]):
    """A sampler that deals samples out to ranks, without those that it repeats to give all ranks as many."""

    def __init__(self, theirs: Any, num_samples: int, *, drop_last: bool) -> None:
        self._theirs, self.num_ranks = theirs, theirs.num_replicas
        # What does not fill a round of ranks is left out where the last batch is.
        self.num_samples = num_samples - (num_samples % self.num_ranks if drop_last else 0)

    def __iter__(self) -> Iterator[int]:
        for place, index in enumerate(self._theirs):
            if place * self.num_ranks + self._theirs.rank < self.num_samples:
                yield index

    def __len__(self) -> int:
        """Samples of this rank."""
        return -(-(self.num_samples - self._theirs.rank) // self.num_ranks)


class _BalancedLoader:
    """Stands in for lmms-engine's loader: the samples of each step, in other microbatches."""

    def __init__(self, trainer: Any, theirs: Any) -> None:
        """Lets the loader leave collation for later, and the trainer weigh losses."""
        self._trainer, self._theirs, self._spread = trainer, theirs, trainer.dflop_spread
        self._collate: Callable[[Sequence[Row]], Row] = theirs.collate_fn
        theirs.collate_fn = ReadRows
        self._accumulation = trainer.args.gradient_accumulation_steps
        self._is_stream = isinstance(theirs.dataset, IterableDataset)
        if not self._is_stream:
            args, num_samples = trainer.args, len(theirs.dataset)
            once = _Once(theirs.batch_sampler.sampler, num_samples, drop_last=args.dataloader_drop_last)
            theirs.batch_sampler.sampler = once
            most = -(-once.num_samples // once.num_ranks)
            size = args.train_batch_size
            self._num_batches = most // size if args.dataloader_drop_last else -(-most // size)
        self._pins = torch.cuda.is_available() and trainer.args.dataloader_pin_memory
        self._loss = 0.0
        self._weigh()
        _say(self._spread.num_ranks)

    def __getattr__(self, name: str) -> Any:
        # What was there is there: the sampler and its epochs.
        if name == "_theirs":
            raise AttributeError(name)
        return getattr(self._theirs, name)

    def __len__(self) -> int:
        """Microbatches of an epoch, of the rank that has the most."""
        return len(self._theirs) if self._is_stream else self._num_batches

    def __iter__(self) -> Iterator[Row]:
        """Balanced microbatches, from where lmms-engine's loader stands; each rank has as many."""
        batches = self._rounds() if self._is_stream else iter(self._theirs)
        # Before it reads, as a checkpoint must not take what is read for trained.
        while not self._trainer.should_stop():
            read = [_rows_of(batch) for batch in islice(batches, self._accumulation)]
            found = self._balanced(read + [[]] * (self._accumulation - len(read)))
            if not found:
                return
            yield from found

    def _rounds(self) -> Iterator[ReadRows]:
        """A stream again and again: a rank whose part has ended begins it anew, as in lmms-engine."""
        num_empty = 0
        while True:
            is_empty = True
            for batch in self._theirs:
                is_empty = False
                yield batch
            # Once where a run resumes at an end.
            num_empty = num_empty + 1 if is_empty else 0
            if num_empty > 1:
                message = "the stream of a rank has no sample, must have some: take fewer ranks or workers"
                raise ValueError(message)

    def state_dict(self) -> dict[str, Any]:
        """lmms-engine's, and whether the epoch had no step left."""
        trainer, state = self._trainer, self._theirs.state_dict()
        is_at_end = not self._is_stream and trainer.global_step % trainer.steps_per_epoch == 0
        return {**state, _IS_AT_END: is_at_end}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there.

        Args:
            state: of `state_dict`, or of lmms-engine's own loader.
        """
        if self._is_stream and self._spread.rank == 0:
            warnings.warn(
                "lmms-engine resumes a stream: each of its readers reads the last sample again, or, with "
                "`packing`, leaves out those that wait in its open packs. It does so without dflop, too",
                stacklevel=2,
            )
        # The next epoch begins with samples of its own.
        if not state.get(_IS_AT_END, False):
            self._theirs.load_state_dict({name: one for name, one in state.items() if name != _IS_AT_END})

    def _balanced(self, read: list[list[Row]]) -> list[Row]:
        """The microbatches of this rank; none where no rank has read anything."""
        spread = self._spread
        parts, labels = spread.split(read)
        if not any(parts.counts):
            return []
        rows = [row for batch in read for row in batch]
        held = parts.of_rank(rows, spread.rank, _CPU)
        shortest = min(range(len(rows)), key=lambda at: len(rows[at]["input_ids"]), default=0)
        copies = parts.copies(rows, spread.rank, _CPU, shortest)
        # The trainer takes the mean over ranks and microbatches.
        share = spread.num_ranks * self._accumulation / max(1.0, sum(labels))
        found = []
        for samples, mine, _ in held:
            # A sample that another microbatch trains fills an empty one: ranks meet, and nothing is learnt.
            count = sum(labels[sample] for sample in samples)
            found.append(self._collated(mine or [copies.pop()], count * share))
        if self._pins:
            pin: Any = import_module("torch.utils.data._utils.pin_memory")
            found = pin.pin_memory(found)
        return found

    def _collated(self, rows: Sequence[Row], weight: float) -> Row:
        """A microbatch by lmms-engine's own collation, with its weight."""
        rows = [_of_learnt(row) for row in rows]
        if not weight:
            # A mean over no label is no number, so there is one; it weighs nothing.
            longest = max(rows, key=lambda row: len(row["input_ids"]))
            longest["labels"][-1] = longest["input_ids"][-1]
        return {**self._collate(rows), _WEIGHT: weight}

    def _weigh(self) -> None:
        """Lets the trainer's loss count by label tokens, and its log tell that of the whole step."""
        trainer = self._trainer
        loss_of, step_of = trainer.compute_loss, trainer.training_step

        def compute_loss(batch: Row) -> Any:
            weight = batch.pop(_WEIGHT)
            return loss_of(batch) * weight

        def training_step(batch: Row) -> Any:
            metrics = step_of(batch)
            self._loss += metrics["train/loss"] / self._accumulation
            if trainer.accumulated_grad_steps == 0:
                metrics["train/loss"], self._loss = self._loss, 0.0
            return metrics

        trainer.compute_loss, trainer.training_step = compute_loss, training_step


class _Learnt:
    """A collation of samples whose first label is not learnt."""

    def __init__(self, theirs: Callable[[Sequence[Row]], Row]) -> None:
        self._theirs = theirs

    def __call__(self, rows: Sequence[Row]) -> Row:
        return self._theirs([_of_learnt(row) for row in rows])


def _rows_of(batch: ReadRows) -> list[Row]:
    """Samples of a microbatch that was read; a pack has several."""
    found = []
    for item in batch.rows:
        for row in item if isinstance(item, list) else [item]:
            if not isinstance(row, Mapping) or not {"input_ids", "labels"} <= row.keys():
                message = (
                    f"a sample is a `{type(row).__name__}`, must be a dictionary with `input_ids` and "
                    "`labels`: nobody knows what it costs"
                )
                raise ValueError(message)
            found.append(dict(row))
    return found


def _of_learnt(row: Row) -> Row:
    """A sample whose first label is not learnt: no token of its own stands before it."""
    labels = row["labels"].clone()
    labels[:1] = _IGNORED
    return {**row, "labels": labels}


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
