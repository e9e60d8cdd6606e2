"""What a rank holds whatever the samples: the memory model's parts are the trainer's own tensors, byte for byte.

Under each ZeRO, in float32 and bfloat16, with frozen parts. The profile has the true numbers of parameters.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.utils.tensorboard  # noqa: F401  (imported once, for all forked ranks)
from demo_run import lines, python, request, run_training, write_demo
from family_run import FamilyRun, trains
from ranks import results
from toy_run import write_colocated

from dflop.models import load_adapter
from dflop.models.parameters import component_of
from dflop.models.tensor import TensorRank
from dflop.parallel.shard import local
from dflop.runtime import gradients, sharded, trainer

BATCH, MICROBATCHES, REPLICAS = 8, 2, 2
BYTES = {"float32": 4, "bfloat16": 2}
SLACK_BYTES = 4096
"""The optimizer's step counters, one a parameter, and what does not divide among the ranks."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("demo"), 16, BATCH, MICROBATCHES)


def write_profile(demo, path, dtype, llm_tp=1):
    """The demo's profile with the parameters of its model, layers and all others apart; their bytes.

    Where the LLM's layers are cut, they are those of the first rank of a group.
    """
    adapter = load_adapter(demo / "model")
    meta, tensor = torch.device("meta"), TensorRank(llm_tp, 0)
    pieces = {
        "encoder": adapter.build_encoder(meta, torch.float32, 0),
        "llm": adapter.build_llm_stage(0, adapter.num_llm_layers, meta, torch.float32, 0, tensor=tensor),
    }
    profile = json.loads((demo / "model_profile.json").read_text())
    profile["device"]["dtype"] = dtype
    for module in profile["modules"].values():
        for point in module["linear"]["points"]:
            # Measured apart, as of what is frozen.
            point |= {"input_ns": 25_000, "weight_ns": 25_000}
    profile["hidden_bytes"] = BYTES[dtype] * adapter.hidden_size
    for component, piece in pieces.items():
        layer, count = f"{component}_layer", profile["modules"][f"{component}_layer"]["count"]
        sizes = dict.fromkeys((layer, f"{component}_embedding", "projector", "llm_head"), 0)
        del sizes["llm_head" if component == "encoder" else "projector"]
        for name, parameter in piece.named_parameters():
            if ".layers." in name:
                sizes[layer] += parameter.numel()
            elif component == "llm":
                sizes["llm_head"] += parameter.numel()
            else:
                # A recipe may train the projector and leave what stands before the layers.
                part = "projector" if component_of(name) == "projector" else "encoder_embedding"
                sizes[part] += parameter.numel()
        assert sizes[layer] % count == 0
        sizes[layer] //= count
        for name, size in sizes.items():
            profile["modules"][name] |= {"num_parameters": size, "parameter_bytes": BYTES[dtype] * size}
    profile["variants"][0]["modules"] = profile["modules"]
    path.write_text(json.dumps(profile))
    return BYTES[dtype] * sum(p.numel() for piece in pieces.values() for p in piece.parameters())


def size(tensors):
    """Bytes of what this rank has of tensors, each storage once."""
    storages = [local(t).untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def whole_gradients(pieces):
    """Those that FSDP2 has added up before it sums them over ranks."""
    found = []
    for piece in pieces:
        for module in piece.modules():
            group = getattr(module, "_get_fsdp_state", lambda: None)()
            for parameter in group._fsdp_param_group.fsdp_params if group is not None else ():
                found.append(parameter.unsharded_accumulated_grad)
    return [gradient for gradient in found if gradient is not None]


def count_held(directory):
    """Has each rank write the bytes that it holds, by part, in step 1: before gradients are summed, and after."""

    def before(index):
        def counting(kind):
            reduce = kind.reduce

            def reducing(self):
                held = {"whole": 0 if kind is gradients.Gradients else size(whole_gradients(self.modules))}
                reduce(self)
                held["gradients"] = size(p.grad for p in self.parameters.values())
                torch.save(held, directory / f"gradients {index}")

            kind.reduce = reducing

        counting(gradients.Gradients)
        counting(sharded.ShardedGradients)
        meter = trainer.Trainer._meter

        def metering(self, turn):
            gathered = [p for piece in self._pieces.values() for p in piece.parameters()]
            cut = self._gradients.held.values()
            self._gradients.modules = list(self._pieces.values())
            held = {
                "parameters": size([*gathered, *cut]),
                "cut": size(cut),
                "optimizer": size(self._optimizer.tensors()),
            }
            torch.save(held, directory / f"held {index}")
            return meter(self, turn)

        trainer.Trainer._meter = metering

    return before


CASES = [
    (0, "bfloat16", "full"),
    (2, "bfloat16", "frozen-llm"),
    (3, "bfloat16", "full"),
    (0, "float32", "full"),
]
OTHERS = [
    (zero, dtype, recipe)
    for zero in range(4)
    for dtype in BYTES
    for recipe in ("full", "frozen-llm", "frozen-encoder")
]


@pytest.mark.some(1, 3)
@pytest.mark.parametrize(
    ("zero", "dtype", "recipe"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.layouts) for case in OTHERS if case not in CASES)],
)
def test_the_planners_memory_is_the_trainers(zero, dtype, recipe, demo, tmp_path):
    check(demo, tmp_path, zero, dtype, recipe)


