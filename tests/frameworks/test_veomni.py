"""VeOmni by counted work: its own task scripts on two CPU ranks, with dflop's command and without, and one process.

The one process is transformers' own model on each sample alone. `veomni_rank.py` says what stands in for a GPU.
`make test-frameworks` runs these tests in an environment of VeOmni's own versions.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny_vision
import torch

pytest.importorskip("veomni", reason="VeOmni is not installed: `make test-frameworks`")
from veomni_media import hugging_face, loss_of
from veomni_runs import (
    TASK,
    TRAINS,
    key,
    keys_of,
    length,
    patches,
    run,
    trained,
    waits,
    write_chats,
    write_tasks,
)

PAGE = Path(__file__).resolve().parents[2] / "docs/frameworks.md"
COUNT = 40
CAP = 300
FIXED = {"train.dyn_bsz": False, "train.global_batch_size": 8}
TEXT = {
    "script": "train_text.py",
    "model": "text",
    "data": "texts.jsonl",
    "given": {"data.data_type": "plaintext", "data.text_keys": "text", "data.chat_template": "default"},
}
KINDS = {
    "packed": {},
    "worker": {"given": {"train.dyn_bsz_runtime": "worker", "data.dataloader.num_workers": 2}},
    "fixed": {"given": {**FIXED, "train.micro_batch_size": 2}},
    "single": {"given": FIXED},
    "thread": {"given": {"data.dataloader.use_background_prefetcher": True}},
    "length": {"given": {"train.pad_to_length": True}},
    "effective": {"given": {"train.dyn_bsz_count_mode": "effective", "data.max_seq_len": 100}},
    "text": TEXT,
}
# Where samples are counted there is none but VeOmni's fullest; half as many more than `max_seq_len` are learnt from.
LIMITS = {"fixed": 0, "single": 0, "effective": 150}
# Workers read on until there is nothing more: ranks by themselves would end at different steps.
END = {
    "train.dyn_bsz_runtime": "worker",
    "data.dataloader.num_workers": 1,
    "data.dataloader.drop_last": False,
    "train.max_steps": 100,
}
# Threads that load go on behind the last step of an epoch, each as far as it comes.
EPOCHS = {"data.dataloader.use_background_prefetcher": True, "train.num_train_epochs": 3}


def case(kind, *, is_ours, **more):
    name = f"{'ours' if is_ours else 'theirs'}_{kind}"
    return {"name": name, "is_ours": is_ours, **KINDS.get(kind, {}), **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("veomni")
    write_chats(folder, COUNT)
    tiny_vision.write_text_model(folder / "text")
    write_tasks(folder)
    return folder


@pytest.fixture(scope="module")
def both(folder):
    """Two ranks: VeOmni itself, then the same by the command of the page."""
    # Workers of a loader end with their process, so they have one of their own.
    together = [kind for kind in KINDS if kind != "worker"]
    found = {}
    for is_ours in (False, True):
        for kinds in (together, ["worker"]):
            found |= run(folder, *(case(kind, is_ours=is_ours) for kind in kinds))[0]
    for kind, given in (("end", END), ("epochs", EPOCHS)):
        found |= run(folder, case(kind, is_ours=True, given=given))[0]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_has_its_samples(kind, both):
    """Each sample of a step once, as many microbatches on both ranks, none with more tokens than VeOmni's limit."""
    theirs, ours = both[f"theirs_{kind}"], both[f"ours_{kind}"]
    assert [len(rank["steps"]) for rank in ours] == [len(rank["steps"]) for rank in theirs]
    for step in range(len(theirs[0]["steps"])):
        assert keys_of(ours, step) == keys_of(theirs, step)
        counts = {len(rank["steps"][step]) for rank in ours}
        assert len(counts) == 1
        fullest = max(length(batch) for rank in theirs for batch in rank["steps"][step])
        limit = max(LIMITS.get(kind, CAP), fullest)
        assert max(length(batch) for rank in ours for batch in rank["steps"][step]) <= limit


@pytest.mark.parametrize("kind", ["packed", "worker", "fixed", "single", "thread", "text"])
def test_microbatches_are_even(kind, both):
    """By encoder patches and LLM tokens, which ranks wait for in each microbatch."""
    theirs, ours = (waits(both[f"{side}_{kind}"], (patches, length)) for side in ("theirs", "ours"))
    assert ours - 1 < (theirs - 1) / 2, (theirs, ours)


def test_epochs_that_a_thread_loads_have_their_steps(both):
    """Two of each, of as many microbatches on both ranks."""
    assert [[len(step) for step in rank["steps"]] for rank in both["ours_epochs"]] == [[2] * 6] * 2


def test_ranks_end_together(both):
    """Each sample of the data once, and as many microbatches on both ranks to the last step."""
    ranks = both["ours_end"]
    counts = [[len(step) for step in rank["steps"]] for rank in ranks]
    assert counts[0] == counts[1]
    found = [key(sample) for rank in ranks for step in rank["steps"] for batch in step for sample in batch]
    assert len(found) == len(set(found)) == COUNT


@pytest.mark.parametrize("kind", [*KINDS, "end", "epochs"])
def test_two_ranks_train_what_one_process_trains(kind, folder, both):
    """Transformers' own model on each sample of a step alone, with the mean over all label tokens of the step."""
    ours, is_text = both[f"ours_{kind}"], kind == "text"
    model = hugging_face(folder, "text" if is_text else "model")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = trained(model, ours, loss_of_text if is_text else loss_of)
    assert tiny_vision.difference(one, before) > 1e-2
    for rank in ours:
        assert tiny_vision.difference(rank["state"], one) <= TRAINS


def loss_of_text(model, row):
    """Sum over the label tokens of a sample."""
    logits = model(input_ids=row["input_ids"][None]).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, row["labels"][1:], ignore_index=-100, reduction="sum")


def test_the_command_is_that_of_the_page():
    """Its name, and the script that it runs."""
    section = PAGE.read_text().split("## VeOmni\n")[1]
    command = re.findall(r"^```sh\n(.+)", section, flags=re.M)[0]
    assert "-m dflop.integrations.veomni tasks/train_vlm.py" in command


def test_one_rank_is_left_alone(folder):
    """Nothing to balance: and the command says so, before VeOmni refuses a CPU without FSDP."""
    said = run(folder, case("packed", is_ours=True), num_ranks=1, passes=False)
    assert "dflop: one data-parallel rank, nothing to balance" in said
    assert "ValueError: Only FSDP training supports `init_device=meta`." in said


def test_preferences_are_refused(folder):
    """In words, before a step."""
    (folder / "train_dpo.py").write_text(
        TASK.format(module="text_dpo_trainer", trainer="TextDPOTrainer", arguments="VeOmniDPOArguments")
    )
    dpo = {**TEXT, "script": "train_dpo.py", "given": {**TEXT["given"], "data.data_type": "dpo"}}
    said = run(folder, case("dpo", is_ours=True, **dpo), passes=False)
    assert "ValueError: the trainer is VeOmni's of preferences (DPO), must be that of text" in said
