"""LLaMA-Factory with balanced batches: two ranks train what one process trains that computes each sample alone.

The model is a tiny Qwen2.5-VL, the data are chats with pictures and without. `make test-frameworks` runs these
tests in an environment of LLaMA-Factory's own versions.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_text
import tiny_vision
import torch
import yaml
from ranks import environment, free_port, results, run_ranks
from safetensors.torch import load_file
from test_trainers import TOLERANCE, as_launched
from torch.nn import functional as F

pytest.importorskip("llamafactory", reason="LLaMA-Factory is not installed: `make test-frameworks`")
PAGE = Path(__file__).resolve().parents[2] / "docs/frameworks.md"
NUM_RANKS, BATCH_SIZE, NUM_EPOCHS, SEED, LEARNING_RATE = 2, 2, 2, 3, 0.1
NUM_PAIRS = 16
COLUMNS = {"messages": "messages", "images": "images"}
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Once, before ranks are forked."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import llamafactory.train.tuner  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model and data."""
    folder = tmp_path_factory.mktemp("llamafactory")
    tiny_vision.write_model(folder / "model")
    tiny_vision.write_sharegpt(folder / "chats.json", tiny_vision.chats(folder / "pictures"))
    info = {"chats": {"file_name": "chats.json", "formatting": "sharegpt", "columns": COLUMNS, "tags": TAGS}}
    # As many pairs as a step has, so that a step of one process has the same ones, in whatever order.
    tiny_vision.write_pairs(folder / "pairs.json", tiny_vision.chats(folder / "pictures", NUM_PAIRS))
    columns = {name: name for name in ("chosen", "rejected", "images")} | {"messages": "conversations"}
    info["pairs"] = {
        "file_name": "pairs.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": columns,
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def arguments_of(folder, out, **changes):
    """As its YAML says."""
    given = {
        "model_name_or_path": str(folder / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "freeze_vision_tower": False,
        "freeze_multi_modal_projector": False,
        "dataset": "chats",
        "dataset_dir": str(folder),
        "template": "qwen2_vl",
        "output_dir": str(out),
        "per_device_train_batch_size": BATCH_SIZE,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": NUM_EPOCHS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "ddp_backend": "gloo",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "preprocessing_num_workers": 1,
        "seed": SEED,
    }
    return {**given, **changes}


LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all", "freeze_vision_tower": True}


def steps_of(num_samples, accumulation):
    """The samples of each step, whatever they cost."""
    samples = SimpleNamespace(costs=[(0, 1)] * num_samples)
    return tiny_text.global_batches(samples, BATCH_SIZE, NUM_RANKS * accumulation, NUM_EPOCHS, seed=SEED)


def train_alone(arguments, accumulation, directory):
    """Its rows in the order that the trainer has by the seed; the rows and each step's loss."""

    def chosen(rows):
        rows = list(rows)
        return [[rows[i] for i in indices] for indices in steps_of(len(rows), accumulation)]

    steps, losses = learn_alone(arguments, chosen, directory)
    num_steps = len(steps) // NUM_EPOCHS
    return [row for step in steps[:num_steps] for row in step], losses


def learn_alone(arguments, chosen, directory):
    """LLaMA-Factory's model, rows and collation in a loop of our own; the rows of each step and its loss."""
    from llamafactory.data import (
        SFTDataCollatorWith4DAttentionMask,
        get_dataset,
        get_template_and_fix_tokenizer,
    )
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_model, load_tokenizer

    found = get_train_args({name: value for name, value in arguments.items() if name != "ddp_backend"})
    model_args, data_args, training_args, finetuning_args, _ = found
    module = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(module["tokenizer"], data_args)
    found = get_dataset(template, model_args, data_args, training_args, stage="sft", **module)
    steps = chosen(found["train_dataset"])
    model = load_model(module["tokenizer"], model_args, finetuning_args, True)
    collate = SFTDataCollatorWith4DAttentionMask(
        template=template, model=model, pad_to_multiple_of=8, **module
    )
    losses = []
    for rows in steps:
        tokens = sum(label != -100 for row in rows for label in row["labels"][1:])
        losses.append(0.0)
        for row in rows:
            batch = collate([dict(row)])
            labels = batch.pop("labels")[:, 1:]
            logits = model(**batch).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
            loss.backward()
            losses[-1] += float(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
                    parameter.grad = None
    model.save_pretrained(directory)
    return [[tuple(row["input_ids"]) for row in rows] for rows in steps], losses


def alone(arguments, accumulation, directory):
    """The same in a process of its own, which leaves nothing behind."""
    (found,) = results(
        run_ranks(1, lambda _: train_alone(arguments, accumulation, directory), directory / "rank")
    )
    return found


def train_on_ranks(arguments, directory):
    """Of each rank its losses, and the rows of each microbatch."""
    port = free_port()

    def run(rank):
        from llamafactory.train.sft import workflow

        from dflop.integrations.llamafactory import train

        as_launched(rank, port)
        microbatches, theirs = [], workflow.SFTDataCollatorWith4DAttentionMask.__call__

        def collate(self, features):
            microbatches.append([tuple(feature["input_ids"]) for feature in features])
            return theirs(self, features)

        workflow.SFTDataCollatorWith4DAttentionMask.__call__ = collate
        train(arguments)
        return microbatches

    found = results(run_ranks(NUM_RANKS, run, directory))
    entries = map(json.loads, (Path(arguments["output_dir"]) / "trainer_log.jsonl").read_text().splitlines())
    return found, [entry["loss"] for entry in entries if "loss" in entry]


def weights(directory):
    (file,) = [file for file in directory.glob("*.safetensors") if "model" in file.name]
    return load_file(file)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_ranks_train_what_one_process_does(kind, accumulation, folder, tmp_path):
    """Parameters after two epochs, losses, and each sample once an epoch; microbatches of uneven counts."""
    changes = LORA if kind == "lora" else {}
    arguments = arguments_of(folder, tmp_path / "out", gradient_accumulation_steps=accumulation, **changes)
    rows, losses = alone(arguments, accumulation, tmp_path / "alone")
    ranks, found = train_on_ranks(arguments, tmp_path / "ranks")
    assert found == pytest.approx(losses, rel=1e-3)
    assert tiny_vision.difference(weights(tmp_path / "out"), weights(tmp_path / "alone")) <= TOLERANCE
    assert accumulation == 1 or len({len(batch) for rank in ranks for batch in rank}) > 1
    num_batches = len(ranks[0]) // NUM_EPOCHS
    for epoch in range(NUM_EPOCHS):
        batches = [batch for rank in ranks for batch in rank[epoch * num_batches : (epoch + 1) * num_batches]]
        assert sorted(row for batch in batches for row in batch) == sorted(rows)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_run_resumes_inside_an_epoch(kind, folder, tmp_path):
    """From the checkpoint of the third step, in an epoch of seven."""
    changes = LORA if kind == "lora" else {}
    out = tmp_path / "out"
    arguments = arguments_of(
        folder, out, gradient_accumulation_steps=1, save_strategy="steps", save_steps=3, **changes
    )
    alone(arguments, 1, tmp_path / "alone")
    first, _ = train_on_ranks(arguments, tmp_path / "first")
    whole = weights(out)
    from_here = {"resume_from_checkpoint": str(out / "checkpoint-3")}
    if kind == "full":
        # transformers 5.6 does not load these weights otherwise, which are saved by other names.
        from_here["model_name_or_path"] = str(out / "checkpoint-3")
    again, _ = train_on_ranks({**arguments, **from_here}, tmp_path / "second")
    assert again == [rank[3:] for rank in first]
    assert tiny_vision.difference(weights(out), whole) <= TOLERANCE
    assert tiny_vision.difference(whole, weights(tmp_path / "alone")) <= TOLERANCE


def test_the_command_and_all_lines(folder, tmp_path):
    """As the page says them: the encoder is shared, and no padding is computed."""
    section = PAGE.read_text().split("## LLaMA-Factory\n")[1].split("\n## ")[0]
    (said,) = re.findall(r"^```sh\n(.*?)^```", section, flags=re.M | re.S)
    (lines,) = re.findall(r"^```yaml\n(.*?)^```", section, flags=re.M | re.S)
    lines, out = yaml.safe_load(lines), tmp_path / "out"
    assert lines["dflop"].pop("remove_padding")
    arguments = arguments_of(folder, out, num_train_epochs=1, use_reentrant_gc=False)
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({**arguments, **lines}))
    words = said.replace("--nproc-per-node 8", f"--nproc-per-node 2 --master-port {free_port()}").split()
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    command += [f"num_train_epochs={NUM_EPOCHS}", "dflop.remove_padding=true"]
    given = {**os.environ, **environment(0, 1, 1)}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        given.pop(name)
    ended = subprocess.run(
        command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stderr
    alone({**arguments, "output_dir": str(tmp_path / "other")}, 2, tmp_path / "alone")
    assert tiny_vision.difference(weights(out), weights(tmp_path / "alone")) <= TOLERANCE


@pytest.mark.parametrize("lines", [{}, {"balance_encoder": True, "remove_padding": True}])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_preferences(kind, lines, folder, tmp_path):
    """`stage: dpo`, with a part that learns the chosen answers: two ranks against LLaMA-Factory's own one."""
    changes = {"stage": "dpo", "dataset": "pairs", "pref_ftx": 0.5, "learning_rate": 0.02}
    changes |= {"use_reentrant_gc": False, **(LORA if kind == "lora" else {})}
    sizes = {"per_device_train_batch_size": NUM_PAIRS, "gradient_accumulation_steps": 1}
    whole = arguments_of(folder, tmp_path / "whole", **changes, **sizes)

    def losses_of(out):
        entries = map(json.loads, (out / "trainer_log.jsonl").read_text().splitlines())
        return [entry["loss"] for entry in entries if "loss" in entry]

    def run_alone(_):
        from llamafactory.train import tuner

        as_launched(0, free_port(), 1)
        tuner.run_exp(whole)
        return True

    results(run_ranks(1, run_alone, tmp_path / "one"))
    sizes = {"per_device_train_batch_size": NUM_PAIRS // 4, "gradient_accumulation_steps": 2}
    balanced = {**arguments_of(folder, tmp_path / "out", **changes, **sizes), "dflop": lines}
    port = free_port()

    def run(rank):
        from llamafactory.data import PairwiseDataCollatorWithPadding

        from dflop.integrations.llamafactory import train

        as_launched(rank, port)
        counts, theirs = [], PairwiseDataCollatorWithPadding.__call__

        def collate(self, features):
            counts.append(len(features))
            return theirs(self, features)

        PairwiseDataCollatorWithPadding.__call__ = collate
        train(balanced)
        return counts

    counts = results(run_ranks(NUM_RANKS, run, tmp_path / "ranks"))
    assert sum(map(sum, counts)) == NUM_EPOCHS * NUM_PAIRS
    assert len({count for rank in counts for count in rank}) > 1
    assert losses_of(tmp_path / "out") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-3)
    assert len(losses_of(tmp_path / "whole")) == NUM_EPOCHS
    assert tiny_vision.difference(weights(tmp_path / "out"), weights(tmp_path / "whole")) <= TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": True}, "`packing` is True, must be False for balanced batches"),
        (
            {"streaming": True, "max_steps": 3, "stage": "dpo", "dataset": "pairs"},
            "`streaming` is True and `stage` is 'dpo': pairs are balanced before they are read",
        ),
        ({"stage": "pt"}, "`stage` is 'pt', must be 'sft' or 'dpo'"),
        ({"stage": "dpo", "pref_bco_weight": 0.5}, "`pref_bco_weight` is 0.5, must be 0.0"),
        ({"ignore_pad_token_for_loss": False}, "`ignore_pad_token_for_loss` is False"),
        ({"use_asft_loss": True}, "`use_asft_loss` is True"),
        (
            {"dflop": {"balance_encoder": True}},
            "`use_reentrant_gc` is True, must be False for `dflop.balance",
        ),
        ({"dflop": {"remove_paddings": True}}, "`dflop.remove_paddings` is not known"),
        ({"dflop": {"remove_padding": "yes"}}, "`dflop.remove_padding` is 'yes', must be true or false"),
        ({"dflop": True}, "`dflop` is True, must have keys of its own"),
    ],
)
def test_what_cannot_be_balanced_is_refused(changes, message, folder, tmp_path):
    """Before a model is loaded, with the key."""
    from llamafactory.train import tuner
    from llamafactory.train.sft import workflow

    from dflop.integrations.llamafactory import train

    theirs = workflow.CustomSeq2SeqTrainer, tuner.get_train_args
    with pytest.raises(ValueError, match=message):
        train(arguments_of(folder, tmp_path, ddp_backend=None, **changes))
    assert theirs == (workflow.CustomSeq2SeqTrainer, tuner.get_train_args)
