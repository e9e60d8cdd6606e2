"""Qwen2.5-Omni: files of the whole model, of which the thinker trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conformance import CPU, FLOAT, conversations, write_model
from conformance_settings import AUDIO_START, IMAGE, SOUND, VISION_START
from safetensors.torch import save_file
from test_pieces import WHOLE, as_hugging_face, real_model, taken
from tiny_families import tiny
from transformers import Qwen2_5OmniThinkerForConditionalGeneration

from dflop import ProfileError
from dflop.models import load_adapter
from dflop.models.adapter import MediaGrid
from dflop.models.export import write_model as write_export
from dflop.models.load import Weights
from dflop.models.mel_windows import bounds_of_windows, to_rows, windows_of
from dflop.models.parameters import component_of
from dflop.models.tensor import TensorRank
from dflop.profiling.cases import Gradients
from dflop.profiling.curves import Built, build_curves
from dflop.profiling.request import Request

pytestmark = pytest.mark.usefixtures("quiet")
TALKER = {"talker.thinker_to_talker_proj.weight": torch.zeros(3), "token2wav.code2wav.weight": torch.zeros(2)}


def changed(model_dir, path, value):
    """Sets a field of `config.json`, or takes it away."""
    file = model_dir / "config.json"
    config = section = json.loads(file.read_text())
    *parents, last = path.split(".")
    for name in parents:
        section = section.setdefault(name, {})
    section[last] = value
    if value is None:
        del section[last]
    file.write_text(json.dumps(config))


def published(name):
    """The name of a parameter of the thinker in the files of the hub."""
    name = name.replace("model.language_model.", "model.") if "language_model" in name else name
    return "thinker." + name.removeprefix("model." if name.split(".")[1] in ("visual", "audio_tower") else "")


@pytest.fixture
def model(tmp_path):
    """(folder, adapter, Hugging Face's model): weights as the hub has them, with those of the talker."""
    model_dir = write_model(tmp_path, "qwen2_5_omni")
    # As the vocoder of the published model has it.
    changed(model_dir, "token2wav_config.dit_config.dropout", 0.1)
    adapter = load_adapter(model_dir)
    own = adapter.reference_model(3)
    tensors = {published(name): value.detach().clone() for name, value in own.named_parameters()}
    for name in ("model.layers.0.mlp.up_proj", "visual.merger.ln_q", "audio_tower.conv1", "lm_head"):
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
    found = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(out, dtype=FLOAT)
    assert all(torch.equal(value, parameters[name]) for name, value in found.named_parameters())
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (out, model_dir))
    assert config == before | {"enable_audio_output": False, "dtype": "float32"}
    # Read again by dflop, as the next stage of a training does.
    assert Weights(out, load_adapter(out).build_whole()[0]).num_files == 1


def test_what_makes_features_of_sounds_is_a_projector(model):
    names = [name for name, _ in model[2].named_parameters() if component_of(name) == "projector"]
    owners = {name.rpartition(".")[0].removeprefix("model.") for name in names}
    assert owners == {"visual.merger.ln_q", "visual.merger.mlp.0", "visual.merger.mlp.2", "audio_tower.proj"}


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("vision_start_token_id", None, "`thinker_config.vision_start_token_id` is None, must be the id of"),
        ("audio_config.dropout", 0.1, "`thinker_config.audio_config.dropout` is 0.1, must be 0"),
        ("audio_config.output_dim", 32, "`thinker_config.audio_config.output_dim` is 32, must be 48"),
        ("audio_config.num_mel_bins", 588, "`thinker_config.audio_config.num_mel_bins` is 588, must be at most 587"),
        ("vision_config.fullatt_block_indexes", [], "`thinker_config.vision_config.fullatt_block_indexes` is"),
        ("text_config.use_sliding_window", True, "`thinker_config.text_config.sliding_window` is 32768, must be null"),
    ],
)  # fmt: skip
def test_fields_are_named_with_their_section(tmp_path, path, value, rule):
    model_dir = write_model(tmp_path, "qwen2_5_omni")
    changed(model_dir, f"thinker_config.{path}", value)
    with pytest.raises(ProfileError) as error:
        load_adapter(model_dir)
    assert rule in str(error.value)


def test_a_medium_that_transformers_would_not_find_is_refused(tmp_path):
    adapter = load_adapter(write_model(tmp_path, "qwen2_5_omni"))
    image, sound = MediaGrid("image", 1, 56, 56, 4, patches=(4, 4)), MediaGrid("audio", 1, 0, 0, 2)
    ids = [5, VISION_START, *[IMAGE] * 4, 6, AUDIO_START, SOUND, SOUND, 7]

    def positions(ids, media):
        ids_T = torch.tensor(ids)
        return adapter.positions(ids_T, ids_T >= IMAGE, media)

    # Two rows of two features; the next token is behind the larger side.
    assert positions(ids, [image, sound]).tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5, 6, 7, 8],
        [0, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 2, 3, 4, 5, 6, 7, 8],
    ]
    for token in (VISION_START, AUDIO_START):
        with pytest.raises(ValueError, match=r"\(1, 0, 1\) images, videos and sounds, and before them \("):
            positions([5 if one == token else one for one in ids], [image, sound])
    with pytest.raises(ValueError, match="they have no positions"):
        positions([*ids, VISION_START], [image, sound])
    # Of sounds alone, positions do not depend on it.
    assert positions([5, SOUND, SOUND], [sound]).tolist() == [[0, 1, 2]] * 3


