"""Qwen3-Omni: files of the whole model, of which the thinker trains; positions and sounds of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from conformance import CPU, FLOAT, conversations, write_model
from conformance_settings import IMAGE, VISION_START
from safetensors.torch import save_file
from test_omni import changed, published
from test_pieces import WHOLE, as_hugging_face, real_model, taken
from tiny_families import tiny
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from dflop import ProfileError
from dflop.models import load_adapter
from dflop.models.adapter import MediaGrid
from dflop.models.adapters import is_of_projector
from dflop.models.export import write_model as write_export
from dflop.models.load import Weights
from dflop.models.mel_chunks import to_rows, tokens_of
from dflop.models.mel_windows import bounds_of_windows, windows_of
from dflop.models.parameters import component_of
from dflop.profiling.cases import Gradients
from dflop.profiling.curves import Built, build_curves
from dflop.profiling.request import Request

pytestmark = pytest.mark.usefixtures("quiet")
NAME = "qwen3_omni_moe"
TALKER = {
    "talker.hidden_projection.linear_fc1.weight": torch.zeros(3),
    "code2wav.decoder.0.bias": torch.zeros(2),
}
EXPERTS = re.compile(r"(.*mlp\.experts)\.(gate_up_proj|down_proj)$")


def of_the_hub(parameters):
    """Tensors by the names of the published files: each expert has matrices of its own."""
    found = {}
    for name, value in parameters:
        match = EXPERTS.match(published(name))
        if match is None:
            found[published(name)] = value.detach().clone()
            continue
        where, kind = match.groups()
        for index, matrix in enumerate(value.detach()):
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for part, own in zip(matrix.chunk(len(names)), names, strict=True):
                found[f"{where}.{index}.{own}.weight"] = part.clone()
    return found


@pytest.fixture
def model(tmp_path):
    """(folder, adapter, Hugging Face's model): weights as the hub has them, with those of the talker."""
    model_dir = write_model(tmp_path, NAME)
    # Of no concern: the talker and the vocoder.
    changed(model_dir, "talker_config.text_config.attention_dropout", 0.1)
    adapter = load_adapter(model_dir)
    own = adapter.reference_model(3)
    tensors = of_the_hub(own.named_parameters())
    for name in ("model.layers.0.mlp.experts.5.up_proj", "visual.merger_list.1.mlp.0", "audio_tower.conv2d1"):
        assert f"thinker.{name}.weight" in tensors
    save_file(tensors | TALKER, model_dir / "model.safetensors", metadata={"format": "pt"})
    return model_dir, adapter, own


def test_weights_are_those_of_the_thinker(model):
    model_dir, adapter, own = model
    weights = Weights(model_dir, adapter.build_whole()[0])
    encoder = adapter.build_encoder(CPU, FLOAT, None)
    stages = [adapter.build_llm_stage(first, count, CPU, FLOAT, None) for first, count in ((0, 1), (1, 2))]
    expected = dict(own.named_parameters())
    seen = set()
    for piece in (encoder, *stages):
        weights.fill(piece)
        for name, parameter in piece.named_parameters():
            assert torch.equal(parameter, expected[name]), name
            seen.add(name)
    assert seen == set(expected)


def test_an_export_is_the_thinker_alone(model, tmp_path):
    model_dir, adapter, own = model
    out = tmp_path / "out"
    parameters = {name: value.detach() + 1 for name, value in own.named_parameters()}
    write_export(adapter.build_whole()[0], parameters, model_dir, out, FLOAT, 1 << 30)
    found = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(out, dtype=FLOAT)
    assert all(torch.equal(value, parameters[name]) for name, value in found.named_parameters())
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (out, model_dir))
    assert config == before | {"enable_audio_output": False, "dtype": "float32"}
    # Read again by dflop, as the next stage of a training does.
    assert Weights(out, load_adapter(out).build_whole()[0]).num_files == 1


def test_what_makes_features_is_a_projector(model):
    names = [name for name, _ in model[2].named_parameters() if component_of(name) == "projector"]
    owners = {name.rpartition(".")[0].removeprefix("model.") for name in names}
    mergers = ("merger", "merger_list.0", "merger_list.1")
    wanted = {f"visual.{merger}.{part}" for merger in mergers for part in ("ln_q", "mlp.0", "mlp.2")}
    assert owners == wanted | {"audio_tower.proj1", "audio_tower.proj2"}
    assert all(map(is_of_projector, names))


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("vision_start_token_id", None, "`thinker_config.vision_start_token_id` is None, must be the id of"),
        ("audio_config.dropout", 0.1, "`thinker_config.audio_config.dropout` is 0.1, must be 0"),
        ("audio_config.output_dim", 32, "`thinker_config.audio_config.output_dim` is 32, must be 48"),
        ("audio_config.num_mel_bins", 147, "`thinker_config.audio_config.num_mel_bins` is 147, must be at most 146"),
        ("audio_config.n_window", 40, "`thinker_config.audio_config.n_window` is 40, must be 50"),
        ("audio_config.n_window_infer", 99, "`thinker_config.audio_config.n_window_infer` is 99, must be at least"),
        ("vision_config.deepstack_visual_indexes", [9], "`thinker_config.vision_config.deepstack_visual_indexes` is"),
        ("text_config.output_router_logits", True, "`thinker_config.text_config.output_router_logits` is True"),
    ],
)  # fmt: skip
def test_fields_are_named_with_their_section(tmp_path, path, value, rule):
    model_dir = write_model(tmp_path, NAME)
    changed(model_dir, f"thinker_config.{path}", value)
    with pytest.raises(ProfileError) as error:
        load_adapter(model_dir)
    assert rule in str(error.value)


