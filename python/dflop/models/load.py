"""Loading of weights: a piece of a model reads its parameters from the files of a model directory.

    headers of all files --transformers' own renaming--> which tensors make each parameter
    parameters of a piece --> their tensors alone are read, converted, copied into place

Every rank reads the headers of all files (kilobytes), so every rank notices a missing or left-over tensor. It
reads the tensors of its own piece only.
"""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from dflop.models.errors import hinted, profile_error
from dflop.models.tensor import slices_of
from dflop.models.weight_files import check_has_weights, weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import nn

    from dflop.models.tensor import Slice

# Types of safetensors that are read. 8-bit integers and floats are quantised weights, which also need scales.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class _Tensor:
    """What the header of a file says of one tensor."""

    path: Path
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Group:
    """Tensors of the files that together become parameters; mostly one tensor becomes one parameter."""

    name: str
    """Full name of the first parameter."""
    keys: tuple[tuple[str, str | None], ...]
    """Names in the files, each with the pattern of transformers that it matches."""
    converter: WeightConverter | None
    """What turns the tensors into parameters; none: the only tensor is the parameter."""

    def made(self, whole: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters, by full name."""
        if self.converter is None:
            return {self.name: tensors[self.keys[0][0]]}
        converter: Any = deepcopy(self.converter)
        for key, pattern in self.keys:
            converter.add_tensor(self.name, key, pattern, tensors[key])
        made = converter.convert(self.name, model=whole, config=whole.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class Weights:
    """The weights of a model directory, found by the names of the model's parameters."""

    def __init__(self, model_dir: Path, whole: nn.Module) -> None:
        """Reads the headers of all files, no tensor.

        Args:
            model_dir: folder in Hugging Face form.
            whole: the model of its `config.json`, a `PreTrainedModel`; on the meta device, which is enough.

        Raises:
            ProfileError: there are no weights; a file cannot be read; a tensor is missing, left over, of
                another shape or quantised. All of them are counted, and the first is named.
        """
        check_has_weights(model_dir)
        self._dir = model_dir
        self._whole: Any = whole
        self._tensors = dict(_headers(weight_files(model_dir)))
        self._wanted: dict[str, torch.Tensor] = self._whole.state_dict(keep_vars=True)
        self._groups: dict[str, _Group] = {}
        left_over = self._match()
        self._check(left_over)

    @property
    def num_files(self) -> int:
        """Files that hold the weights."""
        return len({tensor.path for tensor in self._tensors.values()})

    def _match(self) -> set[str]:
        """Finds the tensors of each parameter. Gives the names of tensors that belong to none."""
        conversions: list[Any] = get_model_conversion_mapping(self._whole)
        renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        converters = [c for c in conversions if isinstance(c, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        prefix = self._whole.base_model_prefix
        keys: dict[str, list[tuple[str, str | None]]] = {}
        left_over: set[str] = set()
        for key in sorted(self._tensors, key=_natural):
            name, pattern = rename_source_key(key, renamings, converters, prefix, self._wanted)
            if name not in self._wanted and key in self._wanted:
                name, pattern = key, None
            if name in self._wanted:
                keys.setdefault(name, []).append((key, pattern))
            else:
                left_over.add(key)
        for name, sources in keys.items():
            pattern = sources[0][1]
            group = _Group(name, tuple(sources), None if pattern is None else by_pattern[pattern])
            for made in self._shapes(group):
                self._groups[made] = group
        return left_over

    def _shapes(self, group: _Group) -> dict[str, tuple[int, ...]]:
        """Tensor shapes of the parameters of a group, by full name; no tensor is read."""
        empty = {key: torch.empty(self._tensors[key].shape, device="meta") for key, _ in group.keys}
        return {name: tuple(value.shape) for name, value in group.made(self._whole, empty).items()}

    def _check(self, left_over: set[str]) -> None:
        tied: dict[int, list[str]] = {}
        for name, parameter in self._wanted.items():
            tied.setdefault(id(parameter), []).append(name)
        # The files hold a tied parameter under at least one of its names.
        missing = {names[0] for names in tied.values() if not any(name in self._groups for name in names)}
        # Ignores buffers that older releases saved, and keys that the model's class declares optional.
        info: Any = SimpleNamespace(missing_keys=missing, unexpected_keys=left_over)
        self._whole._adjust_missing_and_unexpected_keys(info)
        shapes = {}
        for group in dict.fromkeys(self._groups.values()):
            shapes |= self._shapes(group)
        other = {
            name: f"{list(shape)}, `config.json` says {list(self._wanted[name].shape)}"
            for name, shape in shapes.items()
            if name in self._wanted and shape != tuple(self._wanted[name].shape)
        }
        problems = [
            _problem(info.missing_keys, "missing"),
            _problem(info.unexpected_keys | (shapes.keys() - self._wanted.keys()), "left over"),
            _problem(other, "of another tensor shape", other),
        ]
        if any(problems):
            text = "; ".join(problem for problem in problems if problem)
            message = f"the weights in `{self._dir}` are not those of its `config.json`: {text}"
            raise hinted(profile_error(message), "put `config.json` and weights of one model there")

    @torch.no_grad()
    def fill(self, piece: nn.Module) -> list[str]:
        """Fills the parameters of a piece; each tensor is rounded to the dtype of its parameter.

        Args:
            piece: its parameters have memory, and the names of the whole model.

        Returns:
            Names of the tensors that were read.

        Raises:
            ProfileError: a file cannot be read, or gives a tied parameter two values.
        """
        held: dict[str, torch.Tensor] = piece.state_dict(keep_vars=True)
        slices = slices_of(piece)
        groups = dict.fromkeys(self._groups[name] for name in held if name in self._groups)
        filled: dict[int, str] = {}
        keys: list[str] = []
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            for group in groups:
                # Only a tensor that needs no conversion is cut while it is read; others are cut afterwards.
                is_plain = group.converter is None
                part = slices.get(group.name) if is_plain else None
                tensors = {key: self._read(key, part, files, stack) for key, _ in group.keys}
                keys += tensors
                for name, made in group.made(self._whole, tensors).items():
                    parameter = held.get(name)
                    if parameter is None:
                        continue
                    value = made if is_plain or name not in slices else slices[name].take(made)
                    first = filled.setdefault(id(parameter), name)
                    if first == name:
                        parameter.copy_(value)
                    elif not torch.equal(parameter, value.to(parameter.device, parameter.dtype)):
                        message = (
                            f"`{self._dir}` has two values of one parameter: `{first}` and `{name}` are tied "
                            "by `config.json`, must be equal"
                        )
                        raise hinted(
                            profile_error(message), "set `tie_word_embeddings` to false in `config.json`"
                        )
        return keys

    def _read(self, key: str, part: Slice | None, files: dict[Path, Any], stack: ExitStack) -> torch.Tensor:
        path = self._tensors[key].path
        try:
            if path not in files:
                files[path] = stack.enter_context(safe_open(path, framework="pt"))
            if part is None:
                return files[path].get_tensor(key)
            found = files[path].get_slice(key)
            rows = [
                found[(slice(None),) * part.dim + (slice(first, first + count),)]
                for first, count in part.runs
            ]
            return torch.cat(rows, part.dim)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layer 10 after layer 9: converters need their tensors in this order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]


def _problem(names: Any, what: str, values: Mapping[str, str] | None = None) -> str:
    """A count and the first name; empty where there are none."""
    if not names:
        return ""
    first = min(names, key=_natural)
    verb = "is" if len(names) == 1 else "are"
    value = f" ({values[first]})" if values else ""
    return f"{len(names)} {verb} {what}, `{first}`{value}{'' if len(names) == 1 else ' first'}"


def _unreadable(path: Path, error: Exception) -> Exception:
    message = f"`{path}` cannot be read as safetensors: {str(error).lower()}"
    return hinted(profile_error(message), "download the file again")


def _headers(paths: list[Path]) -> Iterator[tuple[str, _Tensor]]:
    """Names of all tensors in the files, with tensor shapes."""
    seen: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (no mapping)
                    part = file.get_slice(key)
                    if part.get_dtype() not in _DTYPES:
                        message = (
                            f"`{key}` in `{path}` is {part.get_dtype()}, must be one of "
                            f"{', '.join(_DTYPES)}: quantised weights cannot be trained"
                        )
                        raise hinted(profile_error(message), "use the model as it was before quantisation")
                    if key in seen:
                        message = f"`{key}` is in `{seen[key]}` and in `{path.name}`, must be in one file"
                        raise profile_error(message)
                    seen[key] = path
                    yield key, _Tensor(path, tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
