"""What the rows cost that a trainer holds, counted from the rows themselves: no data profile is needed.

rows with `input_ids`        -> tokens, and media tokens among them   \
rows with chats and media    -> `dflop profile data` of them          /  -> cost_of_parameters(model) -> Costs
"""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from dflop.data.costs import Costs, costs
from dflop.data.saved import is_dataset
from dflop.integrations.backbone import unwrapped
from dflop.integrations.loader import of_first_rank
from dflop.integrations.parameter_cost import ParameterCost, cost_of_parameters

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torch import nn

_HINT = "give `costs`: a pair (encoder, LLM) of each row, or the path of a profile by `dflop profile data`"
_MEDIA = ("image", "video", "audio")
# Fields that say how many encoder tokens become one feature, and the power of it that they do.
_FIELDS = (
    ("spatial_merge_size", 2),
    ("pooling_kernel_size", 2),
    ("scale_factor", 2),
    ("downsample_factor", 2),
    ("downsample_ratio", -2),
)
# The same of families that have it in their code: pooled frames, and halved or folded mel frames.
_MERGED_BY = {
    ("llava", "image"): 1.0,
    ("llava_next", "image"): 1.0,
    ("llava_onevision", "image"): 1.0,
    ("llava_onevision", "video"): 4.0,
    ("qwen2_audio", "audio"): 2.0,
    ("audioflamingo3", "audio"): 2.0,
    ("voxtral", "audio"): 4.0,
    ("qwen2_5_omni", "audio"): 2.0,
    ("qwen3_omni_moe", "audio"): 1.0,
    ("gemma4", "audio"): 1.0,
}
_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
_LENGTHS = ("lengths", "length")
_BATCH = 1_000
"""Rows that are counted at a time."""


def costs_of_rows(
    rows: Any, model: nn.Module, processor: Any = None, model_dir: str | os.PathLike[str] | None = None
) -> Costs:
    """Costs of the rows of a dataset, by the parameters of the model that trains on them.

    Call it on every rank: rank 0 counts, the others take its numbers. Frozen parts cost what they cost, so
    freeze before. Where rows have `input_ids`, their media tokens say what the encoder reads: a feature is
    taken for as many encoder tokens as the configuration merges into it, and encoder tokens behind no feature
    (padding of tiles, a thumbnail that is cut) are not counted. Other rows are profiled as `dflop profile
    data` does it.

    Args:
        rows: a `datasets.Dataset`, or a list of dictionaries with `input_ids`. Of a model of text alone a
            column `length` or `lengths` is enough.
        model: of transformers, with or without adapters of peft, not sharded yet.
        processor: of transformers; needed where rows have no `input_ids`, unless `model_dir` has it.
        model_dir: the directory of the model, instead of `processor`.

    Returns:
        One cost a row, in floating point operations, with the rows' tokens.

    Raises:
        ValueError: rows of another form, or a model whose parameters cannot be counted; on the other ranks,
            where rank 0 could not count.
        ProfileError: rows that `dflop profile data` refuses, or bad ones among them.
    """
    pairs, tokens = of_first_rank(
        lambda: _counted(rows, model, processor, model_dir), "count what the rows cost"
    )
    return costs(pairs, tokens=tokens)


def _counted(
    rows: Any, model: nn.Module, processor: Any, model_dir: str | os.PathLike[str] | None
) -> tuple[list[tuple[float, float]], list[int]]:
    """A cost and the LLM tokens of each row."""
    cost = cost_of_parameters(model)
    if _has_ids(rows):
        return _of_ids(rows, model, cost)
    if is_dataset(rows) and not _merged(unwrapped(model).config):
        # Of text alone a length says all, as ms-swift and `group_by_length` of transformers have it.
        for name in _LENGTHS:
            if name in rows.column_names:
                lengths = [max(n) if isinstance(n, list) else int(n) for n in rows[name]]
                return [cost((0, n)) for n in lengths], lengths
    if not is_dataset(rows):
        message = (
            f"`train_dataset` is a `{type(rows).__name__}` whose rows say nothing of their size, {_HINT}"
        )
        raise ValueError(message)
    with TemporaryDirectory(prefix="dflop-") as folder:
        directory = _directory(model, processor, Path(folder)) if model_dir is None else Path(model_dir)
        found = costs(rows, model_dir=directory, cost=cost)
    if found.num_bad:
        message = f"{found.num_bad} of {len(found) + found.num_bad} rows are bad, and the trainer reads all"
        raise ValueError(message)
    # A data profile has them always.
    tokens = list(found.tokens or ())
    return list(zip(found.encoder_ns, found.llm_ns, strict=True)), tokens


