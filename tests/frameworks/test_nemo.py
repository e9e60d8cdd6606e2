"""NeMo Automodel with balanced batches: two ranks train what its own recipe trains on one process, a step at once.

The model is a tiny Qwen2.5-VL, the data are chats with pictures and without. `make test-frameworks` runs these tests
in an environment of Automodel's own versions.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_vision
import torch
import yaml
from ranks import environment, free_port, results, run_ranks
from safetensors.torch import load_file

pytest.importorskip("nemo_automodel", reason="NeMo Automodel is not installed: `make test-frameworks`")
os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="disabled")
PAGE = Path(__file__).resolve().parents[2] / "docs/frameworks.md"
RECIPE = "dflop.integrations.nemo.recipe.BalancedRecipeForVLM"
NUM_RANKS, STEP, NUM_SAMPLES, NUM_EPOCHS, TOLERANCE = 2, 8, 28, 2, 1e-5
ITS_OWN = "nemo_automodel.components."


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Once, before ranks are forked."""
    import dflop.integrations.nemo.recipe  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model and data."""
    folder = tmp_path_factory.mktemp("nemo")
    tiny_vision.write_model(folder / "model")
    samples = tiny_vision.chats(folder / "pictures", count=NUM_SAMPLES)
    # In turn a chat with pictures and one without: of batches of two ranks one is of text alone.
    alone = [sample for sample in samples if not sample[2]]
    mixed = [sample for pair in zip(samples[: 3 * STEP : 3], alone, strict=False) for sample in pair]
    for name, found in {"chats": samples, "mixed": mixed}.items():
        tiny_vision.write_sharegpt(folder / f"{name}.json", found)
        (folder / f"{name}_meta.json").write_text(json.dumps({name: {"file_name": f"{name}.json"}}))
    return folder


def dataset(folder, name="chats", **more):
    """Of Automodel's own datasets the one that reads chats from a file."""
    target = f"{ITS_OWN}datasets.vlm.datasets.make_meta_dataset"
    return {"_target_": target, "path_or_dataset": str(folder / f"{name}_meta.json"), **more}


def keys_of(folder, out, **changes):
    """As its YAML says; a mapping among the changes is merged."""
    given = {
        "recipe": RECIPE,
        "seed": 3,
        "step_scheduler": {
            "global_batch_size": STEP,
            "local_batch_size": 2,
            "num_epochs": NUM_EPOCHS,
            "ckpt_every_steps": 1000,
            "save_checkpoint_every_epoch": False,
        },
        "dist_env": {"backend": "gloo", "timeout_minutes": 5},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForImageTextToText.from_pretrained",
            "pretrained_model_name_or_path": str(folder / "model"),
            "attn_implementation": "sdpa",
            "torch_dtype": "float32",
        },
        "checkpoint": {
            "enabled": True,
            "checkpoint_dir": str(out),
            "model_save_format": "safetensors",
            "save_consolidated": True,
        },
        "distributed": FSDP2,
        "loss_fn": {"_target_": f"{ITS_OWN}loss.masked_ce.MaskedCrossEntropy"},
        "dataset": dataset(folder),
        "dataloader": {"shuffle": False},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
        "clip_grad_norm": {"max_norm": 1e9},
    }
    for name, value in changes.items():
        both = name in given and isinstance(value, dict) and name != "distributed"
        given[name] = {**given[name], **value} if both else value
    return given


FSDP2 = {
    "strategy": "fsdp2",
    "mp_policy": {
        "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
        "param_dtype": "float32",
        "reduce_dtype": "float32",
    },
}
LORA = {
    "_target_": f"{ITS_OWN}_peft.lora.PeftConfig",
    "target_modules": ["*.language_model.*.q_proj", "*.language_model.*.down_proj"],
    "dim": 4,
    "alpha": 8,
    "use_triton": False,
}
KINDS = {
    "full": {},
    "lora": {"peft": LORA},
    "ddp": {"distributed": {"strategy": "ddp", "find_unused_parameters": True}},
    "tokenized": {"pretokenize": True, "inject_fake_images": False},
}


