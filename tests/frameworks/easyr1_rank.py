"""One rank of EasyR1 on a CPU: its own trainer's division of a batch, and its own actor's step on it.

    python easyr1_rank.py FOLDER CASES   # CASES: JSON; RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set

made batch -> RayPPOTrainer._balance_batch -> rows of this rank -> DataParallelPPOActor.update_policy -> parameters

Nothing of EasyR1 is replaced but the device, which it names in one place: a tensor that it asks of `cuda` is on the
CPU. Its worker, which needs flash attention and vLLM, is left out: the model stands in FSDP with EasyR1's own policy
of what to wrap and with EasyR1's own forward pass. With `"dflop"` in the environment variable `LINE`, dflop's line
comes before EasyR1 is imported.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image
from torch.overrides import TorchFunctionMode

IS_OURS = os.environ["LINE"] == "dflop"
if IS_OURS:
    from dflop.integrations import cost_of_parameters
    from dflop.integrations.easyr1 import balance_batches

    balance_batches()

from omegaconf import OmegaConf  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor  # noqa: E402
from verl import protocol  # noqa: E402
from verl.models.monkey_patch import apply_ulysses_patch  # noqa: E402
from verl.models.transformers.qwen2_vl import get_rope_index  # noqa: E402
from verl.trainer import ray_trainer  # noqa: E402
from verl.trainer.config import PPOConfig  # noqa: E402
from verl.utils.fsdp_utils import get_fsdp_wrap_policy  # noqa: E402
from verl.workers.actor import dp_actor  # noqa: E402

WEIGHT = "_fsdp_wrapped_module."


class OnCPU(TorchFunctionMode):
    """What EasyR1 asks of `cuda` by that name."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def made_batch(folder, seed=0):
    """Chats with none to two pictures as EasyR1's rollout leaves them: prompts padded left, answers right."""
    processor = AutoProcessor.from_pretrained(folder / "model", use_fast=True)
    torch.manual_seed(seed)
    rows = []
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
        ids = torch.cat([prompt, answer])
        places = get_rope_index(
            processor,
            input_ids=ids,
            image_grid_thw=made.get("image_grid_thw"),
            attention_mask=torch.ones_like(ids),
        )
        rows.append((prompt, answer, torch.cat([torch.arange(len(ids))[None], places]), made))
    count = len(rows)
    width, most = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)

    def padded(value, row):
        return torch.nn.functional.pad(value, (width - len(row[0]), most - len(row[1])))

    pad = torch.nn.functional.pad
    batch = {
        "prompts": torch.stack([pad(row[0], (width - len(row[0]), 0)) for row in rows]),
        "responses": torch.stack([pad(row[1], (0, most - len(row[1]))) for row in rows]),
        "position_ids": torch.stack([padded(row[2], row) for row in rows]),
        "attention_mask": torch.stack([padded(torch.ones_like(row[2][0]), row) for row in rows]),
    }
    batch["input_ids"] = torch.cat([batch["prompts"], batch["responses"]], dim=1)
    batch["response_mask"] = batch["attention_mask"][:, width:]
    # Made up: what other policies would have said of the answers, and how good they were.
    for name in ("old_log_probs", "ref_log_probs"):
        batch[name] = (-5.4 + 0.1 * torch.randn(count, most)) * batch["response_mask"]
    batch["advantages"] = torch.randn(count, 1) * batch["response_mask"]
    held = np.empty(count, dtype=object)
    held[:] = [row[3] for row in rows]
    return protocol.DataProto.from_dict(
        tensors=batch,
        non_tensors={"multi_modal_inputs": held, "uid": np.arange(count)},
        meta_info={"temperature": 1.0},
    )


def settings_of(folder, overrides, num_ranks):
    """As EasyR1's `main` reads its command, and its worker completes it."""
    given = [
        f"worker.actor.model.model_path={folder / 'model'}",
        "worker.actor.model.trust_remote_code=false",
        # Rows without padding, and the kernel of probabilities, are for GPUs.
        "worker.actor.padding_free=false",
        "worker.actor.use_torch_compile=false",
        "worker.actor.max_grad_norm=1e9",
        "worker.rollout.n=2",
        "algorithm.use_kl_loss=true",
        "algorithm.kl_penalty=low_var_kl",
        "algorithm.kl_coef=0.01",
    ]
    asked = OmegaConf.from_cli([*given, *overrides])
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PPOConfig()), asked))
    config.deep_post_init()
    actor = config.worker.actor
    actor.global_batch_size_per_device = actor.global_batch_size * config.worker.rollout.n // num_ranks
    return config


