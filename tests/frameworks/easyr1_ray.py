"""EasyR1's command up to the division of a batch: its `main` and its Ray are real, what trains behind it is left out.

    RAY_RUNTIME_ENV_HOOK=... python easyr1_ray.py FOLDER key=value...

Writes `FOLDER/ray.json`: which samples each of two ranks has, and whether the policy says whose microbatches it makes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import ray
from verl.trainer import main as easyr1

FOLDER = Path(sys.argv.pop(1))


@ray.remote(num_cpus=1)
class Runner:
    """In place of EasyR1's own, which asks for GPUs: the same trainer divides a batch."""

    def run(self, config):
        from easyr1_rank import made_batch
        from verl.trainer import ray_trainer
        from verl.workers.actor import dp_actor

        trainer = object.__new__(ray_trainer.RayPPOTrainer)
        trainer.config = config
        trainer.actor_rollout_ref_wg = SimpleNamespace(world_size=2)
        batch = made_batch(FOLDER)
        trainer._balance_batch(batch, metrics={})
        ranks = [[int(one) for one in part.non_tensor_batch["uid"]] for part in batch.chunk(2)]
        is_watched = hasattr(dp_actor.DataParallelPPOActor.update_policy, "__wrapped__")
        (FOLDER / "ray.json").write_text(json.dumps([ranks, is_watched]))


easyr1.Runner = Runner
easyr1.main()