def test_time_of_a_video_is_that_of_its_frames(tmp_path):
    """13 positions a second, not rounded; where the file does not tell its rate, one frame a second."""
    model_dir = write_model(tmp_path, NAME)
    changed(model_dir, "thinker_config.position_id_per_seconds", 13)
    adapter = load_adapter(model_dir)
    ids_T = torch.tensor([VISION_START, *[IMAGE + 1] * 3, 5])
    for fps, step in ((5.0, 5.2), (None, 26.0)):
        video = MediaGrid("video", 3, 28, 28, 3, patches=(2, 2), sampled_fps=fps)
        time_T = adapter.positions(ids_T, ids_T == IMAGE + 1, [video])[0]
        assert time_T.tolist() == pytest.approx([0, 1, 1 + step, 1 + 2 * step, 2 + 2 * step])


def test_a_sound_that_is_not_as_profiled_is_refused(tmp_path):
    adapter = load_adapter(write_model(tmp_path, NAME))
    medium = conversations(tmp_path / "media", adapter, NAME)["sound"].media[0]
    rows = adapter.pixels(Path(medium.file), "audio", (), medium.grid)
    assert tuple(rows.shape) == (medium.grid.num_inputs, *adapter.input_shape) == (26, 1176)
    other = MediaGrid("audio", 1, 0, 0, 1, patches=(26, 1))
    with pytest.raises(ProfileError, match=r"6880 samples of sound, 6 features, profiled as 1$"):
        adapter.pixels(Path(medium.file), "audio", (), other)


def heard(pieces, model, sounds):
    """Tokens of each window of these spectrograms, and the features that the pieces make of them."""
    tokens = [tokens_of(mel.shape[1]) for mel in sounds]
    grids = [
        MediaGrid("audio", -(-n // 26), 0, 0, n, patches=(26, 1), last_segment_tokens=(n - 1) % 26 + 1)
        for n in tokens
    ]
    windows = windows_of(grids, 26)
    rows_NC = torch.cat([to_rows(mel, 26, 1176) for mel in sounds])
    names = ("sound_embedding", "sound_layer", "sound_projector")
    embedding, layers, projector = (taken(pieces[name], model) for name in names)
    with torch.no_grad():
        hidden = layers(embedding(rows_NC, windows), bounds_of_windows(windows, CPU))
        return windows.tokens, projector(hidden, windows)


def test_the_pieces_of_sounds_are_the_second_tower(tmp_path):
    """Several windows; a last chunk of one frame, of some, and a whole one: as in one call of transformers."""
    pieces, directory = tiny(tmp_path, NAME)
    model, frames = as_hugging_face(real_model(directory)), [401, 337, 100]
    mel_BF = torch.randn(8, sum(frames))
    with torch.no_grad():
        wanted = model.model.audio_tower(mel_BF, feature_lens=torch.tensor(frames)).last_hidden_state
    tokens, found = heard(pieces, model, mel_BF.split(frames, dim=1))
    assert tokens == (26, 26, 1, 26, 18, 13)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_a_short_sound_ends_where_its_frames_end(tmp_path):
    """As transformers computes it in a call of its own, whatever stands beside it here."""
    pieces, directory = tiny(tmp_path, NAME)
    model, longer = as_hugging_face(real_model(directory)), torch.randn(8, 250)
    shorter = [torch.randn(8, frames) for frames in (1, 7, 8, 9, 43, 99)]
    with torch.no_grad():
        tower = model.model.audio_tower
        wanted = [tower(mel, feature_lens=torch.tensor([mel.shape[1]])).last_hidden_state for mel in shorter]
    tokens, found = heard(pieces, model, [*shorter, longer])
    assert tokens == (1, 1, 1, 2, 6, 13, 26, 7)
    for own, expected in zip(found.split(tokens), wanted, strict=False):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_sounds_are_measured_up_to_their_windows(tmp_path):
    """Whatever segments pictures have: no sound has a longer one."""
    fields = {"model_dir": tmp_path, "max_llm_tokens": 512, "max_encoder_tokens": 400}
    request = Request.parse({**fields, "max_encoder_segment_tokens": 300})
    piece = tiny(tmp_path, NAME)[0]["sound_layer"]
    attention, linear = build_curves([Built(piece, WHOLE, "")], request, Gradients())
    assert attention.last == attention.pack_tokens == 26
    assert linear.last == 416
    assert linear.segments(416) == [26] * 16