def on_cpu():
    """The recipe takes the device to be a GPU in four places."""
    from nemo_automodel._transformers import auto_model
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy

    torch.cuda.current_device = lambda: 0
    torch.cuda.reset_peak_memory_stats = lambda *_: None
    apply, loss = auto_model.apply_model_infrastructure, MaskedCrossEntropy.forward
    cpu = {"device": torch.device("cpu")}
    auto_model.apply_model_infrastructure = lambda *given, **named: apply(*given, **{**named, **cpu})

    def forward(self, logits, labels, **named):
        # What goes to a GPU arrives there without the gaps of a slice.
        return loss(self, logits, labels.contiguous(), **named)

    MaskedCrossEntropy.forward = forward


def trained(keys, num_ranks, directory):
    """By Automodel's own command on each rank: of each rank the rows of its microbatches."""
    port = free_port()

    def run(rank):
        from nemo_automodel.cli import app
        from nemo_automodel.components.datasets.vlm import loader

        torch.set_num_threads(1)
        os.environ.update(environment(rank, num_ranks, port), TORCHELASTIC_RUN_ID="a test")
        on_cpu()
        microbatches, theirs = [], loader.COLLATE_FNS["Qwen2_5_VLProcessor"]

        def collate(examples, processor):
            microbatches.append([named(example) for example in examples])
            return theirs(examples, processor)

        loader.COLLATE_FNS["Qwen2_5_VLProcessor"] = collate
        path = directory / f"train{rank}.yaml"
        path.write_text(yaml.safe_dump(keys))
        sys.argv = ["automodel", str(path)]
        app.main()
        return microbatches

    return run_ranks(num_ranks, run, directory)


def named(row):
    """By what a row is told from others."""
    return json.dumps(row["conversation"])


def alone(keys, directory, num_ranks=1):
    """Automodel without dflop, a microbatch a step."""
    changes = {**keys["step_scheduler"], "local_batch_size": STEP // num_ranks}
    keys = {**keys, "recipe": "FinetuneRecipeForVLM", "step_scheduler": changes}
    keys["checkpoint"] = {**keys["checkpoint"], "checkpoint_dir": str(directory / "out")}
    keys.pop("dflop", None)
    results(trained(keys, num_ranks, directory))
    return weights(directory / "out"), losses(directory / "out")


def weights(out):
    """Of the last checkpoint."""
    folder = out / (out / "LATEST").readlink() if (out / "LATEST").is_symlink() else _last(out)
    whole = sorted((folder / "model").rglob("consolidated/*.safetensors"))
    (file,) = whole or (folder / "model").glob("adapter*.safetensors")
    return load_file(file)


def _last(out):
    return max(out.glob("epoch_*"), key=lambda path: int(path.name.rsplit("_", 1)[1]))


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "training.jsonl").read_text().splitlines()]


def changed(folder, kind):
    """What the YAML says for a kind of training."""
    changes = KINDS[kind]
    return {"dataset": dataset(folder, **changes)} if kind == "tokenized" else changes


@pytest.mark.parametrize(
    ("kind", "accumulation"), [("full", 1), ("full", 2), ("lora", 2), ("ddp", 2), ("tokenized", 2)]
)
def test_ranks_train_what_one_process_does(kind, accumulation, folder, tmp_path):
    """Parameters after two epochs, losses, and each sample once an epoch; microbatches of uneven counts."""
    size = STEP // NUM_RANKS // accumulation
    scheduler = {"local_batch_size": size}
    keys = keys_of(folder, tmp_path / "out", step_scheduler=scheduler, **changed(folder, kind))
    # Adapters begin with other numbers on each rank.
    expected, theirs = alone(keys, tmp_path / "alone", num_ranks=NUM_RANKS if kind == "lora" else 1)
    ranks = results(trained(keys, NUM_RANKS, tmp_path / "ranks"))
    assert losses(tmp_path / "out") == pytest.approx(theirs, rel=1e-4)
    assert tiny_vision.difference(weights(tmp_path / "out"), expected) <= TOLERANCE
    if kind == "tokenized":
        return
    assert accumulation == 1 or len({len(batch) for rank in ranks for batch in rank}) > 1
    _check_epochs(ranks)


