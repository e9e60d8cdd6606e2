"""Links between ranks: latency and bandwidth of each kind of communication.

under torchrun          its ranks, over all nodes
a CPU, no torchrun      ranks forked here, over gloo
GPUs, no torchrun       one rank a GPU of this machine, over NCCL
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop.device import num_gpus, take_device
from dflop.profiling.artifact import FORMAT_VERSION, KIND, write_artifact

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

_LOG = logging.getLogger("dflop")
_MAX_FORKED = 4
_TIMEOUT_S = 60.0
QUICK_BUDGET_S, MAX_BUDGET_S = 2.0, 30.0
"""Seconds for the quick way, and the most for all links: with more, medians no longer change."""


def measure_network(
    device: str, num_neighbours: int, *, is_quick: bool = False, budget_s: float = MAX_BUDGET_S
) -> dict[str, Any]:
    """Measures the links between the ranks of torchrun, or between ranks that are started for it.

    The caller waits. On a CPU it must not have running threads of its own, since ranks are forked.

    Args:
        device: `cpu` or `cuda`.
        num_neighbours: ranks that will train beside one on this machine; ignored on a GPU and under torchrun.
        is_quick: whether to measure only point-to-point messages of few sizes, in `QUICK_BUDGET_S`.
        budget_s: time to spend, in seconds.

    Returns:
        The fields of `Network`, on every rank. If there is only one rank, or the ranks cannot talk, there are
        no links; a warning says so where links were asked for.
    """
    budget_s = min(budget_s, QUICK_BUDGET_S if is_quick else MAX_BUDGET_S)
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _network(backend, _under_torchrun(device, backend, is_quick, budget_s))
    num_ranks = _num_ranks(device, num_neighbours)
    if num_ranks < 2:
        if not is_quick:
            _LOG.warning("one rank has no links: nothing to measure")
        return _network("", [])
    answer = _start(num_ranks, device, is_quick, budget_s)
    if isinstance(answer, str):
        _LOG.warning("cannot measure the links between ranks: %s; transfers are taken as free", answer)
        return _network("", [])
    return _network(backend, answer)


def update_network(request: Mapping[str, Any]) -> dict[str, Any]:
    """Measures the links, and replaces those of an existing model profile.

    Args:
        request: as the command line makes it: `out` (the profile), `device`, `num_neighbours`, `budget_s`.

    Returns:
        The fields of `Network`; under torchrun rank 0 alone writes.

    Raises:
        ArtifactError: the profile is not of this version, or cannot be written.
        ProfileError: there are no links.
    """
    from dflop._native import ArtifactError, ProfileError

    path = Path(request["out"])
    fields = json.loads(path.read_text(encoding="utf-8"))
    kind, version = fields.pop("dflop", None), fields.pop("format_version", None)
    if (kind, version) != (KIND, FORMAT_VERSION):
        message = f"`{path}` is a {kind} of format {version}, must be a {KIND} of format {FORMAT_VERSION}"
        raise ArtifactError(message)
    network = measure_network(
        str(request["device"]), int(request["num_neighbours"]), budget_s=float(request["budget_s"])
    )
    if not network["links"]:
        message = f"no links were measured, `{path}` keeps those it has"
        raise ProfileError(message)
    if os.environ.get("RANK", "0") == "0":
        write_artifact(path, {**fields, "network": network})
    return network


def summary(network: Mapping[str, Any]) -> list[str]:
    """The links for people.

    Args:
        network: as `measure_network` returns it.

    Returns:
        A line a link.
    """
    return [
        f"{link['collective'].replace('_', ' '):<15} {link['num_ranks']:>4} ranks of a {link['span']:<8}"
        f"{link['latency_ns'] / 1e3:>10.1f} us{link['bandwidth_bytes_per_s'] / 1e9:>10.3f} GB/s"
        for link in network["links"]
    ]


def _network(backend: str, links: list[dict[str, Any]]) -> dict[str, Any]:
    return {"backend": backend, "is_assumed": False, "links": links}


def _num_ranks(device: str, num_neighbours: int) -> int:
    if device == "cuda":
        return num_gpus()
    return min(os.cpu_count() or 1, num_neighbours + 1, _MAX_FORKED)


def _under_torchrun(device: str, backend: str, is_quick: bool, budget_s: float) -> list[dict[str, Any]]:
    import torch.distributed as dist

    num_ranks = int(os.environ["WORLD_SIZE"])
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if num_ranks < 2:
        return []
    if num_ranks % ranks_per_node:
        from dflop._native import ProfileError

        message = f"{num_ranks} ranks on nodes of {ranks_per_node}, must be as many on each node"
        raise ProfileError(message)
    place = take_device(device)
    is_mine = not dist.is_initialized()
    if is_mine:
        dist.init_process_group(backend, timeout=timedelta(seconds=_TIMEOUT_S + budget_s))
    try:
        from dflop.profiling.exchange import Exchange

        return Exchange(place, ranks_per_node, is_quick=is_quick).measure(budget_s)
    finally:
        if is_mine:
            dist.destroy_process_group()


def _start(num_ranks: int, device: str, is_quick: bool, budget_s: float) -> list[dict[str, Any]] | str:
    """The links between ranks that are started here; or, as text, why they could not be measured."""
    # A forked process cannot use a GPU that its parent has used.
    is_cuda = device == "cuda"
    context = multiprocessing.get_context("spawn") if is_cuda else multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="dflop-") as folder:
        receiving, sending = context.Pipe(duplex=False)
        processes = [
            context.Process(
                target=_play,
                args=(rank, num_ranks, f"{folder}/store", device, is_quick, budget_s, sending),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        sending.close()
        try:
            is_there = receiving.poll(2 * _TIMEOUT_S + 3 * budget_s)
            return receiving.recv() if is_there else "no answer within the time limit"
        except EOFError:
            return "the processes ended without an answer"
        finally:
            for process in processes:
                process.join(timeout=5.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _play(
    rank: int, num_ranks: int, store: str, device: str, is_quick: bool, budget_s: float, answer: Connection
) -> None:
    import torch
    import torch.distributed as dist

    from dflop.profiling.exchange import Exchange

    torch.set_num_threads(1)
    place = torch.device("cpu")
    try:
        if device == "cuda":
            place = torch.device("cuda", rank)
            torch.cuda.set_device(place)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )
        links = Exchange(place, num_ranks, is_quick=is_quick).measure(budget_s)
        if rank == 0:
            answer.send(links)
        dist.destroy_process_group()
    except KeyboardInterrupt:
        return
    except RuntimeError as error:
        if rank == 0:
            answer.send(str(error))
