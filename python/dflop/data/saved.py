"""A `datasets.Dataset` is profiled as `dflop profile data` does it: saved into a folder, measured there.

dataset -> folder/data, folder/dflop.yaml -> folder/data_profile.parquet, and what the verb noticed
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop._native import ProfileError, families
from dflop.data.family import PROCESSOR

if TYPE_CHECKING:
    import os

_BAD = (
    "leave them out of the dataset (`dataset.select`), or save it and give the path of a profile that "
    "`dflop profile data` makes of it with `data.on_bad_sample`"
)


def is_dataset(source: Any) -> bool:
    """Whether it is a `datasets.Dataset`, or several of them by split, without importing `datasets`.

    Args:
        source: Anything.

    Returns:
        Whether it can be saved, and so profiled. A stream cannot.
    """
    return hasattr(source, "save_to_disk") and hasattr(source, "column_names")


def profile(dataset: Any, model_dir: str | os.PathLike[str] | None, folder: Path) -> tuple[Path, list[str]]:
    """Makes the data profile, by the command line's own verb.

    Args:
        dataset: What `is_dataset` knows.
        model_dir: The directory of the model, whose processor decides the sizes.
        folder: An empty one, for the copy and the profile.

    Returns:
        The profile's path, and notices, for example of fields that are not read.

    Raises:
        ValueError: No directory, several splits, or no samples.
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
    data = folder / "data"
    dataset.save_to_disk(data)
    directory = Path(model_dir).resolve()
    model = {"dir": str(directory)}
    if _has_no_rule(directory):
        # Its own processor is asked.
        model["family"] = PROCESSOR
    config = {"model": model, "data": {"mixture": str(data)}}
    (folder / "dflop.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "dflop", "profile", "data", "--config", str(folder / "dflop.yaml")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise _refusal(done.stderr.strip(), data)
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    # The source is called by its folder's name.
    told = [line.replace(f"`{data.name}`, ", "the dataset, ", 1) for line in lines]
    notices = [line.removeprefix("notice: ") for line in told if line.startswith("notice: ")]
    return folder / "data_profile.parquet", notices


def _refusal(told: str, data: Path) -> ProfileError:
    """What the verb says, without a file that is gone by then and a configuration that nobody has."""
    told, _, hint = told.replace(f"`{data}`", "the dataset").partition("\n\nhint: ")
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
