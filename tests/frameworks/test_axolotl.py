"""Axolotl with balanced batches: two ranks train what one process trains that computes each sample alone.

The model is a tiny Qwen2.5-VL, the data are chats with pictures and without, tokenized by its collation; and texts
that it tokenizes before. `make test-frameworks` runs these tests in an environment of Axolotl's own versions.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_text
import tiny_vision
import torch
import yaml
from ranks import free_port, results, run_ranks
from safetensors.torch import load_file
from test_trainers import TOLERANCE, as_launched
from torch.nn import functional as F

pytest.importorskip("axolotl", reason="Axolotl is not installed: `make test-frameworks`")
# Before its modules are imported: it would tell its makers of each run.
os.environ.update(AXOLOTL_DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", WANDB_MODE="disabled")
PAGE = Path(__file__).resolve().parents[2] / "docs/frameworks.md"
NUM_RANKS, BATCH_SIZE, NUM_EPOCHS, SEED, LEARNING_RATE = 2, 2, 2, 3, 0.1
NUM_PAIRS = 16


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Once, before ranks are forked."""
    import axolotl.cli.train
    import axolotl.core.builders
    import axolotl.train  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model and data."""
    folder = tmp_path_factory.mktemp("axolotl")
    tiny_vision.write_model(folder / "model")
    # A whole number of steps: Axolotl counts the steps of all epochs together, and leaves the last one out where the
    # last step of an epoch is smaller.
    samples = tiny_vision.chats(folder / "pictures", count=24)
    tiny_vision.write_messages(folder / "chats.jsonl", samples)
    tiny_vision.write_messages(folder / "texts.jsonl", [(ask, answer, []) for ask, answer, _ in samples])
    # As many pairs as a step has, so that a step of one process has the same ones, in whatever order.
    tiny_vision.write_answers(folder / "pairs.jsonl", samples[:NUM_PAIRS], are_chats=True)
    tiny_vision.write_answers(folder / "judged.jsonl", samples[:NUM_PAIRS], are_chats=False)
    tiny_vision.write_judge(folder / "judge")
    return folder


def keys_of(folder, out, **changes):
    """As its YAML says."""
    given = {
        "base_model": str(folder / "model"),
        "processor_type": "AutoProcessor",
        "skip_prepare_dataset": True,
        "remove_unused_columns": False,
        "sample_packing": False,
        "chat_template": "qwen2_vl",
        "datasets": [{"path": str(folder / "chats.jsonl"), "type": "chat_template", "ds_type": "json"}],
        "dataset_prepared_path": str(out / "prepared"),
        "output_dir": str(out),
        "sequence_len": 512,
        "micro_batch_size": BATCH_SIZE,
        "gradient_accumulation_steps": 2,
        "num_epochs": NUM_EPOCHS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler": "constant",
        "optimizer": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "val_set_size": 0,
        "bf16": False,
        "fp16": False,
        "attn_implementation": "sdpa",
        "seed": SEED,
        "ddp_find_unused_parameters": True,
        "dataloader_num_workers": 0,
        "plugins": ["dflop.integrations.axolotl.BalancePlugin"],
    }
    return {**given, **changes}


LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
# Axolotl takes its kernels for GPUs by itself.
LORA |= {"lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False}
LORA["lora_target_modules"] = r"model\.language_model\.layers.*\.(q_proj|down_proj)"
TEXTS = {
    "freeze_mm_modules": True,
    "processor_type": None,
    "skip_prepare_dataset": False,
    "remove_unused_columns": None,
}


def loaded(keys, folder):
    """Axolotl's own object of these keys, for CPUs, which it has no key for."""
    from axolotl.cli.config import load_cfg

    torch.cuda.can_device_access_peer = lambda *_: True
    path = folder / "train.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({name: value for name, value in keys.items() if value is not None}))
    cfg = load_cfg(str(path))
    cfg.device_map = {"": "cpu"}
    return cfg


def steps_of(num_samples, accumulation):
    """The samples of each step, whatever they cost."""
    samples = SimpleNamespace(costs=[(0, 1)] * num_samples)
    return tiny_text.global_batches(samples, BATCH_SIZE, NUM_RANKS * accumulation, NUM_EPOCHS, seed=SEED)