def policy_of(actor):
    """EasyR1's actor with its model in FSDP on CPUs, in float32; what dflop counts of that model."""
    path = actor.model.model_path
    config = AutoConfig.from_pretrained(path)
    # transformers 4.57 gives a configuration that it wrote itself the type of its text part.
    apply_ulysses_patch("qwen2_5_vl")
    model = AutoModelForImageTextToText.from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation="sdpa"
    )
    is_lora = actor.model.lora.rank > 0
    torch.manual_seed(0)
    if is_lora:
        import peft

        model.enable_input_require_grads()
        targets = actor.model.lora.target_modules
        adapter = peft.LoraConfig(r=actor.model.lora.rank, lora_alpha=64, target_modules=targets)
        model = peft.get_peft_model(model, adapter)
    if actor.model.freeze_vision_tower:
        model.model.visual.requires_grad_(False)
    costs = [cost_of_parameters(model)] if IS_OURS else []
    module = FullyShardedDataParallel(
        model,
        auto_wrap_policy=get_fsdp_wrap_policy(model, is_lora_model=is_lora),
        device_id=torch.device("cpu"),
        use_orig_params=actor.model.freeze_vision_tower,
    )
    trained = [one for one in module.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0 if is_lora else 0.1)
    policy = dp_actor.DataParallelPPOActor(config=actor, actor_module=module, actor_optimizer=optimizer)
    return policy, costs


def weights_of(policy):
    with FullyShardedDataParallel.summon_full_params(policy.actor_module, writeback=False):
        return {
            name.replace(WEIGHT, ""): value.detach().clone()
            for name, value in policy.actor_module.named_parameters()
        }


@contextmanager
def watched():
    """Keeps which rows the actor puts into each of its microbatches, by their place in what it divides."""
    kept = []
    theirs = dp_actor.prepare_dynamic_batch

    def prepare_dynamic_batch(*given, **named):
        found = theirs(*given, **named)
        kept.append(found[1])
        return found

    dp_actor.prepare_dynamic_batch = prepare_dynamic_batch
    try:
        yield kept
    finally:
        dp_actor.prepare_dynamic_batch = theirs


def run(folder, case, rank, num_ranks):
    """Divides a batch and trains a step or some on it, all by EasyR1's own code; what came of it."""
    config = settings_of(folder, case["overrides"], num_ranks)
    batch = made_batch(folder)
    tokens = batch.batch["attention_mask"].sum(dim=1).tolist()
    patches = [len(held.get("pixel_values", ())) for held in batch.non_tensor_batch["multi_modal_inputs"]]
    trainer = object.__new__(ray_trainer.RayPPOTrainer)
    trainer.config = config
    trainer.actor_rollout_ref_wg = SimpleNamespace(world_size=num_ranks)
    trainer._balance_batch(batch, metrics={})
    data = batch.chunk(num_ranks)[rank]
    own = [int(one) for one in data.non_tensor_batch["uid"]]
    policy, costs = policy_of(config.worker.actor)
    before = weights_of(policy)
    with watched() as scored:
        log_probs = policy.compute_log_prob(data)
    with watched() as trained:
        metrics = policy.update_policy(data)
    size = config.worker.actor.global_batch_size_per_device
    if IS_OURS:
        costs += [trainer._dflop_counted, policy._dflop_counted]
    return {
        "costs": costs,
        "own": own,
        "scored": [[[own[at] for at in held] for held in step] for step in scored],
        "trained": [
            [[own[place * size + at] for at in held] for held in step] for place, step in enumerate(trained)
        ],
        "tokens": tokens,
        "patches": patches,
        "width": batch.batch["input_ids"].shape[1],
        "norms": metrics["actor/grad_norm"],
        "log_probs": {
            sample: found[: int(mask.sum())]
            for sample, found, mask in zip(own, log_probs, data.batch["response_mask"], strict=True)
        },
        "before": before,
        "weights": weights_of(policy),
    }


def main():
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    for case in cases:
        with warnings.catch_warnings(record=True) as said, OnCPU():
            warnings.simplefilter("always")
            found = run(folder, case, rank, num_ranks)
        found["said"] = [str(one.message) for one in said]
        torch.save(found, folder / f"{case['name']}.{rank}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
