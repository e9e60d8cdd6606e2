"""verl by counted work: its own trainer and actor worker on two CPU ranks, against verl itself on one.

Rollout is left out: prompts, answers, old log-probabilities and advantages are made. `RayPPOTrainer._balance_batch`
divides them among ranks, and `TrainingWorker` scores and trains them by FSDP2 with gloo (`verl_rank.py`).
`make test-frameworks` runs these tests in an environment of verl's own versions.
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

pytest.importorskip("verl", reason="verl is not installed: `make test-frameworks`")
PAGE = Path(__file__).resolve().parents[2] / "docs/frameworks.md"
TOLERANCE = 1e-5
COUNT = 24
CAP = 300
OF_ACTOR = "actor_rollout_ref.actor"
ALONE = f"{OF_ACTOR}.ppo_max_token_len_per_gpu=100000"
CAPPED = f"{OF_ACTOR}.ppo_max_token_len_per_gpu={CAP}"
LORA = ("actor_rollout_ref.model.lora_rank=4", f"{OF_ACTOR}.optim.lr=1")
BY_SAMPLES = (f"{OF_ACTOR}.loss_agg_mode=seq-mean-token-mean", f"{OF_ACTOR}.entropy_coeff=0.1")
BY_WIDTH = (f"{OF_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",)


def line():
    """What the page says."""
    section = PAGE.read_text().split("## verl\n")[1]
    return re.findall(r"^```sh\n.*(actor_rollout_ref\.model\.external_lib=\S+)", section, flags=re.M)[0]


def case(name, *overrides, **more):
    return {"name": name, "overrides": list(overrides), **more}


def run(folder, num_ranks, cases):
    """Ranks of verl that run some cases one after the other; of each case what every rank found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("verl_rank.py")), str(folder), json.dumps(cases)]
    started = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank)},
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
        one["name"]: [
            torch.load(folder / f"{one['name']}.{rank}", weights_only=False) for rank in range(num_ranks)
        ]
        for one in cases
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    tiny_vision.write_model(folder / "model")
    (folder / "chats.json").write_text(json.dumps(tiny_vision.chats(folder / "pictures", COUNT)))
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """Verl itself: one process, whose microbatch is the whole step."""
    cases = [
        case("alone", ALONE),
        case("alone_lora", ALONE, *LORA),
        case("alone_samples", ALONE, *BY_SAMPLES),
        case("alone_width", ALONE, *BY_WIDTH),
    ]
    found = run(folder, 1, cases)
    assert all(len(found[one["name"]][0]["trained"][0]) == 1 for one in cases)
    return {name.removeprefix("alone").removeprefix("_"): ranks[0] for name, ranks in found.items()}


@pytest.fixture(scope="module")
def both(folder):
    """Two ranks: verl itself, then the same with the line of the page."""
    ours = (CAPPED, line())
    cases = [
        case("theirs", CAPPED),
        case("ours", *ours),
        case("ours_lora", *ours, *LORA),
        case("ours_samples", *ours, *BY_SAMPLES),
        case("ours_width", *ours, *BY_WIDTH),
        case("ours_steps", *ours, f"{OF_ACTOR}.ppo_mini_batch_size={COUNT // 2}", num_steps=2),
        case("ours_cov", *ours, f"{OF_ACTOR}.policy_loss.loss_mode=kl_cov"),
    ]
    return run(folder, 2, cases)