def train_alone(keys, accumulation, directory):
    """Its rows in the order that the trainer has by the seed; the rows and each step's loss."""

    def chosen(rows):
        rows = list(rows)
        return [[rows[i] for i in indices] for indices in steps_of(len(rows), accumulation)]

    steps, losses = learn_alone(keys, chosen, directory)
    return [named(row) for step in steps[: len(steps) // NUM_EPOCHS] for row in step], losses


def learn_alone(keys, chosen, directory):
    """Axolotl's model, rows and collation in a loop of our own; the rows of each step and its loss."""
    from axolotl.common.datasets import load_datasets
    from axolotl.train import setup_model_and_trainer

    cfg = loaded({**keys, "plugins": None, "dflop": None}, directory)
    trainer, model, *_ = setup_model_and_trainer(cfg, load_datasets(cfg=cfg))
    model.train()
    steps, collate = chosen(trainer.train_dataset), trainer.data_collator
    losses = []
    for rows in steps:
        batches = [collate([kept(row)]) for row in rows]
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        losses.append(0.0)
        for batch in batches:
            given = dict(batch)
            labels = given.pop("labels")[:, 1:]
            logits = model(**given).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
            loss.backward()
            losses[-1] += float(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
                    parameter.grad = None
    model.save_pretrained(directory)
    return steps, losses


def kept(row):
    """Of a row that Axolotl has tokenized, what its trainer hands to the collation."""
    names = ("input_ids", "attention_mask", "labels")
    return {name: row[name] for name in names} if "input_ids" in row else row


def named(row):
    """By what a row is told from others."""
    return str(row.get("messages", row.get("input_ids", row.get("chosen_ids"))))


def alone(keys, accumulation, directory):
    """The same in a process of its own, which leaves nothing behind."""
    (found,) = results(run_ranks(1, lambda _: train_alone(keys, accumulation, directory), directory / "rank"))
    return found


def train_on_ranks(keys, directory, num_ranks=NUM_RANKS):
    """By Axolotl: of each rank its losses, and the rows of each microbatch."""
    port = free_port()

    def run(rank):
        from axolotl.cli.args import TrainerCliArgs
        from axolotl.cli.train import do_train
        from transformers import Trainer

        as_launched(rank, port, num_ranks)
        microbatches, losses, theirs = [], [], Trainer.train

        def train(self, *given, **more):
            collate = self.data_collator
            self.data_collator = lambda rows: (
                microbatches.append([named(row) for row in rows]),
                collate(rows),
            )[1]
            done = theirs(self, *given, **more)
            losses.extend(entry["loss"] for entry in self.state.log_history if "loss" in entry)
            return done

        Trainer.train = train
        do_train(loaded(keys, directory / f"keys{rank}"), TrainerCliArgs())
        return losses, microbatches

    return run_ranks(num_ranks, run, directory, timeout_s=120)


def weights(directory):
    """Those that trained: of preferences Axolotl saves the frozen model beside the adapters."""
    adapters = directory / "adapter_model.safetensors"
    if adapters.exists():
        return load_file(adapters)
    (file,) = [file for file in directory.glob("*.safetensors") if "model" in file.name]
    return load_file(file)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["full", "lora", "texts"])
def test_ranks_train_what_one_process_does(kind, accumulation, folder, tmp_path):
    """Parameters after two epochs, losses, and each sample once an epoch; microbatches of uneven counts."""
    changes = {"full": {}, "lora": LORA, "texts": dict(TEXTS)}[kind]
    if kind == "texts":
        changes["datasets"] = [
            {"path": str(folder / "texts.jsonl"), "type": "chat_template", "ds_type": "json"}
        ]
    keys = keys_of(folder, tmp_path / "out", gradient_accumulation_steps=accumulation, **changes)
    rows, losses = alone(keys, accumulation, tmp_path / "alone")
    ranks = results(train_on_ranks(keys, tmp_path / "ranks"))
    assert tiny_vision.difference(weights(tmp_path / "out"), weights(tmp_path / "alone")) <= TOLERANCE
    for found, _ in ranks:
        assert found == pytest.approx(losses, rel=1e-4)
    assert accumulation == 1 or len({len(batch) for _, rank in ranks for batch in rank}) > 1
    num_batches = len(ranks[0][1]) // NUM_EPOCHS
    for epoch in range(NUM_EPOCHS):
        batches = [
            batch for _, rank in ranks for batch in rank[epoch * num_batches : (epoch + 1) * num_batches]
        ]
        assert sorted(row for batch in batches for row in batch) == sorted(rows)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_run_resumes_inside_an_epoch(kind, folder, tmp_path):
    """From the checkpoint of the third step, in an epoch of seven."""
    out = tmp_path / "out"
    changes = {"gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 3}
    keys = keys_of(folder, out, **changes, **(LORA if kind == "lora" else {}))
    alone(keys, 1, tmp_path / "alone")
    first = results(train_on_ranks(keys, tmp_path / "first"))
    whole = weights(out)
    from_here = {"resume_from_checkpoint": str(out / "checkpoint-3")}
    if kind == "full":
        # transformers 5.16 does not load these weights otherwise, which are saved by other names.
        from_here |= {"base_model": str(out / "checkpoint-3"), "base_model_config": str(folder / "model")}
    again = results(train_on_ranks({**keys, **from_here}, tmp_path / "second"))
    assert [rank for _, rank in again] == [rank[3:] for _, rank in first]
    assert tiny_vision.difference(weights(out), whole) <= TOLERANCE
    assert tiny_vision.difference(whole, weights(tmp_path / "alone")) <= TOLERANCE


def test_all_lines(folder, tmp_path):
    """What the page says: the encoder is shared, and no padding is computed. Nothing else is then needed of DDP."""
    section = PAGE.read_text().split("## Axolotl\n")[1].split("\n## ")[0]
    (said,) = re.findall(r"^```yaml\n(.*?)^```", section, flags=re.M | re.S)
    keys = keys_of(folder, tmp_path / "out", **yaml.safe_load(said), ddp_find_unused_parameters=False)
    assert keys["dflop"] == {"balance_encoder": True, "remove_padding": True}
    alone(keys, 2, tmp_path / "alone")
    results(train_on_ranks(keys, tmp_path / "ranks"))
    assert tiny_vision.difference(weights(tmp_path / "out"), weights(tmp_path / "alone")) <= TOLERANCE


PREFERENCES = {
    "dpo": {"rl": "dpo"},
    "ipo": {"rl": "ipo", "rl_beta": 0.5},
    # A mixture with a part that is a mean over the tokens of chosen answers.
    "mixture": {"rl": "dpo", "dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [0.8, 0.5]},
    "lora": {"rl": "dpo", **LORA, "dflop": {"remove_padding": True}},
    # Without a second model; with a part that is a mean over chosen tokens, too.
    "orpo": {"rl": "orpo", "orpo_alpha": 0.5},
    "simpo": {"rl": "simpo", "rl_beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.7},
    "reward": {"reward_model": True, "center_rewards_coefficient": 0.01},
}


@pytest.mark.parametrize("kind", list(PREFERENCES))
def test_preferences(kind, folder, tmp_path):
    """Two ranks with uneven microbatches, against Axolotl's own one whose microbatch is the whole step."""
    rows = {"path": str(folder / "pairs.jsonl"), "type": "chat_template.argilla"}
    changes = {**TEXTS, **PREFERENCES[kind], "learning_rate": 0.05}
    if kind != "orpo":
        # The same rows: Axolotl reads them for ORPO by another name.
        rows["type"] = "chat_template.argilla_chat"
    if kind == "reward":
        rows = {"path": str(folder / "judged.jsonl"), "type": "bradley_terry.chat_template"}
        changes |= {"base_model": str(folder / "judge"), "model_type": "AutoModelForSequenceClassification"}
        changes |= {"num_labels": 1, "freeze_mm_modules": None}
    changes["datasets"] = [{**rows, "ds_type": "json", "split": "train"}]
    sizes = {"micro_batch_size": NUM_PAIRS, "gradient_accumulation_steps": 1, "plugins": None, "dflop": None}
    whole = keys_of(folder, tmp_path / "whole", **{**changes, **sizes})
    ((losses, batches),) = results(train_on_ranks(whole, tmp_path / "one", 1))
    assert [len(batch) for batch in batches] == [NUM_PAIRS] * NUM_EPOCHS
    assert losses[0] != pytest.approx(losses[1], rel=1e-3), "a step that changes what the next one sees"
    sizes = {"micro_batch_size": NUM_PAIRS // 4, "gradient_accumulation_steps": 2}
    keys = keys_of(folder, tmp_path / "out", **{**changes, **sizes})
    ranks = results(train_on_ranks(keys, tmp_path / "ranks"))
    for found, _ in ranks:
        assert found == pytest.approx(losses, rel=1e-4)
    assert tiny_vision.difference(weights(tmp_path / "out"), weights(tmp_path / "whole")) <= TOLERANCE
    assert len({len(batch) for _, rank in ranks for batch in rank}) > 1
    num_batches = len(ranks[0][1]) // NUM_EPOCHS
    for epoch in range(NUM_EPOCHS):
        found = [
            row
            for _, rank in ranks
            for batch in rank[epoch * num_batches : (epoch + 1) * num_batches]
            for row in batch
        ]
        assert sorted(found) == sorted(batches[epoch])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_parallel_size": 2}, "`context_parallel_size` is 2, must be 1"),
        ({"group_by_length": True}, "`group_by_length` is True, leave it out"),
        ({"sample_packing": True}, "`sample_packing` is True, leave it out"),
        ({"pretraining_dataset": ["a"]}, "`pretraining_dataset` is .*, leave it out"),
        ({"orpo_alpha": 0.1}, "`orpo_alpha` is 0.1, leave it out"),
        ({"process_reward_model": True}, "`process_reward_model` is True, leave it out"),
        ({"rl": "kto"}, "`rl` is `kto`, must be one of `dpo`, .* with the mean of its microbatch"),
        ({"rl": "grpo"}, "`rl` is `grpo`, must be .* samples are generated in training"),
    ],
)
def test_what_cannot_be_balanced_is_refused(changes, message):
    """With the key, before a model is loaded."""
    from axolotl.utils.dict import DictDefault

    from dflop.integrations.axolotl import BalancePlugin

    with pytest.raises(ValueError, match=message):
        BalancePlugin().register(DictDefault(changes))


def test_texts_beside_a_trained_encoder_are_refused_where_ddp_would_hang(folder, tmp_path):
    """With what to do about it."""
    keys = keys_of(folder, tmp_path / "out", ddp_find_unused_parameters=False)
    ended = train_on_ranks(keys, tmp_path / "ranks")
    assert [rank.status for rank in ended] == [1] * NUM_RANKS
    for rank in ended:
        assert "8 of 24 samples have nothing for the encoder, which trains" in rank.stderr


def test_a_trainer_with_a_loss_of_its_own_is_refused():
    """As those of `rl` and of other plugins are."""
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.utils.dict import DictDefault

    from dflop.integrations.axolotl import BalancePlugin

    class Other(AxolotlTrainer):
        def compute_loss(self, *given, **named):
            return None

    with pytest.raises(ValueError, match="the trainer is a `Other`, must be Axolotl's own"):
        BalancePlugin().post_trainer_create(DictDefault({}), Other.__new__(Other))


def test_losses_inside_the_model_are_told():
    """They take no effect."""
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.utils.dict import DictDefault

    from dflop.integrations.axolotl import _check

    with pytest.warns(UserWarning, match="`cut_cross_entropy` does not take effect"):
        _check(DictDefault({"cut_cross_entropy": True}), AxolotlTrainer.__new__(AxolotlTrainer))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflop": {"padding": True}}, r"`dflop.padding` is not known, must be one of `balance_encoder`"),
        ({"rl": "kto"}, "`rl` is `kto`, must be one of `dpo`"),
    ],
)
def test_a_yaml_is_looked_at_first(changes, message, folder, tmp_path):
    """While Axolotl reads it, before a model is loaded."""
    with pytest.raises(ValueError, match=message):
        loaded(keys_of(folder, tmp_path / "out", **changes), tmp_path)
