"""Where a run goes on: the checkpoint, what must be as it was then, and the journals cut back to it.

A checkpoint `step-N` was taken when N steps, 0 to N - 1, were trained. The journals then hold these N steps.
A run that is killed later has trained further steps, whose weights are lost. When the run goes on, the lines
of these steps are cut from the journals and moved to `*.undone.jsonl`. So the journals hold each step of the
trained trajectory once.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop.runtime.failure import RankError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MANIFEST = "checkpoint.json"
"""What a checkpoint says of itself; written last."""
VERSION = 1
"""Format version of checkpoints."""
RESTARTED = "DFLOP_RESTARTED"
"""Environment variable that is set for ranks that the agent has started again."""
_FIELDS = {"step": int, "place": dict, "made_from": dict, "guard": dict, "files": dict}
"""What a manifest must say, and as what."""
_STEP = re.compile(rb'\{"step": (\d+),')
"""How a line of a journal begins."""
_CHECKPOINT = re.compile(r"step-\d+(\.new|\.undone)?")
"""Names in `checkpoints`."""
_CURVES = re.compile(r"(blind|tokens|aware)(-ahead)?(-rehearsed)?")
"""Names in `tensorboard`: those of the arms."""
_KEPT = re.compile(r"(plan|model_profile)\.[0-9a-f]{12}\.json")
"""Copies of what steps were trained with, named by the plan's hash."""


@dataclass(frozen=True)
class Resume:
    """Where a run goes on."""

    step: int
    """Steps trained; the number of the next one."""
    path: Path | None
    """The checkpoint; none: from the beginning, since there is none yet."""
    manifest: Mapping[str, Any]
    """Content of its `checkpoint.json`."""

    def continues(self, out: Path) -> bool:
        """Whether the run in `out` itself goes on; false for a new run that begins from another's state."""
        return self.path is None or self.path.parent.parent == out.absolute()

    def owes_evaluation(self, out: Path) -> bool:
        """Whether a signal cut off the evaluation of the last step.

        Args:
            out: Directory of this run, which may have made up for it since.

        Returns:
            Whether the run must begin with it.
        """
        if not self.manifest.get("evaluation_due", False) or not self.continues(out):
            return False
        path = out / "evaluations.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return not any((found := _STEP.match(line)) and int(found[1]) == self.step - 1 for line in lines)


def request_of(path: Path) -> dict[str, Any]:
    """What a rank that was started by `path` is asked to do.

    Args:
        path: The request. When the first step has ended, it is renamed to `request.json` beside it.

    Returns:
        The request. For ranks that the agent has started again, it says to go on where the run is.

    Raises:
        OSError: It cannot be read.
    """
    begun = path.with_name("request.json")
    if RESTARTED not in os.environ or path.exists():
        return json.loads(path.read_bytes())
    request = json.loads(begun.read_bytes())
    # A run that began from another run's checkpoint begins there again, until it has a checkpoint itself.
    if request.get("resume") is None or checkpoints(Path(request["out"])):
        request["resume"] = "auto"
    # The file has its final name already.
    request["request_path"] = str(begun)
    return request


def was_started_again() -> bool:
    """Whether these ranks were started again, by dflop's agent or by that of an external torchrun."""
    return RESTARTED in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def step_dir(out: Path, step: int) -> Path:
    """The checkpoint of a run after `step` steps."""
    return out / "checkpoints" / f"step-{step}"