def _check_epochs(ranks):
    """Each epoch has each sample once; its rows in order."""
    num_batches = len(ranks[0]) // NUM_EPOCHS
    epochs = []
    for epoch in range(NUM_EPOCHS):
        batches = [rank[epoch * num_batches : (epoch + 1) * num_batches] for rank in ranks]
        epochs.append([row for rank in batches for batch in rank for row in batch])
        assert len(epochs[-1]) == len(set(epochs[-1])) == NUM_SAMPLES
    assert set(epochs[0]) == set(epochs[1])
    return epochs


def test_shuffled_epochs_differ(folder, tmp_path):
    """As Automodel shuffles unless `dataloader.shuffle` says otherwise; a profile gives the same batches."""
    from nemo_automodel.components.datasets.vlm.datasets import make_meta_dataset

    from dflop.data.saved import profile_records
    from dflop.integrations.nemo.rows import records_of

    rows = list(make_meta_dataset(folder / "chats_meta.json"))
    records = records_of(rows, lambda conversation: conversation)
    (tmp_path / "profile").mkdir()
    path, *_ = profile_records(records, folder / "model", tmp_path / "profile", folder)
    keys = keys_of(folder, tmp_path / "out", dataloader={"shuffle": True})
    ranks = results(trained(keys, NUM_RANKS, tmp_path / "ranks"))
    first, second = _check_epochs(ranks)
    assert first != second
    keys = keys_of(
        folder, tmp_path / "again", dataloader={"shuffle": True}, dflop={"data_profile": str(path)}
    )
    assert results(trained(keys, NUM_RANKS, tmp_path / "again")) == ranks


@pytest.mark.parametrize(
    ("at", "num_ranks"), [("epoch_0_step_1", 2), ("epoch_0_step_3", 2), ("epoch_1_step_5", 1)]
)
def test_a_run_resumes(at, num_ranks, folder, tmp_path, whole_run):
    """Inside an epoch of four steps, behind its last one, and on fewer ranks: each sample once."""
    out, microbatches = whole_run
    num_done = int(at.rsplit("_", 1)[1]) + 1
    keys = keys_of(
        folder,
        tmp_path / "out",
        checkpoint={"restore_from": str(out / at)},
        dataloader={"shuffle": True},
    )
    again = results(trained(keys, num_ranks, tmp_path / "ranks"))
    assert steps_of(again) == steps_of(microbatches)[num_done:]
    assert tiny_vision.difference(weights(tmp_path / "out"), weights(out)) <= TOLERANCE


@pytest.fixture(scope="module")
def whole_run(folder, tmp_path_factory):
    """A run that was not interrupted, with a checkpoint of every second step."""
    directory = tmp_path_factory.mktemp("whole")
    keys = keys_of(
        folder,
        directory / "out",
        step_scheduler={"ckpt_every_steps": 2},
        dataloader={"shuffle": True},
    )
    return directory / "out", results(trained(keys, NUM_RANKS, directory))


def steps_of(ranks):
    """The rows of each step, whichever rank computes them."""
    size = STEP // 2 // len(ranks)
    num_steps = len(ranks[0]) // size
    parts = [[rank[step * size : (step + 1) * size] for rank in ranks] for step in range(num_steps)]
    return [sorted(row for rank in step for batch in rank for row in batch) for step in parts]


def test_all_lines_and_evaluation(folder, tmp_path):
    """What the page says: the encoder is shared, and no padding is computed. Text alone hangs nobody."""
    section = PAGE.read_text().split("## NeMo Automodel\n")[1].split("\n## ")[0]
    (said,) = re.findall(r"^```yaml\n(.*?)^```", section, flags=re.M | re.S)
    said = yaml.safe_load(said)
    assert said == {"recipe": RECIPE, "dflop": {"balance_encoder": True, "remove_padding": True}}
    validation = {
        "validation_dataset": dataset(folder, "mixed"),
        "validation_dataloader": {"shuffle": False},
    }
    keys = keys_of(folder, tmp_path / "out", step_scheduler={"val_every_steps": 2}, **said, **validation)
    expected, theirs = alone(keys, tmp_path / "alone")
    results(trained(keys, NUM_RANKS, tmp_path / "ranks"))
    assert losses(tmp_path / "out") == pytest.approx(theirs, rel=1e-4)
    assert tiny_vision.difference(weights(tmp_path / "out"), expected) <= TOLERANCE
    of_both = [tmp_path / name / "validation.jsonl" for name in ("out", "alone/out")]
    found, its = (
        [json.loads(line)["val_loss"] for line in file.read_text().splitlines()] for file in of_both
    )
    assert found == pytest.approx(its, rel=1e-4)
    assert len(found) >= 4