def test_time_of_a_video_is_that_of_its_frames(tmp_path):
    """25 positions a second; where the file does not tell its rate, two frames a second."""
    adapter = load_adapter(write_model(tmp_path, "qwen2_5_omni"))
    ids_T = torch.tensor([VISION_START, *[IMAGE + 1] * 3, 5])
    for fps, step in ((5.0, 10), (None, 25)):
        video = MediaGrid("video", 3, 28, 28, 3, patches=(2, 2), sampled_fps=fps)
        time_T = adapter.positions(ids_T, ids_T == IMAGE + 1, [video])[0]
        assert time_T.tolist() == [0, 1, 1 + step, 1 + 2 * step, 2 + 2 * step]


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_runs_of_layers_are_the_two_encoders(name, tmp_path):
    """Three layers of sounds are spread over four of pictures; together the runs have each parameter once."""
    adapter = load_adapter(write_model(tmp_path, name))
    runs = [adapter.build_encoder(CPU, FLOAT, 0, range(first, first + 1)) for first in range(4)]
    layers = [len(run.model.audio_tower.layers) for run in runs]
    assert layers == [0, 1, 1, 1]
    assert [len(run.layers_in_order()) for run in runs] == [1, 2, 2, 2]
    found = [name for run in runs for name, _ in run.named_parameters()]
    whole = dict(adapter.build_encoder(CPU, FLOAT, 0).named_parameters())
    assert sorted(found) == sorted(whole)
    media = conversations(tmp_path / "media", adapter, name)["sound"].media
    assert adapter.num_rows([medium.grid for medium in media]) > 0
    with pytest.raises(ValueError, match="layers 2 to 5 of an encoder of 4"):
        adapter.build_encoder(CPU, FLOAT, 0, range(2, 5))


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_the_planner_counts_the_parameters_that_a_rank_of_both_encoders_has(name, tmp_path):
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
        encoder = adapter.build_encoder(CPU, FLOAT, 0, tensor=TensorRank(degree, 0))
        found = sum(p.numel() for layer in encoder.layers_in_order() for p in layer.parameters())
        names = [each for each in modules if each.endswith("layer") and each != "llm_layer"]
        counts = {each: profile["modules"][each]["count"] for each in names}
        assert sum(counts.values()) == 4 + 3
        assert sum(counts[each] * modules[each]["num_parameters"] for each in names) == found, degree
    assert "sound_layer" not in cut.get(8, {})


def test_a_sound_that_is_not_as_profiled_is_refused(tmp_path):
    adapter = load_adapter(write_model(tmp_path, "qwen2_5_omni"))
    medium = conversations(tmp_path / "media", adapter, "qwen2_5_omni")["sound"].media[0]
    path = Path(medium.file)
    rows = adapter.pixels(path, "audio", (), medium.grid)
    assert tuple(rows.shape) == (medium.grid.num_inputs, *adapter.input_shape)
    other = MediaGrid("audio", 1, 0, 0, 1, patches=(8, 1))
    with pytest.raises(
        ProfileError, match="6880 samples of sound, 11 features, profiled as 1; at most 64000"
    ):
        adapter.pixels(path, "audio", (), other)


def test_the_pieces_of_sounds_are_the_second_tower(tmp_path):
    """Sounds of several windows, with a last window of one frame, of an odd number of frames, and whole."""
    pieces, directory = tiny(tmp_path, "qwen2_5_omni")
    model, frames = as_hugging_face(real_model(directory)), [33, 27, 32]
    mel_BF = torch.randn(8, sum(frames))
    with torch.no_grad():
        wanted = model.model.audio_tower(mel_BF, feature_lens=torch.tensor(frames)).last_hidden_state
    grids = [
        MediaGrid("audio", -(-n // 16), 0, 0, 0, last_segment_tokens=(n - 1) % 16 // 2 + 1) for n in frames
    ]
    windows = windows_of(grids, 8)
    assert (windows.tokens, windows.of_sounds) == ((8, 8, 1, 8, 6, 8, 8), (17, 14, 16))
    rows_NC = torch.cat([to_rows(mel, 8, 1176) for mel in mel_BF.split(frames, dim=1)])
    names = ("sound_embedding", "sound_layer", "sound_projector")
    embedding, layers, projector = (taken(pieces[name], model) for name in names)
    with torch.no_grad():
        hidden = layers(embedding(rows_NC, windows), bounds_of_windows(windows, CPU))
        found = projector(hidden, windows)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_sounds_are_measured_up_to_their_windows(tmp_path):
    """Whatever segments pictures have: no sound has a longer one."""
    fields = {"model_dir": tmp_path, "max_llm_tokens": 512, "max_encoder_tokens": 400}
    request = Request.parse({**fields, "max_encoder_segment_tokens": 300})
    piece = tiny(tmp_path, "qwen2_5_omni")[0]["sound_layer"]
    attention, linear = build_curves([Built(piece, WHOLE, "")], request, Gradients())
    assert attention.last == attention.pack_tokens == 8
    assert linear.last == 400
    assert linear.segments(400) == [8] * 50
