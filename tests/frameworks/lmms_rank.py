"""One rank of lmms-engine on a CPU: its own command, with dflop's in its place or without.

    python lmms_rank.py FOLDER CASES   # CASES: JSON; RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR are set

chats -> lmms-engine's dataset, loader, collation, model and FSDP2 -> samples of each microbatch, parameters

Nothing of lmms-engine is replaced but the device, its 16 bits by 32, and Adam by plain descent; and for rows without
padding (`use_rmpad`) flash attention by attention of each sample alone, and Liger's loss by PyTorch's.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import torch
import yaml
from torch import distributed

BATCHES: list = []
STATES: list = []
LOGGED: list = []
KEPT: list = []
"""Which of lmms-engine's types are not 32 bits."""


def on_a_cpu():
    """What lmms-engine asks of a GPU, of a CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_device_name = lambda *_: "CPU"
    torch.cuda.synchronize = lambda *_: None
    import lmms_engine.parallel.process_group_manager as groups
    from lmms_engine.train.fsdp2 import fsdp2_trainer

    mesh = groups.init_device_mesh
    groups.init_device_mesh = lambda _, *given, **named: mesh("cpu", *given, **named)
    add, wait = distributed.all_reduce, distributed.barrier

    def all_reduce(tensor, op=distributed.ReduceOp.SUM, **named):
        # gloo has no mean.
        is_mean = op == distributed.ReduceOp.AVG
        add(tensor, distributed.ReduceOp.SUM if is_mean else op, **named)
        if is_mean:
            tensor /= distributed.get_world_size()

    distributed.all_reduce = all_reduce
    distributed.barrier = lambda *_, **__: wait()
    policy = fsdp2_trainer.MixedPrecisionPolicy
    exact = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), torch.float32)

    def exact_policy(**asked):
        kept = {name: asked[name] for name in KEPT}
        return policy(**{**exact, **kept})

    fsdp2_trainer.MixedPrecisionPolicy = exact_policy

    # Adam divides gradients by their size, and so hides errors of small ones.
    def prepare_optimizer(trainer):
        trainer.optimizer = torch.optim.SGD(trainer.fsdp2_model.parameters(), trainer.args.learning_rate)

    fsdp2_trainer.FSDP2SFTTrainer.prepare_optimizer = prepare_optimizer


def without_kernels():
    """What stands in for flash attention and for Liger, in the places where lmms-engine has them."""
    from einops import rearrange
    from lmms_engine.models.qwen2_5_vl import qwen2_5_vl_liger, qwen2_5_vl_ops

    def attention(q, k, v, cu_seqlens_q, softmax_scale, **_):
        groups, ends = q.shape[1] // k.shape[1], cu_seqlens_q.tolist()
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        parts = [[one[start:end].transpose(0, 1) for one in (q, k, v)] for start, end in pairwise(ends)]
        attend = torch.nn.functional.scaled_dot_product_attention
        return torch.cat([attend(*part, is_causal=True, scale=softmax_scale) for part in parts], 1).transpose(
            0, 1
        )

    class Loss:
        def __init__(self, reduction):
            self.reduction = reduction

        def __call__(self, weight, hidden, labels):
            return torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction=self.reduction)

    qwen2_5_vl_ops.flash_attn_varlen_func = attention
    qwen2_5_vl_ops.index_first_axis = lambda rows, indices: rows[indices]
    qwen2_5_vl_ops.rearrange = rearrange
    qwen2_5_vl_liger.LigerFusedLinearCrossEntropyLoss = Loss


def record():
    """Notes the samples of each microbatch, what is logged, and the parameters when training ends."""
    from lmms_engine.train.fsdp2 import fsdp2_trainer

    kind = fsdp2_trainer.FSDP2SFTTrainer
    step, save = kind.training_step, kind.save_checkpoints

    def training_step(trainer, batch):
        BATCHES.append((trainer.global_step, samples(batch), batch.get("dflop_weight")))
        return step(trainer, batch)

    def save_checkpoints(trainer, *given, **named):
        found = trainer.fsdp2_model.state_dict()
        STATES.append(
            {name: getattr(one, "full_tensor", lambda one=one: one)().clone() for name, one in found.items()}
        )
        return save(trainer, *given, **named)

    kind.training_step, kind.save_checkpoints = training_step, save_checkpoints
    _record_hf()
    log = fsdp2_trainer.Tracking.log

    def noted(tracking, data, step=None):
        LOGGED.append(dict(data))
        return log(tracking, data, step)

    fsdp2_trainer.Tracking.log = noted


def _record_hf():
    from lmms_engine.train.hf.trainer import Trainer
    from lmms_engine.train.runner import TrainRunner

    step = Trainer.training_step

    def training_step(trainer, model, inputs, *given):
        weight = float(bool((inputs["labels"] != -100).any()))
        BATCHES.append((trainer.state.global_step, samples(inputs), weight))
        return step(trainer, model, inputs, *given)

    # lmms-engine 0.1.4 asks for a setting here that it does not have, and ends.
    def safe_save(_, trainer, output_dir):
        STATES.append({name: one.clone() for name, one in trainer.model.state_dict().items()})
        LOGGED.extend({"train/loss": one["loss"]} for one in trainer.state.log_history if "loss" in one)

    Trainer.training_step, TrainRunner.safe_save_model_for_hf_trainer = training_step, safe_save


def samples(batch):
    """Each sample of a microbatch as it was before it was padded."""
    grids = batch["image_grid_thw"].tolist() if "image_grid_thw" in batch else []
    pixels, found, first = batch.get("pixel_values"), [], 0
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        row = {"input_ids": ids[mask.bool()], "labels": labels[mask.bool()]}
        num_patches = 4 * int((row["input_ids"] == IMAGE).sum())
        held = []
        while sum(t * h * w for t, h, w in held) < num_patches:
            held.append(grids.pop(0))
        if held:
            row["image_grid_thw"] = torch.tensor(held)
            row["pixel_values"] = pixels[first : first + num_patches]
            first += num_patches
        found.append({name: value.clone() for name, value in row.items()})
    return found


def configuration(folder, case):
    """What a YAML of lmms-engine says."""
    found = {
        "trainer_type": "fsdp2_trainer",
        "dataset_config": {
            "extra_kwargs": {},
            "dataset_type": "vision",
            "dataset_format": "json",
            "dataset_path": "chats.json",
            "datasets": [{"path": "chats.columns.json", "data_folder": "", "data_type": "json"}],
            "processor_config": {"processor_name": str(folder / "model"), "processor_type": "qwen2_5_vl"},
        },
        "model_config": {
            "extra_kwargs": {},
            "load_from_pretrained_path": str(folder / "model"),
            "attn_implementation": "eager",
        },
        "trainer_args": {
            "output_dir": str(folder / f"out_{case['name']}"),
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "warmup_ratio": 0.0,
            "lr_scheduler_kwargs": {"start_factor": 1.0},
            "max_grad_norm": 1e9,
            "num_train_epochs": 1,
            "max_steps": -1,
            "save_steps": 1000,
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "dataloader_num_workers": 0,
            "dataloader_pin_memory": False,
            "fsdp2": True,
            "fsdp_config": {
                "transformer_layer_cls_to_wrap": ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"]
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
    if any(case.get("is_flat") for case in cases):
        without_kernels()
    for case in cases:
        BATCHES.clear(), STATES.clear(), LOGGED.clear()
        KEPT[:] = case.get("keeps", ())
        os.environ["MASTER_PORT"] = str(case["port"])
        # Before this rank joins the others: they look for checkpoints when all are there.
        for checkpoint in case.get("removes", ()) if rank == "0" else ():
            shutil.rmtree(folder / checkpoint)
        path = folder / f"{case['name']}.{rank}.yaml"
        path.write_text(yaml.safe_dump(configuration(folder, case)))
        module = "dflop.integrations.lmms_engine" if case["is_ours"] else "lmms_engine.launch.cli"
        # As `python -m` does it.
        sys.argv = [module, *case.get("options", ()), f"config_yaml={path}"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        torch.save(
            {"batches": list(BATCHES), "state": STATES[-1], "logged": list(LOGGED)},
            folder / f"{case['name']}.{rank}",
        )


IMAGE = None
if __name__ == "__main__":
    IMAGE = json.loads((Path(sys.argv[1]) / "model/config.json").read_text())["image_token_id"]
    main()
