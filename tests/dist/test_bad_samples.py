"""Media whose headers are sound and that cannot be decoded, under each policy, on every layout."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import av
import pytest
import soundfile
import tiny_families
import torch
import torch.utils.tensorboard  # noqa: F401  (imported once, for all forked ranks)
from demo_run import lines, python, request, run_training, write_demo
from PIL import Image, ImageSequence
from ranks import results
from test_training import SEED, Oracle, layout_of
from transformers import WhisperFeatureExtractor

from dflop._native import Dataset, GlobalBatches, Schedule, ScheduleError
from dflop._native.testing import load_config
from dflop.models import load_adapter
from dflop.models.adapter import MediaGrid
from dflop.models.families.qwen2_audio import num_features
from dflop.runtime import trainer  # noqa: F401
from dflop.runtime.bad_samples import changed

NUM_SAMPLES, BATCH, MICROBATCHES, STEPS = 20, 8, 4, 3


def cut(path):
    """Leaves the first half of a file."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def as_mp4(path):
    """The clip of a GIF as H.264, its index before its frames, as files for the web are."""
    frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(Image.open(path))]
    made = path.with_suffix(".mp4")
    with av.open(str(made), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=1)
        width, height = frames[0].size
        stream.width, stream.height, stream.pix_fmt = width - width % 2, height - height % 2, "yuv420p"
        for frame in frames:
            container.mux(
                stream.encode(av.VideoFrame.from_image(frame.resize((stream.width, stream.height))))
            )
        container.mux(stream.encode())
    return made


def cut_some(directory):
    """Two pictures, an animation and a video that end in the middle: their headers are whole, and are profiled."""
    media, videos = directory / "data/media", directory / "data/videos.json"
    animation, clip = sorted(media.glob("*.gif"))[:2]
    video = as_mp4(clip)
    videos.write_text(videos.read_text().replace(clip.name, video.name))
    paths = [*sorted(media.glob("*.jpg"))[:2], animation, video]
    for path in paths:
        cut(path)
    (directory / "cut.json").write_text(json.dumps([path.name for path in paths]))


def cut_all(directory):
    """Every picture, animation and video."""
    for path in (directory / "data/media").iterdir():
        cut(path)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """An epoch of global batches of 8, 8 and 4, with some that cannot be decoded."""
    return write_demo(tmp_path_factory.mktemp("demo"), NUM_SAMPLES, BATCH, MICROBATCHES, cut_some)


