"""Weights in: pieces read from the files of a model directory what Hugging Face's own loading gives the whole model."""

from __future__ import annotations

import json

import pytest
import tiny_llava
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaOnevisionForConditionalGeneration

from dflop import ProfileError
from dflop.models import load_adapter
from dflop.models.load import Weights
from dflop.models.weight_files import INDEX, WHOLE, check_has_weights

CPU, FLOAT = torch.device("cpu"), torch.float32


def reference(model_dir, seed=3):
    """Hugging Face's model with the values of a seed."""
    return load_adapter(model_dir).reference_model(seed)


@pytest.fixture
def saved(tmp_path, quiet):
    """A model directory with weights in several shards, as `save_pretrained` writes them."""
    model_dir = tiny_llava.write_model_dir(tmp_path / "model")
    reference(model_dir).save_pretrained(model_dir, max_shard_size="100KB")
    assert len(list(model_dir.glob("*.safetensors"))) > 2
    return model_dir


def whole_file(model_dir, rename=lambda name: name, drop=()):
    """The weights of a directory in one file instead, under other names than files have now, or without some."""
    for path in sorted(model_dir.glob("*.safetensors*")):
        path.unlink()
    state = reference(model_dir).state_dict()
    tensors = {rename(name): value for name, value in state.items() if name not in drop}
    save_file(tensors, model_dir / WHOLE, metadata={"format": "pt"})
    return tensors


def pieces(model_dir, cuts=(0, 2, 4), dtype=FLOAT):
    """Encoder and LLM stages without values."""
    adapter = load_adapter(model_dir)
    ends = zip(cuts, cuts[1:], strict=False)
    stages = [adapter.build_llm_stage(first, last - first, CPU, dtype, None) for first, last in ends]
    return [adapter.build_encoder(CPU, dtype, None), *stages]


def weights(model_dir):
    return Weights(model_dir, load_adapter(model_dir).build_whole()[0])


def check_filled(model_dir, cuts=(0, 2, 4)):
    """All pieces hold what `from_pretrained` reads from the same directory; returns what each of them read."""
    own = LlavaOnevisionForConditionalGeneration.from_pretrained(model_dir, dtype=FLOAT)
    expected = dict(own.named_parameters())
    source, seen, keys = weights(model_dir), set(), []
    for piece in pieces(model_dir, cuts):
        keys.append(source.fill(piece))
        for name, parameter in piece.named_parameters():
            assert torch.equal(parameter, expected[name]), name
            seen.add(name)
    assert seen == set(expected)
    return keys


def test_each_piece_reads_its_own_tensors_from_shards(saved):
    keys = check_filled(saved)
    assert [len(k) for k in keys] == [len(list(piece.parameters())) for piece in pieces(saved)]
    stored = [key for path in saved.glob("*.safetensors") for key in load_file(path)]
    assert sorted(key for own in keys for key in own) == sorted(stored)


def test_names_of_older_releases(saved):
    """Those that transformers wrote before version 4.52, and a buffer that it saved then."""
    older = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}

    def rename(name):
        for new, old in older.items():
            if name.startswith(new):
                return old + name.removeprefix(new)
        name = name.removeprefix("model.")
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)

    tensors = whole_file(saved, rename)
    tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(tensors, saved / WHOLE, metadata={"format": "pt"})
    assert any(name.startswith("vision_tower.vision_model.encoder") for name in tensors)
    check_filled(saved)


def test_a_head_tied_to_the_embedding_is_read_once(tmp_path, quiet):
    model_dir = tiny_llava.write_model_dir(tmp_path / "model", tie_word_embeddings=True)
    reference(model_dir).save_pretrained(model_dir)
    assert "lm_head.weight" not in load_file(model_dir / WHOLE)
    keys = check_filled(model_dir, cuts=(0, 4))
    assert "lm_head.weight" not in keys[1]
    stage = pieces(model_dir, (0, 4))[1]
    weights(model_dir).fill(stage)
    assert stage.lm_head.weight is stage.model.language_model.embed_tokens.weight
    # Older files have both: equal ones are one parameter, others are refused.
    tensors = load_file(model_dir / WHOLE)
    embedding = tensors[next(name for name in tensors if name.endswith("embed_tokens.weight"))]
    for value, is_equal in [(embedding.clone(), True), (embedding + 1, False)]:
        save_file({**tensors, "lm_head.weight": value}, model_dir / WHOLE, metadata={"format": "pt"})
        if is_equal:
            weights(model_dir).fill(stage)
        else:
            with pytest.raises(ProfileError, match="two values of one parameter"):
                weights(model_dir).fill(stage)


def test_weights_are_rounded_to_the_dtype_of_the_piece(saved):
    exact, rounded = pieces(saved)[2], pieces(saved, dtype=torch.bfloat16)[2]
    for piece in (exact, rounded):
        weights(saved).fill(piece)
    for name, parameter in rounded.named_parameters():
        assert torch.equal(parameter, exact.get_parameter(name).to(torch.bfloat16)), name


def test_missing_left_over_and_misshapen_tensors_are_counted_and_named(saved):
    dropped = ["model.language_model.layers.1.mlp.up_proj.weight", "model.image_newline"]
    tensors = whole_file(saved, drop=dropped)
    tensors["model.language_model.layers.9.mlp.up_proj.weight"] = torch.ones(2)
    tensors["model.language_model.norm.weight"] = torch.ones(47)
    save_file(tensors, saved / WHOLE)
    with pytest.raises(ProfileError) as caught:
        weights(saved)
    text = str(caught.value)
    for expected in (
        "2 are missing, `model.image_newline` first",
        "1 is left over, `model.language_model.layers.9.mlp.up_proj.weight`",
        "1 is of another tensor shape, `model.language_model.norm.weight` ([47], `config.json` says [48])",
    ):
        assert expected in text, text


def test_files_that_cannot_be_used(saved):
    """Each is refused by its name."""
    shard = sorted(saved.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(ProfileError, match=shard.name):
        weights(saved)
    shard.unlink()
    with pytest.raises(ProfileError, match=f"lacks 1 of the .* `{shard.name}` first"):
        weights(saved)
    (saved / INDEX).write_text("[]")
    with pytest.raises(ProfileError, match="is no index of safetensors"):
        weights(saved)
    (saved / INDEX).write_text(json.dumps({"weight_map": {"a": "../b"}}))
    with pytest.raises(ProfileError, match=r"names `\.\./b`, must be a file beside it"):
        weights(saved)
    save_file({"model.image_newline": torch.ones(48, dtype=torch.int8)}, saved / WHOLE)
    with pytest.raises(ProfileError, match="`model.image_newline` in .* is I8, must be one of"):
        weights(saved)
    (saved / WHOLE).unlink()
    (saved / INDEX).unlink()
    with pytest.raises(ProfileError, match="has no weights") as caught:
        check_has_weights(saved)
    assert "train.init: random" in caught.value.__notes__[0]
    (saved / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ProfileError, match="is no safetensors file"):
        check_has_weights(saved)
