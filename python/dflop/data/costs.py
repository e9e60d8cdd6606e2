"""What the samples of a dataset cost, from pairs, shapes, arrays, profiles or functions: two columns.

source --> Costs(encoder_ns, llm_ns, tokens) --> BalancedBatchSampler, balance
"""

from __future__ import annotations

import csv
import inspect
import os
import reprlib
import sys
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from dflop._native import SampleCosts, profile_shapes
from dflop.data import saved

_CHUNK_BYTES = 1 << 24
"""Of an array as many bytes are handed over at a time."""

_CODES = {"d": "d", "f": "f", "b": "b", "B": "B", "h": "h", "H": "H", "i": "i", "I": "I", "q": "q", "Q": "Q"}
"""Formats of `struct` whose size is the same on every machine; `l` and `n` are not."""

_LONGS = {4: {"l": "i", "L": "I"}, 8: {"l": "q", "L": "Q", "n": "q", "N": "Q"}}


class Costs:
    """What each sample of a dataset costs, held outside Python.

    Frozen, and as large as its numbers: 16 bytes a sample, 8 more for tokens and bytes each. The columns are
    read through `memoryview`, so that `numpy.asarray(costs.llm_ns)` copies nothing more.
    """

    def __init__(self, native: SampleCosts, *, num_extrapolated: int = 0) -> None:
        """Wraps the columns; `dflop.costs` makes them.

        Args:
            native: The columns.
            num_extrapolated: Samples outside the range that was measured.
        """
        self._native = native
        self.num_extrapolated = num_extrapolated
        """Samples whose cost is outside what the model profile measured."""

    def __len__(self) -> int:
        """Samples that have a cost; bad ones of a profile have none."""
        return len(self._native)

    @property
    def encoder_ns(self) -> memoryview:
        """Encoder cost of each sample, of format `Q`; nanoseconds where they are measured or estimated."""
        return _column(self._native, "encoder_ns") or memoryview(array("Q"))

    @property
    def llm_ns(self) -> memoryview:
        """LLM cost of each sample, likewise."""
        return _column(self._native, "llm_ns") or memoryview(array("Q"))

    @property
    def tokens(self) -> memoryview | None:
        """LLM tokens of each sample; None where they are not known."""
        return _column(self._native, "tokens")

    @property
    def bytes(self) -> memoryview | None:
        """Bytes of each sample; None where they are not known."""
        return _column(self._native, "bytes")

    @property
    def positions(self) -> memoryview | None:
        """Position in the dataset of each sample; None where they are 0, 1, 2, ..."""
        return _column(self._native, "positions")

    @property
    def num_bad(self) -> int:
        """Samples of the dataset that are bad and have no cost."""
        return self._native.num_bad

    def llm_alone(self) -> Costs:
        """The same samples with an encoder cost of 0: for batches of a model whose encoder is shared out.

        Returns:
            Costs with the positions, tokens and bytes of these.
        """
        native = self._native.with_costs([(0, llm_ns) for llm_ns in self.llm_ns])
        return Costs(native, num_extrapolated=self.num_extrapolated)

    def of_groups(self, size: int) -> Costs:
        """The same samples where `size` ranks share the LLM's work on each, and none the encoder's.

        So it is with tensor, context and sequence parallel of the LLM. The encoder's costs grow, in place of
        the LLM's being divided: what is compared with the LLM's (`giant_llm_cost`) keeps its unit.

        Args:
            size: ranks of a group, at least 1.

        Returns:
            Costs with the positions, tokens and bytes of these.
        """
        pairs = [(encoder * size, llm) for encoder, llm in zip(self.encoder_ns, self.llm_ns, strict=True)]
        return Costs(self._native.with_costs(pairs), num_extrapolated=self.num_extrapolated)

    def taken(self, order: Sequence[int]) -> Costs:
        """Costs of some of the samples, in an order of their own, for example of a dataset that was shuffled.

        Args:
            order: which sample each is of, among those that have a cost.

        Returns:
            Costs with their tokens and bytes. They are at the positions 0, 1, 2, ...; none is bad.

        Raises:
            IndexError: there is no such sample.
        """
        encoder_ns, llm_ns = self.encoder_ns, self.llm_ns
        pairs = [(encoder_ns[index], llm_ns[index]) for index in order]
        sizes = {name: column for name in ("tokens", "bytes") if (column := getattr(self, name)) is not None}
        kept = {name: _numbers([column[index] for index in order], name) for name, column in sizes.items()}
        native = SampleCosts.of_list(pairs)
        return Costs(native.with_sizes(**kept) if kept else native, num_extrapolated=self.num_extrapolated)

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes a line for each sample, as `dflop advise --costs` and `dflop schedule --costs` read them.

        Args:
            path: The file; one that is there is replaced.

        Raises:
            OSError: It cannot be written.
        """
        names = ("encoder_ns", "llm_ns", "tokens", "bytes")
        held = {name: column for name in names if (column := getattr(self, name)) is not None}
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["sample", *held])
            positions = range(len(self)) if self.positions is None else self.positions
            writer.writerows(zip(positions, *held.values(), strict=True))

    def __repr__(self) -> str:
        return f"Costs({len(self)} samples, {self.num_bad} bad, {self.num_extrapolated} extrapolated)"


class _Model(NamedTuple):
    """By which model samples of a data profile are costed."""

    profile: str | os.PathLike[str] | None
    estimated: tuple[str, str, str] | None
    """Model, device and dtype."""
    recipe: str
    lora_rank: int

    def check_unused(self) -> None:
        if self.recipe != "full":
            message = f"`recipe` is {self.recipe!r}, which needs costs by a model profile or a `model`"
            raise ValueError(message)


def costs(
    source: Costs | Iterable[Any] | Callable[[int], Any] | str | os.PathLike[str],
    model_profile: str | os.PathLike[str] | None = None,
    *,
    model_dir: str | os.PathLike[str] | None = None,
    model: str | None = None,
    device: str | None = None,
    dtype: str = "bfloat16",
    recipe: str = "full",
    lora_rank: int = 16,
    cost: Callable[[Any], tuple[float, float]] | None = None,
    batch_size: int = 1,
    num_samples: int | None = None,
    tokens: Any = None,
    bytes: Any = None,
) -> Costs:
    """Encoder and LLM cost of each sample of a dataset.

    Args:
        source: One entry a sample: `(encoder cost, LLM cost)` in any one unit, best measured nanoseconds,
            also as an array or tensor of tensor shape (samples, 2); or a shape with `llm_tokens` and
            `encoder_tokens` or `encoder_segments`, as attributes or keys. Or a function that gives such an
            entry for an index. Or the path of a data profile. Or a `datasets.Dataset`, which is profiled as
            `dflop profile data` does it, where its files lie; what `map` made in memory is copied to a
            temporary folder. Integers are taken as they are; others keep nine digits of the largest. Of
            shapes the cost is the token count, scaled so that encoder and LLM weigh the same over the
            dataset; attention's squares are not in it.
        model_profile: The path of a model profile, by which the samples of a data profile are costed in
            nanoseconds. By default, for a path, the `model_profile.json` beside the data profile, if there
            is one; without any, a data profile's samples are shapes.
        model_dir: The directory of the model whose processor decides the sizes of a `datasets.Dataset`, of
            any family that `dflop models` lists, or whose processor transformers has.
        model: A model that `dflop models` lists, for example `qwen2.5-vl-7b`, instead of a model
            profile: times are then estimated.
        device: The device they are estimated for, for example `h100`.
        dtype: Its numbers: `bfloat16`, `float16` or `float32`.
        recipe: What trains, with a model profile or a `model`: `full`, `projector`, `frozen-encoder`,
            `frozen-llm` or `lora` (frozen encoder, adapters in the LLM backbone). What is frozen costs less:
            a frozen encoder a third, as it has no backward.
        lora_rank: Rank of the adapters, with the recipe `lora`. A model profile must hold it
            (`dflop profile model --lora-rank`).
        cost: Gives `(encoder cost, LLM cost)` for each entry of `source`, or for each (encoder tokens, LLM
            tokens) of a data profile.
        batch_size: About how many samples a microbatch has: the cost of a sample is what it adds to a
            microbatch of that size.
        num_samples: Samples of the dataset, where `source` is a function.
        tokens: LLM tokens of each sample, for `max_tokens`; shapes and profiles have them.
        bytes: Bytes that each sample takes on a device, for `max_bytes`; with a model profile or a `model`
            they are the bytes of its activations.

    Returns:
        The costs, frozen. A warning counts the samples outside the measured range, another tells where the
        data profile is of another model family than the costs. What `dflop profile data` notices of a
        `datasets.Dataset` is a warning too, for example fields that it does not read.

    Raises:
        ValueError: An entry that is not a cost, arguments that exclude each other, or a `datasets.Dataset`
            without samples or of several splits.
        FileNotFoundError: There is no such profile.
        ArtifactError: The file is not a profile, or one whose rows have no position in a dataset.
        ProfileError: The model profile holds no adapters of that rank, or a `datasets.Dataset` cannot be
            profiled.
    """
    if (model is None) != (device is None):
        message = f"`model` is {model!r} and `device` is {device!r}, both are needed to estimate costs"
        raise ValueError(message)
    ways = [name for name, way in (("model_profile", model_profile), ("model", model), ("cost", cost)) if way]
    if len(ways) > 1:
        message = f"costs come from one of `model_profile`, `model` and `cost`, given are: {', '.join(ways)}"
        raise ValueError(message)
    if model_dir is not None and not saved.is_dataset(source):
        message = (
            "`model_dir` decides the sizes of a `datasets.Dataset`, the source is of type "
            f"{type(source).__name__}: make a data profile with `dflop profile data` and give its path"
        )
        raise ValueError(message)
    if batch_size < 1:
        message = f"`batch_size` is {batch_size}, must be at least 1"
        raise ValueError(message)
    model_of = _Model(
        model_profile, None if model is None else (model, str(device), dtype), recipe, lora_rank
    )
    if isinstance(source, (str, os.PathLike)):
        found = _of_profile(source, model_of, cost, batch_size)
    elif saved.is_dataset(source):
        with TemporaryDirectory(prefix="dflop-") as folder:
            path, notices, order = saved.profile(source, model_dir, Path(folder))
            for notice in notices:
                _warn(notice)
            found = _of_profile(path, model_of, cost, batch_size)
            if order is not None:
                found = found.taken(order)
    else:
        if model_profile is not None or model is not None:
            what = type(source).__name__
            message = (
                f"`{ways[0]}` needs the path of a data profile, a {what} does not say what the encoder reads"
            )
            raise ValueError(message)
        model_of.check_unused()
        found = _of_source(source, cost, num_samples)
    if tokens is None and bytes is None:
        return found
    sizes = {
        name: _numbers(given, name)
        for name, given in (("tokens", tokens), ("bytes", bytes))
        if given is not None
    }
    return Costs(found._native.with_sizes(**sizes), num_extrapolated=found.num_extrapolated)


def _of_source(
    source: Any, cost: Callable[[Any], tuple[float, float]] | None, num_samples: int | None
) -> Costs:
    """Costs of what is no file."""
    if source is None:
        message = (
            "costs are None, must be a pair (encoder cost, LLM cost) or a shape for each sample, or the path "
            "of a data profile (`dflop profile data`)"
        )
        raise ValueError(message)
    if isinstance(source, Costs):
        if cost is not None:
            message = "`cost` gives costs to samples, these have theirs already"
            raise ValueError(message)
        return source
    if callable(source) and not isinstance(source, Iterable):
        source = list(map(source, range(_counted(num_samples))))
    return Costs(_of_entries(source if cost is None else list(map(cost, source))))


def _of_profile(
    path: str | os.PathLike[str],
    model: _Model,
    cost: Callable[[Any], tuple[float, float]] | None,
    batch_size: int,
) -> Costs:
    """Costs of the samples of a data profile: by the user's function, by a model, or as shapes."""
    beside = Path(path).parent / "model_profile.json"
    profile = model.profile
    if (
        profile is None
        and model.estimated is None
        and cost is None
        and beside.exists()
        and Path(path).exists()
    ):
        profile = beside
    if profile is None and model.estimated is None:
        model.check_unused()
        native = SampleCosts.of_profile(os.fspath(path))
        if cost is not None:
            rows, _ = profile_shapes(os.fspath(path))
            native = native.with_costs([cost((encoder, llm)) for _, encoder, llm in rows])
        return Costs(native)
    for file in (path, profile):
        if file is not None and not Path(file).exists():
            message = f"`{os.fspath(file)}` does not exist"
            raise FileNotFoundError(message)
    profile_path = None if profile is None else os.fspath(profile)
    native, num_extrapolated, notice = SampleCosts.of_model(
        os.fspath(path), profile_path, model.estimated, model.recipe, model.lora_rank, batch_size
    )
    if notice is not None:
        _warn(f"`{os.fspath(path)}`: {notice}")
    if num_extrapolated:
        verb = "is" if num_extrapolated == 1 else "are"
        _warn(
            f"{num_extrapolated} of {len(native)} samples {verb} outside of what the model profile measured"
        )
    return Costs(native, num_extrapolated=num_extrapolated)