def asked(demo, out, tmp_path, layout, policy, **changes):
    """A request under a policy."""
    config = load_config(str(demo / "dflop.yaml"))
    config["data"] |= {"on_bad_sample": policy, "bad_samples_max_percent": 50, **changes}
    config["train"] |= {"seed": SEED, "learning_rate": 0.0, "weight_decay": 0.0, "workers": 1}
    return request(demo, out, **layout_of(demo, tmp_path, layout), config=config, steps=STEPS)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("policy", "layout"),
    [
        # Part of the next; and, without a cut, of the last two.
        pytest.param("skip", (1, 1, 1), marks=pytest.mark.layouts),
        ("skip", (2, 2, 2)),
        ("substitute", (2, 1, 1)),
        pytest.param("skip", (2, 0), marks=pytest.mark.layouts),
        # The policies meet the data before any rank does: one of them on colocated ranks is enough.
        pytest.param("substitute", (2, 1), marks=pytest.mark.layouts),
        ("skip", (2, 3)),
        # The second rank of the encoder's tensor group finds nothing bad, and takes part in what becomes of it.
        ("substitute", (1, 1, 1, {"encoder_tp": 2})),
    ],
    ids=str,
)
def test_the_loss_is_that_of_the_others(policy, layout, demo, tmp_path):
    """An epoch: each good sample once, no bad one; losses over the label tokens of what was trained."""
    wanted = asked(demo, tmp_path / "run", tmp_path, layout, policy)
    assert set(results(run_training(wanted, tmp_path))) == {0}
    metrics, turns = (lines(tmp_path / f"run/{name}.jsonl") for name in ("metrics", "schedules"))
    listed = lines(tmp_path / "run/bad_samples.jsonl")
    oracle = Oracle(demo, tmp_path / "pretrained")
    batches = GlobalBatches(len(oracle.dataset), BATCH, SEED)
    trained = []
    for turn, m in zip(turns, metrics, strict=True):
        placed = [s for row in turn["schedule"]["llm"] for replica in row for s in replica]
        assert sorted(placed) == sorted(turn["samples"])
        bad = dict(turn["bad"])
        assert sorted(s for s in turn["samples"] if s not in bad.values()) == sorted(
            set(batches.batch(turn["step"])) - set(bad)
        )
        assert m["bad_samples"] == len(bad)
        assert m["samples"] == len(turn["samples"])
        label_tokens = sum(oracle.dataset.shape(s)[2] for s in turn["samples"])
        assert turn["schedule"]["label_tokens"] == label_tokens
        assert m["loss"] == pytest.approx(oracle.backward(turn["samples"]), rel=1e-5)
        for sample, other in bad.items():
            if other is not None:
                sizes = zip(oracle.dataset.shape(other), oracle.dataset.shape(sample), strict=True)
                assert all(size <= limit for size, limit in sizes)
        trained += placed
    found = {one["sample"] for one in listed}
    names = set(json.loads((demo / "cut.json").read_text()))
    files = {
        s: {Path(m.path).name for m in oracle.dataset.encode(s).media} for s in range(len(oracle.dataset))
    }
    assert found == {s for s, own in files.items() if own & names}
    assert len(found) >= 3
    assert {(one["step"], one["sample"], one["substitute"]) for one in listed} == {
        (turn["step"], *pair) for turn in turns for pair in turn["bad"]
    }
    assert all(re.search(r"sample `.*` \(\d+\): cannot decode `.*`", one["cause"]) for one in listed)
    good = set(range(len(oracle.dataset))) - found
    if policy == "skip":
        assert sorted(trained) == sorted(good)
    else:
        assert set(trained) == good
        assert any(one["substitute"] is not None for one in listed)


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 1, {"encoder_tp": 2})], ids=str)
def test_fail_ends_the_run_with_the_name(layout, demo, tmp_path):
    """The ranks that decode nothing end, too: those of the LLM, and others of the tensor group."""
    wanted = asked(demo, tmp_path / "run", tmp_path, layout, "fail")
    ranks = run_training(wanted, tmp_path)
    assert {rank.result for rank in ranks} == {1}
    assert re.search(r"step \d: sample `.*` \(\d+\): cannot decode `.*`", ranks[0].stderr)


def test_a_file_that_is_gone_is_skipped_too(demo, tmp_path):
    """Encoder and LLM rank both look at it, and both find it missing; it is listed once."""
    copy = tmp_path / "demo"
    shutil.copytree(demo, copy)
    cut_names = set(json.loads((demo / "cut.json").read_text()))
    gone = max(path for path in (copy / "data/media").glob("*.jpg") if path.name not in cut_names)
    gone.unlink()
    wanted = asked(copy, tmp_path / "run", tmp_path, (1, 1, 1), "skip")
    assert set(results(run_training(wanted, tmp_path))) == {0}
    listed = lines(tmp_path / "run/bad_samples.jsonl")
    assert [gone.name in one["cause"] for one in listed].count(True) == 1
    assert len(listed) == len({one["sample"] for one in listed})
    trained = [s for turn in lines(tmp_path / "run/schedules.jsonl") for s in turn["samples"]]
    assert sorted([*trained, *(one["sample"] for one in listed)]) == list(range(NUM_SAMPLES))


def test_a_run_that_goes_on_counts_the_bad_samples_before(demo, tmp_path):
    """Else a run that is often started again never reaches its limit, and one that was fine may pass it."""
    wanted = asked(demo, tmp_path / "run", tmp_path, (1, 1, 1), "skip")
    assert set(results(run_training(wanted | {"steps": 2}, tmp_path / "0"))) == {0}
    before = len(lines(tmp_path / "run/bad_samples.jsonl"))
    assert set(results(run_training(wanted | {"resume": "auto"}, tmp_path / "1"))) == {0}
    listed = [one["sample"] for one in lines(tmp_path / "run/bad_samples.jsonl")]
    assert 0 < before <= len(listed)
    manifest = json.loads((tmp_path / f"run/checkpoints/step-{STEPS}/checkpoint.json").read_text())
    assert manifest["bad_samples"] == {"known": sorted(listed), "seen": NUM_SAMPLES}


