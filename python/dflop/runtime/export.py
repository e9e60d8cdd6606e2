"""`dflop export`: the weights of a checkpoint as a model directory, read without ranks."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from dflop.models import load_adapter
from dflop.models.adapters import merged, write_adapter
from dflop.models.errors import hinted, profile_error
from dflop.models.experts import WITH_DENSE_FIRST
from dflop.models.export import write_model
from dflop.models.parameters import kept_buffers
from dflop.runtime.checkpoint import damage
from dflop.runtime.resume import MANIFEST, checkpoints

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEYS = "model."
"""Prefix of the names of parameters in a checkpoint; states of the optimizer have another one."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(request: Mapping[str, Any]) -> int:
    """Writes the model directory that `request` asks for.

    Args:
        request: As the command line makes it: `run`, `out`, `step`, `dtype`, `shard_bytes_max`, `adapter`.

    Returns:
        The exit status, 0.

    Raises:
        Error: There is no such checkpoint, it is damaged, of a rehearsal, or not of this model.
        OSError: A file cannot be read or written.
    """
    run, out = Path(request["run"]), Path(request["out"])
    checkpoint = find_checkpoint(run, request["step"])
    fault = damage(checkpoint, 0, 1)
    if fault is not None:
        message = f"`{checkpoint}` is damaged: {fault}"
        raise hinted(profile_error(message), "export the checkpoint before it with `--step`")
    manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    if manifest.get("is_rehearsed", False):
        message = f"`{checkpoint}` is of a rehearsal, which has no weights"
        raise hinted(profile_error(message), "name the directory of a run of `dflop train`")
    model = manifest["model"]
    source, dtype = Path(model["dir"]), str(request["dtype"] or model["dtype"])
    adapter = load_adapter(source)
    whole, _ = adapter.build_whole()
    print(f"reading {checkpoint}", file=sys.stderr, flush=True)
    parameters = read_parameters(checkpoint)
    num_buffers = len(kept_buffers(whole))
    what = f"{len(parameters) - num_buffers} parameters"
    adapters = (int(model["lora_rank"]), float(model["lora_alpha"]))
    if request["adapter"]:
        if model["recipe"] != "lora":
            message = f"`{run}` was trained with `train.recipe: {model['recipe']}`, it has no adapters"
            raise hinted(profile_error(message), "leave `--adapter` out")
        config: Any = whole.config
        if config.get_text_config().model_type in WITH_DENSE_FIRST:
            message = f"adapters of `{adapter.family}`: peft would read those of MLPs as adapters of experts"
            raise hinted(profile_error(message), "leave `--adapter` out: they are merged into the weights")
        write_adapter(whole, parameters, source, out, *adapters, _DTYPES[dtype])
        what = f"adapters of rank {adapters[0]}"
    else:
        if model["recipe"] == "lora":
            parameters = merged(parameters, *adapters)
            what = f"{len(parameters) - num_buffers} parameters, adapters merged"
        template = model["chat_template"]
        shard_bytes_max = int(request["shard_bytes_max"])
        own = None if template is None else Path(template)
        write_model(whole, parameters, source, out, _DTYPES[dtype], shard_bytes_max, own)
    # Of a whole model that hears, thinks and talks.
    alone = "" if not adapter.field_prefix else f" of the thinker alone: `{source}` still has the talker"
    print(f"wrote {out}: {what}{alone}, {dtype}", file=sys.stderr, flush=True)
    return 0


def find_checkpoint(run: Path, step: int | None) -> Path:
    """The directory of a checkpoint.

    Args:
        run: Directory of the run.
        step: Steps trained; none: of the last checkpoint.

    Returns:
        `run/checkpoints/step-N`, which is whole.

    Raises:
        Error: There is none, or none of this step.
    """
    found = dict(checkpoints(run))
    if not found:
        message = f"`{run / 'checkpoints'}` holds no whole checkpoint"
        raise hinted(profile_error(message), "let `dflop train` run on until it has written one")
    if step is not None and step not in found:
        message = f"`{run / 'checkpoints'}` has no checkpoint of step {step}"
        raise hinted(
            profile_error(message), f"choose one of them with `--step`: {', '.join(map(str, found))}"
        )
    return found[max(found) if step is None else step]


def read_parameters(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Parameters of a checkpoint, and buffers that are weights: whole, whatever the ranks that wrote it.

    Args:
        checkpoint: Its directory.

    Returns:
        By full name, on the CPU, in the dtype of the checkpoint.
    """
    held: dict[str, Any] = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    parameters: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in held.items()
        if key.startswith(_KEYS) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # It says that one process reads, which is asked for here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(parameters, checkpoint_id=checkpoint, no_dist=True)
    return {key.removeprefix(_KEYS): value for key, value in parameters.items()}
