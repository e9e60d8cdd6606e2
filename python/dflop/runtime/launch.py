"""Starts the ranks of one machine, or becomes one where torchrun has started this process."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop.child import run_child
from dflop.models import FAMILIES
from dflop.models.errors import hinted, profile_error
from dflop.models.rules import check_rules, dropout_rules, read_family, trained_part
from dflop.models.weight_files import check_has_weights
from dflop.runtime.progress import say

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def launch(request: Mapping[str, Any]) -> int:
    """Trains as `request` says.

    Under torchrun (RANK and WORLD_SIZE are set) this process is that rank. Otherwise torchrun is started on
    this machine, with one process a rank of the plan; Ctrl-C is passed on, and the ranks finish their step.

    Args:
        request: As the command line makes it; see `Options` of `runtime/options.py`.

    Returns:
        The exit status: 0 done, 1 a rank failed, 2 this machine has no GPU for each rank, 130 interrupted.

    Raises:
        Error: The model cannot be trained: its family, dropout in its configuration, no weights to start
            from.
        OSError: The output directory cannot be written.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from dflop.runtime.worker import run

        # The allocator of a GPU is set by each rank itself (`device.py`).
        names = [n for n in request["environment"] if n != "PYTORCH_ALLOC_CONF"]
        missing = [n for n in names if n not in os.environ]
        if missing and os.environ["RANK"] == "0":
            names = ", ".join(missing)
            print(f"warning: the profile was measured with {names} set: times may differ", file=sys.stderr)
        return run(request)
    verb = "rehearse" if "rehearsal" in request else "train"
    if verb == "train":
        _check_family(request)
        _check_own_shapes(request)
    with _alone_in(Path(request["out"])):
        return _started(request, verb)


def _started(request: Mapping[str, Any], verb: str) -> int:
    """The exit status of torchrun, which is started here with one process a rank."""
    path = _written(request)
    command = [
        sys.executable, "-m", "dflop.runtime.agent",
        "--standalone", "--local-addr", "127.0.0.1", "--nnodes", "1",
        "--nproc-per-node", str(request["num_ranks"]),
        "-m", "dflop.runtime.worker", str(path),
    ]  # fmt: skip
    # Variables that the user has set win over those of the profile.
    environment = {**request["environment"], **os.environ}
    say(f"starting {request['num_ranks']} rank{'' if request['num_ranks'] == 1 else 's'}", verb)
    try:
        status, caught = run_child(command, environment, "torchrun's agent, which starts the ranks,")
        has_begun = not path.exists()
    finally:
        # The file is still there only if no step has ended: removing it leaves an earlier run as it was.
        path.unlink(missing_ok=True)
    if caught is None:
        return 1 if status < 0 else status
    if not has_begun:
        print("interrupted before the first step; nothing is written", file=sys.stderr)
    return 128 + caught


def _check_family(request: Mapping[str, Any]) -> None:
    """Raises before any rank starts if the model cannot be trained; notes an estimated model profile."""
    config = request["config"]
    model_dir = Path(config["model"]["dir"])
    try:
        read_family(model_dir, FAMILIES)
    except ValueError as error:
        hint = "other families can be profiled, planned and simulated; set `model.dir` to one that trains"
        raise hinted(error, hint) from None
    path = model_dir / "config.json"
    content, prefix = trained_part(json.loads(path.read_bytes()))
    check_rules(path, dropout_rules(content), prefix)
    if config["train"]["recipe"] == "lora" and find_spec("peft") is None:
        message = "`train.recipe` is `lora`, which needs `peft`: it is not installed"
        raise hinted(profile_error(message), "pip install 'dflop[lora]'")
    if config["train"]["init"] == "pretrained":
        check_has_weights(model_dir)
    profile = json.loads(Path(request["model_profile"]).read_bytes())
    if profile.get("is_estimated"):
        print(
            "note: the model profile is estimated: steps will take other times than predicted",
            file=sys.stderr,
        )


def _check_own_shapes(request: Mapping[str, Any]) -> None:
    """Raises before any rank starts if `model.family` gives other shapes than the family that trains.

    The first sample of each kind is decoded: a function of Python that is wrong about one kind is wrong about
    its first sample. What it is wrong about later is found by the rank that decodes it.
    """
    name = request["config"]["model"]["family"]
    if name is None:
        return
    from dflop._native import Dataset, ProfileError
    from dflop.data.loader import SampleLoader
    from dflop.models import load_adapter

    model_dir = Path(request["config"]["model"]["dir"])
    dataset = Dataset(str(request["config_path"]), str(request["data_profile"]))
    first: dict[str, int] = {}
    for index in range(len(dataset)):
        first.setdefault(dataset.kind(index), index)
    loader = SampleLoader(dataset, load_adapter(model_dir), cache_bytes=0, num_threads=1)
    try:
        for index in sorted(first.values()):
            loader.tiles(index)
    except ProfileError as error:
        # A file that cannot be read is a bad sample, which the ranks treat as the configuration says.
        if "profiled as" not in str(error):
            return
        family = read_family(model_dir, FAMILIES)
        message = f"`model.family` is `{name}`, but `model_type` is `{family}`, which is what trains: {error}"
        hint = f"leave out `model.family` and run `dflop profile data` again: dflop knows `{family}`"
        raise hinted(profile_error(message), hint) from error
    finally:
        loader.close()


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Makes the output directory, and keeps other commands from training in it until this one ends.

    The lock is one of the operating system. It is released when this process ends, however it ends, and
    leaves no file. On a file system without locks nothing is locked.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _not_writable(out, error) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        message = f"`{out}`: another command is training there, only one may"
        hint = "wait until it has ended, or choose another directory with `--out`"
        raise hinted(OSError(message), hint) from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(held)


def _not_writable(out: Path, error: OSError) -> OSError:
    # Where a file of that name is in the way, mkdir only says that it exists.
    cause = "it is no directory" if out.exists() and not out.is_dir() else str(error.strerror).lower()
    message = f"`{out}`: {cause}, the run must be written there"
    return hinted(OSError(message), "choose another directory with `--out`")


def _written(request: Mapping[str, Any]) -> Path:
    """Writes the request to a file in the output directory, and gives its path.

    When the first step has ended, this file replaces the `request.json` of an earlier run.
    """
    out = Path(request["out"])
    path = out / "request.new.json"
    try:
        text = json.dumps({**request, "request_path": str(path)}, indent=1)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _not_writable(out, error) from error
    return path
