"""Export of weights: writes them, by their full names, as a directory that `from_pretrained` reads.

parameters and buffers that are weights, by name --transformers' own naming--> safetensors, sharded by size
config.json, tokenizer, processor, chat template: copied from the model that training started from
"""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import torch

from dflop.models.errors import hinted, profile_error
from dflop.models.parameters import kept_buffers
from dflop.models.rules import trained_part
from dflop.models.weight_files import INDEX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import nn

_CONFIG = "config.json"
_TEMPLATE = "chat_template.jinja"
# Files of a model directory that are copied. A model card (.md) is not: it describes other weights.
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
_TEMPLATES = "additional_chat_templates"
# The file of weights, or one of several.
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_DTYPE_FIELDS = ("dtype", "torch_dtype")


def write_model(
    whole: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    source: Path,
    out: Path,
    dtype: torch.dtype,
    shard_bytes_max: int,
    chat_template: Path | None = None,
) -> None:
    """Writes a model directory; files of an earlier export in it are removed.

    Of Qwen2.5-Omni and Qwen3-Omni that is the thinker; its `config.json` is still that of the whole model,
    without a talker.

    All parameters are in memory at the same time. The files are written beside `out` and moved there when all
    are complete.

    Args:
        whole: the model of the source's `config.json`, a `PreTrainedModel`; it may be on the meta device.
        parameters: by full name, on the CPU; of any dtype. Buffers that files of weights hold are among them.
        source: model directory with the files to copy.
        out: where to write; made if missing.
        dtype: of the weights. Buffers keep theirs, and what transformers keeps in float32 (`gate.weight` of
            GLM-4.5V from 5.24 on) is written so.
        shard_bytes_max: of one file; a larger tensor has a file of its own.
        chat_template: template that the model was trained with; none: that of the source.

    Raises:
        ProfileError: a parameter is missing, left over or of another shape; the first is named.
        OSError: a file cannot be read or written.
    """
    _check(whole, parameters)
    # Of no name that a user would give, as what an earlier export left there is removed.
    new = out.with_name(f".{out.name}.dflop-export")
    if new.exists():
        shutil.rmtree(new)
    new.mkdir(parents=True)
    try:
        buffers = kept_buffers(whole)
        wide = getattr(whole, "_keep_in_fp32_modules_strict", None) or ()
        tensors = {
            name: (value if name in buffers else value.to(_dtype_of(name, dtype, wide))).contiguous()
            for name, value in parameters.items()
        }
        model: Any = whole
        model.save_pretrained(new, state_dict=tensors, max_shard_size=shard_bytes_max)
        # transformers wrote these two files with defaults added: the files of the source are copied instead.
        for name in (_CONFIG, "generation_config.json"):
            (new / name).unlink(missing_ok=True)
        _copy(source, new, dtype)
        if chat_template is not None:
            shutil.copyfile(chat_template, new / _TEMPLATE)
        _move(new, out)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _dtype_of(name: str, dtype: torch.dtype, wide: Iterable[str]) -> torch.dtype:
    """What a parameter is written in, where those at these ends or parts of names stay in float32."""
    return torch.float32 if any(f".{part}." in f".{name}." for part in wide) else dtype


def _check(whole: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises unless these are exactly the parameters of the whole model, and its buffers that are weights."""
    named = {**dict(whole.named_parameters()), **kept_buffers(whole)}
    wanted = {name: tuple(p.shape) for name, p in named.items()}
    problems = [
        *(f"`{name}` is missing" for name in wanted if name not in parameters),
        *(f"`{name}` is left over" for name in parameters if name not in wanted),
        *(
            f"`{name}` is {list(value.shape)}, must be {list(wanted[name])}"
            for name, value in parameters.items()
            if name in wanted and tuple(value.shape) != wanted[name]
        ),
    ]
    if problems:
        message = f"{len(problems)} parameters are not those of `{_CONFIG}`: {problems[0]}"
        raise hinted(profile_error(message), "`model.dir` must still hold the model that was trained")


def _copy(source: Path, new: Path, dtype: torch.dtype) -> None:
    """Copies all but weights. The copied configuration gets the dtype of the exported weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COPIED and not path.name.endswith(".index.json"):
            shutil.copyfile(path, new / path.name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, new / _TEMPLATES)
    config = _with_dtype(json.loads((source / _CONFIG).read_bytes()), str(dtype).removeprefix("torch."))
    if trained_part(config)[1]:
        # Else the class of the whole model would draw a talker and a vocoder at random.
        config["enable_audio_output"] = False
    if not any(field in config for field in _DTYPE_FIELDS):
        config["dtype"] = str(dtype).removeprefix("torch.")
    (new / _CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _with_dtype(config: Any, dtype: str) -> Any:
    """A configuration with another dtype in all its fields for it, those of its parts included."""
    if not isinstance(config, dict):
        return config
    return {
        name: dtype if name in _DTYPE_FIELDS and value is not None else _with_dtype(value, dtype)
        for name, value in config.items()
    }


def _move(new: Path, out: Path) -> None:
    """Moves all files, and removes old weight files first: old shards would be read along with new ones."""
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("model*.safetensors"):
        if _WEIGHTS.fullmatch(path.name):
            path.unlink()
    (out / INDEX).unlink(missing_ok=True)
    # The configuration is moved last: a directory without one is not a model.
    for path in sorted(new.iterdir(), key=lambda path: (path.name == _CONFIG, path.name)):
        target = out / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)
