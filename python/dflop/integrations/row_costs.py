"""What the rows cost that a trainer holds, counted from the rows themselves: no data profile is needed.

rows with `input_ids`        -> tokens, and media tokens among them   \
rows with chats and media    -> `dflop profile data` of them           | -> cost_of_parameters(model) -> Costs
pairs of answers             -> each answer with its prompt, as above /
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from dflop._native import profile_shapes
from dflop.data.costs import Costs, costs
from dflop.data.saved import changes_rows, is_dataset, profile, profile_records
from dflop.integrations.backbone import unwrapped
from dflop.integrations.loader import of_first_rank
from dflop.integrations.parameter_cost import cost_of_parameters
from dflop.integrations.row_ids import batches_of_ids, has_ids, held, lengths_of_ids, warn_of_changes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from dflop.integrations.parameter_cost import ParameterCost

# Encoder and LLM tokens of each sequence of a row; whether they stand in one, or are padded to the longest.
_Row = tuple["Sequence[tuple[float, int]]", bool]
_HINT = "give `costs`: a pair (encoder, LLM) of each row, or the path of a profile by `dflop profile data`"
_WHEN_LOADED = (
    "; or `balance(trainer, when_loaded=True)`, of `python -m dflop.integrations.script` `--when-loaded`, "
    "which counts samples when they have been read"
)
_MEDIA = ("image", "video", "audio")
# Fields that say how many encoder tokens become one feature, and the power of it that they do.
_FIELDS = (
    ("spatial_merge_size", 2),
    ("merge_size", 2),
    ("merge_kernel_size", 1),
    ("hidden_stride", 2),
    ("pooling_kernel_size", 2),
    ("scale_factor", 2),
    ("downsample_factor", 2),
    ("downsample_ratio", -2),
)
# Of sounds.
_FIELDS_OF_SOUNDS = (("downsample_rate", 1), ("downsample_factor", 1), ("audio_merge_size", 1))
# The same of families that have it in their code: pooled frames, and halved or folded mel frames.
_MERGED_BY = {
    **dict.fromkeys((("deepseek_vl", "image"), ("janus", "image"), ("vipllava", "image")), 1.0),
    ("llava_next_video", "image"): 1.0,
    ("llava_next_video", "video"): 4.0,
    ("video_llama_3", "image"): 1.0,
    ("video_llama_3", "video"): 4.0,
    # A projector of two convolutions that halve height and width.
    **dict.fromkeys((("got_ocr2", "image"), ("pp_chart2table", "image"), ("step3p7", "image")), 16.0),
    # Frames of videos have the same token: 9 patches are pooled there.
    ("molmo2", "image"): 4.0,
    ("phi4_multimodal", "image"): 4.0,
    ("phi4_multimodal", "audio"): 1.0,
    # Patches are merged before the model sees them, and there is no encoder.
    **{("gemma4_unified", kind): 1.0 for kind in ("image", "video", "audio")},
    ("glmasr", "audio"): 4.0,
    **dict.fromkeys((("qwen3_asr", "audio"), ("fun_asr_nano", "audio")), 1.0),
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
_PARTS = ("vision_config", "audio_config", "encoder_config", "vq_config")
"""Parts of a configuration that are of an encoder."""
MEDIA_COLUMNS = {"image", "images", "video", "videos", "audio", "audios"}
_TENSORS = ("pixel_values", "input_features")
"""What columns of encoded media begin with."""
_LENGTHS = ("lengths", "length")
_ANSWERS = ("chosen", "rejected")
"""Columns of TRL's preference datasets."""


