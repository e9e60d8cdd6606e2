"""The process of one rank of a training run: from its request to its exit status.

In order:  options and plan | workers are forked | device | all ranks meet | signals are taken over |
           the directory | the model | the steps | all ranks end together
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dflop._native import Plan
from dflop.device import take_device
from dflop.runtime.ahead import begin
from dflop.runtime.directory import take_together
from dflop.runtime.failure import RankError, complain, describe, talking, tell_agent
from dflop.runtime.flight import dump_flight, record_flight
from dflop.runtime.interrupt import Interrupt
from dflop.runtime.mesh import join
from dflop.runtime.options import Options
from dflop.runtime.progress import say
from dflop.runtime.trainer import Trainer
from dflop.runtime.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Mapping


def train(request: Mapping[str, Any]) -> int:
    """Runs this process as one rank of a training run; torchrun's environment says which.

    Every rank must call it; blocks until training ends. Errors go to stderr, with the rank, step and action.

    Args:
        request: As the command line makes it; see `Options`.

    Returns:
        The exit status: 0 done, 1 failed; 128 plus the number of the signal that ended it (130 after Ctrl-C),
        where all steps up to then and a checkpoint are written.
    """
    coordinates, is_leader = "rank not placed yet", True
    trainer: Trainer | None = None
    watch: Watch | None = None
    try:
        options = Options.of_request(request)
        plan = Plan.read(options.plan_path)
        # Workers are forked first, while this process has no GPU, no process group and no threads.
        ahead = begin(options, plan)
        device = take_device(options.device)
        check_device(options, device)
        record_flight(options.out, device.type)
        say("waiting for all ranks")
        mesh = join(plan, device, options.timeout_s, first_timeout_s=options.first_timeout_s)
        coordinates, is_leader = mesh.coordinates, mesh.is_leader
        # Signals are taken over only now. Before all ranks have met, Ctrl-C may stop this process at once.
        interrupt = Interrupt()
        watch = Watch(plan, mesh.rank, lambda: (trainer.step, trainer.action) if trainer else (None, None))
        take_together(options, mesh)
        say("building the model and reading the data profile")
        trainer = Trainer(options, mesh, interrupt, ahead)
        say(trainer.what_comes)
        is_done = trainer.run()
        if not is_done:
            trainer.say_interrupted()
        with talking("end together"):
            dist.barrier(group=mesh.control)
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001
        step, action = (None, None) if trainer is None else (trainer.step, trainer.action)
        if isinstance(error, RankError) and error.is_of_all:
            coordinates = "all ranks"
            if not is_leader:
                tell_agent("", error)
                return 1
        line = describe(coordinates, step, action, error)
        if watch is not None and isinstance(error, RankError) and error.is_of_other:
            dump_flight(Path(request["out"]), watch.rank)
            blamed = watch.blame()
            line += "" if blamed is None else f"; {blamed}"
        complain(line, error)
        tell_agent(line, error)
        return 1
    finally:
        if watch is not None:
            watch.stop()
    return 0 if is_done else 128 + trainer.stop


def check_device(options: Options, device: torch.device) -> None:
    """Raises if this rank's GPU is not the one of the model profile; the command line has compared CPUs.

    Args:
        options: Of this run.
        device: Of this rank.

    Raises:
        RankError: It is another GPU; the message names both.
    """
    if device.type != "cuda" or options.profile_device is None:
        return
    name = torch.cuda.get_device_name(device)
    if name != options.profile_device:
        message = (
            f"`{options.model_profile_path}` is of another device: {options.profile_device}, "
            f"this machine has {name}: measure it with `dflop profile model`, or pass `--other-device`"
        )
        raise RankError(message)