@pytest.mark.parametrize("kind", ["ours", "ours_lora", "ours_samples", "ours_steps"])
def test_what_verl_needs_is_kept(kind, both):
    """As many samples and microbatches on both ranks, each sample once, no microbatch above the cap on tokens."""
    ranks = both[kind]
    assert sorted(sample for rank in ranks for sample in rank["own"]) == list(range(COUNT))
    assert {len(rank["own"]) for rank in ranks} == {COUNT // 2}
    for stage in ("scored", "trained"):
        for steps in zip(*(rank[stage] for rank in ranks), strict=True):
            assert len({len(step) for step in steps}) == 1
        for rank in ranks:
            microbatches = [held for step in rank[stage] for held in step]
            assert sorted(sample for held in microbatches for sample in held) == sorted(rank["own"])
            assert max(sum(rank["tokens"][sample] for sample in held) for held in microbatches) <= CAP
            # The cap divides: else it would be kept by chance.
            assert len(microbatches) > 1


def waits(ranks, stage="trained"):
    """Encoder and LLM tokens of the slower rank, over those of the mean; ranks meet in every microbatch."""
    slower = mean = 0
    for sizes in (ranks[0]["patches"], ranks[0]["tokens"]):
        for step in zip(*(rank[stage][0] for rank in ranks), strict=True):
            loads = [sum(sizes[sample] for sample in held) for held in step]
            slower, mean = slower + max(loads), mean + sum(loads) / len(loads)
    return slower / mean


def test_loads_are_more_even(both):
    """Verl sees tokens alone; by the tokens of both components ours wait less than half as long."""
    for stage in ("scored", "trained"):
        theirs, ours = waits(both["theirs"], stage), waits(both["ours"], stage)
        assert ours - 1 < (theirs - 1) / 2, (stage, theirs, ours)


def test_a_loss_of_a_microbatch_is_named(both):
    """Verl's gradient depends on the division there, with dflop and without."""
    why = "it chooses tokens by means and ranks over a microbatch"
    assert any(
        f"`actor.policy_loss.loss_mode` is `kl_cov`: {why}" in one for one in both["ours_cov"][0]["said"]
    )
    assert not any("loss_mode" in one for one in both["ours"][0]["said"])


@pytest.mark.parametrize("name", ["", "lora", "samples", "width"])
def test_two_ranks_train_what_one_process_trains(name, alone, both):
    """The gradient of verl does not depend on the division: parameters, losses and log-probabilities."""
    one = alone[name]
    kinds = ["theirs", "ours"] if name == "" else [f"ours_{name}"]
    assert tiny_vision.difference(one["weights"], one["before"]) > 1e-3
    for kind in kinds:
        for rank in both[kind]:
            assert tiny_vision.difference(rank["before"], one["before"]) == 0
            assert tiny_vision.difference(rank["weights"], one["weights"]) <= TOLERANCE
            assert rank["loss"] == pytest.approx(one["loss"], rel=1e-4)
            for sample, found in rank["log_probs"].items():
                torch.testing.assert_close(found, one["log_probs"][sample], rtol=1e-4, atol=1e-5)


def test_costs_are_those_of_the_model(folder):
    """Of the configuration alone, a value model has no head, and adapters train instead of weights."""
    from transformers import Qwen2_5_VLForConditionalGeneration
    from verl.workers.config import HFModelConfig

    from dflop.integrations import cost_of_parameters
    from dflop.integrations.verl_costs import Counted

    given = {"path": str(folder / "model"), "override_config": {"attn_implementation": "sdpa"}}
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "model")
    config = HFModelConfig(**given)
    counted = Counted.of(config)
    # What verl builds its own model by is left alone.
    assert config.hf_config._attn_implementation == "sdpa"
    assert counted.trained == cost_of_parameters(model)
    assert counted.scored == cost_of_parameters(model, is_trained=False)
    head = model.lm_head.weight.numel()
    value = Counted.of(HFModelConfig(**given, model_type="value_model"))
    assert value.trained.llm_token == counted.trained.llm_token - 6 * head
    adapted = Counted.of(HFModelConfig(**given, lora_rank=1))
    assert adapted.trained.llm_token < counted.trained.llm_token
    # Four patches become one token: the second sample has two such tokens, and one of text.
    image = model.config.image_token_id
    rows = {
        "input_ids": torch.nested.as_nested_tensor(
            [torch.tensor([1, 2]), torch.tensor([image, 1, image])], layout=torch.jagged
        )
    }
    work = counted.work(rows)
    assert work.tokens == [2, 3]
    assert work.encoder[0] == 0
    expected = [counted.trained((0, 2)), counted.trained((8, 3))]
    assert work.encoder[1] / work.llm[0] == pytest.approx(expected[1][0] / expected[0][1])


def test_keys_of_the_newer_trainer(folder):
    """`trainer.use_v1`: 15 samples in the TransferQueue, of which four have pictures, and one that verl adds."""
    from transformers import AutoConfig

    image = AutoConfig.from_pretrained(folder / "model").image_token_id
    samples = []
    for place in range(15):
        ids = torch.full((40 + place * 37 % 90,), 7)
        ids[: 36 * (place in (1, 6, 8, 13))] = image
        samples.append(ids)
    torch.save(samples, folder / "samples")
    overrides = [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.rollout.n=2",
        f"{OF_ACTOR}.ppo_mini_batch_size=8",
        f"{OF_ACTOR}.use_dynamic_bsz=true",
        line(),
    ]
    command = [
        sys.executable,
        str(Path(__file__).with_name("verl_keys.py")),
        str(folder),
        json.dumps(overrides),
    ]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "disabled",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = json.loads(done.stdout.splitlines()[-1])
    assert sorted(key for rank in ranks for key, _ in rank) == list(range(-1, 15))
    assert [len(rank) for rank in ranks] == [8, 8]
    assert [sum(key in (1, 6, 8, 13) for key, _ in rank) for rank in ranks] == [2, 2]
    loads = [sum(tokens for _, tokens in rank) for rank in ranks]
    assert max(loads) <= 1.05 * min(loads)