def costs_of_rows(
    rows: Any,
    model: nn.Module,
    processor: Any = None,
    model_dir: str | os.PathLike[str] | None = None,
    *,
    media_root: str | os.PathLike[str] | None = None,
    max_length: int | None = None,
) -> Costs:
    """Costs of the rows of a dataset, by the parameters of the model that trains on them.

    Call it on every rank: rank 0 counts, the others take its numbers. Frozen parts cost what they cost, so
    freeze before. Where rows have `input_ids`, their media tokens say what the encoder reads: a feature is
    taken for as many encoder tokens as the configuration merges into it, and encoder tokens behind no feature
    (padding of tiles, a thumbnail that is cut) are not counted. Other rows are profiled as `dflop profile
    data` does it. A row with the answers `chosen` and `rejected` costs what both cost, each with the prompt
    and its media, as TRL's `DPOTrainer` and `RewardTrainer` compute them.

    Args:
        rows: a `datasets.Dataset`; a list of dictionaries with `input_ids`; or a list of records of chats as
            a line of JSONL has them, where a list in place of a record is one sample of several; or a
            `Subset` or `ConcatDataset` of such. Of a dataset
            that keeps its records in `list_data_dict`, as the training scripts of Qwen-VL and LLaVA do, those
            are read. Of a model of text alone a column `length` or `lengths` is enough.
        model: of transformers, with or without adapters of peft, not sharded yet.
        processor: of transformers; needed where rows have no `input_ids`, unless `model_dir` has it.
        model_dir: the directory of the model, instead of `processor`.
        media_root: where relative paths of media start, in records of chats: by default at their `data_path`
            (Qwen-VL), at `data_args.image_folder` of the dataset (LLaVA), or at the working directory.
        max_length: tokens of a sample, or of an answer with its prompt, beyond which the collation cuts.

    Returns:
        One cost a row, in floating point operations, with the rows' tokens. A pair has those of its longer
        answer twice, as both are padded to it.

    Raises:
        ValueError: rows of another form, rows of chats that change when they are read, or a model whose
            parameters cannot be counted; on the other ranks, where rank 0 could not count.
        ProfileError: rows that `dflop profile data` refuses, or bad ones among them.
    """
    return _costs_of(lambda: _sequences(rows, model, processor, model_dir, media_root), model, max_length)


def costs_of_answers(
    chosen: Any,
    rejected: Any,
    model: nn.Module,
    processor: Any = None,
    model_dir: str | os.PathLike[str] | None = None,
) -> Costs:
    """Costs of pairs whose answers stand in two sets of rows; see `costs_of_rows`.

    Args:
        chosen: rows with the one answer of each pair.
        rejected: the same with the other answer, in the same order.
        model: as there.
        processor: as there.
        model_dir: as there.

    Returns:
        One cost a pair.
    """

    def both() -> Iterator[_Row]:
        rows = [_sequences(answers, model, processor, model_dir, None) for answers in (chosen, rejected)]
        for (one, _), (other, _) in zip(*rows, strict=True):
            yield [*one, *other], False

    return _costs_of(both, model, None)


def _costs_of(read: Callable[[], Iterator[_Row]], model: nn.Module, max_length: int | None) -> Costs:
    """Costs of rows that rank 0 reads."""

    def count() -> tuple[list[tuple[float, float]], list[int]]:
        by_parameters = cost_of_parameters(model)
        kept = float("inf") if max_length is None else max_length
        pairs, tokens = [], []
        for parts, is_joined in read():
            both = [by_parameters((encoder, min(llm, kept))) for encoder, llm in parts]
            pairs.append((sum(encoder for encoder, _ in both), sum(llm for _, llm in both)))
            lengths = [min(llm, kept) for _, llm in parts]
            tokens.append(int(sum(lengths) if is_joined else len(parts) * max(lengths)))
        return pairs, tokens

    pairs, tokens = of_first_rank(count, "count what the rows cost")
    return costs(pairs, tokens=tokens)