@pytest.mark.parametrize("is_resumed", [False, True], ids=["whole", "resumed"])
def test_a_substitute_that_is_bad_is_no_sample_of_its_own(is_resumed, tmp_path):
    """The first sample gets the next one that is no larger than itself, also in a run that was resumed."""
    first = next(
        index
        for index in range(NUM_SAMPLES - 2)
        if step_of(index + 1) < step_of(index) != step_of(index + 2) and step_of(index) == STEPS - 1
    )

    def write(directory):
        media = directory / "data/media"
        whole = min(media.glob("*.jpg")).read_bytes()
        words = {first: 40, first + 1: 5, first + 2: 20}
        records = []
        for index in range(NUM_SAMPLES):
            is_cut = index in (first, first + 1)
            (media / f"{index}.jpg").write_bytes(whole[: len(whole) // 2] if is_cut else whole)
            says = "word " * words.get(index, 60 + index)
            turns = [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": says}]
            records.append({"id": str(index), "image": f"{index}.jpg", "conversations": turns})
        (directory / "data/images.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
        (directory / "data/mixture.yaml").write_text(
            "datasets:\n  - {json_path: images.jsonl, media_root: media}\n"
        )

    demo = write_demo(tmp_path / "demo", NUM_SAMPLES, BATCH, MICROBATCHES, write)
    wanted = asked(demo, tmp_path / "run", tmp_path, (1, 1, 1), "substitute")
    if is_resumed:
        before = wanted | {"steps": STEPS - 1}
        assert set(results(run_training(before, tmp_path / "0"))) == {0}
        wanted |= {"resume": "auto"}
    assert set(results(run_training(wanted, tmp_path / "1"))) == {0}
    listed = [(one["sample"], one["substitute"]) for one in lines(tmp_path / "run/bad_samples.jsonl")]
    assert listed[1:] == [(first, first + 2)]
    assert [sample for sample, _ in listed] == [first + 1, first]
    assert first + 2 in lines(tmp_path / "run/schedules.jsonl")[-1]["samples"]


def step_of(sample):
    """The step that draws it."""
    batches = GlobalBatches(NUM_SAMPLES, BATCH, SEED)
    return next(step for step in range(STEPS) if sample in batches.batch(step))


def test_a_batch_whose_labels_are_all_bad_names_them(tmp_path):
    """The last global batch of the epoch has one sample, and its picture is cut."""
    demo = write_demo(tmp_path / "demo", BATCH + 1, BATCH, MICROBATCHES, cut_all)
    dataset = Dataset(str(demo / "dflop.yaml"), str(demo / "data_profile.parquet"))

    def ends_with_media(seed):
        (last,) = GlobalBatches(BATCH + 1, BATCH, seed).batch(1)
        return dataset.shape(last)[0] > 0

    seed = next(filter(ends_with_media, range(100)))
    wanted = asked(demo, tmp_path / "run", tmp_path, (1, 1, 1), "skip", bad_samples_max_percent=100)
    wanted["config"]["train"]["seed"] = seed
    ranks = run_training(wanted | {"steps": 2}, tmp_path)
    assert [rank.result for rank in ranks] == [1, 1]
    assert re.search(
        r"all samples of step \d that have label tokens are bad, .*cannot decode `", ranks[0].stderr
    )


def test_too_many_end_the_run_on_all_ranks(tmp_path):
    """Every picture is cut: more than four, and more than the percentage."""
    demo = write_demo(tmp_path / "demo", NUM_SAMPLES, BATCH, MICROBATCHES, cut_all)
    wanted = asked(demo, tmp_path / "run", tmp_path, (1, 1, 1), "skip", bad_samples_max_percent=5)
    ranks = run_training(wanted, tmp_path)
    assert [rank.result for rank in ranks] == [1, 1]
    assert re.search(
        r"all ranks.* samples are bad \(.* %\), `data.bad_samples_max_percent` is 5", ranks[0].stderr
    )


def test_a_schedule_changes_only_where_a_sample_is_bad():
    """Sample 1 has three parts on two encoder replicas; its substitute has media, that of 4 is text."""
    llm = [[[0, 1], [2]], [[3], [4]]]
    encoder = [[[[1, 0, 2], 0], [[1, 2, 1]]], [[4], [3]]]
    fields = {
        "step": 3, "llm": llm, "encoder": encoder, "actions": [], "label_tokens": 9, "predicted_makespan_ns": 5,
        "max_load_ns": 4, "lower_bound_ns": 3, "giants": [1, 3],
    }  # fmt: skip
    shapes = {0: (4, 9, 1), 2: (0, 5, 2), 3: (4, 9, 3), 7: (3, 5, 4), 8: (0, 3, 5)}
    dataset = SimpleNamespace(shape=shapes.__getitem__)
    schedule = Schedule.from_record(fields)
    found = changed(schedule, {1: 7, 4: 8}, [0, 7, 2, 3, 8], dataset).record()
    assert found["llm"] == [[[0, 7], [2]], [[3], [8]]]
    assert found["encoder"] == [[[7, 0], []], [[], [3]]]
    assert found["label_tokens"] == 15
    assert found["giants"] == [3]
    left_out = changed(schedule, {1: None}, [0, 2, 3, 4], SimpleNamespace(shape=lambda _: (1, 1, 1))).record()
    assert left_out == json.loads(Schedule.from_record(left_out).to_json())
    for wrong in ({**fields, "step": -1}, {**fields, "step": True}, {**fields, "llm": {1: 2}}, "text"):
        with pytest.raises(ScheduleError, match="^not a schedule: "):
            Schedule.from_record(wrong)
    assert left_out["llm"] == [[[0], [2]], [[3], [4]]]
    assert left_out["encoder"] == [[[0], []], [[4], [3]]]
    assert left_out["label_tokens"] == 4


@pytest.mark.parametrize("ending", ["flac", "wav"])
def test_a_sound_that_ends_early_is_bad_where_its_header_says_more(ending, tmp_path):
    """By the adapter that trains. The header of a WAV is not believed: its profile has what is there."""
    directory = tiny_families.write_config(
        tmp_path / "model", "qwen2_audio", tiny_families.TINY["qwen2_audio"]
    )
    WhisperFeatureExtractor(
        feature_size=8, chunk_length=1, sampling_rate=4000, hop_length=100
    ).save_pretrained(directory)
    adapter = load_adapter(directory)
    path = tmp_path / f"sound.{ending}"
    generator = torch.Generator().manual_seed(0)
    soundfile.write(path, torch.rand(2400, generator=generator).numpy(), 4000)

    def profiled_s():
        found = python(["-m", "dflop", "probe", "--json", str(path)], tmp_path).stdout
        return json.loads(found)["duration_s"]

    assert profiled_s() == pytest.approx(0.6)
    cut(path)
    left_s = profiled_s()
    assert left_s == pytest.approx(0.6) if ending == "flac" else left_s < 0.4
    grid = MediaGrid("audio", 1, 0, 0, num_features(round(left_s * 40)))
    if ending == "wav":
        assert adapter.pixels(path, "audio", (), grid).shape[0] == 1
    else:
        with pytest.raises(ValueError, match="sound.flac"):
            adapter.pixels(path, "audio", (), grid)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.more), 1])
def test_a_decoder_that_hangs_is_named_with_file_rank_and_step(workers, demo, tmp_path):
    """Under `skip` too: it may be the disk. Before the others give up."""
    wanted = asked(demo, tmp_path / "run", tmp_path, (1, 1, 1), "skip")
    config = wanted["config"]
    config["train"]["workers"] = workers
    wanted |= {"config": config, "timeout_s": 8.0, "first_timeout_s": 8.0}
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def before(_):
        def pixels(self, file, kind, frame_indices, grid=None):
            # Nobody writes into it.
            fifo.read_bytes()

        type(load_adapter(demo / "model")).pixels = pixels

    assert set(results(run_training(wanted, tmp_path, before))) == {1}
    said = (tmp_path / "stderr0").read_text()
    place = r"error: \[encoder dp 0/1\] step 0: sample `\S+` \(\d+\), file `(\S+)`"
    found = re.search(place + ": reading and decoding has not ended in 6 s\nhint: look at the file", said)
    assert found, said
    assert Path(found[1]).exists()
