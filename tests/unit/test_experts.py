"""Layers with experts: their weight files, the ways to compute them, what is refused, and what changes no gradient."""

import json
import subprocess
import sys

import pytest
import torch
from conformance import CPU, FLOAT, check_gradients, conversations, write_model
from safetensors.torch import load_file, save_file

from dflop._native import ProfileError
from dflop.data.collate import llm_input
from dflop.models import load_adapter
from dflop.models.export import write_model as export
from dflop.models.load import Weights
from dflop.models.recompute import recomputing
from dflop.models.split_backward import split_backward
from dflop.models.tensor import TensorRank

pytestmark = pytest.mark.usefixtures("quiet")
NAME, SEED = "qwen3_vl_moe", 3


def changed(folder, way=None, **fields):
    """A folder with the tiny model; its backbone has these fields, its experts are computed in this way."""
    directory = write_model(folder, NAME)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"].update(fields)
    if way is not None:
        config["experts_implementation"] = way
    path.write_text(json.dumps(config))
    return directory


def pieces_of(adapter, seed=SEED):
    """Encoder and backbone."""
    return [
        adapter.build_encoder(CPU, FLOAT, seed),
        adapter.build_llm_stage(0, adapter.num_llm_layers, CPU, FLOAT, seed),
    ]


def values_of(pieces):
    """Parameters by name."""
    return {name: p.detach() for piece in pieces for name, p in piece.named_parameters()}


def are_read(adapter, directory, values):
    """The pieces get these values from the files, as `from_pretrained` does."""
    theirs = dict(adapter.model_class.from_pretrained(directory, dtype=FLOAT).named_parameters())
    weights = Weights(directory, adapter.build_whole()[0])
    pieces = pieces_of(adapter, seed=SEED + 1)
    for piece in pieces:
        weights.fill(piece)
    found = values_of(pieces)
    assert found.keys() == theirs.keys()
    for name, value in found.items():
        assert torch.equal(value, theirs[name]), name
        assert torch.equal(value, values[name]), name


def text_loss(stage, adapter, folder, backward=torch.Tensor.backward):
    """Loss and gradients of text."""
    samples = conversations(folder / "media", adapter, NAME)
    batch = llm_input([samples["text"].sample])
    loss = stage(batch, torch.empty(0, adapter.feature_width))
    backward(loss)
    return float(loss.detach()), {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("has_hub_form", [True, False])
def test_both_forms_of_the_files_are_read_as_from_pretrained_reads_them(tmp_path, has_hub_form):
    """The hub's files have the matrices of experts transposed, those that transformers 5 writes may not."""
    directory = write_model(tmp_path, NAME)
    adapter = load_adapter(directory)
    values = values_of(pieces_of(adapter))
    is_stacked = {name: ".experts." in name for name in values}
    assert sum(is_stacked.values()) == 2 * adapter.num_llm_layers
    files = {
        name: value.transpose(1, 2).contiguous() if has_hub_form and is_stacked[name] else value
        for name, value in values.items()
    }
    save_file(files, directory / "model.safetensors", metadata={"format": "pt"})
    are_read(adapter, directory, values)


def test_files_with_a_tensor_for_each_matrix_of_an_expert_are_read(tmp_path):
    """So older releases wrote the backbones of Qwen3 with experts, those of InternVL3.5 among them."""
    name = "internvl-qwen3_moe"
    directory = write_model(tmp_path, name)
    adapter = load_adapter(directory)
    values = values_of(pieces_of(adapter))
    files = {}
    for key, value in values.items():
        layer, _, matrix = key.partition(".experts.")
        if not matrix:
            files[key] = value
            continue
        names = ["gate_proj", "up_proj"] if matrix == "gate_up_proj" else ["down_proj"]
        for expert, whole in enumerate(value):
            for part, of_part in zip(names, whole.chunk(len(names)), strict=True):
                files[f"{layer}.experts.{expert}.{part}.weight"] = of_part.contiguous()
    assert len(files) > len(values)
    save_file(files, directory / "model.safetensors", metadata={"format": "pt"})
    are_read(adapter, directory, values)


def test_what_is_exported_is_what_transformers_writes(tmp_path):
    directory = write_model(tmp_path, NAME)
    adapter = load_adapter(directory)
    values = values_of(pieces_of(adapter))
    export(adapter.build_whole()[0], values, directory, tmp_path / "out", FLOAT, 1 << 30)
    model = adapter.model_class(adapter.read_config())
    model.load_state_dict(values)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_a_user_chooses_how_experts_are_computed_and_all_ways_agree(tmp_path):
    found = {}
    for way in (None, "eager", "grouped_mm", "batched_mm"):
        adapter = load_adapter(changed(tmp_path / str(way), way))
        whole, config = adapter.build_whole()
        # transformers' own choice where nobody chose.
        assert config.text_config._experts_implementation == (way or "grouped_mm")
        experts = whole.model.language_model.layers[0].mlp.experts
        assert experts.config._experts_implementation == (way or "grouped_mm")
        found[way] = text_loss(pieces_of(adapter)[1], adapter, tmp_path / str(way))
    loss, gradients = found.pop(None)
    assert all(".experts." not in name or gradient.any() for name, gradient in gradients.items())
    for other, of_other in found.values():
        assert other == pytest.approx(loss, rel=1e-6)
        check_gradients(of_other, gradients)


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_and_a_split_backward_change_no_gradient(tmp_path, way, mode):
    adapter = load_adapter(changed(tmp_path, way))
    _, expected = text_loss(pieces_of(adapter)[1], adapter, tmp_path)
    stage = pieces_of(adapter)[1]
    with recomputing(stage.layers_in_order(), mode):
        _, again = text_loss(stage, adapter, tmp_path)
    check_gradients(again, expected)
    stage = pieces_of(adapter)[1]
    with split_backward(stage) as queue:
        _, _ = text_loss(stage, adapter, tmp_path)
        # Those of experts and routers are there, those of linear maps wait.
        early = {name for name, p in stage.named_parameters() if p.grad is not None and p.dim() > 1}
        assert early == {name for name in expected if ".experts." in name or ".mlp.gate." in name}
        queue.flush()
    check_gradients({n: p.grad for n, p in stage.named_parameters() if p.grad is not None}, expected)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"output_router_logits": True}, "`text_config.output_router_logits` is True, must be false"),
        (
            {"mlp_only_layers": [1]},
            r"`text_config.mlp_only_layers` is \[1\], must be such that all 3 layers have experts",
        ),
        (
            {"decoder_sparse_step": 2},
            "`text_config.decoder_sparse_step` is 2, must be such that all 3 layers",
        ),
        ({"num_experts_per_tok": 7}, "`text_config.num_experts_per_tok` is 7, must be from 1 to"),
    ],
)
def test_what_would_make_the_gradient_depend_on_the_schedule_or_is_not_planned_is_refused(
    tmp_path, fields, words
):
    with pytest.raises(ProfileError, match=words):
        load_adapter(changed(tmp_path, **fields))


