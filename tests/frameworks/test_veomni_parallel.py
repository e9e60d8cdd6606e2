"""VeOmni's other ways to share a model out: HSDP, Ulysses, experts with and without expert parallelism, and LoRA.

The oracle is VeOmni's own run of the same samples, and transformers' own model in one process where it has the same
parameters. `make test-frameworks` runs these tests.
"""

from __future__ import annotations

import pytest
import tiny_media
import tiny_vision

pytest.importorskip("veomni", reason="VeOmni is not installed: `make test-frameworks`")
from veomni_media import hugging_face, loss_of
from veomni_runs import (
    TRAINS,
    keys_of,
    length,
    name_as_in_module,
    patches,
    run,
    trained,
    waits,
    write_tasks,
)

from dflop.integrations import cost_of_parameters

FLASH = {"model.ops_implementation.attn_implementation": "flash_attention_2"}
FUSED = {"model.ops_implementation.moe_implementation": "fused_triton", "train.accelerator.ep_size": 2}
EXPERTS = {"model": "experts", "data.chat_template": "qwen3vl", "train.global_batch_size": 8}
LORA = {"rank": 4, "alpha": 8}
OF_LINEAR = {**LORA, "lora_modules": ["q_proj", "v_proj"]}
OF_EXPERTS = {**LORA, "lora_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
# Number of ranks, how many of them share a sample, and what the configuration says.
KINDS = {
    "hsdp": (4, 1, {"train.accelerator.dp_replicate_size": 2, "train.accelerator.dp_shard_size": 2}),
    "replicas": (2, 1, {"train.accelerator.dp_replicate_size": 2, "train.accelerator.dp_shard_size": 1}),
    "ulysses": (4, 2, {**FLASH, "train.accelerator.ulysses_size": 2}),
    "experts": (2, 1, EXPERTS),
    # No model of this version reads it: dflop makes the encoder's work even.
    "encoder": (2, 1, {**EXPERTS, "model.encoder_data_balance": True}),
    "lora": (2, 1, {"model.lora_config": OF_LINEAR}),
    # An adapter of each expert, and one that all experts of a layer share.
    "lora_each": (2, 1, {**EXPERTS, "model.lora_config": OF_EXPERTS}),
    "lora_shared": (2, 1, {**EXPERTS, "model.lora_config": {**OF_EXPERTS, "share_expert_lora": True}}),
    # The last one, as VeOmni binds the kernels that it asks for in all that follows.
    "apart": (2, 1, {**EXPERTS, **FUSED}),
}
# Adapters are drawn by VeOmni itself.
OF_ONE_PROCESS = ("hsdp", "replicas", "ulysses", "experts", "encoder", "apart")


def case(kind, *, is_ours):
    given = {"data.max_seq_len": 500, **KINDS[kind][2]}
    name = f"{'ours' if is_ours else 'theirs'}_{kind}"
    return {
        "name": name,
        "is_ours": is_ours,
        "data": "videos.parquet",
        "model": given.pop("model", "model"),
        "given": given,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    tiny_vision.write_model(folder / "model")
    name_as_in_module(folder / "model")
    tiny_media.write_qwen3_vl(folder / "experts", has_experts=True)
    tiny_media.write_media(folder / "videos.parquet", folder / "pictures", ("image", "video"), 60)
    write_tasks(folder)
    return folder


@pytest.fixture(scope="module")
def both(folder):
    """VeOmni itself, then the same by dflop's command."""
    found = {}
    for num_ranks in (4, 2):
        kinds = [kind for kind, (ranks, *_) in KINDS.items() if ranks == num_ranks]
        for is_ours in (False, True):
            found |= run(folder, *(case(kind, is_ours=is_ours) for kind in kinds), num_ranks=num_ranks)[0]
    return found


def of_kind(both, kind):
    """VeOmni's ranks and dflop's: of those that share samples the first."""
    return (both[f"{side}_{kind}"][:: KINDS[kind][1]] for side in ("theirs", "ours"))


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_has_its_samples(kind, both):
    """Each sample of a step once, and ranks that share a sample have the same ones."""
    theirs, ours = of_kind(both, kind)
    steps = len(theirs[0]["steps"])
    assert [len(rank["steps"]) for rank in both[f"ours_{kind}"]] == [steps] * KINDS[kind][0]
    for step in range(steps):
        assert keys_of(ours, step) == keys_of(theirs, step)
        for index, rank in enumerate(both[f"ours_{kind}"]):
            shared = KINDS[kind][1]
            assert keys_of([rank], step) == keys_of([ours[index // shared]], step)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "replicas"])
def test_microbatches_are_even(kind, both):
    """By encoder patches and LLM tokens, where ranks wait for each other in both."""
    theirs, ours = (waits(ranks, (patches, length)) for ranks in of_kind(both, kind))
    assert ours - 1 < 0.7 * (theirs - 1), (theirs, ours)


def test_steps_of_replicas_are_even(folder, both):
    """Replicas of a whole model wait for each other in a step alone: for encoder and LLM together."""
    cost = cost_of_parameters(hugging_face(folder, "model"))

    def work(batch):
        return sum(sum(cost((patches([row]), length([row])))) for row in batch)

    theirs, ours = (waits(ranks, (work,), meets="step") for ranks in of_kind(both, "replicas"))
    assert ours - 1 < 0.01 < theirs - 1, (theirs, ours)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_veomni(kind, both):
    """Of the same samples in other microbatches."""
    expected = both[f"theirs_{kind}"][0]["state"]
    # They begin as zeros.
    adapters = [value for name, value in expected.items() if ".lora_B." in name]
    assert bool(adapters) == kind.startswith("lora")
    assert all(value.any() for value in adapters)
    for rank in both[f"ours_{kind}"]:
        assert tiny_vision.difference(rank["state"], expected) <= TRAINS


@pytest.mark.parametrize("kind", OF_ONE_PROCESS)
def test_ranks_train_what_one_process_trains(kind, folder, both):
    """The mean over all label tokens of each step."""
    name = KINDS[kind][2].get("model", "model")
    model = hugging_face(folder, name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    one = trained(model, list(of_kind(both, kind))[1], loss_of)
    assert tiny_vision.difference(one, before) > 1e-2
    for rank in both[f"ours_{kind}"]:
        assert tiny_vision.difference(rank["state"], one) <= TRAINS
