"""A `datasets.Dataset` is profiled as `dflop profile data` does it: where its files lie, or from a copy.

dataset -> folder/data, folder/dflop.yaml -> folder/data_profile.parquet, what the verb noticed, and the rows
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from dflop._native import ProfileError, families
from dflop.data.family import PROCESSOR

if TYPE_CHECKING:
    import os

_BAD = (
    "leave them out of the dataset (`dataset.select`), or save it and give the path of a profile that "
    "`dflop profile data` makes of it with `data.on_bad_sample`"
)

_MANY = 10_000
"""Rows that take long enough for a word before."""


def is_dataset(source: Any) -> bool:
    """Whether it is a `datasets.Dataset`, or several of them by split, without importing `datasets`.

    Args:
        source: Anything.

    Returns:
        Whether it can be saved, and so profiled. A stream cannot.
    """
    return hasattr(source, "save_to_disk") and hasattr(source, "column_names")


def changes_rows(dataset: Any) -> bool:
    """Whether a function changes the rows when they are read (`set_transform`, `with_transform`).

    Args:
        dataset: What `is_dataset` knows.

    Returns:
        Whether its rows are others than those that are stored, or may be.
    """
    parts = list(dataset.values()) if hasattr(dataset, "values") else [dataset]
    return any(part.format["type"] == "custom" for part in parts)


def profile(
    dataset: Any,
    model_dir: str | os.PathLike[str] | None,
    folder: Path,
    *,
    media_root: Path | None = None,
    columns: dict[str, str] | None = None,
    ignore: tuple[str, ...] = (),
) -> tuple[Path, list[str], list[int] | None]:
    """Makes the data profile, by the command line's own verb.

    A dataset whose rows lie in files, as `load_dataset` caches them, is read there; others are copied.

    Args:
        dataset: What `is_dataset` knows.
        model_dir: The directory of the model, whose processor decides the sizes.
        folder: An empty one, for the copy and the profile.
        media_root: Where relative paths of media start; None: the working directory, as of `datasets`.
        columns: `data.columns` of the configuration.
        ignore: With `columns`: those that are not read without a word, but for columns that it names.

    Returns:
        The profile's path; notices, for example of fields that are not read; and the row of the profile that
        each row of the dataset is (None: the same one).

    Raises:
        ValueError: No directory, several splits, no samples, or rows that change when they are read.
        ProfileError: What the verb refuses; the hint is a note.
    """
    if model_dir is None:
        message = "`model_dir` is None, must be the directory of a model, whose processor decides the sizes"
        raise ValueError(message)
    splits: dict[str, Any] = dataset if hasattr(dataset, "keys") else {"": dataset}
    if len(splits) > 1:
        names = ", ".join(f"`{name}`" for name in splits)
        message = f"the dataset has {len(splits)} splits, one is needed: {names}"
        raise ValueError(message)
    if not any(map(len, splits.values())):
        message = "there are no samples"
        raise ValueError(message)
    if changes_rows(dataset):
        message = (
            "the dataset changes its rows when they are read (`with_transform`), and they are measured as "
            "they are stored: give the dataset without that (`with_format(None)`) if sizes stay what they "
            "are, or costs of each row"
        )
        raise ValueError(message)
    data = folder / "data"
    config = _config(model_dir, data, media_root or Path.cwd(), columns or {}, ignore)
    (whole,) = splits.values()
    if len(whole) >= _MANY:
        # What the verb itself says of its progress is kept for an error.
        sys.stderr.write(f"dflop: measuring {len(whole):,} rows of the dataset\n")
        sys.stderr.flush()
    if not _is_linked(whole, data):
        whole.save_to_disk(data)
        return (*_profiled(data, config, folder), None)
    # Which rows of its files are its rows, after a shuffle or a filter.
    indices = getattr(whole, "_indices", None)
    order = None if indices is None else indices.column(0).to_pylist()
    try:
        return (*_profiled(data, config, folder), order)
    except ProfileError:
        if order is None:
            raise
    # What is wrong may be a row that the dataset leaves out, and the error is to count its own rows.
    rmtree(data)
    whole.save_to_disk(data)
    return (*_profiled(data, config, folder), None)


def profile_records(
    records: list[dict[str, Any]], model_dir: str | os.PathLike[str], folder: Path, media_root: Path
) -> tuple[Path, list[str], None]:
    """Makes the data profile of records as a line of JSONL has them, by the command line's own verb.

    Args:
        records: At least one; media are paths or URLs.
        model_dir: The directory of the model, whose processor decides the sizes.
        folder: An empty one, for the lines and the profile.
        media_root: Where relative paths of media start.

    Returns:
        As `profile` does it.

    Raises:
        ValueError: A record that JSON cannot say.
        ProfileError: What the verb refuses; the hint is a note.
    """
    data = folder / "data.jsonl"
    try:
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
    except TypeError as error:
        message = f"the records hold what is no JSON ({error}): media must be paths or URLs"
        raise ValueError(message) from error
    return (*_profiled(data, _config(model_dir, data, media_root), folder), None)


def _is_linked(dataset: Any, data: Path) -> bool:
    """Makes `data` a saved dataset of links to the files that hold all of its rows; False: none do."""
    from datasets.table import list_table_cache_files

    files = list(map(Path, list_table_cache_files(dataset.data)))
    if not files or not _is_whole(dataset.data, files):
        return False
    data.mkdir()
    names = [f"{index}.arrow" for index in range(len(files))]
    for name, file in zip(names, files, strict=True):
        (data / name).symlink_to(file.resolve())
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (data / "state.json").write_text(json.dumps(state))
    return True


def _is_whole(table: Any, files: list[Path]) -> bool:
    """Whether the table is these files, one behind the other: columns, chunks and first rows of chunks."""
    import pyarrow as pa

    start, lengths = 0, [len(chunk) for chunk in table.column(0).chunks] if table.num_columns else []
    found = []
    for file in files:
        try:
            source = pa.memory_map(str(file))
            with pa.ipc.open_stream(source) as batches:
                if not batches.schema.equals(table.schema):
                    return False
                for batch in batches:
                    first = pa.Table.from_batches([batch.slice(0, 1)])
                    if not table.table.slice(start, 1).equals(first):
                        return False
                    found.append(batch.num_rows)
                    start += batch.num_rows
        except (OSError, pa.ArrowInvalid):
            return False
    return found == lengths


def _config(
    model_dir: str | os.PathLike[str],
    data: Path,
    media_root: Path,
    columns: dict[str, str] | None = None,
    ignore: tuple[str, ...] = (),
) -> str:
    """The file by which the verb profiles."""
    directory = Path(model_dir).resolve()
    model = {"dir": str(directory)}
    if _has_no_rule(directory):
        # Its own processor is asked.
        model["family"] = PROCESSOR
    mixture = data
    if columns:
        unread = [name for name in ignore if name not in columns.values()]
        source = {"path": str(data), "columns": columns, "ignore": unread}
        mixture = data.with_name("mixture.yaml")
        mixture.write_text(json.dumps({"datasets": [source]}))
    of_data = {"mixture": str(mixture), "media_root": str(media_root)}
    return json.dumps({"model": model, "data": of_data})


def _profiled(data: Path, config: str, folder: Path) -> tuple[Path, list[str]]:
    """The profile of what was saved in `data`, and notices."""
    (folder / "dflop.yaml").write_text(config)
    command = [sys.executable, "-m", "dflop", "profile", "data", "--config", str(folder / "dflop.yaml")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise _refusal(done.stderr.strip(), data)
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    # The source is called by its folder's name, or in a mixture by its path.
    named = [f"`{data.name}`, ", f"`{data}`, "]
    told = [
        line.replace(named[0], "the dataset, ", 1).replace(named[1], "the dataset, ", 1) for line in lines
    ]
    notices = [line.removeprefix("notice: ") for line in told if line.startswith("notice: ")]
    return folder / "data_profile.parquet", notices


def _refusal(told: str, data: Path) -> ProfileError:
    """What the verb says, without a file that is gone by then and a configuration that nobody has."""
    told = told.replace(f"`{data}`", "the dataset").replace(str(data), "the dataset")
    told, _, hint = told.partition("\n\nhint: ")
    lines = [line for line in told.splitlines() if not line.startswith("  all of them: ")]
    error = ProfileError("the dataset cannot be profiled: " + "\n".join(lines))
    if hint:
        note = _BAD if "data.on_bad_sample" in hint else hint.replace("`model.dir`", "`model_dir`")
        # Python 3.10 has no `add_note`, so the list of notes is set by its name.
        vars(error)["__notes__"] = [note]
    return error


def _has_no_rule(model_dir: Path) -> bool:
    """Whether dflop lacks a shape rule for the model; what cannot be read is reported later."""
    try:
        family = json.loads((model_dir / "config.json").read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return False
    return isinstance(family, str) and not families().get(family, {}).get("data", False)