def _has_ids(rows: Any) -> bool:
    if is_dataset(rows):
        return "input_ids" in rows.column_names
    return isinstance(rows, (list, tuple)) and all(
        isinstance(row, dict) and "input_ids" in row for row in rows
    )


def _of_ids(rows: Any, model: nn.Module, cost: ParameterCost) -> tuple[list[tuple[float, float]], list[int]]:
    config = unwrapped(model).config
    merged = _merged(config)
    if cost.sound_token is not None:
        # As many tokens of the other encoder as cost the same.
        for token in _ids_of(config, "audio"):
            merged[token] *= cost.sound_token / cost.encoder_token
    pairs, lengths, num_media = [], [], 0
    for tokens, found in _batches_of_ids(rows):
        ends = np.cumsum(found)
        encoder = np.zeros(len(found))
        for token, count in merged.items():
            before = np.concatenate([[0], np.cumsum(tokens == token)])
            encoder += count * (before[ends] - before[ends - found])
            num_media += int(before[-1])
        pairs += map(cost, zip(encoder.tolist(), found.tolist(), strict=True))
        lengths += found.tolist()
    if 0 < num_media <= (num_pictures := _num_pictures(rows)):
        message = (
            f"the rows have {num_pictures} media and {num_media} tokens for them: the collation makes more "
            f"of these, and nobody knows how many, {_HINT}"
        )
        raise ValueError(message)
    return pairs, lengths


def _num_pictures(rows: Any) -> int:
    """Media in columns beside the tokens."""
    names = [name for name in _COLUMNS if is_dataset(rows) and name in rows.column_names]
    if not names:
        return 0
    total = 0
    for batch in rows.select_columns(names).with_format("arrow").iter(_BATCH):
        for name in names:
            column = batch.column(name).combine_chunks()
            is_list = hasattr(column, "value_lengths")
            total += len(column.flatten()) if is_list else len(column) - column.null_count
    return total


def _batches_of_ids(rows: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The tokens of some rows, one behind the other, and how many each row has."""
    if is_dataset(rows):
        # The one column, so that no picture beside it is decoded.
        for batch in rows.select_columns(["input_ids"]).with_format("arrow").iter(_BATCH):
            column = batch.column("input_ids").combine_chunks()
            yield np.asarray(column.flatten()), np.asarray(column.value_lengths(), dtype=np.int64)
        return
    for start in range(0, len(rows), _BATCH):
        ids = [np.asarray(row["input_ids"]).reshape(-1) for row in rows[start : start + _BATCH]]
        yield np.concatenate(ids), np.asarray([len(one) for one in ids])


def _merged(config: Any) -> dict[int, float]:
    """Encoder tokens behind one token of each medium, by the id of that token."""
    return {token: _merged_of(config, kind) for kind in _MEDIA for token in _ids_of(config, kind)}


def _ids_of(config: Any, kind: str) -> list[int]:
    """Ids of the token that stands for a feature."""
    found = [getattr(config, f"{kind}_token_{field}", None) for field in ("id", "index")]
    return [token for token in found if isinstance(token, int)]


def _merged_of(config: Any, kind: str) -> float:
    """Encoder tokens that become one feature, by the fields in which families say so."""
    family = str(config.model_type).removesuffix("_thinker")
    if (family, kind) in _MERGED_BY:
        return _MERGED_BY[family, kind]
    part = getattr(config, "vision_config", None)
    for place in (config, part):
        for name, power in _FIELDS:
            if isinstance(value := getattr(place, name, None), (int, float)) and value > 0:
                return float(value**power)
    if part is not None and (features := getattr(config, "mm_tokens_per_image", None)):
        return float((part.image_size // part.patch_size) ** 2 / features)
    if isinstance(mode := getattr(config, "downsample_mode", None), str) and mode[:-1].isdigit():
        return float(mode[:-1])
    warnings.warn(
        f"`{family}` has no field that dflop knows of how many encoder tokens become a feature of its "
        f"{kind}s: one is taken; better costs are those of a data profile (`dflop profile data`)",
        stacklevel=2,
    )
    return 1.0


def _directory(model: nn.Module, processor: Any, folder: Path) -> Path:
    """A directory of the model as it trains: its configuration, and the processor that reads the samples."""
    config = unwrapped(model).config
    if not hasattr(processor, "image_processor") and not hasattr(processor, "feature_extractor"):
        named = Path(str(getattr(config, "_name_or_path", "")))
        if (named / "config.json").exists():
            return named
        message = (
            "the rows have no `input_ids`, and the trainer holds no processor that says how many tokens "
            f"they become: {_HINT}"
        )
        raise ValueError(message)
    directory = folder / "model"
    processor.save_pretrained(directory)
    config.save_pretrained(directory)
    return directory
