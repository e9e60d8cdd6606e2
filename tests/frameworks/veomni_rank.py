"""One rank of VeOmni on a CPU: its own task script, with the command of dflop or without.

    python veomni_rank.py FOLDER CASES   # CASES: JSON; RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR are set

chats -> VeOmni's dataset, loader, collation, model and FSDP2 -> samples of each microbatch, parameters

Nothing of VeOmni is replaced but the device, Adam by plain descent, flash attention by attention of each packed
sample alone, and Triton's kernels for experts by one matrix product per expert.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
import sys
import types
from functools import partial
from pathlib import Path

import torch
import veomni.trainer.base
import veomni.trainer.text_trainer
import veomni.trainer.vlm_trainer
import yaml
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from veomni.data.multimodal.preprocess import PREPROCESSOR_REGISTRY
from veomni.distributed.parallel_state import get_parallel_state
from veomni.ops import kernel_registry
from veomni.ops.kernels import moe
from veomni.ops.kernels.attention import flash
from veomni.utils import helper

STEPS: list = []
STATES: list = []
CASE: dict = {}
"""What is run just now."""
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


def flash_attention(query, key, value, attention_mask, *, is_causal, softmax_scale, cu_seq_lens_q, **_):
    """What VeOmni calls for the kernel, between its exchanges of heads: [1, tokens, heads, width]."""
    groups = query.shape[2] // key.shape[2]
    query, key, value = (one.transpose(1, 2) for one in (query, key, value))
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    ends = cu_seq_lens_q.tolist()
    found = [
        torch.nn.functional.scaled_dot_product_attention(
            *(one[:, :, start:end] for one in (query, key, value)), scale=softmax_scale, is_causal=is_causal
        )
        for start, end in zip(ends, ends[1:], strict=False)
    ]
    return torch.cat(found, dim=2).transpose(1, 2)


def products_of_tokens(a, b, cumsum_M, max_M, transpose_b=False, **_):  # noqa: N803 as VeOmni names them
    """Tokens of each expert times its matrix."""
    ends = [0, *cumsum_M.tolist()]
    parts = [
        a[start:end] @ (one.T if transpose_b else one)
        for start, end, one in zip(ends, ends[1:], b, strict=False)
    ]
    return torch.cat(parts)


def products_of_experts(a, b, c, cumsum_K, max_K, **_):  # noqa: N803
    """The gradient of each expert's matrix, into `c`."""
    ends = [0, *cumsum_K.tolist()]
    for start, end, one in zip(ends, ends[1:], c, strict=False):
        one.copy_(a[start:end].T @ b[start:end])


def lists_to_all(found, sent, group=None, async_op=False):
    """All-to-all of lists, which gloo lacks."""
    sizes = [[one.numel() for one in many] for many in (found, sent)]
    joined = torch.cat([one.reshape(-1) for one in sent])
    arrived = joined.new_empty(sum(sizes[0]))
    torch.distributed.all_to_all_single(arrived, joined, *sizes, group=group)
    for one, part in zip(found, arrived.split(sizes[0]), strict=True):
        one.copy_(part.view_as(one))


GATHER = torch.distributed.all_gather_into_tensor


def gather_flat(found, sent, *given, **more):
    """Gloo takes no axis of ranks."""
    return GATHER(found.view(-1), sent.reshape(-1), *given, **more)


def on_a_cpu():
    """What VeOmni asks of a GPU, of a CPU."""
    ALL_ATTENTION_FUNCTIONS.register("sdpa", attention_of_samples)
    # With the name under which it is asked for: transformers looks whether it is installed.
    kernels = types.ModuleType("flash_attn")
    kernels.flash_attn_func = kernels.flash_attn_varlen_func = flash_attention
    sys.modules["flash_attn"] = kernels
    flash._flash_attention_forward = flash_attention
    # Triton asks for a GPU when it is imported.
    for name in ("group_gemm", "moe"):
        triton = types.ModuleType(name)
        triton.group_gemm_same_nk, triton.group_gemm_same_mn = products_of_tokens, products_of_experts
        triton.expert_histogram = triton.moe_gather = triton.moe_scatter = None
        sys.modules[f"veomni.ops.kernels.moe._kernels.kernel.{name}"] = triton
    kernel_registry.HardwareRequirement.is_satisfied = lambda *_: True
    moe.is_fused_moe_available = lambda: True
    torch.distributed.all_to_all = lists_to_all
    torch.distributed.all_gather_into_tensor = gather_flat
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
        module.build_optimizer = partial(plain_descent, module.build_optimizer)


def plain_descent(theirs, model, lr, **given):
    if get_parallel_state().ep_enabled:
        # There it notes for the norm of gradients which experts are apart.
        theirs(model, lr=lr, **{**given, "fused": False})
    return torch.optim.SGD(model.parameters(), lr)


@PREPROCESSOR_REGISTRY.register("chats")
def chats(conversations, **_):
    return [
        [turn["role"], *((kind, None) for kind in turn["media"]), ("text", turn["text"])]
        for turn in conversations
    ]


