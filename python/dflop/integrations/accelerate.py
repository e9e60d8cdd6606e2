"""Balanced batches with accelerate: each rank keeps its own, and gradients are those of the global batch."""

from __future__ import annotations

from dflop.data import needs_torch  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import warnings
from typing import TYPE_CHECKING, Any

from dflop.integrations.loader import balanced_loader
from dflop.integrations.text_alone import counts_of, is_sharded_by_fsdp2, meet_in_encoder

try:
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import DistributedType
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "accelerate":
        raise
    message = (
        "`accelerate` is not installed, which `transformers.Trainer` and this line need: "
        "pip install 'dflop[integrations]', or accelerate alone"
    )
    raise ModuleNotFoundError(message, name="accelerate") from error

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from torch.utils.data import DataLoader

    from dflop.data.sampler import BalancedBatchSampler
    from dflop.data.split import Meets


def meets_of(accelerator: Accelerator, model: nn.Module | None = None) -> Meets:
    """What the ranks of a run wait for, as `BalancedBatchSampler` has it.

    Args:
        accelerator: as the run has made it.
        model: that trains, if it is known; FSDP2 may have sharded it already.

    Returns:
        `phase` where the layers' weights are gathered from all ranks (FSDP, DeepSpeed's ZeRO-3), else `step`.
    """
    if is_sharded_by_fsdp2(model):
        return "phase"
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        plugin: Any = accelerator.state.deepspeed_plugin
        # Not `zero_stage`: that is a default, whatever the file of DeepSpeed says.
        return "phase" if plugin.hf_ds_config.is_zero3() else "step"
    if kind == DistributedType.FSDP:
        strategy: Any = getattr(accelerator.state.fsdp_plugin, "sharding_strategy", None)
        return "step" if getattr(strategy, "name", None) == "NO_SHARD" else "phase"
    return "step"


def keep_batches(accelerator: Accelerator, loader: DataLoader[Any]) -> DataLoader[Any]:
    """`loader`, moving its batches to the accelerator's device and dealing none of them out to other ranks.

    `accelerator.prepare(loader)` would: it takes every loader for one of all ranks' batches.

    Args:
        accelerator: whose device and registry of loaders are used.
        loader: of this rank's batches.

    Returns:
        What `accelerator.prepare` takes and leaves as it is.
    """
    device = accelerator.device if accelerator.device_placement else None
    prepared: Any = prepare_data_loader(
        loader, device, num_processes=1, process_index=0, put_on_device=device is not None, rng_types=[]
    )
    prepared._is_accelerate_prepared = True
    return prepared


def balanced(
    accelerator: Accelerator, dataset: Any, costs: Any, batch_size: int, **options: Any
) -> DataLoader[Any]:
    """The prepared DataLoader of this rank: batches of even work over the ranks.

    Take the loss from `dflop.integrations.token_loss`, with the label tokens of all microbatches of the step
    (`num_label_tokens`) and `accelerator.num_processes` ranks. `accelerator.backward` divides by
    `gradient_accumulation_steps`, which that loss has no need of: multiply by it.

    Under FSDP2 prepare the model first: then a microbatch of text alone hangs nobody (`attend_encoder`).
    Under FSDP of version 1 and ZeRO-3, and with models of other families, a warning counts the samples of
    text alone.

    Args:
        accelerator: says which rank this is, how many there are, and how many microbatches make a step.
        dataset: with positions from 0.
        costs: what `BalancedBatchSampler` takes.
        batch_size: samples of a microbatch, on average.
        **options: of the DataLoader and of `BalancedBatchSampler`; `meets` is that of the accelerator.

    Returns:
        The loader; its `batch_sampler` is the sampler. To go on inside an epoch load a state of the sampler
        (with `num_batches=`, as accelerate takes a batch ahead), or take `accelerate.skip_first_batches`.

    Warns:
        UserWarning: `sync_with_dataloader` is on with several microbatches a step.
    """
    accumulation = accelerator.gradient_accumulation_steps
    if accumulation > 1 and getattr(accelerator.gradient_state, "sync_with_dataloader", False):
        warnings.warn(
            f"`sync_with_dataloader` is on, accelerate's default: when the {accumulation} microbatches of an "
            "epoch's last step are taken before the first is computed, as their label tokens are needed, "
            "each of them becomes a step of its own. Give the Accelerator "
            f"`GradientAccumulationPlugin(num_steps={accumulation}, sync_with_dataloader=False)`",
            stacklevel=2,
        )
    models: list[Any] = accelerator._models or [None]
    meets = max((meets_of(accelerator, model) for model in models), key=("step", "phase").index)
    options = {"meets": meets, **options}
    loader = balanced_loader(dataset, costs, batch_size, accumulation=accumulation, **options)
    if meets == "phase":
        sampler: Any = loader.batch_sampler
        for model in models:
            is_fsdp2 = accelerator.is_fsdp2 or is_sharded_by_fsdp2(model)
            meet_in_encoder(model, counts_of(sampler), accelerator.process_index, is_fsdp2=is_fsdp2)
    prepared = accelerator.prepare_data_loader(keep_batches(accelerator, loader))
    _follow_sampler(prepared, loader.batch_sampler)  # type: ignore[arg-type]
    return prepared


def _follow_sampler(loader: Any, sampler: BalancedBatchSampler) -> None:
    """Has `loader` begin the epoch that its sampler stands at, not the one that the loader has counted.

    accelerate's loader tells the sampler at each start how many epochs it has seen end. It knows nothing of a
    state that was loaded: the sampler would forget it, and the first epoch would be trained again.
    """
    theirs = loader.set_epoch

    def set_epoch(epoch: int) -> None:
        chosen = sampler.epoch if epoch == loader.iteration else epoch
        theirs(chosen)
        sampler.set_epoch(chosen)

    loader.set_epoch = set_epoch
