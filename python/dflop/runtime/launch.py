"""Starts the ranks of one machine, or becomes one where torchrun has started this process."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop.child import end_with_torchrun, run_child
from dflop.models import FAMILIES
from dflop.models.errors import hinted, profile_error
from dflop.models.rules import check_rules, dropout_rules, read_family, trained_part
from dflop.models.weight_files import check_has_weights
from dflop.runtime.directory import alone_in, not_writable
from dflop.runtime.progress import say

if TYPE_CHECKING:
    from collections.abc import Mapping


def launch(request: Mapping[str, Any]) -> int:
    """Trains as `request` says.

    Under torchrun (RANK is set) this process is that rank, and ends when torchrun's agent is killed.
    Otherwise torchrun is started on this machine, with one process a rank of the plan; Ctrl-C is passed on,
    and the ranks finish their step.

    Args:
        request: As the command line makes it; see `Options` of `runtime/options.py`.

    Returns:
        The exit status: 0 done, 1 a rank failed, 2 this machine has no GPU for each rank, 130 interrupted.

    Raises:
        Error: The model cannot be trained: its family, dropout in its configuration, no weights to start
            from. Or RANK is set, and another variable of torchrun is missing, or no number.
        OSError: The output directory cannot be written, or another command trains there.
    """
    if "RANK" in os.environ:
        from dflop.runtime.worker import run

        end_with_torchrun()
        _check_environment(os.environ)
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
    with alone_in(Path(request["out"])) as lock:
        return _started(request, verb, lock)


_HINT = "let `torchrun` start the ranks; without RANK in the environment this command starts them itself"


def _check_environment(environment: Mapping[str, str]) -> None:
    """Raises if a variable by which ranks find each other is missing, or is no number where it must be."""
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            message = f"RANK is set to `{environment['RANK']}`, and {name} is not: a rank needs both"
            raise hinted(profile_error(message), _HINT)
    num_ranks = _number(environment, "WORLD_SIZE", range(1, 1 << 31))
    _number(environment, "RANK", range(num_ranks))
    _number(environment, "MASTER_PORT", range(1, 1 << 16))


def _number(environment: Mapping[str, str], name: str, values: range) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()) or int(text) not in values:
        message = f"{name} is `{text}`, must be an integer from {values.start} to {values.stop - 1}"
        raise hinted(profile_error(message), _HINT)
    return int(text)


def _started(request: Mapping[str, Any], verb: str, lock: int) -> int:
    """The exit status of torchrun, which is started here with one process a rank, and shares the lock."""
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
        what = "torchrun's agent, which starts the ranks,"
        status, caught = run_child(command, environment, what, handles=[lock])
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
        raise not_writable(out, error) from error
    return path