def warn_of_bad(found: Costs, source: Any) -> None:
    """Warns where samples of a profile never come.

    Args:
        found: Of `costs`.
        source: What it was made from.
    """
    if found.num_bad:
        total = len(found) + found.num_bad
        name = f"`{os.fspath(source)}`" if isinstance(source, (str, os.PathLike)) else "`costs`"
        what = "is bad and never comes" if found.num_bad == 1 else "are bad and never come"
        _warn(f"{name}: {found.num_bad} of {total} samples {what}")


def _warn(message: str) -> None:
    """Warns at the line outside of this package that asked, however many of our functions stand between."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "dflop":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _column(native: SampleCosts, name: str) -> memoryview | None:
    found = native.column(name)
    return None if found is None else memoryview(found).cast("Q")


def _counted(num_samples: int | None) -> int:
    if num_samples is None or num_samples < 1:
        message = (
            f"`num_samples` is {num_samples}, must be at least 1 where costs are a function of the index"
        )
        raise ValueError(message)
    return num_samples


def _of_entries(source: Iterable[Any]) -> SampleCosts:
    """One entry a sample, all pairs or all shapes."""
    view = _buffer(source, num_columns=2)
    if view is not None:
        chunks, code, num_rows = view
        if num_rows == 0:
            message = "there are no samples"
            raise ValueError(message)
        return SampleCosts.of_rows(chunks, code)
    # Arrays and tensors of other kinds: their rows as lists, from any device.
    to_list = getattr(source, "tolist", None)
    given = source if to_list is None else to_list()
    entries = given if isinstance(given, Sequence) else list(given)
    if not entries:
        message = "there are no samples"
        raise ValueError(message)
    if _is_pair(entries[0]):
        return SampleCosts.of_list(entries)
    pair, shape = "a pair (encoder cost, LLM cost)", "a shape with `llm_tokens`"
    if not _is_shape(entries[0]):
        # In short: a record may hold a picture or a book.
        message = f"sample 0 is {reprlib.repr(entries[0])}, must be {pair} or {shape}"
        raise ValueError(message)
    rows = array("Q")
    for index, entry in enumerate(entries):
        if not _is_shape(entry):
            message = f"sample {index} is {reprlib.repr(entry)}, must be {shape}, as sample 0 is"
            raise ValueError(message)
        rows.append(_tokens(index, "encoder_tokens", _encoder_tokens(entry)))
        rows.append(_tokens(index, "llm_tokens", _field(entry, "llm_tokens")))
    return SampleCosts.of_token_rows([rows.tobytes()], "Q")


def _numbers(source: Any, name: str) -> tuple[Iterable[bytes], str]:
    """A column of integers from 0 as chunks and the letter of their format."""
    view = _buffer(source, num_columns=1)
    if view is not None:
        return view[:2]
    to_list = getattr(source, "tolist", None)
    column = array("Q")
    for index, entry in enumerate(source if to_list is None else to_list()):
        column.append(_tokens(index, name, entry))
    return [column.tobytes()], "Q"


def _tokens(index: int, name: str, value: Any) -> int:
    """A count, as an integer; a ValueError that names the sample where it is none."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if number != value or not 0 <= number < 2**53:
        message = f"`{name}` of sample {index} is {value!r}, must be a whole number from 0 to 2^53"
        raise ValueError(message)
    return number


