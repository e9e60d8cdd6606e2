"""Ranks of VeOmni on a CPU, each a process of `veomni_rank.py`, and the folders that they train in."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import tiny_vision
import torch

TRAINS = 1e-5
"""The largest relative error of a parameter."""
TASK = """from veomni.arguments import parse_args
from veomni.trainer.{module} import {trainer}, {arguments}

if __name__ == "__main__":
    {trainer}(parse_args({arguments})).train()
"""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(folder, *cases, num_ranks=2, passes=True):
    """Ranks of VeOmni that run some cases one after the other; of each case what every rank found, and what they said.

    The last case may say in which step its ranks kill themselves (`dies_in`); `passes` is false where ranks refuse.
    """
    # One for each case: a rank that is late would find the store of the case before.
    cases = [{**one, "port": free_port()} for one in cases]
    codes, said = _ended(folder, cases, num_ranks)
    if not passes:
        assert any(codes)
        return "\n".join(said)
    is_killed = "dies_in" in cases[-1]
    is_right = all(codes) and -signal.SIGKILL in codes if is_killed else not any(codes)
    assert is_right, "\n".join([str(codes), *(one[-4000:] for one in said)])
    found = {
        one["name"]: [torch.load(folder / f"{one['name']}.{rank}") for rank in range(num_ranks)]
        for one in cases
    }
    return found, "\n".join(said)


def _ended(folder, cases, num_ranks):
    """Exit status and output of each rank."""
    environment = {**os.environ, "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [
        sys.executable,
        str(Path(__file__).with_name("veomni_rank.py")),
        str(folder),
        json.dumps(cases),
    ]
    # Files, as pipes are full before the first rank has ended: VeOmni says much.
    logs = [folder / f"{cases[0]['name']}.{rank}.log" for rank in range(num_ranks)]
    started = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            of_rank = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(subprocess.Popen(command, env=of_rank, stdout=file, stderr=subprocess.STDOUT))
    try:
        # A rank that waits for one that has failed waits for long.
        ends = time.monotonic() + 550
        while any(process.poll() is None for process in started) and time.monotonic() < ends:
            if any(process.poll() for process in started):
                ends = min(ends, time.monotonic() + 60)
            time.sleep(0.1)
    finally:
        for process in started:
            process.kill()
    return [process.wait() for process in started], [log.read_text() for log in logs]


def name_as_in_module(directory):
    """Weights by the names of today's module: of older ones VeOmni draws others, and says so in its log alone."""
    from safetensors.torch import save_file
    from transformers import Qwen2_5_VLForConditionalGeneration

    weights = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory).state_dict()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def write_tasks(folder):
    """VeOmni's own scripts, `tasks/train_vlm.py` and `tasks/train_text.py`, which the package lacks."""
    for module, trainer, arguments in (
        ("vlm_trainer", "VLMTrainer", "VeOmniVLMArguments"),
        ("text_trainer", "TextTrainer", "VeOmniArguments"),
    ):
        task = TASK.format(module=module, trainer=trainer, arguments=arguments)
        (folder / f"train_{module.partition('_')[0]}.py").write_text(task)


def write_chats(folder, count):
    """A tiny Qwen2.5-VL, and chats of which a third have no picture; their texts alone too."""
    tiny_vision.write_model(folder / "model")
    name_as_in_module(folder / "model")
    chats = tiny_vision.chats(folder / "pictures", count)
    rows = []
    for question, answer, pictures in chats:
        turns = [("user", question, ["image"] * len(pictures)), ("assistant", answer, [])]
        turns = [{"role": role, "text": text, "media": media} for role, text, media in turns]
        rows.append({"conversations": turns, "images": pictures})
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = [{"text": f"{question} {answer}"} for question, answer, _ in chats]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))


def samples_of(rank, step):
    return [sample for batch in rank["steps"][step] for sample in batch]


def key(sample):
    """What tells samples apart."""
    return (*sample["input_ids"].tolist(), *sample["labels"][1:].tolist())


def keys_of(ranks, step):
    """Of all samples of a step, in an order of their own."""
    return sorted(key(sample) for rank in ranks for sample in samples_of(rank, step))


def length(batch):
    return sum(len(sample["input_ids"]) for sample in batch)


def waits(ranks, works, *, meets="microbatch"):
    """What ranks wait for, in each microbatch or each step, over what they compute, of kinds of work that a batch says."""
    steps = list(zip(*(rank["steps"] for rank in ranks), strict=True))
    slots = [slot for step in steps for slot in zip(*step, strict=True)]
    if meets == "step":
        slots = [[[row for batch in of_rank for row in batch] for of_rank in step] for step in steps]
    slowest = [sum(max(map(of, slot)) for slot in slots) for of in works]
    mean = [sum(sum(map(of, slot)) for slot in slots) / len(ranks) for of in works]
    # Each kind counts alike; texts have nothing for an encoder.
    ratios = [slow / even for slow, even in zip(slowest, mean, strict=True) if even]
    return sum(ratios) / len(ratios)


def patches(batch):
    """Of pictures and videos."""
    masks = [row[name] for row in batch for name in ("image_mask", "video_mask") if name in row]
    return 4 * sum(int(mask.sum()) for mask in masks)


def trained(model, ranks, loss_of):
    """Parameters of a model behind all steps, by the mean over all label tokens of a step, each sample alone."""
    for step in range(len(ranks[0]["steps"])):
        rows = [sample for rank in ranks for sample in samples_of(rank, step)]
        count = sum(int((row["labels"][1:] != -100).sum()) for row in rows)
        for row in rows:
            (loss_of(model, row) / count).backward()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.grad is not None:
                    weight -= 0.1 * weight.grad
                    weight.grad = None
    return dict(model.state_dict())