def checkpoints(out: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run, by step; one that a kill left half written is not among them."""
    found = (out / "checkpoints").glob("step-*")
    named = [(name, path) for path in found if (name := path.name.removeprefix("step-")).isdecimal()]
    return sorted((int(name), path) for name, path in named)


def find(
    asked: str,
    out: Path,
    place: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    *,
    is_rehearsed: bool = False,
) -> Resume:
    """The checkpoint that `--resume` names, checked.

    Args:
        asked: `auto`, the directory of a checkpoint, or that of a run.
        out: Directory of this run.
        place: All that decides which samples each step has, as in the manifest of a checkpoint.
        model: What trains, as in `Options.model`; none: nothing does, as in a rehearsal.
        is_rehearsed: Whether a rehearsal asks, which does not go on from training, nor training from it.

    Returns:
        Where to go on; the beginning where `auto` finds no checkpoint.

    Raises:
        RankError: There is no checkpoint, it cannot be read, it is of a rehearsal where training asks (or the
            other way round), other samples would come next, or another model would be trained; on every rank
            alike.
    """
    path = Path(asked)
    if asked == "auto" or not (path / MANIFEST).exists():
        found = checkpoints(out if asked == "auto" else path)
        if not found and asked == "auto":
            # Steps of the one, without a checkpoint yet, would become undone steps of the other.
            _check_kind(f"`{out}` holds", _holds_rehearsal(out), is_rehearsed)
            return Resume(0, None, {})
        if not found:
            hint = "name a directory such as `run/checkpoints/step-100`, or pass `--resume auto`"
            message = f"no checkpoint at `{path}`"
            raise RankError(message, hint, is_of_all=True)
        path = found[-1][1]
    manifest = _manifest(path)
    # Earlier versions of dflop saved no checkpoints in rehearsals.
    _check_kind(f"`{path}` is of", bool(manifest.get("is_rehearsed", False)), is_rehearsed)
    for field, now in place.items():
        then = manifest["place"].get(field)
        if then != now:
            message = f"`{path}` has `{field}` {then}, this run has {now}: other samples would come next"
            hint = f"give `{field}` its value of then, or start a new run in another directory with `--out`"
            raise RankError(message, hint, is_of_all=True)
    if model is not None:
        _check_model(path, manifest.get("model", {}), model)
    return Resume(int(manifest["step"]), path.absolute(), manifest)


def _check_model(path: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises if a checkpoint lacks what is trained now, or has adapters that were scaled otherwise.

    Checkpoints of early versions do not say what was trained: the names of their tensors decide.
    """
    from dflop.models.recipes import goes_on

    anew = "write its weights with `dflop export` and begin a new run from them, as `model.dir`"
    recipe = then.get("recipe", now["recipe"])
    if not goes_on(recipe, now["recipe"]):
        message = (
            f"`{path}` was trained with `train.recipe: {recipe}`, this run has `{now['recipe']}`: "
            "it lacks part of what would be trained"
        )
        raise RankError(message, f"set `train.recipe: {recipe}`, or {anew}", is_of_all=True)
    for name in ("lora_rank", "lora_alpha") if recipe == now["recipe"] == "lora" else ():
        if then.get(name, now[name]) != now[name]:
            message = (
                f"`{path}` was trained with `train.{name}: {then[name]}`, this run has {now[name]}: "
                "its adapters would be those of another model"
            )
            raise RankError(message, f"set `train.{name}: {then[name]}`, or {anew}", is_of_all=True)


def _check_kind(which: str, found: bool | None, asked: bool) -> None:
    """Raises if steps of a rehearsal would follow on steps of training, or these on those."""
    if found is None or found == asked:
        return
    if asked:
        message = f"{which} training: a rehearsal cannot go on from it"
        hint = "name a checkpoint of `dflop rehearse`, or rehearse in another directory with `--out`"
    else:
        message = f"{which} a rehearsal, which has no weights: training cannot go on from it"
        hint = "name a checkpoint of `dflop train`, or train in another directory with `--out`"
    raise RankError(message, hint, is_of_all=True)


def _holds_rehearsal(out: Path) -> bool | None:
    """Whether the steps of a run are rehearsed; none where it has no step."""
    try:
        with (out / "metrics.jsonl").open(encoding="utf-8") as file:
            return bool(json.loads(file.readline()).get("is_rehearsed", False))
    except (FileNotFoundError, ValueError):
        return None


def hint_of_earlier(path: Path, step: int | None) -> str:
    """What to do where a checkpoint cannot be used.

    Args:
        path: Of the checkpoint.
        step: Its step; None: its manifest does not say it.

    Returns:
        The checkpoint before it to go on from, if the run has one.
    """
    if step is None:
        number = path.name.removeprefix("step-")
        step = int(number) if number.isdecimal() else None
    beside = checkpoints(path.absolute().parent.parent)
    earlier = [found for other, found in beside if step is None or other < step]
    if earlier:
        return f"go on from the checkpoint before it: `--resume {earlier[-1]}`"
    return "no checkpoint before it is left: train again with `--force`, or name another directory"


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        version = manifest["format_version"]
        if version != VERSION:
            message = f"`{path / MANIFEST}` has format version {version}, this dflop reads {VERSION}"
            raise RankError(message, is_of_all=True)
        for field, kind in _FIELDS.items():
            if not isinstance(manifest[field], kind):
                message = f"`{field}` is {manifest[field]!r}"
                raise TypeError(message)
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = f"`{error.args[0]}` is missing" if isinstance(error, KeyError) else str(error)
        message = f"cannot read `{path / MANIFEST}`, it is damaged: {cause}"
        raise RankError(message, hint_of_earlier(path, None), is_of_all=True) from error
    return manifest


def cut_back(out: Path, step: int, names: Sequence[str]) -> None:
    """Moves steps from `step` on out of a run's journals, and later checkpoints out of the way.

    If this is killed at any moment, it can be called again.

    Args:
        out: Directory of the run.
        step: The first step that will be trained again.
        names: Of the journals, without `.jsonl`.

    Raises:
        OSError: A file cannot be written.
    """
    # Checkpoints go first: otherwise a kill could leave journals that end before the newest checkpoint.
    for later, path in checkpoints(out):
        if later > step:
            undone = path.with_name(f"{path.name}.undone")
            shutil.rmtree(undone, ignore_errors=True)
            path.rename(undone)
    for half in (out / "checkpoints").glob("step-*.new"):
        if _CHECKPOINT.fullmatch(half.name):
            shutil.rmtree(half)
    for name in names:
        path = out / f"{name}.jsonl"
        if path.exists():
            _cut(path, out / f"{name}.undone.jsonl", step)


def clear(out: Path) -> list[Path]:
    """Removes checkpoints, curves and kept plans of an earlier run, and nothing of another name.

    Args:
        out: Directory of the run.

    Returns:
        What stays in the folders of checkpoints and curves: it is the user's.
    """
    stayed = []
    # TensorBoard draws all files of a folder: curves of an earlier run would mix with the new ones.
    for folder, of_dflop in (("checkpoints", _CHECKPOINT), ("tensorboard", _CURVES)):
        for path in sorted((out / folder).glob("*")):
            if of_dflop.fullmatch(path.name) is None or not path.is_dir():
                stayed.append(path)
            elif path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)
        # Not a folder, not there, or not empty.
        with suppress(OSError):
            (out / folder).rmdir()
    for path in out.glob("*.json"):
        if _KEPT.fullmatch(path.name):
            path.unlink()
    return stayed


def _cut(path: Path, undone: Path, step: int) -> None:
    """Moves the lines from `step` on, and a last line without an end, to another file."""
    with path.open("r+b") as file:
        keep = _end_of_steps_before(file.fileno(), step)
        file.seek(keep)
        rest = file.read()
        if not rest:
            return
        with undone.open("ab") as moved:
            moved.write(rest if rest.endswith(b"\n") else rest + b"\n")
            moved.flush()
            os.fsync(moved.fileno())
        file.truncate(keep)


def _end_of_steps_before(handle: int, step: int) -> int:
    """Bytes of a journal up to the end of the last line of a step before `step`; searched from the end."""
    if os.fstat(handle).st_size == 0:
        return 0
    with mmap.mmap(handle, 0, access=mmap.ACCESS_READ) as text:
        end = text.rfind(b"\n") + 1
        while end > 0:
            start = text.rfind(b"\n", 0, end - 1) + 1
            found = _STEP.match(text[start : min(end, start + 64)])
            if found is not None and int(found[1]) < step:
                break
            end = start
        return end