def _buffer(source: Any, num_columns: int) -> tuple[Iterator[bytes], str, int] | None:
    """Rows of an array in memory as chunks, the letter of their format, and their number; else None."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(source, torch.Tensor):
        try:
            source = source.detach().cpu().numpy()
        except (TypeError, RuntimeError):  # bfloat16; or no numpy.
            return None
    try:
        view = memoryview(source)
    except TypeError:
        return None
    letter = view.format[1:] if view.format[:1] in ("@", "=") else view.format
    if view.format[:1] == "<" and sys.byteorder == "little":
        letter = view.format[1:]
    code = _LONGS.get(view.itemsize, {}).get(letter) or _CODES.get(letter)
    shape = (view.shape or ())[1:]
    if (
        code is None
        or view.ndim != (1 if num_columns == 1 else 2)
        or (num_columns > 1 and shape != (num_columns,))
    ):
        return None
    num_rows = len(view)
    step = max(1, _CHUNK_BYTES // (view.itemsize * num_columns))
    return (view[at : at + step].tobytes() for at in range(0, num_rows, step)), code, num_rows


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, (tuple, list)) and len(entry) == 2


def _is_shape(entry: Any) -> bool:
    return "llm_tokens" in entry if isinstance(entry, Mapping) else hasattr(entry, "llm_tokens")


def _field(shape: Any, name: str) -> Any:
    return shape[name] if isinstance(shape, Mapping) else getattr(shape, name)


def _encoder_tokens(shape: Any) -> Any:
    has_tokens = "encoder_tokens" in shape if isinstance(shape, Mapping) else hasattr(shape, "encoder_tokens")
    if has_tokens:
        return _field(shape, "encoder_tokens")
    segments = _field(shape, "encoder_segments")
    return sum(_field(s, "count") * _field(s, "tokens") for s in segments)