def _sequences(
    rows: Any,
    model: nn.Module,
    processor: Any,
    model_dir: str | os.PathLike[str] | None,
    media_root: str | os.PathLike[str] | None,
) -> Iterator[_Row]:
    """Each row, from one of the forms that the module names."""
    of_rows = held(rows)
    if has_ids(of_rows):
        yield from (([shape], True) for shape in _of_ids(of_rows, model))
        return
    if is_dataset(of_rows):
        if names := _ids_of_answers(of_rows):
            yield from ((pair, False) for pair in _pairs_of_ids(of_rows, model, names))
            return
        if lengths := _lengths(of_rows, model):
            yield from (([(0.0, length)], True) for length in lengths)
            return
        if changes_rows(of_rows):
            message = (
                "`train_dataset` changes its rows when they are read (`with_transform`), so those that are "
                f"stored say nothing of their size, {_HINT}{_WHEN_LOADED}"
            )
            raise ValueError(message)
    elif not _are_records(of_rows):
        message = (
            f"`train_dataset` is a `{type(rows).__name__}` whose rows say nothing of their size, {_HINT}"
            f"{_WHEN_LOADED}"
        )
        raise ValueError(message)
    with TemporaryDirectory(prefix="dflop-") as folder:
        # The trainer of Qwen-VL's script has a tokenizer alone, its dataset the processor.
        holder = processor if _is_processor(processor) else getattr(rows, "processor", processor)
        directory = _directory(model, holder, Path(folder)) if model_dir is None else Path(model_dir)
        if is_dataset(of_rows):
            root = _media_root(rows, media_root)
            answers = [_profiled(of_rows, directory, root, columns) for columns in _columns(of_rows)]
            yield from ((shapes, len(answers) == 1) for shapes in zip(*answers, strict=True))
            return
        counts = [len(row) if isinstance(row, list) else 1 for row in of_rows]
        found = iter(_profiled(_flat(of_rows), directory, _media_root(rows, media_root)))
        yield from (([next(found) for _ in range(count)], True) for count in counts)


def _are_records(rows: Any) -> bool:
    """Whether these are records of chats, or lists of some."""
    is_list = isinstance(rows, (list, tuple)) and len(rows) > 0
    return is_list and all(
        isinstance(one, dict) for row in rows for one in (row if isinstance(row, list) else [row])
    )


def _flat(rows: Any) -> list[dict[str, Any]]:
    """The records one behind the other, with media below their `data_path` as paths of the file system."""
    found = []
    for row in rows:
        for record in row if isinstance(row, list) else [row]:
            kept = {name: value for name, value in record.items() if name != "data_path"}
            if root := record.get("data_path"):
                for name in MEDIA_COLUMNS & kept.keys():
                    media = kept[name]
                    is_one = isinstance(media, str)
                    below = [_below(str(root), one) for one in ([media] if is_one else media or ())]
                    kept[name] = below[0] if is_one else below
            found.append(kept)
    return found


def _below(root: str, medium: Any) -> Any:
    is_path = isinstance(medium, str) and "://" not in medium and not medium.startswith("data:")
    return str(Path(root).absolute() / medium) if is_path else medium


def _media_root(rows: Any, given: str | os.PathLike[str] | None) -> Path:
    """Where relative paths start."""
    folder = getattr(getattr(rows, "data_args", None), "image_folder", None)
    return Path(given or folder or Path.cwd()).absolute()


def _lengths(rows: Any, model: nn.Module) -> list[int]:
    """Of text alone a length says all, as ms-swift and `group_by_length` of transformers have it."""
    config = unwrapped(model).config
    if not _merged(config) and _why_unknown(config) is None:
        for name in _LENGTHS:
            if name in rows.column_names:
                warn_of_changes(rows, name)
                stored = rows.select_columns([name]).with_format(None)[name]
                return [max(n) if isinstance(n, list) else int(n) for n in stored]
    return []


def _columns(rows: Any) -> list[dict[str, str]]:
    """How `dflop profile data` is to read the rows: once, or once for each answer of a pair."""
    if not all(name in rows.column_names for name in _ANSWERS):
        return [{}]
    # Without a prompt each answer is a whole chat, or a whole text.
    is_chat = "prompt" not in rows.column_names
    name = "messages" if is_chat else "completion"
    return [{name: answer} for answer in _ANSWERS]


