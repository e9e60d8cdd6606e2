"""One rank of verl on a CPU: its own trainer's division of a batch, and its own actor worker's step on it.

    python verl_rank.py FOLDER OUT OPTIONS   # OPTIONS: JSON; RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set

made batch -> RayPPOTrainer._balance_batch -> rows of this rank -> TrainingWorker.train_mini_batch -> parameters

Nothing of verl is replaced but the device: its platform and engine for GPUs are registered for CPUs, with gloo.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

os.environ["VERL_PLATFORM"] = "cpu"
# The FSDP engine is registered for GPUs, and this name asks for that of another device.
os.environ["VERL_ENGINE_DEVICE"] = "cuda"
os.environ["LOCAL_RANK"] = "0"

import numpy as np
import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """What verl asks of its device, of a CPU."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = SimpleNamespace(
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        mem_get_info=lambda *_: (0, 1),
        empty_cache=lambda: None,
        synchronize=lambda *_: None,
        is_available=lambda: False,
        get_device_name=lambda *_: "cpu",
        current_device=lambda: "cpu",
        set_device=lambda *_: None,
    )

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def empty_cache(self):
        pass

    def manual_seed(self, seed):
        pass

    def manual_seed_all(self, seed):
        pass

    def communication_backend_name(self):
        return "gloo"


from tensordict import NonTensorData  # noqa: E402,F401
from verl import DataProto  # noqa: E402
from verl.trainer.ppo import ray_trainer  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import (  # noqa: E402
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding  # noqa: E402


def main():
    folder, out, options = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    # verl asks for gloo of CPUs and for a backend of its device, which is the same one here.
    torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    model_config = HFModelConfig(
        path=str(folder / "model"),
        external_lib=options.get("external_lib"),
        override_config={"attn_implementation": "sdpa"},
        enable_gradient_checkpointing=False,
        use_remove_padding=False,
        lora_rank=options.get("lora_rank", 0),
    )
    engine_config = FSDPEngineConfig(
        strategy=options.get("strategy", "fsdp2"),
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_torch_compile=False,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=options["max_tokens"],
        infer_max_token_len_per_gpu=options["max_tokens"],
        use_remove_padding=False,
    )
    optimizer = FSDPOptimizerConfig(
        optimizer="SGD",
        lr=0.1,
        weight_decay=0.0,
        clip_grad=1e9,
        total_training_steps=10,
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=optimizer,
        )
    )
    worker.reset()
    print("built", rank)


main()