def record():
    """Notes the samples of each microbatch, and the parameters when training ends; dies where a case says so."""
    base = veomni.trainer.base.BaseTrainer
    begin, end = base.on_step_begin, base.on_train_end

    def on_step_begin(trainer, micro_batches=None, **given):
        STEPS.append([samples(batch) for batch in micro_batches])
        if trainer.state.global_step == CASE.get("dies_in"):
            write()
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(trainer, micro_batches=micro_batches, **given)

    def on_train_end(trainer):
        STATES.append({name: full(name, one) for name, one in trainer.model.state_dict().items()})
        return end(trainer)

    base.on_step_begin, base.on_train_end = on_step_begin, on_train_end


def full(name, weight):
    """A parameter of which ranks have parts; experts are apart besides."""
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    state = get_parallel_state()
    if not state.ep_enabled or ".experts." not in name or weight.dim() < 3:
        return weight
    parts = [torch.empty_like(weight) for _ in range(state.ep_size)]
    torch.distributed.all_gather(parts, weight.contiguous(), group=state.ep_group)
    return torch.cat(parts)


def whole(batch):
    """A microbatch of which ranks of Ulysses have parts, and labels where their tokens are."""
    state = get_parallel_state()
    found = {name: batch[name] for name in batch}
    if not state.sp_enabled:
        return found
    for name, dim in SHARED.items():
        if name in found:
            parts = [torch.empty_like(found[name]) for _ in range(state.sp_size)]
            torch.distributed.all_gather(parts, found[name].contiguous(), group=state.sp_group)
            found[name] = torch.cat(parts, dim=dim)
    labels = found["labels"]
    found["labels"] = torch.cat([torch.full_like(labels[:, :1], -100), labels[:, :-1]], dim=1)
    return found


SHARED = {"input_ids": -1, "labels": -1, "position_ids": -1, "pixel_values": 0, "pixel_values_videos": 0}
"""What ranks of Ulysses have parts of, and along which axis."""


def write():
    """What this rank found."""
    found = {"steps": list(STEPS), "state": STATES[-1] if STATES else None}
    torch.save(found, CASE["folder"] / f"{CASE['name']}.{os.environ['RANK']}")


def samples(batch):
    """Each sample of a microbatch as it was before it was packed; none where another microbatch trains it."""
    batch = whole(batch)
    if bool((batch["labels"] == -100).all()):
        return []
    ends = batch["cu_seq_lens_q"].tolist()
    # `pad_to_length` fills up the row with a sample of nothing.
    ends = ends[:-1] if "tail_padding_length" in batch else ends
    media = [Media(batch, *names) for names in MEDIA]
    found = []
    for start, end in zip(ends, ends[1:], strict=False):
        row = {name: batch[name][0, start:end] for name in ("input_ids", "labels")}
        row["position_ids"] = batch["position_ids"][0, ..., start:end]
        for one in media:
            row |= one.next(start, end)
        found.append({name: value.clone() for name, value in row.items()})
    return found


MEDIA = (
    ("image_mask", "pixel_values", "image_grid_thw", lambda sizes: math.prod(sizes) // 4, math.prod),
    ("video_mask", "pixel_values_videos", "video_grid_thw", lambda sizes: math.prod(sizes) // 4, math.prod),
    # Frames of sound are halved and pooled; a video without sound has one of none.
    (
        *("audio_mask", "input_features", "audio_feature_lengths"),
        lambda frames: ((frames - 1) // 2 - 1) // 2 + 1 if frames else 0,
        lambda frames: frames,
    ),
)
"""Mask, values and sizes of a medium; of a size its LLM tokens, and its rows among the values."""


class Media:
    """Media of one kind in a packed row, sample by sample."""

    def __init__(self, batch, mask, values, sizes, tokens_of, rows_of):
        self.names, self.tokens_of, self.rows_of = (values, sizes), tokens_of, rows_of
        self.mask_name, self.mask = mask, batch.get(mask, torch.zeros_like(batch["input_ids"]).bool())
        self.values, self.sizes = batch.get(values), batch[sizes].tolist() if sizes in batch else []
        self.first = 0

    def next(self, start, end):
        """Its fields of the next sample, which stands there."""
        mask, held = self.mask[0, start:end], []
        missing = int(mask.sum())
        while missing > 0:
            held.append(self.sizes.pop(0))
            missing -= self.tokens_of(held[-1])
        assert missing == 0
        row, held = {self.mask_name: mask}, [sizes for sizes in held if self.rows_of(sizes)]
        if held:
            first, self.first = self.first, self.first + sum(map(self.rows_of, held))
            row |= dict(zip(self.names, (self.values[first : self.first], torch.tensor(held)), strict=True))
        return row


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
                "output_dir": str(folder / f"out_{case.get('goes_on', case['name'])}"),
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
        STEPS.clear(), STATES.clear(), CASE.clear(), CASE.update(case, folder=folder)
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
        write()


if __name__ == "__main__":
    main()
