"""verl's newer trainer, which divides keys of samples that lie in its TransferQueue: one process, Ray and the queue real.

    python verl_keys.py FOLDER OVERRIDES   # OVERRIDES: JSON

Prints a line of JSON: of each rank the numbers of its samples, -1 of those that verl added, and their tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import list_of_dict_to_tensordict


def main():
    folder, overrides = Path(sys.argv[1]), json.loads(sys.argv[2])
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    config.transfer_queue.enable = True
    config.transfer_queue.backend.SimpleStorage.num_data_storage_units = 1
    tq.init(config.transfer_queue)
    trainer = object.__new__(PPOTrainerSync)
    trainer.config = config
    trainer.global_steps = 1
    # As `_init_tokenizer` does it, which imports the line.
    trainer.tokenizer = omega_conf_to_dataclass(config.actor_rollout_ref.model).tokenizer
    trainer.use_critic = False
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1]})
    samples = torch.load(folder / "samples")
    fields, tags = [], []
    for ids in samples:
        prompts, responses = ids[:-2], ids[-2:]
        fields.append(
            {
                "input_ids": ids,
                "prompts": prompts,
                "responses": responses,
                "response_mask": torch.ones(2, dtype=torch.long),
                "loss_mask": torch.ones(2, dtype=torch.long),
                "attention_mask": torch.ones_like(ids),
                "position_ids": torch.arange(len(ids)).expand(4, -1),
                "rm_scores": torch.zeros(2),
                "rollout_log_probs": torch.zeros(2),
            }
        )
        tags.append({"status": "success", "prompt_len": len(prompts), "response_len": 2, "seq_len": len(ids)})
    keys = [str(place) for place in range(len(samples))]
    tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train")
    batch = trainer_base.KVBatchMeta(partition_id="train", keys=keys, tags=tags)
    batch = trainer._balance_batch(batch, metrics={})
    found = [
        (int(key) if key.isdigit() else -1, tag["seq_len"])
        for key, tag in zip(batch.keys, batch.tags, strict=True)
    ]
    half = len(found) // 2
    print(json.dumps([found[:half], found[half:]]))
    tq.close()
    ray.shutdown()


main()