def _profiled(
    rows: Any, model_dir: Path, media_root: Path, columns: dict[str, str] | None = None
) -> list[tuple[float, int]]:
    """Encoder tokens and LLM tokens of each row, by `dflop profile data`."""
    with TemporaryDirectory(prefix="dflop-") as folder:
        if is_dataset(rows):
            ignore = _ANSWERS if columns else ()
            path, notices, order = profile(
                rows, model_dir, Path(folder), media_root=media_root, columns=columns, ignore=ignore
            )
        else:
            path, notices, order = profile_records(rows, model_dir, Path(folder), media_root)
        for notice in notices:
            warnings.warn(notice, stacklevel=8)
        found, num_bad = profile_shapes(str(path))
    if num_bad:
        message = f"{num_bad} of {len(found) + num_bad} rows are bad, and the trainer reads all"
        raise ValueError(message)
    shapes = [(float(encoder), llm) for _, encoder, llm in found]
    return shapes if order is None else [shapes[index] for index in order]


def _ids_of_answers(rows: Any) -> list[str]:
    """The columns of both answers' tokens, as TRL or LLaMA-Factory names them."""
    for ending in ("ids", "input_ids"):
        names = [f"{answer}_{ending}" for answer in _ANSWERS]
        if all(name in rows.column_names for name in names):
            return names
    return []


def _pairs_of_ids(rows: Any, model: nn.Module, names: list[str]) -> Iterator[Sequence[tuple[float, int]]]:
    """Both answers, with the prompt where that stands apart (TRL's `DPOTrainer`, of text alone)."""
    has_prompt = "prompt_ids" in rows.column_names
    prompts = lengths_of_ids(rows, "prompt_ids") if has_prompt else [0] * len(rows)
    answers = [_of_ids(rows, model, name) for name in names]
    for prompt, *pair in zip(prompts, *answers, strict=True):
        yield [(encoder, prompt + length) for encoder, length in pair]


def _of_ids(rows: Any, model: nn.Module, name: str = "input_ids") -> list[tuple[float, int]]:
    merged = media_tokens(model, cost_of_parameters(model))
    shapes, num_media = [], 0
    for tokens, found in batches_of_ids(rows, name):
        ends = np.cumsum(found)
        encoder = np.zeros(len(found))
        for token, count in merged.items():
            before = np.concatenate([[0], np.cumsum(tokens == token)])
            encoder += count * (before[ends] - before[ends - found])
            num_media += int(before[-1])
        shapes += zip(encoder.tolist(), found.tolist(), strict=True)
    num_pictures = _num_pictures(rows)
    check_expanded(num_media, num_pictures)
    columns = rows.column_names if is_dataset(rows) else rows[0] if len(rows) else ()
    has_tensors = any(column.startswith(_TENSORS) for column in columns)
    if (num_pictures or has_tensors) and (why := _why_unknown(unwrapped(model).config)):
        message = f"{why}: nobody knows what the encoder reads of a row with media, {_HINT}"
        raise ValueError(message)
    return shapes


def check_expanded(num_tokens: int, num_media: int) -> None:
    """Refuses rows with one token a medium, which the collation multiplies.

    Args:
        num_tokens: that stand for media.
        num_media: beside them.

    Raises:
        ValueError: they are such rows.
    """
    if 0 < num_tokens <= num_media:
        message = (
            f"the rows have {num_media} media and {num_tokens} tokens for them: the collation makes more "
            f"of these, and nobody knows how many, {_HINT}"
        )
        raise ValueError(message)


def _num_pictures(rows: Any) -> int:
    """Media in columns beside the tokens."""
    names = [name for name in sorted(MEDIA_COLUMNS) if is_dataset(rows) and name in rows.column_names]
    if not names:
        return 0
    total = 0
    for batch in rows.select_columns(names).with_format("arrow").iter(1_000):
        for name in names:
            column = batch.column(name).combine_chunks()
            is_list = hasattr(column, "value_lengths")
            total += len(column.flatten()) if is_list else len(column) - column.null_count
    return total


