"""Weights out: what is written, `from_pretrained` reads, and it computes the same."""

from __future__ import annotations

import json
import warnings

import pytest
import tiny_llava
import torch
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import LlavaOnevisionForConditionalGeneration

from dflop import ProfileError
from dflop.models import load_adapter
from dflop.models.export import write_model
from dflop.models.load import Weights
from dflop.runtime.export import read_parameters

FILES = ("tokenizer.json", "processor_config.json", "chat_template.jinja", "preprocessor_config.json")


@pytest.fixture
def source(tmp_path, quiet):
    """A model directory with the usual files beside the configuration, and files that are not copied."""
    model_dir = tiny_llava.write_model_dir(tmp_path / "model")
    for name in FILES[:3]:
        (model_dir / name).write_text(f'"{name}"')
    for name in ("README.md", "model.safetensors.index.json", "pytorch_model.bin"):
        (model_dir / name).write_text("{}")
    return model_dir


def write(source, out, parameters, dtype=torch.float32, shard_bytes_max=10**9, **options):
    whole, _ = load_adapter(source).build_whole()
    write_model(whole, parameters, source, out, dtype, shard_bytes_max, **options)


def test_from_pretrained_gives_the_same_logits(source, tmp_path):
    """In shards; and the pieces read them again."""
    model = load_adapter(source).reference_model(3)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    out = tmp_path / "out"
    write(source, out, parameters, shard_bytes_max=100_000)
    shards = list(out.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 120_000 for path in shards)
    assert all((out / name).read_bytes() == (source / name).read_bytes() for name in FILES)
    assert sorted(p.name for p in out.iterdir() if p not in shards) == sorted(
        [*FILES, "config.json", "model.safetensors.index.json"]
    )
    again = LlavaOnevisionForConditionalGeneration.from_pretrained(out)
    assert again.dtype == torch.float32
    sample = tiny_llava.Sample([("image", 126, 126, 0)], 5, seed=1)
    with torch.no_grad():
        logits, _ = tiny_llava.hf_loss(model, sample)
        assert torch.equal(tiny_llava.hf_loss(again, sample)[0], logits)
    adapter = load_adapter(out)
    piece = adapter.build_encoder(torch.device("cpu"), torch.float32, None)
    Weights(out, adapter.build_whole()[0]).fill(piece)
    assert all(torch.equal(p, parameters[name]) for name, p in piece.named_parameters())


def test_a_tied_head_is_written_once_and_tied_again(tmp_path, quiet):
    source = tiny_llava.write_model_dir(tmp_path / "model", tie_word_embeddings=True)
    model = load_adapter(source).reference_model(3)
    write(source, tmp_path / "out", {name: p.detach() for name, p in model.named_parameters()})
    again = LlavaOnevisionForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight.data_ptr() == again.model.language_model.embed_tokens.weight.data_ptr()
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_dtype_and_template_are_those_of_the_training(source, tmp_path):
    """An earlier export in the same directory leaves no shard behind."""
    model, out = load_adapter(source).reference_model(3), tmp_path / "out"
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    write(source, out, parameters, shard_bytes_max=100_000)
    template = tmp_path / "own.jinja"
    template.write_text("own")
    write(source, out, parameters, torch.bfloat16, chat_template=template)
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert (out / "chat_template.jinja").read_text() == "own"
    assert json.loads((out / "config.json").read_bytes())["dtype"] == "bfloat16"
    again = LlavaOnevisionForConditionalGeneration.from_pretrained(out)
    assert again.dtype == torch.bfloat16
    for name, value in again.named_parameters():
        assert torch.equal(value, parameters[name].to(torch.bfloat16)), name


def test_what_another_wrote_beside_an_export_stays(source, tmp_path):
    """A second export takes away weights of the first, and nothing of another name."""
    model = load_adapter(source).reference_model(3)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    out = tmp_path / "out"
    write(source, out, parameters, shard_bytes_max=100_000)
    own = [out / "model_before.safetensors", tmp_path / "out.new" / "weights"]
    own[1].parent.mkdir()
    for path in own:
        path.write_text("mine")
    write(source, out, parameters)
    assert [path.name for path in out.glob("model*.safetensors") if path not in own] == ["model.safetensors"]
    assert all(path.read_text() == "mine" for path in own)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "out.new"]


def test_parameters_of_another_model_are_refused(source, tmp_path):
    model = load_adapter(source).reference_model(3)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    del parameters["lm_head.weight"]
    with pytest.raises(ProfileError, match="1 parameters are not .*`lm_head.weight` is missing"):
        write(source, tmp_path / "out", parameters)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("error")
def test_a_checkpoint_is_read_by_one_process_without_a_warning(tmp_path):
    parameters = {"model.weight": torch.arange(6.0).view(2, 3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({**parameters, "optimizer.weight.exp_avg": torch.zeros(6)}, checkpoint_id=tmp_path, no_dist=True)
    found = read_parameters(tmp_path)
    assert found.keys() == {"weight"}
    assert torch.equal(found["weight"], parameters["model.weight"])