def test_layers_without_experts_are_those_of_the_mlp(tmp_path):
    """All of them: then tensor parallelism cuts them, too."""
    adapter = load_adapter(changed(tmp_path, decoder_sparse_step=9))
    stage = adapter.build_llm_stage(0, 3, CPU, FLOAT, SEED, tensor=TensorRank(2, 1))
    assert stage.layers_in_order()[0].mlp.gate_proj.weight.shape == (48, 48)


def test_a_rank_has_its_part_of_the_width_of_each_expert(tmp_path):
    """Gates lie before all others in one parameter; a rank has the same columns of both. The router is whole."""
    adapter = load_adapter(write_model(tmp_path, NAME))
    whole = adapter.build_llm_stage(0, 3, CPU, FLOAT, SEED)
    for rank in range(2):
        part = adapter.build_llm_stage(0, 3, CPU, FLOAT, SEED, tensor=TensorRank(2, rank))
        for all_of, own_of in zip(whole.layers_in_order(), part.layers_in_order(), strict=True):
            gates, others = all_of.mlp.experts.gate_up_proj.split(32, dim=1)
            own = slice(16 * rank, 16 * (rank + 1))
            expected = torch.cat([gates[:, own], others[:, own]], dim=1)
            assert torch.equal(own_of.mlp.experts.gate_up_proj, expected)
            assert torch.equal(own_of.mlp.experts.down_proj, all_of.mlp.experts.down_proj[:, :, own])
            assert torch.equal(own_of.mlp.gate.weight, all_of.mlp.gate.weight)


def test_a_width_of_experts_that_the_degree_does_not_divide_is_named(tmp_path):
    adapter = load_adapter(changed(tmp_path, moe_intermediate_size=33))
    message = "`text_config.moe_intermediate_size` is 33, must be a multiple of the tensor parallel degree 2"
    with pytest.raises(ProfileError, match=message):
        adapter.build_llm_stage(0, 3, CPU, FLOAT, SEED, tensor=TensorRank(2, 0))


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "glm4v_moe", "qwen3_5", "qwen3_5_moe"])
def test_the_planner_counts_the_parameters_that_a_rank_has(name, tmp_path):
    """Of a layer, whole and cut: so parameters, gradients and the optimizer's states are the trainer's.

    Of Qwen3.5 a profile has the mean of three layers, two of them with linear attention.
    """
    adapter = load_adapter(write_model(tmp_path, name))
    (tmp_path / "dflop.yaml").write_text(
        f"model: {{dir: {tmp_path / name}}}\ndata: {{mixture: mixture.yaml}}\ncluster: {{num_ranks: 1}}\n"
    )
    path = tmp_path / "model_profile.json"
    arguments = ["--config", str(tmp_path / "dflop.yaml"), "--out", str(path)]
    command = ["profile", "model", "--estimate", "--hardware", "h100", *arguments]
    subprocess.run([sys.executable, "-m", "dflop", *command], check=True, capture_output=True)
    profile = json.loads(path.read_text())
    cut = {one["tensor_parallel_degree"]: one["modules"] for one in profile["variants"]}
    for degree, modules in {1: profile["modules"], 2: cut[2], 4: cut[4]}.items():
        run = (0, 3) if name.startswith("qwen3_5") else (1, 1)
        stage = adapter.build_llm_stage(*run, CPU, FLOAT, SEED, tensor=TensorRank(degree, 0))
        found = sum(p.numel() for layer in stage.layers_in_order() for p in layer.parameters())
        assert modules["llm_layer"]["num_parameters"] == -(-found // run[1])
    # Over eight ranks four heads cannot be dealt out, so nobody plans it.
    assert "llm_layer" not in cut.get(8, {})
