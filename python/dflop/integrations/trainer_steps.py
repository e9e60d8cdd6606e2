"""What a checkpoint of `transformers.Trainer` keeps, so that a resumed run goes on where it stopped."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState, TrainerCallback

from dflop.data.sampler import BalancedBatchSampler

if TYPE_CHECKING:
    from collections.abc import Callable


class BalancedSteps(TrainerCallback, ExportableState):
    """Keeps in the checkpoints which samples the trainer's steps have, and compares them on resuming."""

    def __init__(self, steps: dict[str, int]) -> None:
        """Looks at nothing yet.

        Args:
            steps: what decides which samples the step at a position has.
        """
        self.steps = steps

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps.

        Returns:
            As `ExportableState` has it.
        """
        # As an argument: a trainer that restores its callbacks makes new ones by it.
        return {"args": {"steps": self.steps}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compares the steps of the checkpoint that the trainer goes on from with those it would make now.

        Args:
            args: of the trainer.
            state: as the checkpoint has it.
            control: is left alone.
            **kwargs: the trainer's other things, its DataLoader among them.

        Raises:
            ValueError: a step had other samples; the message says why.
        """
        sampler = getattr(kwargs.get("train_dataloader"), "batch_sampler", None)
        if isinstance(sampler, BalancedBatchSampler):
            self.steps = steps_of(sampler, args.gradient_accumulation_steps)
        if not state.global_step or args.ignore_data_skip:
            return
        name = type(self).__name__
        kept = state.stateful_callbacks.get(name)
        if kept is None:
            # The trainer replaces this entry when it saves, and expects one.
            state.stateful_callbacks[name] = self.state()
            warnings.warn(
                "the checkpoint does not say which samples its steps had (another version of dflop wrote "
                "it, or a trainer without dflop): where they were others than now, samples are left out or "
                "trained twice",
                stacklevel=2,
            )
            return
        for field, then in kept["args"]["steps"].items():
            if (now := self.steps.get(field)) != then:
                message = (
                    f"the checkpoint is of a run with `{field}` {then}, this one has {now}: the trainer "
                    "skips as many steps as were trained, so samples would be left out or trained twice. "
                    "Give the run what it had (a step has ranks x `per_device_train_batch_size` x "
                    "`gradient_accumulation_steps` samples). With `ignore_data_skip=True` the remaining "
                    "steps begin the epoch's order again"
                )
                raise ValueError(message)


def steps_of(sampler: BalancedBatchSampler, accumulation: int) -> dict[str, int]:
    """What decides which samples the step at a position has, whatever the ranks.

    Args:
        sampler: of the trainer.
        accumulation: microbatches of a rank and step.

    Returns:
        By the name of the number.
    """
    state = sampler.state_dict(0)
    names = ("num_samples", "global_batch_size", "seed", "shuffle", "num_giants", "giant_steps_max")
    return {**{name: int(state[name]) for name in names}, "steps_per_epoch": len(sampler) // accumulation}


def load_whole_checkpoints(trainer: Any) -> None:
    """Lets `trainer` load the weights of a checkpoint whatever names they have there.

    transformers saves those of LLaVA, Qwen2.5-VL and others by the names of their published files, and its
    trainer (5.23.0) reads them by the names of the model. What it does not find it leaves as it was made,
    with a warning. `from_pretrained` knows both names.

    Args:
        trainer: of transformers; resuming and `load_best_model_at_end` are changed. FSDP, DeepSpeed and peft
            keep weights in ways of their own, and are not.
    """
    _load_whole(trainer, "_load_from_checkpoint", lambda folder, *_: folder)
    _load_whole(trainer, "_load_best_model", lambda *_: trainer.state.best_model_checkpoint)


def _load_whole(trainer: Any, name: str, folder_of: Callable[..., Any]) -> None:
    theirs, tell = getattr(trainer, name, None), getattr(trainer, "_issue_warnings_after_load", None)
    if theirs is None or tell is None:
        return

    def load(*args: Any, **kwargs: Any) -> None:
        results: list[Any] = []
        trainer._issue_warnings_after_load = results.append
        try:
            theirs(*args, **kwargs)
        finally:
            trainer._issue_warnings_after_load = tell
        for result in results:
            model = trainer.model
            if isinstance(model, PreTrainedModel) and _not_loaded(model, result.missing_keys):
                _load(model, str(folder_of(*args, *kwargs.values())))
            else:
                tell(result)

    setattr(trainer, name, load)


def _not_loaded(model: Any, missing: list[str]) -> list[str]:
    """Parameters among the missing names that are not another name of one that was loaded."""
    named = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in named.items() if name not in set(missing)}
    return [name for name in missing if name in named and id(named[name]) not in loaded]


def _load(model: Any, folder: str) -> None:
    saved, found = type(model).from_pretrained(folder, dtype="auto", output_loading_info=True)
    missing = sorted(found["missing_keys"])
    if missing:
        message = (
            f"the checkpoint `{folder}` lacks {len(missing)} weights of the model, `{missing[0]}` among "
            "them: training would go on with those that the model was made with. Give a checkpoint of this "
            "model"
        )
        raise ValueError(message)
    model.load_state_dict(saved.state_dict())
