"""EasyR1 by counted work: its own trainer and actor on two CPU ranks, against EasyR1 itself on one.

Rollout is left out: prompts, answers, log-probabilities and advantages are made. `RayPPOTrainer._balance_batch` divides
them among ranks, and `DataParallelPPOActor` scores and trains them in FSDP with gloo (`easyr1_rank.py`).

No registry has EasyR1. `EASYR1=/path/to/EasyR1 make test-frameworks FRAMEWORKS=easyr1` runs these tests with a
checkout, in an environment of versions that it takes; without one they are skipped. vLLM, which its modules name when
they are imported, is an empty package here, and nothing calls it.
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

CHECKOUT = os.environ.get("EASYR1", "")
if not (Path(CHECKOUT) / "verl/trainer/ray_trainer.py").is_file():
    reason = "`EASYR1` names no checkout of EasyR1: git clone https://github.com/hiyouga/EasyR1"
    pytest.skip(reason, allow_module_level=True)
PAGE = Path(__file__).resolve().parents[2] / "docs/frameworks.md"
TOLERANCE = 1e-5
COUNT = 24
ACTOR = "worker.actor."
NOT_HERE = {
    "": ("LLM", "RequestOutput", "SamplingParams"),
    "lora": (),
    "lora/request": ("LoRARequest",),
    "lora/models": ("LoRAModel",),
    "lora/utils": ("get_adapter_absolute_path",),
    "lora/worker_manager": ("LRUCacheWorkerLoRAManager",),
    "distributed": ("parallel_state",),
}
"""What EasyR1 takes from vLLM when it is imported, by module."""


def variable():
    """What the page says: the variable's name and value."""
    section = PAGE.read_text().split("## EasyR1\n")[1]
    return re.findall(r"^```sh\n(\w+)=(\S+) python3 -m verl\.trainer\.main", section, flags=re.M)[0]


def size(samples):
    """Of a mini-batch, in samples; EasyR1 counts prompts, of which each has two answers."""
    return f"{ACTOR}global_batch_size={samples // 2}"


def cap(rows):
    """Tokens of a microbatch, in rows of the batch's width."""
    return [f"{ACTOR}micro_batch_size_per_device_for_{stage}={rows}" for stage in ("update", "experience")]