def test_first_line_evaluates_text_alone(folder, tmp_path):
    """`attend_encoder` is taken: with DDP's rule for gradients nothing else is needed of FSDP2."""
    validation = {
        "validation_dataset": dataset(folder, "mixed"),
        "validation_dataloader": {"shuffle": False},
    }
    keys = keys_of(folder, tmp_path / "out", dataset=dataset(folder, "mixed"), **validation)
    expected, _ = alone(keys, tmp_path / "alone")
    results(trained(keys, NUM_RANKS, tmp_path / "ranks"))
    assert tiny_vision.difference(weights(tmp_path / "out"), expected) <= TOLERANCE


def test_costs_are_those_of_collated_rows(folder):
    """Encoder tokens and LLM tokens of each row, of files and of pictures in memory."""
    from nemo_automodel.components.datasets.vlm.collate_fns import qwen2_5_collate_fn
    from nemo_automodel.components.datasets.vlm.datasets import PreTokenizedDatasetWrapper, make_meta_dataset
    from nemo_automodel.components.datasets.vlm.fake_image import inject_fake_image_into_conversation
    from PIL import Image
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    from dflop import costs
    from dflop.integrations import cost_of_parameters, costs_of_rows
    from dflop.integrations.nemo.rows import records_of

    processor = AutoProcessor.from_pretrained(folder / "model")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "model")
    cost = cost_of_parameters(model)

    def counted(rows):
        return costs_of_rows(records_of(rows, inject_fake_image_into_conversation), model, processor)

    def check(rows, batches):
        pairs = [(float(grids.prod(dim=1).sum()), length) for grids, length in batches]
        found, expected = counted(rows), costs(map(cost, pairs))
        assert list(found.tokens) == [length for _, length in batches]
        assert list(found.encoder_ns) == list(expected.encoder_ns)
        assert list(found.llm_ns) == list(expected.llm_ns)

    none = torch.zeros(1, 3)
    rows = list(make_meta_dataset(folder / "chats_meta.json"))
    collated = [qwen2_5_collate_fn([row], processor) for row in rows]
    # The last token is no input: it is predicted alone.
    batches = [(batch.get("image_grid_thw", none), batch["input_ids"].shape[1] + 1) for batch in collated]
    check(rows, batches)
    in_memory = json.loads(json.dumps(rows))
    for row in in_memory:
        for part in row["conversation"][0]["content"]:
            if part["type"] == "image":
                part["image"] = Image.open(part["image"])
    check(in_memory, batches)
    # Here a row without pictures has a blank one.
    filled = PreTokenizedDatasetWrapper(json.loads(json.dumps(rows)), processor)
    given = [filled[index] for index in range(len(filled))]
    assert all("image_grid_thw" in one for one in given)
    again = PreTokenizedDatasetWrapper(json.loads(json.dumps(rows)), processor)
    check(again, [(one["image_grid_thw"], len(one["input_ids"])) for one in given])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "row 0 of the dataset has no `conversation` and no `input_ids`"),
        ({"video": "a.mp4", "frame_indices": [1]}, "row 0 of the dataset has a video with `frame_indices`"),
        ({"video": ["a.png"]}, "has a video as a `list`, must be a path to be counted"),
        ({"image": b"a"}, "has an image as a `bytes`, must be a path or a picture of PIL"),
    ],
)
def test_rows_that_nobody_can_count_are_refused(row, message):
    """With the number of the row, and the key that helps."""
    from dflop.integrations.nemo.rows import records_of

    is_part = "text" not in row
    rows = [{"conversation": [{"role": "user", "content": [row]}]} if is_part else row]
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        records_of(rows, lambda conversation: conversation)
    assert "give `dflop.data_profile`" in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distributed": {"pp_size": 2}}, "`distributed.pp_size` is 2, must be 1 for balanced batches"),
        ({"distributed": {"cp_size": 2}}, "`distributed.cp_size` is 2, must be 1 for balanced batches"),
        (
            {"distributed": {"strategy": "megatron_fsdp"}},
            "`distributed.strategy` is 'megatron_fsdp', must be",
        ),
        (
            {"distributed": {"tp_size": 2}, "dflop": {"balance_encoder": True}},
            "`distributed.tp_size` is 2, must be 1 for `dflop.balance_encoder`",
        ),
        ({"dflop": {"padding": True}}, "`dflop.padding` is not known, must be one of `balance_encoder`"),
        (
            {"packed_sequence": {"pack_size": 64}},
            "`packed_sequence.pack_size` is 64, leave `packed_sequence` out",
        ),
        ({"dataset": {"shard_data": True}}, "`dataset.shard_data` is true, must be false"),
        (
            {
                "dataloader": {
                    "collate_fn": {
                        "_target_": f"{ITS_OWN}datasets.vlm.collate_fns.default_collate_fn",
                        "max_length": 64,
                    }
                }
            },
            "`dataloader.collate_fn.max_length` is 64, leave it out or set `dflop.remove_padding`",
        ),
    ],
)
def test_what_cannot_be_balanced_is_refused(changes, message, folder, tmp_path):
    """With the key, before anything is loaded."""
    from nemo_automodel.components.config.loader import load_yaml_config

    from dflop.integrations.nemo.recipe import BalancedRecipeForVLM

    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(keys_of(folder, tmp_path / "out", **changes)))
    with pytest.raises(ValueError, match=re.escape(message)):
        BalancedRecipeForVLM(load_yaml_config(str(path))).setup()