@pytest.mark.some(1, 2)
@pytest.mark.parametrize(
    ("zero", "dtype", "recipe"),
    [
        (1, "bfloat16", "full"),
        (0, "float32", "full"),
        (3, "bfloat16", "full"),
        (3, "float32", "frozen-encoder"),
    ],
)
def test_whole_encoders_beside_parts_of_the_llm(zero, dtype, recipe, demo, tmp_path):
    """Two groups of two ranks: the encoder is cut over four ranks, the LLM over two."""
    check(demo, tmp_path, zero, dtype, recipe, llm_tp=2)


def check(demo, tmp_path, zero, dtype, recipe, llm_tp=1):
    """A run of two steps: what its ranks hold is what is predicted of them."""
    whole_bytes = write_profile(demo, tmp_path / "model_profile.json", dtype, llm_tp)
    path = tmp_path / "plan.json"
    write_colocated(path, REPLICAS, MICROBATCHES, zero=zero, global_batch_size=BATCH, llm_tp=llm_tp)
    trains(path, recipe)
    config = request(demo, tmp_path)["config"]
    config["model"]["dtype"] = dtype
    config["train"] |= {"recipe": recipe, "precision": {"float32": "fp32", "bfloat16": "bf16"}[dtype]}
    check_held(demo, config, REPLICAS * llm_tp, zero, whole_bytes, tmp_path)


WITH_PARTS = ("qwen3_5_moe", "qwen3_5", "qwen3_vl_moe", "gemma4-experts")
"""Whose experts and heads of linear attention tensor parallelism cuts, and whose layers are all predicted as they are."""


@pytest.mark.some(0, 3)
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", WITH_PARTS)
def test_the_planners_memory_of_cut_layers_is_the_trainers(name, zero, tmp_path):
    """Two replicas of two ranks that share layers. What a rank has of each module is what estimates count."""
    run = FamilyRun(name, tmp_path / "demo", BATCH // 2, MICROBATCHES)
    estimated = tmp_path / "model_profile.json"
    asked = ["profile", "model", "--estimate", "--hardware", "h100", "--out", str(estimated)]
    python(["-m", "dflop", *asked], run.folder)
    path = tmp_path / "plan.json"
    degrees = {"encoder_tp": 2, "llm_tp": 2, "global_batch_size": BATCH // 2}
    plan = write_colocated(path, REPLICAS, MICROBATCHES, zero=zero, **degrees)
    trains(path, "full")
    config = request(run.folder, tmp_path)["config"]
    config["train"] |= {"recipe": "full", "precision": "fp32"}
    encoder = run.adapter.build_encoder(torch.device("meta"), torch.float32, 0)
    llm = run.adapter.build_llm_stage(0, run.adapter.num_llm_layers, torch.device("meta"), torch.float32, 0)
    whole_bytes = 4 * sum(p.numel() for piece in (encoder, llm) for p in piece.parameters())
    check_held(run.folder, config, plan.num_ranks, zero, whole_bytes, tmp_path)


def check_held(demo, config, num_ranks, zero, whole_bytes, tmp_path):
    """Trains two steps, and compares what each rank holds in the second with what is predicted."""
    out = tmp_path / "run"
    asked = request(demo, out, num_ranks, steps=2, measure_memory_step=1, config=config)
    asked["plan"] = str(tmp_path / "plan.json")
    asked["model_profile"] = str(tmp_path / "model_profile.json")
    assert results(run_training(asked, tmp_path, count_held(tmp_path))) == [0] * num_ranks
    (record,) = lines(out / "memory.jsonl")
    for index, rank in enumerate(record["ranks"]):
        held = torch.load(tmp_path / f"held {index}") | torch.load(tmp_path / f"gradients {index}")
        predicted = rank["predicted_parts"]
        # Shards are the masters themselves, which the model counts among the optimizer's states.
        fixed = predicted["parameters"] + predicted["optimizer"]
        if zero == 3:
            assert fixed == pytest.approx(held["cut"] + held["optimizer"], abs=SLACK_BYTES)
            assert predicted["gradients"] == pytest.approx(held["gradients"], abs=SLACK_BYTES)
            # Of one component at a time, its parameters and gradients, and gradients on their way to their sum.
            assert 0 < predicted["gathered"] <= 3 * whole_bytes
            continue
        assert fixed == pytest.approx(held["parameters"] + held["optimizer"], abs=SLACK_BYTES)
        gradient_bytes = held["whole"] if zero else held["gradients"]
        assert predicted["gradients"] == pytest.approx(gradient_bytes, abs=SLACK_BYTES)
        assert predicted["gathered"] == 0