KINDS = {
    "": [size(COUNT)],
    "steps": [size(COUNT // 2)],
    "lora": [size(COUNT), f"{ACTOR}model.lora.rank=4"],
    "frozen": [size(COUNT), f"{ACTOR}model.freeze_vision_tower=true"],
    "gspo": [
        size(COUNT),
        f"{ACTOR}loss_type=gspo",
        f"{ACTOR}clip_ratio_low=0.01",
        f"{ACTOR}clip_ratio_high=0.01",
    ],
    "cispo": [size(COUNT), f"{ACTOR}loss_type=cispo", f"{ACTOR}clip_ratio_high=4"],
    "seq": [size(COUNT), f"{ACTOR}loss_avg_mode=seq"],
}
SAME = [kind for kind in KINDS if kind != "seq"]


def environment(folder, **more):
    path = os.pathsep.join([CHECKOUT, str(folder / "not_here")])
    found = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {**found, "CUDA_VISIBLE_DEVICES": "", "RAY_AUTH_MODE": "disabled", **more}


def run(folder, name, num_ranks, rows, *kinds, line="none"):
    """Ranks of EasyR1 that run some kinds one after the other; of each kind what every rank found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cases = [{"name": f"{name}_{kind}", "overrides": [*KINDS[kind], *cap(rows)]} for kind in kinds]
    command = [
        sys.executable,
        str(Path(__file__).with_name("easyr1_rank.py")),
        str(folder),
        json.dumps(cases),
    ]
    ranks = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            command,
            env=environment(folder, **ranks, RANK=str(rank), LINE=line),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        said = [process.communicate(timeout=550)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * num_ranks, "\n".join(
        one[-4000:] for one in said
    )
    return {
        kind: [torch.load(folder / f"{name}_{kind}.{rank}", weights_only=False) for rank in range(num_ranks)]
        for kind in kinds
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("easyr1")
    tiny_vision.write_model(folder / "model")
    (folder / "chats.json").write_text(json.dumps(tiny_vision.chats(folder / "pictures", COUNT)))
    for module, names in NOT_HERE.items():
        package = folder / "not_here/vllm" / module
        package.mkdir(parents=True, exist_ok=True)
        lines = ["class NotHere:", "    pass", *(f"{name} = NotHere" for name in names)]
        (package / "__init__.py").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """EasyR1 itself: one process, whose microbatch is the whole mini-batch."""
    found = run(folder, "alone", 1, COUNT, *KINDS)
    assert all(len(step) == 1 for ranks in found.values() for step in ranks[0]["trained"])
    return {kind: ranks[0] for kind, ranks in found.items()}


@pytest.fixture(scope="module")
def theirs(folder):
    """Two ranks of EasyR1 itself."""
    return run(folder, "theirs", 2, 2, "", "steps", "seq")


@pytest.fixture(scope="module")
def ours(folder):
    """Two ranks with dflop."""
    return run(folder, "ours", 2, 2, *KINDS, line="dflop")


@pytest.mark.parametrize("kind", KINDS)
def test_what_easyr1_needs_is_kept(kind, ours, theirs):
    """As many samples and microbatches on both ranks, each sample once, no microbatch above the cap on tokens."""
    ranks = ours[kind]
    assert sorted(sample for rank in ranks for sample in rank["own"]) == list(range(COUNT))
    assert {len(rank["own"]) for rank in ranks} == {COUNT // 2}
    for stage in ("scored", "trained"):
        for steps in zip(*(rank[stage] for rank in ranks), strict=True):
            assert len({len(step) for step in steps}) == 1
        for rank in ranks:
            microbatches = [held for step in rank[stage] for held in step]
            assert sorted(sample for held in microbatches for sample in held) == sorted(rank["own"])
            assert max(sum(rank["tokens"][sample] for sample in held) for held in microbatches) <= (
                2 * rank["width"]
            )
            # The cap divides: else it would be kept by chance.
            assert len(microbatches) > 1
    # Of the same samples EasyR1 has as many.
    assert [len(step) for step in ranks[0]["scored"]] == [len(step) for step in theirs[""][0]["scored"]]


def waits(ranks, stage):
    """Encoder and LLM tokens of the slower rank, over those of the mean; ranks meet in every microbatch."""
    slower = mean = 0
    for sizes in (ranks[0]["patches"], ranks[0]["tokens"]):
        for steps in zip(*(rank[stage] for rank in ranks), strict=True):
            for held_by_rank in zip(*steps, strict=True):
                loads = [sum(sizes[sample] for sample in held) for held in held_by_rank]
                slower, mean = slower + max(loads), mean + sum(loads) / len(loads)
    return slower / mean


@pytest.mark.parametrize(
    ("kind", "stage", "share"),
    # Divided by mini-batches, ranks are a little less even where all of their samples are scored together.
    [("", "scored", 0.5), ("", "trained", 0.5), ("steps", "scored", 0.6), ("steps", "trained", 0.5)],
)
def test_loads_are_more_even(kind, stage, share, ours, theirs):
    """EasyR1 sees tokens alone; by the tokens of both components ours wait less than half as long."""
    expected, found = waits(theirs[kind], stage), waits(ours[kind], stage)
    assert found - 1 < share * (expected - 1), (expected, found)


@pytest.mark.parametrize("kind", SAME)
def test_two_ranks_train_what_one_process_trains(kind, alone, ours, theirs):
    """The gradient of EasyR1 does not depend on the division: parameters, their norms and log-probabilities."""
    one = alone[kind]
    assert tiny_vision.difference(one["weights"], one["before"]) > 1e-3
    # EasyR1 itself has other mini-batches on two ranks than on one.
    for found in [ours[kind], *([theirs[kind]] if kind == "" else [])]:
        for rank in found:
            assert tiny_vision.difference(rank["before"], one["before"]) == 0
            assert tiny_vision.difference(rank["weights"], one["weights"]) <= TOLERANCE
            assert rank["norms"] == pytest.approx(one["norms"], rel=1e-5)
            for sample, log_probs in rank["log_probs"].items():
                torch.testing.assert_close(log_probs, one["log_probs"][sample], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_those_of_the_model(kind, ours):
    """The trainer counts them from the configuration, a rank from its model in FSDP: with adapters, and frozen."""
    for rank in ours[kind]:
        of_model, of_trainer, of_policy = rank["costs"]
        assert of_trainer == of_policy
        assert of_policy.trained == of_model
        assert len(of_policy.media) == 2
    assert ours["lora"][0]["costs"][0].llm_token < ours[""][0]["costs"][0].llm_token
    assert ours["frozen"][0]["costs"][0].encoder_token < ours[""][0]["costs"][0].encoder_token


def test_mini_batches_hold_samples_in_the_order_of_their_generation(ours, theirs):
    """As on one rank; EasyR1 on two ranks has others in them."""

    def mini_batches(ranks):
        return [
            {sample for step in steps for held in step for sample in held}
            for steps in zip(*(rank["trained"] for rank in ranks), strict=True)
        ]

    first = set(range(COUNT // 2))
    assert mini_batches(ours["steps"]) == [first, set(range(COUNT)) - first]
    assert mini_batches(theirs["steps"])[0] != first


def test_a_mean_over_a_microbatch_is_named(alone, ours, theirs):
    """`loss_avg_mode=seq`: EasyR1's gradient depends on the division there, with dflop and without."""
    assert any("`worker.actor.loss_avg_mode` is `seq`" in said for said in ours["seq"][0]["said"])
    assert not any("loss_avg_mode" in said for said in ours[""][0]["said"])
    for found in (theirs, ours):
        assert found["seq"][0]["norms"] != pytest.approx(alone["seq"]["norms"], rel=1e-3)


def test_the_variable_of_the_page_reaches_each_process(folder, ours):
    """EasyR1's own `main`, whose Ray processes divide by work."""
    name, value = variable()
    command = [
        sys.executable,
        str(Path(__file__).with_name("easyr1_ray.py")),
        str(folder),
        f"{ACTOR}model.model_path={folder / 'model'}",
        "worker.rollout.n=2",
        size(COUNT),
    ]
    more = {name: value, "LINE": "none"}
    done = subprocess.run(
        command, env=environment(folder, **more), capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks, is_watched = json.loads((folder / "ray.json").read_text())
    assert ranks == [rank["own"] for rank in ours[""]]
    assert is_watched
    assert "dflop: batches of even work" in done.stdout + done.stderr
