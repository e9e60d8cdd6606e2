"""One rank of VeOmni on a CPU: its own task script, with the command of dflop or without.

    python veomni_rank.py FOLDER CASES   # CASES: JSON; RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR are set

chats -> VeOmni's dataset, loader, collation, model and FSDP2 -> samples of each microbatch, parameters

Nothing of VeOmni is replaced but the device, Adam by plain descent, and flash attention by attention of each packed
sample alone.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch
import veomni.trainer.base
import veomni.trainer.text_trainer
import veomni.trainer.vlm_trainer
import yaml
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from veomni.data.multimodal.preprocess import PREPROCESSOR_REGISTRY
from veomni.utils import helper

STEPS: list = []
STATES: list = []
PRECISION = {"param_dtype": "float32", "reduce_dtype": "float32"}


def attention_of_samples(
    module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **given
):
    """Attention of each sample of a packed row, as flash attention computes it on a GPU."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    of_llm = cu_seq_lens_q is not None and int(cu_seq_lens_q[-1]) == query.shape[2]
    ends = cu_seq_lens_q.tolist() if of_llm else [0, query.shape[2]]
    is_causal = bool(given.get("is_causal", getattr(module, "is_causal", False)))
    found = [
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            scale=scaling,
            is_causal=is_causal,
        )
        for start, end in zip(ends, ends[1:], strict=False)
    ]
    return torch.cat(found, dim=2).transpose(1, 2), None


def on_a_cpu():
    """What VeOmni asks of a GPU, of a CPU."""
    ALL_ATTENTION_FUNCTIONS.register("sdpa", attention_of_samples)
    base = veomni.trainer.base
    base.get_dist_comm_backend = lambda: "gloo"
    for module in (base, veomni.trainer.vlm_trainer, veomni.trainer.text_trainer):
        module.synchronize = lambda: None
    base.is_nccl_backend = lambda *_: False
    helper.empty_cache = lambda: None
    helper.print_device_mem_info = lambda *_: None
    helper.set_seed = lambda seed, *_: torch.manual_seed(seed)
    for name in ("set_device", "reset_peak_memory_stats", "empty_cache"):
        setattr(torch.cpu, name, lambda *_: None)
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(torch.cpu, name, lambda *_: 0)
    torch.cpu.get_device_name = lambda *_: "H100"
    torch.cpu.memory_stats = lambda *_: dict.fromkeys(("num_alloc_retries", "allocated_bytes.all.peak"), 0)
    # Adam divides gradients by their size, and so hides errors of small ones.
    for module in (base, veomni.trainer.vlm_trainer):
        module.build_optimizer = lambda model, lr, **_: torch.optim.SGD(model.parameters(), lr)


@PREPROCESSOR_REGISTRY.register("chats")
def chats(conversations, **_):
    return [
        [turn["role"], *(("image", None) for _ in range(turn["num_pictures"])), ("text", turn["text"])]
        for turn in conversations
    ]


def record():
    """Notes the samples of each microbatch, and the parameters when training ends."""
    base = veomni.trainer.base.BaseTrainer
    begin, end = base.on_step_begin, base.on_train_end

    def on_step_begin(trainer, micro_batches=None, **given):
        STEPS.append([samples(batch) for batch in micro_batches])
        return begin(trainer, micro_batches=micro_batches, **given)

    def on_train_end(trainer):
        found = trainer.model.state_dict()
        STATES.append(
            {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in found.items()}
        )
        return end(trainer)

    base.on_step_begin, base.on_train_end = on_step_begin, on_train_end