def test_samples_that_nobody_named_are_divided_by_tokens():
    """With a warning: then the line was read before the trainer was there."""
    from verl.utils import seqlen_balancing

    import dflop.integrations.verl as line_of_verl

    line_of_verl.balance_batches()
    with pytest.warns(UserWarning, match="verl divides 2 samples by their tokens: dflop was not told which"):
        found = seqlen_balancing.calculate_workload(torch.tensor([2, 3]))
    assert found.tolist() == [24576 * 2 + 4, 24576 * 3 + 9]
    assert seqlen_balancing.get_seqlen_balanced_partitions([5, 4, 3, 2], 2, equal_size=True) == [
        [1, 2],
        [0, 3],
    ]


def test_other_samples_than_those_counted_are_refused():
    """And a group of samples that stay together costs what they cost together."""
    from dflop.integrations.verl_costs import Work

    work = Work.of([(0.0, 2.0), (1.0, 1.0), (0.0, 4.0), (2.0, 6.0)], [2, 1, 4, 6])
    assert sum(work.encoder + work.llm) == 2**40
    with pytest.raises(ValueError, match="verl divides 4 samples of 14 tokens, dflop counted 4 of 13"):
        work.total(torch.tensor([2, 1, 4, 7]))
    grouped = work.capped(10, 2)
    assert grouped.tokens == [3, 10]
    loads = grouped.total(torch.tensor([2, 1, 4, 6])).view(2, 2).sum(dim=1)
    assert loads.tolist() == [2**38, 3 * 2**38]
    # One mini-batch after the other.
    loads = work.total(torch.tensor([2, 1, 4, 6])).tolist()
    assert work.parts(loads[2:], 2, equal_size=True) == [[0], [1]]
    with pytest.raises(ValueError, match="verl divides 3 samples, must be among the 4 that dflop counted"):
        work.parts([1, 1, 1], 2, equal_size=False)


def test_groups_of_one_prefix_are_refused():
    """Before samples are divided."""
    from types import SimpleNamespace

    import dflop.integrations.verl as line_of_verl

    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=None))
    with pytest.raises(ValueError, match="`use_prefix_grouper` is True, must be False"):
        line_of_verl._with_batch(None)(SimpleNamespace(config=config, use_prefix_grouper=True), None)


@pytest.mark.parametrize(
    ("changed", "is_nested", "why"),
    [
        ({"policy_loss": {"loss_mode": "clip_cov"}}, False, "it draws the tokens that it leaves out"),
        ({"policy_loss": {"loss_mode": "geo_mean"}}, False, "it is a mean over the samples of a microbatch"),
        (
            {
                "policy_loss": {
                    "loss_mode": "bypass_mode",
                    "rollout_correction": {"rollout_is_batch_normalize": True},
                }
            },
            False,
            "`rollout_is_batch_normalize` is a mean over a microbatch",
        ),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, True, "it divides by the longest answer"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, False, None),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 100}, True, None),
        ({}, True, None),
    ],
)
def test_losses_of_a_microbatch(changed, is_nested, why, recwarn):
    """Named by what makes them so; the older trainer pads all answers to one width."""
    from omegaconf import OmegaConf

    import dflop.integrations.verl as line_of_verl

    settings = {"policy_loss": {"loss_mode": "vanilla"}, "loss_agg_mode": "token-mean", **changed}
    line_of_verl._warn_of_loss(OmegaConf.create(settings), is_nested=is_nested)
    said = [str(one.message) for one in recwarn if "how samples are divided" in str(one.message)]
    assert len(said) == (why is not None)
    assert all(why in one for one in said)


def test_other_engines_are_refused():
    """Before they compute anything."""
    from types import SimpleNamespace

    import dflop.integrations.verl as line_of_verl

    compute = line_of_verl._with_engine(lambda engine: None, is_trained=True)
    with pytest.raises(ValueError, match="the engine's `strategy` is `megatron`, must be `fsdp` or `fsdp2`"):
        compute(SimpleNamespace(engine_config=SimpleNamespace(strategy="megatron")))
