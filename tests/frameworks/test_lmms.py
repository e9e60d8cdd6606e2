"""lmms-engine by counted work: its own command on two CPU ranks, with dflop's in its place, and one process.

The one process is transformers' own model on each sample alone. `lmms_rank.py` says what stands in for a GPU.
`make test-frameworks` runs these tests in an environment of lmms-engine's own versions.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_vision
import torch

pytest.importorskip("lmms_engine", reason="lmms-engine is not installed: `make test-frameworks`")
PAGE = Path(__file__).resolve().parents[2] / "docs/frameworks.md"
TOLERANCE = 1e-5
COUNT = 23
SIZES = {"trainer_args.gradient_accumulation_steps": 2, "trainer_args.per_device_train_batch_size": 2}
EPOCHS = {"trainer_args.num_train_epochs": 2}
PACK = 300
STREAM = {
    "dataset_config.dataset_type": "vision_iterable",
    "dataset_config.dataset_format": "yaml",
    "dataset_config.dataset_path": None,
    "trainer_args.max_steps": 7,
}
# lmms-engine takes a picture for 2,000 tokens before it has read it.
PACKED = {"packing": True, "packing_strategy": "first_fit", "packing_length": 4200}
KINDS = {
    "single": {},
    "grouped": {
        "given": {
            **SIZES,
            **EPOCHS,
            "trainer_args.group_by_length": True,
            "trainer_args.dataloader_num_workers": 1,
        }
    },
    "packed": {
        "given": {
            "trainer_args.gradient_accumulation_steps": 2,
            **{f"dataset_config.{name}": value for name, value in PACKED.items()},
        }
    },
    "stream": {
        "given": {
            **STREAM,
            "trainer_args.gradient_accumulation_steps": 2,
            "dataset_config.packing": True,
            "dataset_config.packing_length": PACK,
        }
    },
    "shared": {"given": SIZES, "options": ["--balance-encoder"]},
}
DROPPED = {"given": {**SIZES, "trainer_args.dataloader_drop_last": True}}
HF = {
    "trainer_type": "hf_trainer",
    **SIZES,
    "trainer_args.fsdp2": False,
    "trainer_args.fsdp_config": {},
    "trainer_args.ddp_find_unused_parameters": True,
    "trainer_args.optim": "sgd",
    "trainer_args.lr_scheduler_kwargs": {},
    "trainer_args.logging_steps": 1,
    "trainer_args.save_strategy": "no",
}
FLAT = {
    **SIZES,
    "trainer_args.use_rmpad": True,
    "trainer_args.use_liger_kernel": True,
    # Those that need Triton.
    "model_config.monkey_patch_kwargs": dict.fromkeys(("rope", "rms_norm", "swiglu"), False),
}
# Of `patch_type` lmms-engine logs that it skips one, and rows are padded.
SKIPPED = {**SIZES, "trainer_args.use_rmpad": True}
# lmms-engine's default rounds what each wrapped part returns to 16 bits; here it is the whole model alone.
ROUNDED = {
    "given": {
        **SIZES,
        "trainer_args.fsdp_config": {"transformer_layer_cls_to_wrap": ["none of them"]},
        "model_config.overwrite_config": {"tie_word_embeddings": True},
    },
    "keeps": ["output_dtype"],
}
# A microbatch of text alone ends lmms-engine itself.
PICTURES = {"dataset_config.dataset_path": "pictures.json"}


def case(kind, *, is_ours=True, **more):
    name = f"{'ours' if is_ours else 'theirs'}_{kind}"
    return {"name": name, "is_ours": is_ours, **KINDS.get(kind, {}), **more}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(folder, *cases, num_ranks=2, passes=True):
    """Ranks of lmms-engine that run some cases one after the other; of each case what every rank found."""
    # One for each case: a rank that is late would find the store of the case before.
    cases = [{**one, "port": free_port()} for one in cases]
    environment = {**os.environ, "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HYDRA_FULL_ERROR": "1",
    }
    script = str(Path(__file__).with_name("lmms_rank.py"))
    command = [sys.executable, script, str(folder), json.dumps(cases)]
    # Files, as pipes are full before the first rank has ended: lmms-engine says much.
    logs = [folder / f"{cases[0]['name']}.{rank}.log" for rank in range(num_ranks)]
    started = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            of_rank = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(
                subprocess.Popen(command, env=of_rank, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(timeout=550) for process in started]
    finally:
        for process in started:
            process.kill()
    said = [log.read_text() for log in logs]
    if not passes:
        assert any(codes)
        return "\n".join(said)
    assert codes == [0] * num_ranks, "\n".join(one[-4000:] for one in said)
    found = {
        one["name"]: [torch.load(folder / f"{one['name']}.{rank}") for rank in range(num_ranks)]
        for one in cases
    }
    return found, "\n".join(said)


def write_chats(path, samples):
    """As lmms-engine has them: OpenAI's messages."""
    rows = []
    for question, answer, pictures in samples:
        asked = [{"type": "image_url", "image_url": {"url": picture}} for picture in pictures]
        asked.append({"type": "text", "text": question})
        answered = [{"type": "text", "text": answer}]
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": answered},
                ]
            }
        )
    path.write_text(json.dumps(rows))
    # In columns, as streams are read: of texts, because contents have unlike fields.
    path.with_suffix(".columns.json").write_text(
        json.dumps([{"messages": json.dumps(row["messages"])} for row in rows])
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model and data."""
    folder = tmp_path_factory.mktemp("lmms")
    tiny_vision.write_model(folder / "model")
    drawn = tiny_vision.chats(folder / "pictures", COUNT)
    samples = [(f"{place} {question}", *others) for place, (question, *others) in enumerate(drawn)]
    write_chats(folder / "chats.json", samples)
    write_chats(folder / "pictures.json", [sample for sample in samples if sample[2]])
    return folder


@pytest.fixture(scope="module")
def both(folder):
    """All cases, in two runs."""
    theirs, _ = run(folder, case("pictures", is_ours=False, given={**SIZES, **EPOCHS, **PICTURES}))
    cases = [case(kind) for kind in KINDS]
    cases.append(case("pictures", given={**SIZES, **EPOCHS, **PICTURES}))
    cases += [case("dropped", **DROPPED), case("hf", given=HF), *resumed()]
    cases += [case("rounded", **ROUNDED), case("skipped", given=SKIPPED)]
    ours, said = run(folder, *cases)
    assert said.count("dflop: balanced batches over 2 ranks") == len(cases)
    assert said.count("no patch of lmms-engine that removes padding took effect") == 1
    # It changes classes of transformers.
    cases = [case("flat", given=FLAT, is_flat=True), case("hf_flat", given={**FLAT, **HF})]
    flat, said = run(folder, *cases)
    assert "removes padding" not in said
    return theirs | ours | flat


def resumed():
    """Runs that stop inside an epoch of three steps and behind it, each with the run that goes on, and a whole one."""
    found = [case("whole", given={**SIZES, **EPOCHS})]
    for kind, steps in (("inside", 2), ("behind", 3)):
        given = {**SIZES, **EPOCHS, "trainer_args.output_dir": f"out_{kind}"}
        found.append(case(f"{kind}_first", given={**given, "trainer_args.max_steps": steps}))
        found.append(case(f"{kind}_then", given=given))
    return found + saved()


def saved():
    """A run with a worker that saves each of its six steps, and one that goes on behind the second."""
    given = {**SIZES, **EPOCHS, "trainer_args.output_dir": "out_saved"}
    given |= {"trainer_args.save_steps": 1, "trainer_args.dataloader_num_workers": 1}
    later = [f"out_saved/checkpoint-{step}" for step in range(3, 7)]
    return [case("saved_first", given=given), case("saved_then", given=given, removes=later)]


def key(sample):
    """What tells samples apart; dflop takes a first label away, which nobody learns."""
    return (*sample["input_ids"].tolist(), *sample["labels"][1:].tolist())


def steps_of(rank):
    """Of each step the samples of each microbatch; none where another microbatch trains them."""
    found = {}
    for step, samples, weight in rank["batches"]:
        found.setdefault(step, []).append([] if weight == 0 else samples)
    return [found[step] for step in sorted(found)]


def trained(ranks):
    """The samples of each step, on all ranks."""
    return [
        [sample for rank in step for batch in rank for sample in batch]
        for step in zip(*map(steps_of, ranks), strict=True)
    ]


def train_alone(folder, steps, placed=()):
    """Transformers' own model on each sample of a step alone, with the mean over all label tokens of the step.

    Its LLM knows where in a picture a token stands for the samples of which `placed` has the key.
    """
    from lmms_engine.models.common_ops.rope import qwen2_5_vl_rope_index
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "model", attn_implementation="eager")
    losses = []
    for rows in steps:
        count = sum(int((row["labels"][1:] != -100).sum()) for row in rows)
        losses.append(0.0)
        for row in rows:
            given = {name: row[name] for name in ("pixel_values", "image_grid_thw") if name in row}
            if key(row) in placed:
                ids, grids = row["input_ids"][None], row.get("image_grid_thw")
                given["position_ids"] = qwen2_5_vl_rope_index(model.model, ids, grids)[0]
            logits = model(input_ids=row["input_ids"][None], **given).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits, row["labels"][1:], ignore_index=-100, reduction="sum"
            )
            (loss / count).backward()
            losses[-1] += float(loss.detach()) / count
        with torch.no_grad():
            for weight in model.parameters():
                if weight.grad is not None:
                    weight -= 0.1 * weight.grad
                    weight.grad = None
    return dict(model.state_dict()), losses


@pytest.mark.parametrize(
    "kind", [*KINDS, "pictures", "dropped", "hf", "rounded", "skipped", "flat", "hf_flat"]
)
def test_two_ranks_train_what_one_process_trains(kind, folder, both):
    """Parameters and logged losses; and as many microbatches on both ranks."""
    ours = both[f"ours_{kind}"]
    assert len({tuple(map(len, steps_of(rank))) for rank in ours}) == 1
    # Without padding lmms-engine 0.1.4 tells it in a process's first forward alone, with padding nowhere.
    first = [row for rank in ours for row in steps_of(rank)[0][0]] if kind == "flat" else []
    one, losses = train_alone(folder, trained(ours), set(map(key, first)))
    before, _ = train_alone(folder, [])
    assert tiny_vision.difference(one, before) > 1e-2
    for rank in ours:
        assert tiny_vision.difference(rank["state"], one) <= TOLERANCE
    logged = [entry["train/loss"] for entry in ours[0]["logged"] if "train/loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-2 if kind == "rounded" else 1e-4)


@pytest.mark.parametrize("kind", ["single", "grouped", "packed", "shared"])
def test_each_sample_once_an_epoch(kind, both):
    """23 on two ranks, where lmms-engine itself trains some of them twice."""
    steps = trained(both[f"ours_{kind}"])
    num_epochs = 2 if kind == "grouped" else 1
    size = len(steps) // num_epochs
    for epoch in range(num_epochs):
        keys = [key(row) for step in steps[epoch * size : (epoch + 1) * size] for row in step]
        assert len(keys) == len(set(keys)) == COUNT


def test_the_samples_of_a_step_stay(both):
    """Those that rank 1 of lmms-engine reads; of version 0.1.4 rank 0 has the dataset in another order."""
    theirs = [
        sorted(key(row) for batch in step for row in batch) for step in steps_of(both["theirs_pictures"][1])
    ]
    ours = [set(map(key, step)) for step in trained(both["ours_pictures"])]
    assert len(ours) == len(theirs)
    # The last step of an epoch has repeated samples there.
    assert ours[0].issuperset(theirs[0])


def test_microbatches_are_even(both):
    """By patches and padded LLM tokens, which ranks wait for in each microbatch."""

    def patches(batch):
        return sum(len(row["pixel_values"]) for row in batch if "pixel_values" in row)

    def tokens(batch):
        return max((len(row["input_ids"]) for row in batch), default=0) * len(batch)

    def waits(ranks):
        slots = [
            slot for steps in zip(*map(steps_of, ranks), strict=True) for slot in zip(*steps, strict=True)
        ]
        return sum(max(map(of, slot)) for slot in slots for of in (patches, tokens))

    assert waits(both["ours_pictures"]) < 0.9 * waits(both["theirs_pictures"])


def test_what_does_not_fill_a_batch_is_left_out_where_asked(both):
    """`dataloader_drop_last`: 11 samples a rank, five batches of two."""
    keys = [key(row) for step in trained(both["ours_dropped"]) for row in step]
    assert len(keys) == len(set(keys)) == 20


@pytest.mark.parametrize("kind", ["inside", "behind"])
def test_a_run_resumes(kind, both):
    """With the steps that are left, and the parameters of the run that did not stop."""
    first, then, whole = (both[f"ours_{name}"] for name in (f"{kind}_first", f"{kind}_then", "whole"))
    steps = [sorted(map(key, step)) for step in (*trained(first), *trained(then))]
    assert len(steps) == 6
    assert steps == [sorted(map(key, step)) for step in trained(whole)]
    assert tiny_vision.difference(then[0]["state"], whole[0]["state"]) <= TOLERANCE


def test_a_run_goes_on_from_a_checkpoint_inside_it(both):
    """One that was saved while a worker had read on."""
    first, then = both["ours_saved_first"], both["ours_saved_then"]
    steps = [sorted(map(key, step)) for step in trained(first)]
    assert len(steps) == 6
    assert [sorted(map(key, step)) for step in trained(then)] == steps[2:]
    assert tiny_vision.difference(then[0]["state"], first[0]["state"]) <= TOLERANCE


def test_the_command_is_that_of_the_page():
    """In the place of lmms-engine's own."""
    section = PAGE.read_text().split("## lmms-engine\n")[1]
    (command,) = re.findall(r"^```sh\n(.+)", section.split("\n## ")[0], flags=re.M)
    assert command.endswith("-m dflop.integrations.lmms_engine config_yaml=train.yaml")


def test_refusals_come_before_anything_is_loaded(folder):
    """By the command itself."""
    given = {"trainer_args.tp_degree": 2, "model_config.load_from_pretrained_path": "nowhere"}
    said = run(folder, case("refused", given=given), passes=False)
    assert "ValueError: `tp_degree` is 2, must be 1" in said
