"""Checkpoints: written beside training, whole or not at all, and read by ranks of any layout.

    step-4.new/__0_0.distcp, __1_0.distcp   each rank its part, by torch's distributed checkpoint (DCP)
    step-4.new/.metadata                    which tensor is where
    step-4.new/checkpoint.json              the step, the place in the data, sizes and hashes of the files
    step-4.new -> step-4                    now it is a checkpoint; the oldest ones go

Tensors have names that are the same in every layout: `model.NAME`, `optimizer.NAME.exp_avg`, `.exp_avg_sq`
and `.step`, where NAME is Hugging Face's. Weights are float32 where training keeps a float32 copy. A tensor
that several ranks hold whole is written by one of them; of a sharded tensor each rank writes its shard.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from dflop.runtime.failure import RankError, talking
from dflop.runtime.rectangles import RectangleLoadPlanner, RectangleSavePlanner, rectangles_of
from dflop.runtime.resume import MANIFEST, VERSION, checkpoints, hint_of_earlier, step_dir

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dflop.models.tensor import Slice
    from dflop.runtime.mesh import Mesh
    from dflop.runtime.optim import Optimizer
    from dflop.runtime.rectangles import Rectangle

_HASHED_BYTES = 1 << 22
"""Bytes of a file that are hashed at a time."""
_LIMITED = "a file may have at most"
"""Where the cause of a failed save may be a limit of the process."""
_LEAST_FREE_BYTES = 1 << 20
"""A disk with less than this is called full where a checkpoint could not be written."""


class Saver:
    """What is saved of this rank, and the save under way."""

    def __init__(
        self,
        mesh: Mesh,
        out: Path,
        keep: int,
        held: Mapping[str, torch.Tensor],
        optimizer: Optimizer | None,
        slices: Mapping[str, Slice] | None = None,
    ) -> None:
        """Makes a group of processes for saving alone. Every rank must call it; blocks until all have.

        Args:
            mesh: This rank's coordinates.
            out: Directory of the run.
            keep: Checkpoints to keep, the newest; at least 1.
            held: All parameters of this rank by name, trained or not, shards where they are cut; and buffers
                that are weights.
            optimizer: The optimizer of these parameters; none: they are none, as in a rehearsal.
            slices: For each parameter that tensor parallelism has cut: which part this rank has.
        """
        self._mesh = mesh
        self._out = out
        self._keep = keep
        self._optimizer = optimizer
        self._slices = dict(slices or {})
        # The float32 masters are saved where there are any; a frozen parameter has none.
        self._weights = {name: p.detach() for name, p in held.items()}
        if optimizer is not None:
            self._weights |= {name: p.detach() for name, p in optimizer.masters.items()}
        # A group of its own: ranks exchange messages for saving while they exchange others for training.
        group = dist.new_group(backend="gloo", timeout=mesh.timeout)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        # A save takes as long as the disks need, so this group keeps the long timeout.
        mesh.deadline.keep(group)
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: tuple[Path, Future[str | None]] | None = None
        self.last_step: int | None = None
        """Steps trained at the last checkpoint that was begun or read; none: there is none."""

    def save(self, step: int, about: Mapping[str, Any]) -> None:
        """Copies what there is to save, and has a thread write it; waits first for the save before it.

        Every rank must call it between the same two steps.

        Args:
            step: Steps trained; the number of the next one.
            about: Further fields of `checkpoint.json`; used on the leader only.

        Raises:
            RankError: The save before it failed; see `finish`.
        """
        self.finish()
        path = step_dir(self._out, step)
        fresh = path.with_name(f"{path.name}.new")
        if self._mesh.is_leader:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
        # No rank may write before the leader has made the directory and emptied it.
        with talking("begin a checkpoint"):
            dist.barrier(group=self._mesh.control)
        with _quiet():
            state, rectangles = self._split(self._state())
            planner = RectangleSavePlanner(rectangles)
            written = async_save(state, checkpoint_id=fresh, process_group=self._group, planner=planner)
        assert isinstance(written, Future)
        record = {"dflop": "checkpoint", "format_version": VERSION, "step": step, **about}
        self._under_way = (path, self._threads.submit(self._commit, written, fresh, path, record))
        self.last_step = step

    @property
    def has_failed(self) -> bool:
        """Whether the save under way has failed on this rank: then `finish` says why, on all."""
        future = None if self._under_way is None else self._under_way[1]
        return future is not None and future.done() and (bool(future.exception()) or bool(future.result()))

    def finish(self) -> None:
        """Waits for the save under way.

        Every rank must call it; blocks until all files are written.

        Raises:
            RankError: It failed, on every rank alike; the message names the directory and the cause.
        """
        if self._under_way is None:
            return
        path, future = self._under_way
        self._under_way = None
        with talking("save a checkpoint"):
            cause = future.result()
        if cause is not None:
            message = f"cannot save `{path}`: {cause}"
            room = "raise that limit, or make room" if _LIMITED in cause else "make room"
            hint = f"{room}, then go on from the checkpoint before it with `--resume auto`"
            raise RankError(message, hint, is_of_all=True)

    def load(self, path: Path, step: int) -> None:
        """Fills parameters and optimizer with what a checkpoint of any layout holds of this rank's names.

        Every rank must call it; reads files and compares, no rank waits for another's tensors.

        Args:
            path: Of the checkpoint, whatever its directory is called.
            step: Steps that were trained when it was taken.

        Raises:
            RankError: A file is damaged or missing, or lacks a parameter; on every rank alike.
        """
        cause = damage(path, self._mesh.rank, self._mesh.num_ranks)
        self._refuse(path, cause, hint_of_earlier(path, step))
        state = self._state()
        held = FileSystemReader(path).read_metadata().state_dict_metadata
        # A random state is kept by rank; the checkpoint has none for a rank that its layout did not have.
        state = {name: value for name, value in state.items() if name in held or not _is_random(name)}
        absent = sorted(set(state) - set(held))
        cause = None if not absent else f"it has no `{absent[0]}`, and {len(absent) - 1} more are missing"
        if cause is None:
            try:
                with _quiet():
                    tensors, rectangles = self._split(state)
                    load(tensors, checkpoint_id=path, no_dist=True, planner=RectangleLoadPlanner(rectangles))
            except (CheckpointException, ValueError) as error:
                cause = _cause(error)
        # The files are whole, so it is another model, or another recipe.
        hint = "give `model.dir` and `train.recipe` their values of then, or begin a new run with `--out`"
        self._refuse(path, cause, hint)
        if self._optimizer is not None:
            self._optimizer.round()
        random = state.get(self._random)
        if random is not None:
            torch.set_rng_state(random)
        self.last_step = step

    @property
    def _random(self) -> str:
        return f"random.rank-{self._mesh.rank}-of-{self._mesh.num_ranks}"

    def _state(self) -> dict[str, torch.Tensor]:
        """What is saved and loaded, by name: the tensors themselves, not copies."""
        state = {f"model.{name}": tensor for name, tensor in self._weights.items()}
        if self._optimizer is not None:
            state |= {f"optimizer.{name}": tensor for name, tensor in self._optimizer.states().items()}
        # Today no layer draws random numbers in training. If one ever does, it goes on where it was.
        return {**state, self._random: torch.get_rng_state()}

    def _split(
        self, state: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Rectangle]]:
        """The state with cut tensors as rectangles, and where each rectangle stands in its whole tensor."""
        tensors: dict[str, torch.Tensor] = {}
        rectangles: dict[str, Rectangle] = {}
        for name, tensor in state.items():
            kept = name.partition(".")[2]
            cut = self._slices.get(kept.removesuffix(".exp_avg").removesuffix(".exp_avg_sq"))
            if cut is None or tensor.dim() == 0:
                tensors[name] = tensor
                continue
            for key, (view, rectangle) in rectangles_of(name, tensor, cut).items():
                tensors[key], rectangles[key] = view, rectangle
        return tensors, rectangles

    def _refuse(self, path: Path, cause: str | None, hint: str) -> None:
        causes: list[str | None] = [None for _ in range(self._mesh.num_ranks)]
        with talking("read a checkpoint"):
            dist.all_gather_object(causes, cause, group=self._mesh.control)
        found = [cause for cause in causes if cause is not None]
        if found:
            message = f"cannot resume from `{path}`: {found[0]}"
            raise RankError(message, hint, is_of_all=True)

    def _commit(self, written: Future[Any], fresh: Path, path: Path, record: dict[str, Any]) -> str | None:
        """The end of a save, in a thread: hashes, manifest, name; the cause of its failure, if any."""
        cause = room = None
        try:
            written.result()
            files = {
                file.name: _described(file)
                for file in fresh.glob(f"__{self._mesh.rank}_*.distcp")
            }  # fmt: skip
        except (Exception, CheckpointException) as error:  # noqa: BLE001
            # The other ranks must hear of any error, or they would wait. DCP's error is not an `Exception`.
            cause, room, files = _cause(error), _no_room(fresh), {}
        told: list[Any] = [None for _ in range(self._mesh.num_ranks)]
        dist.all_gather_object(told, (cause, room, files), group=self._group)
        cause = next((cause for cause, _, _ in told if cause is not None), None)
        room = next((room for _, room, _ in told if room is not None), None)
        cause = cause if room is None else f"{room} ({cause})"
        if self._mesh.is_leader and cause is None:
            cause = self._name(fresh, path, record, {k: v for *_, files in told for k, v in files.items()})
        ends: list[str | None] = [cause]
        dist.broadcast_object_list(ends, src=0, group=self._group)
        if ends[0] is not None and self._mesh.is_leader:
            shutil.rmtree(fresh, ignore_errors=True)
        return ends[0]

    def _name(self, fresh: Path, path: Path, record: dict[str, Any], files: dict[str, Any]) -> str | None:
        try:
            files |= {".metadata": _described(fresh / ".metadata")}
            with (fresh / MANIFEST).open("w", encoding="utf-8") as file:
                json.dump({**record, "files": files}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                # A checkpoint of this step from before the run was resumed: the new one takes its place.
                shutil.rmtree(path)
            fresh.rename(path)
            _sync(path.parent)
            for _, old in checkpoints(self._out)[: -self._keep]:
                shutil.rmtree(old)
        except OSError as error:
            return _cause(error)
        return None


def damage(path: Path, rank: int, num_ranks: int) -> str | None:
    """What is wrong with the files of a checkpoint that this rank checks; the ranks share the files out.

    Args:
        path: Of the checkpoint.
        rank: Of this process.
        num_ranks: That share the files.

    Returns:
        The first fault, with the file's name; none if there is none.
    """
    try:
        files = json.loads((path / MANIFEST).read_bytes())["files"]
        for name in sorted(files)[rank::num_ranks]:
            found, wanted = _described(path / name), files[name]
            if found["bytes"] != wanted["bytes"]:
                return f"`{name}` has {found['bytes']} bytes, must have {wanted['bytes']}"
            if found != wanted:
                return f"`{name}` has another SHA-256 than when it was written, it is damaged"
    except FileNotFoundError as error:
        return f"`{Path(str(error.filename)).name}` is missing"
    except (OSError, ValueError, KeyError) as error:
        return f"`{MANIFEST}` cannot be read ({error})"
    return None


def _described(path: Path) -> dict[str, Any]:
    """Size and hash of a file."""
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_HASHED_BYTES):
            digest.update(block)
            num_bytes += len(block)
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


def _is_random(name: str) -> bool:
    return name.startswith("random.")


def _cause(error: BaseException) -> str:
    """The first cause of an error, in a few words. DCP's error holds a cause and a traceback a rank."""
    if isinstance(error, CheckpointException):
        first, _ = next(iter(error.failures.values()))
        return _cause(first)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).partition("\n")[0] or type(error).__name__


def _no_room(directory: Path) -> str | None:
    """Why there is no room for files in a directory that is there: PyTorch does not say it."""
    with suppress(OSError):
        free_bytes = shutil.disk_usage(directory).free
        if free_bytes < _LEAST_FREE_BYTES:
            return f"the disk is full, {free_bytes:,} bytes are free"
        most_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        largest_bytes = max((file.stat().st_size for file in directory.iterdir()), default=0)
        if most_bytes != resource.RLIM_INFINITY and largest_bytes >= most_bytes:
            return f"{_LIMITED} {most_bytes:,} bytes (`ulimit -f`)"
    return None


def _sync(directory: Path) -> None:
    """Waits until the disk has the names in a directory, as after a rename."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings of DCP about what is meant here: loading by one process, plain tensors, a new API."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
