"""The house tour, `docs/tour.md`, step by step: one sample from dataset to gradient."""

from __future__ import annotations

import shutil
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pyarrow import parquet

from dflop._native import Dataset, GlobalBatches, Plan, StepScheduler, run_cli
from dflop.data.collate import encoder_input, llm_input
from dflop.data.dataset import sample_from_encoded
from dflop.data.shares import share_of
from dflop.models import load_adapter

ROOT = Path(__file__).parent.parent
NUM_SAMPLES, BATCH, MICROBATCHES, SEED = 48, 16, 4, 0


@dataclass
class Tour:
    """What the verbs before training leave."""

    folder: Path

    def file(self, name: str) -> str:
        """The path of one of them."""
        return str(self.folder / name)


def dflop(*arguments: str) -> None:
    status, request = run_cli(["dflop", *arguments])
    assert (status, request) == (0, None), arguments


@pytest.fixture(scope="module")
def tour(tmp_path_factory) -> Tour:
    """Steps a to c; the model profile is the recorded one."""
    folder = tmp_path_factory.mktemp("tour") / "demo"
    dflop("demo-data", str(folder), "--samples", str(NUM_SAMPLES), "--seed", str(SEED))
    config = folder / "dflop.yaml"
    text = config.read_text()
    text = text.replace("global_batch_size: 64", f"global_batch_size: {BATCH}")
    config.write_text(
        text.replace("num_microbatches: 16", f"num_microbatches: {MICROBATCHES}\n  pipeline_order: 1f1b")
    )
    dflop("profile", "data", "-c", str(config))
    shutil.copy(ROOT / "fixtures/profiles/demo_cpu.json", folder / "model_profile.json")
    dflop("plan", "-c", str(config), "--only", "colocated=false")
    return Tour(folder)


def test_before_training_sizes_are_known_and_a_plan_is_chosen(tour):
    profile = parquet.read_table(tour.file("data_profile.parquet")).to_pylist()
    assert len(profile) == NUM_SAMPLES
    image = next(row for row in profile if row["kind"] == "image")
    # Tiles of 126 x 126 in patches of 14: 81 encoder tokens each.
    assert all(segments["tokens"] == 81 for segments in image["segments"])
    plan = Plan.read(tour.file("plan.json"))
    assert (plan.num_ranks, plan.num_microbatches) == (2, MICROBATCHES)
    assert plan.coordinates(0) == ("encoder", 0, 0)
    assert plan.coordinates(1) == ("llm", 0, 1)


def test_one_step_from_the_global_batch_to_the_gradient(tour):
    dataset = Dataset(tour.file("dflop.yaml"), tour.file("data_profile.parquet"))
    ours = next(i for i in range(NUM_SAMPLES) if dataset.kind(i) == "image")

    # 1, 2: the global batch that holds our sample; each sample stands in one of the epoch.
    batches = GlobalBatches(NUM_SAMPLES, BATCH, SEED)
    step = next(s for s in range(batches.steps_per_epoch) if ours in batches.batch(s))
    batch = batches.batch(step)

    # 3 to 6: shapes become durations, durations microbatches; in a Rust thread.
    scheduler = StepScheduler(
        tour.file("plan.json"), tour.file("data_profile.parquet"), tour.file("model_profile.json"), SEED
    )
    scheduler.submit(step, batch, "aware")
    schedule = scheduler.take(step, "aware")[0]
    packs = [schedule.llm(j, 0) for j in range(MICROBATCHES)]
    assert sorted(i for pack in packs for i in pack) == sorted(batch)
    mine = next(j for j, pack in enumerate(packs) if ours in pack)

    # 7: every rank finds the same digest.
    assert schedule.digest() == type(schedule).from_json(schedule.to_json()).digest()
    assert schedule.label_tokens == sum(dataset.shape(i)[2] for i in batch)

    # 8: now the pixels are decoded; tokens are packed, none padded.
    adapter = load_adapter(tour.folder / "model")
    samples = {i: sample_from_encoded(i, dataset.encode(i), adapter) for i in packs[mine]}
    tiles = {
        i: torch.cat([adapter.pixels(Path(m.path), m.kind, m.frame_indices) for m in dataset.encode(i).media])
        for i, _ in schedule.encoder(mine, 0)
    }
    packed = llm_input([samples[i] for i in packs[mine]])
    assert packed.input_ids_T.numel() == sum(dataset.shape(i)[1] for i in packs[mine])
    seen = encoder_input([share_of(samples[i]) for i in tiles], list(tiles.values()), torch.float32)
    assert seen.inputs_N.shape[0] * 81 == sum(dataset.shape(i)[0] for i in tiles)

    # 9: the list that is run, and was timed: that of the schedule, or where it has none that of the plan.
    plan = Plan.read(tour.file("plan.json"))
    lists = [[str(action) for action in schedule.actions(rank) or plan.actions(rank)] for rank in range(2)]
    assert f"0F{mine}" in lists[0]
    assert f"1B{mine}" in lists[1]

    # 10, 11: tiles become features; they take the order of the packed samples.
    device = torch.device("cpu")
    encoder = adapter.build_encoder(device, torch.float32, SEED)
    llm = adapter.build_llm_stage(0, adapter.num_llm_layers, device, torch.float32, SEED)
    features_ED = encoder(seen)
    rows = dict(zip(tiles, features_ED.split([samples[i].num_features for i in tiles]), strict=True))
    ordered_ED = torch.cat([rows[i] for i in packs[mine] if i in rows])
    assert int(packed.feature_mask_T.sum()) == ordered_ED.shape[0]

    # 12, 13: the loss is a sum over label tokens / those of the whole global batch; its gradient returns.
    loss = llm(packed, ordered_ED) / schedule.label_tokens
    loss.backward()
    assert torch.isfinite(loss)
    gradient = next(p.grad for n, p in encoder.named_parameters() if n.endswith("patch_embedding.weight"))
    assert gradient is not None
    assert gradient.norm() > 0

    # 16: the same step simulated.
    assert scheduler.predict_makespan_ns(schedule) == schedule.predicted_makespan_ns > 0


def test_ctrl_c_ends_the_wait_for_a_schedule(tour):
    """The wait looks for signals all along: three are handled in it, each sent when the one before has been.

    The last of them ends it from within. Who looked only when the schedule is there would handle one.
    """
    scheduler = StepScheduler(
        tour.file("plan.json"), tour.file("data_profile.parquet"), tour.file("model_profile.json"), SEED
    )
    batch = GlobalBatches(NUM_SAMPLES, BATCH, SEED).batch(0)
    # So many stand before it that it takes far longer than this test.
    for step in range(20_000):
        scheduler.submit(step, batch, "aware")
    handled, again = [], threading.Event()

    def handle(*_):
        handled.append(True)
        again.set()
        if len(handled) == 3:
            raise KeyboardInterrupt

    def strike():
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
            again.wait(60)
            again.clear()

    before = signal.signal(signal.SIGINT, handle)
    try:
        threading.Timer(0.1, strike).start()
        with pytest.raises(KeyboardInterrupt):
            scheduler.take(19_999, "aware")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(handled) == 3
