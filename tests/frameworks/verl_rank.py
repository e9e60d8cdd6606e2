"""One rank of verl on a CPU: its own trainer's division of a batch, and its own actor worker's step on it.

    python verl_rank.py FOLDER CASES   # CASES: JSON; RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set

made batch -> RayPPOTrainer._balance_batch -> rows of this rank -> TrainingWorker.train_mini_batch -> parameters

Nothing of verl is replaced but the device: its platform and engine for GPUs are registered for CPUs, with gloo.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import contextmanager
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


from hydra import compose, initialize_config_module  # noqa: E402
from PIL import Image  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.trainer.ppo import ray_trainer  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.workers import engine_workers  # noqa: E402
from verl.workers.config import TrainingWorkerConfig  # noqa: E402
from verl.workers.engine import utils as engine_utils  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding  # noqa: E402


def made_batch(folder, model_config, seed=0):
    """Chats with none to two pictures as verl's agent loop leaves them: prompts padded left, answers right."""
    from transformers import Qwen2_5_VLModel

    processor = model_config.processor
    with torch.device("meta"):
        rope = Qwen2_5_VLModel(model_config.hf_config)
    torch.manual_seed(seed)
    kinds, rows = ("image", "video"), []
    for question, answer, paths in json.loads((folder / "chats.json").read_text()):
        content = [*({"type": "image"} for _ in paths), {"type": "text", "text": question}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        pictures = [Image.open(path) for path in paths] or None
        made = dict(processor(text=[text], images=pictures, return_tensors="pt"))
        prompt = made.pop("input_ids")[0]
        made.pop("attention_mask")
        made.pop("mm_token_type_ids", None)
        answer = torch.tensor(processor.tokenizer(answer + "<|im_end|>")["input_ids"])
        ids = torch.cat([prompt, answer])[None]
        types = sum(
            (ids == getattr(model_config.hf_config, f"{kind}_token_id")) * (place + 1)
            for place, kind in enumerate(kinds)
        )
        places, _ = rope.get_rope_index(
            input_ids=ids,
            mm_token_type_ids=types,
            image_grid_thw=made.get("image_grid_thw"),
            attention_mask=torch.ones_like(ids),
        )
        places = torch.cat([torch.arange(ids.shape[1])[None], places[:, 0]])
        rows.append((prompt, answer, places, made))
    count = len(rows)
    width, most = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)

    def padded(value, left, right):
        return torch.nn.functional.pad(value, (left, right))

    batch = {
        "prompts": torch.stack([padded(row[0], width - len(row[0]), 0) for row in rows]),
        "responses": torch.stack([padded(row[1], 0, most - len(row[1])) for row in rows]),
        "position_ids": torch.stack(
            [padded(row[2], width - len(row[0]), most - len(row[1])) for row in rows]
        ),
        "attention_mask": torch.stack(
            [
                padded(
                    torch.ones(len(row[0]) + len(row[1]), dtype=torch.long),
                    width - len(row[0]),
                    most - len(row[1]),
                )
                for row in rows
            ]
        ),
    }
    batch["input_ids"] = torch.cat([batch["prompts"], batch["responses"]], dim=1)
    batch["response_mask"] = batch["attention_mask"][:, width:]
    # Made up: what another policy would have said of the answers, and how good they were.
    batch["old_log_probs"] = (-5.4 + 0.1 * torch.randn(count, most)) * batch["response_mask"]
    batch["advantages"] = torch.randn(count, 1) * batch["response_mask"]
    held = np.empty(count, dtype=object)
    held[:] = [row[3] for row in rows]
    return DataProto.from_dict(
        tensors=batch, non_tensors={"multi_modal_inputs": held, "uid": np.arange(count)}
    )


def main():
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    # verl asks for gloo of CPUs and for a backend of its device, which is the same one here.
    torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    with initialize_config_module("verl.trainer.config", version_base=None):
        for case in cases:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = run(folder, case, rank, num_ranks)
            found["said"] = [str(one.message) for one in said]
            torch.save(found, folder / f"{case['name']}.{rank}")
    torch.distributed.destroy_process_group()


def run(folder, case, rank, num_ranks):
    """Divides a batch and trains one step on it, all by verl's own code; what came of it."""
    config = compose("ppo_trainer", overrides=[*given(folder), *case["overrides"]])
    part = config.actor_rollout_ref
    model_config, actor = omega_conf_to_dataclass(part.model), omega_conf_to_dataclass(part.actor)
    for name, value in {
        "max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
        "use_dynamic_bsz": True,
    }.items():
        # As verl's worker does it; what scores has the cap of what trains here.
        object.__setattr__(actor.engine, name, value)
        object.__setattr__(actor.engine, f"infer_{name}", value)
    batch = made_batch(folder, model_config)
    tokens = batch.batch["attention_mask"].sum(dim=1).tolist()
    patches = [len(held.get("pixel_values", ())) for held in batch.non_tensor_batch["multi_modal_inputs"]]

    trainer = object.__new__(ray_trainer.RayPPOTrainer)
    trainer.config = config
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(num_ranks))})
    num_steps = case.get("num_steps", 1)
    trainer._balance_batch(batch, metrics={}, keep_minibatch=num_steps > 1)
    own = batch.chunk(num_ranks)[rank]
    torch.manual_seed(0)
    worker = engine_workers.TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model_config,
            engine_config=actor.engine,
            optimizer_config=actor.optim,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    before = weights_of(worker)
    rows = left_right_2_no_padding(own.to_tensordict())
    size = len(tokens) // num_steps
    asked = {"calculate_entropy": True, "temperature": 1.0}
    with watched() as scored:
        found = worker.infer_batch(assigned(rows.clone(), compute_loss=False, **asked))
    with watched() as trained:
        sizes = {
            "global_batch_size": size,
            "mini_batch_size": size,
            "epochs": 1,
            "dataloader_kwargs": {"shuffle": False},
        }
        done = worker.train_mini_batch(assigned(rows, compute_loss=True, **asked, **sizes))
    own = [int(one) for one in own.non_tensor_batch["uid"]]
    return {
        "own": own,
        "scored": scored,
        "trained": trained,
        "tokens": tokens,
        "patches": patches,
        "loss": tu.get(done, "metrics")["loss"],
        "log_probs": dict(zip(own, tu.get(found, "log_probs").unbind(), strict=True)),
        "before": before,
        "weights": weights_of(worker),
    }


@contextmanager
def watched():
    """Keeps which samples verl's engine puts into each of its microbatches."""
    kept = []
    theirs = engine_utils.rearrange_micro_batches

    def rearrange_micro_batches(rows, *given, **named):
        found = theirs(rows, *given, **named)
        uids = [int(one) for one in rows["uid"]]
        kept.append([[uids[at] for at in places] for places in found[1]])
        return found

    engine_utils.rearrange_micro_batches = rearrange_micro_batches
    try:
        yield kept
    finally:
        engine_utils.rearrange_micro_batches = theirs


def weights_of(worker):
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in worker.engine.module.state_dict().items()
    }


def assigned(rows, **named):
    tu.assign_non_tensor(rows, **named)
    return rows


def given(folder):
    """What a user would write, for a tiny model on CPUs."""
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        # Attention over rows without padding is that of flash attention alone.
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.optim.optimizer=SGD",
        "actor_rollout_ref.actor.optim.lr=0.1",
        "actor_rollout_ref.actor.optim.weight_decay=0",
        "actor_rollout_ref.actor.optim.clip_grad=1e9",
        "actor_rollout_ref.actor.optim.total_training_steps=10",
        f"{fsdp}.use_torch_compile=false",
        f"+{fsdp}.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
    ]


main()