def samples(batch):
    """Each sample of a microbatch as it was before it was packed; none where another microbatch trains it."""
    if bool((batch["labels"] == -100).all()):
        return []
    ends = batch["cu_seq_lens_q"].tolist()
    # `pad_to_length` fills up the row with a sample of nothing.
    ends = ends[:-1] if "tail_padding_length" in batch else ends
    grids = batch["image_grid_thw"].tolist() if "image_grid_thw" in batch else []
    pixels = batch.get("pixel_values")
    found, first = [], 0
    for start, end in zip(ends, ends[1:], strict=False):
        row = {name: batch[name][0, start:end] for name in ("input_ids", "labels")}
        row["position_ids"] = batch["position_ids"][0, ..., start:end]
        row["image_mask"] = (
            batch["image_mask"][0, start:end]
            if "image_mask" in batch
            else torch.zeros(end - start, dtype=torch.bool)
        )
        held, num_patches = [], 4 * int(row["image_mask"].sum())
        while sum(t * h * w for t, h, w in held) < num_patches:
            held.append(grids.pop(0))
        if held:
            row["image_grid_thw"] = torch.tensor(held)
            row["pixel_values"] = pixels[first : first + num_patches]
            first += num_patches
        found.append({name: value.clone() for name, value in row.items()})
    return found


def configuration(folder, case):
    """What a YAML of VeOmni says."""
    eager = dict.fromkeys(
        [
            *("moe_implementation", "cross_entropy_loss_implementation", "rms_norm_implementation"),
            *(
                "swiglu_mlp_implementation",
                "rotary_pos_emb_implementation",
                "load_balancing_loss_implementation",
            ),
            *("rms_norm_gated_implementation", "causal_conv1d_implementation"),
            "chunk_gated_delta_rule_implementation",
        ],
        "eager",
    )
    model = str(folder / case.get("model", "model"))
    found = {
        "model": {
            "model_path": model,
            "ops_implementation": {"attn_implementation": "sdpa", **eager},
        },
        "data": {
            "train_path": str(folder / case.get("data", "chats.jsonl")),
            "data_type": "conversation",
            "datasets_type": "mapping",
            "chat_template": "qwen2_5vl",
            "source_name": "chats",
            "max_seq_len": 300,
            "dyn_bsz_buffer_size": 4,
            "mm_configs": {},
            "dataloader": {"num_workers": 0, "drop_last": True, "pin_memory": False},
        },
        "train": {
            "accelerator": {
                "fsdp_config": {"fsdp_mode": "fsdp2", "mixed_precision": {"enable": True, **PRECISION}}
            },
            "gradient_checkpointing": {"enable": False},
            "wandb": {"enable": False},
            "vit_lr": 0.1,
            "optimizer": {
                "lr": 0.1,
                "lr_warmup_ratio": 0.0,
                "lr_decay_style": "constant",
                "max_grad_norm": 1e9,
            },
            "num_train_epochs": 1,
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "bsz_warmup_ratio": 0.0,
            "dyn_bsz": True,
            "max_steps": 2,
            "init_device": "meta",
            "checkpoint": {
                "output_dir": str(folder / f"out_{case['name']}"),
                "manager": "dcp",
                "save_hf_weights": False,
                "save_steps": 0,
                "save_epochs": 0,
            },
        },
    }
    for name, value in case.get("given", {}).items():
        *places, last = name.split(".")
        place = found
        for one in places:
            place = place.setdefault(one, {})
        place[last] = value
    return found


def main():
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank = os.environ["RANK"]
    on_a_cpu()
    record()
    for case in cases:
        STEPS.clear(), STATES.clear()
        os.environ["MASTER_PORT"] = str(case["port"])
        path = folder / f"{case['name']}.{rank}.yaml"
        path.write_text(yaml.safe_dump(configuration(folder, case)))
        script = str(folder / case.get("script", "train_vlm.py"))
        if case["is_ours"]:
            # As `python -m` does it.
            sys.argv = ["veomni", script, str(path)]
            runpy.run_module("dflop.integrations.veomni", run_name="__main__", alter_sys=True)
        else:
            sys.argv = [script, str(path)]
            runpy.run_path(script, run_name="__main__")
        torch.save({"steps": list(STEPS), "state": STATES[-1]}, folder / f"{case['name']}.{rank}")


if __name__ == "__main__":
    main()