def media_tokens(model: nn.Module, cost: ParameterCost) -> dict[int, float]:
    """Encoder tokens behind each LLM token that stands for a medium.

    Args:
        model: of transformers.
        cost: of its parameters.

    Returns:
        By the id of the LLM token. Of sounds with an encoder of their own: as many tokens of the encoder of
        pictures as cost the same. Empty for a model of text alone, and where the configuration names none.
    """
    config = unwrapped(model).config
    merged = _merged(config)
    if cost.sound_token is not None:
        for token in merged.keys() & ids_of_media(config, "audio"):
            merged[token] *= cost.sound_token / cost.encoder_token
    return merged


def warn_of_unknown(model: nn.Module) -> None:
    """Says of a model whose media no token stands for that the LLM's work alone is balanced.

    Args:
        model: of transformers.
    """
    config = unwrapped(model).config
    if not _merged(config) and (why := _why_unknown(config)):
        warnings.warn(f"{why}: what its encoder reads is not counted", stacklevel=3)


def _why_unknown(config: Any) -> str | None:
    """Why the tokens of a row do not say what the encoder reads of it; None: they do, or there is none."""
    if getattr(getattr(config, "text_config", None), "cross_attention_layers", None):
        return "layers of the LLM attend to the encoder (`cross_attention_layers`)"
    parts = [name for name in _PARTS if getattr(config, name, None) is not None]
    if not parts or any(ids_of_media(config, kind) for kind in _MEDIA):
        return None
    return f"the model has a `{parts[0]}`, and its configuration has no `image_token_id` or the like"


def _merged(config: Any) -> dict[int, float]:
    """Encoder tokens behind one token of each medium, by the id of that token."""
    found: dict[int, float] = {}
    for kind in _MEDIA:
        for token in ids_of_media(config, kind):
            # Of media that share a token, the first kind counts.
            if token not in found:
                found[token] = _merged_of(config, kind)
    return found


def ids_of_media(config: Any, kind: str) -> list[int]:
    """Ids of the token that stands for a feature of an `image`, a `video` or an `audio`."""
    # Of Phi-4-multimodal the parts say it.
    part = getattr(config, "audio_config" if kind == "audio" else "vision_config", None)
    names = [f"{kind}_token_{field}" for field in ("id", "index")]
    found = [getattr(place, name, None) for place in (config, part) for name in names]
    return [token for token in found if isinstance(token, int)]


def _merged_of(config: Any, kind: str) -> float:
    """Encoder tokens that become one feature, by the fields in which families say so."""
    family = str(config.model_type).removesuffix("_thinker")
    if (family, kind) in _MERGED_BY:
        return _MERGED_BY[family, kind]
    is_sound = kind == "audio"
    mode = getattr(config, "downsample_mode", None)
    if not is_sound and isinstance(mode, str) and mode[:-1].isdigit():
        return float(mode[:-1])
    part = getattr(config, "audio_config" if is_sound else "vision_config", None)
    for place in (config, part):
        for name, power in _FIELDS_OF_SOUNDS if is_sound else _FIELDS:
            value = getattr(place, name, None)
            if isinstance(value, (list, tuple)):
                value = math.prod(value)
            if isinstance(value, (int, float)) and value > 0:
                return float(value**power)
    if not is_sound and part is not None and (features := getattr(config, "mm_tokens_per_image", None)):
        return float((part.image_size // part.patch_size) ** 2 / features)
    warnings.warn(
        f"`{family}` has no field that dflop knows of how many encoder tokens become a feature of its "
        f"{kind}s: one is taken; better costs are those of a data profile (`dflop profile data`)",
        stacklevel=2,
    )
    return 1.0


def _is_processor(processor: Any) -> bool:
    """Whether it reads media too, not texts alone."""
    return hasattr(processor, "image_processor") or hasattr(processor, "feature_extractor")


def _directory(model: nn.Module, processor: Any, folder: Path) -> Path:
    """A directory of the model as it trains: its configuration, and the processor that reads the samples."""
    config = unwrapped(model).config
    if not _is_processor(processor):
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