def test_texts_beside_a_trained_encoder_are_refused_where_ddp_would_hang(folder, tmp_path):
    """With what to do about it."""
    keys = keys_of(folder, tmp_path / "out", distributed={"strategy": "ddp"})
    ended = trained(keys, NUM_RANKS, tmp_path / "ranks")
    assert [rank.status for rank in ended] == [1] * NUM_RANKS
    for rank in ended:
        assert f"9 of {NUM_SAMPLES} rows have nothing for the encoder, which trains" in rank.stderr


def test_a_step_of_no_whole_microbatches_is_refused(folder, tmp_path):
    """As Automodel's scheduler does it."""
    keys = keys_of(folder, tmp_path / "out", step_scheduler={"local_batch_size": 3})
    (ended,) = trained(keys, 1, tmp_path / "ranks")
    assert "`step_scheduler.global_batch_size` is 8, must be a multiple of `local_batch_size`" in ended.stderr


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_goes_on_where_its_state_was_taken(num_workers):
    """Behind each batch of an epoch, whatever the workers have read ahead; as Automodel does it."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from dflop import BalancedBatchSampler
    from dflop.integrations.nemo.loader import BalancedLoader

    def loader():
        sampler = BalancedBatchSampler([(0, 1 + i % 5) for i in range(14)], 2, num_buckets=2)
        return BalancedLoader(list(range(14)), sampler, collate_fn=list, num_workers=num_workers)

    whole, states = [], []
    first = loader()
    for epoch in range(2):
        first.sampler.set_epoch(epoch)
        for batch in first:
            whole.append((epoch, batch))
            states.append((epoch, json.loads(json.dumps(first.state_dict()))))
    assert len(whole) == 2 * len(first)
    for done, (begun, state) in enumerate(states[: len(first)], 1):
        again, found = loader(), []
        again.load_state_dict(state)
        for epoch in range(begun, 2):
            again.sampler.set_epoch(epoch)
            found += [(epoch, batch) for batch in again]
        assert found == whole[done:]
    with pytest.raises(ValueError, match="the checkpoint's loader is none of balanced batches"):
        loader().load_state_dict(StatefulDataLoader([1], collate_fn=list).state_dict())


def test_automodel_may_run_the_file_as_a_script(folder, tmp_path):
    """Nothing beside the file is taken for a package of another name: it comes as far as the options."""
    from dflop.integrations.nemo import recipe

    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(keys_of(folder, tmp_path / "out", dflop={"padding": True})))
    command = [sys.executable, recipe.__file__, "-c", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 1
    assert "ValueError: `dflop.padding` is not known" in ended.stderr
