"""Videos, and samples of several media, in VeOmni: Qwen2.5-VL, Qwen3-VL and Qwen2.5-Omni, which reads sounds too.

VeOmni's own transforms make the samples. The oracle is transformers' own model on each sample alone, in one process.
`make test-frameworks` runs these tests.
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
    run,
    samples_of,
    trained,
    waits,
    write_tasks,
)

COUNT = 60
# Four microbatches of each rank: long videos are few.
OMNI = {"data": "sounds.parquet", "model": "omni", "given": {"train.global_batch_size": 8}}
KINDS = {
    "videos": {"data": "videos.parquet"},
    "qwen3_vl": {"data": "videos.parquet", "model": "qwen3_vl", "given": {"data.chat_template": "qwen3vl"}},
    "sounds": OMNI,
    "workers": {
        **OMNI,
        "given": {**OMNI["given"], "train.dyn_bsz_runtime": "worker", "data.dataloader.num_workers": 1},
    },
}


def case(kind, *, is_ours):
    given = {"data.max_seq_len": 500 if KINDS[kind]["data"] == "videos.parquet" else 900}
    given |= KINDS[kind].get("given", {})
    return {
        **KINDS[kind],
        "name": f"{'ours' if is_ours else 'theirs'}_{kind}",
        "is_ours": is_ours,
        "given": given,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    tiny_vision.write_model(folder / "model")
    name_as_in_module(folder / "model")
    tiny_media.write_qwen3_vl(folder / "qwen3_vl")
    tiny_media.write_omni(folder / "omni")
    tiny_media.write_media(folder / "videos.parquet", folder / "pictures", ("image", "video"), COUNT)
    tiny_media.write_media(
        folder / "sounds.parquet", folder / "sounds", ("image", "video", "audio", "audio"), COUNT
    )
    write_tasks(folder)
    return folder


@pytest.fixture(scope="module")
def both(folder):
    """Two ranks: VeOmni itself, then the same by dflop's command; workers end with their process, so they are last."""
    found = {}
    for is_ours in (False, True):
        found |= run(folder, *(case(kind, is_ours=is_ours) for kind in KINDS))[0]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_has_its_samples(kind, both):
    """Each sample of a step once, and of each medium there are samples, and samples without one."""
    theirs, ours = both[f"theirs_{kind}"], both[f"ours_{kind}"]
    steps = len(theirs[0]["steps"])
    assert [len(rank["steps"]) for rank in ours] == [steps] * 2
    for step in range(steps):
        assert keys_of(ours, step) == keys_of(theirs, step)
    rows = [row for rank in ours for step in range(steps) for row in samples_of(rank, step)]
    masks = ["image_mask", "video_mask", *(["audio_mask"] if has_sounds(kind) else [])]
    for mask in masks:
        assert 0 < sum(bool(row[mask].any()) for row in rows) < len(rows)
    assert any(not any(row[mask].any() for mask in masks) for row in rows)
    # And videos with their sound, and without.
    assert not has_sounds(kind) or {
        bool(row["audio_mask"].any()) for row in rows if row["video_mask"].any()
    } == {True, False}


def folder_of(kind):
    return KINDS[kind].get("model", "model")


def has_sounds(kind):
    return folder_of(kind) == "omni"


@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_are_even(kind, folder, both):
    """By what encoders multiply, and by LLM tokens."""
    model = hugging_face(folder, folder_of(kind))
    parts = getattr(model, "model", model)
    visual = getattr(model, "visual", getattr(parts, "visual", None))
    of_patch = sum(one.numel() for one in visual.parameters())
    # Two tokens of its encoder become one of the LLM.
    of_sound = 2 * sum(one.numel() for one in model.audio_tower.parameters()) if has_sounds(kind) else 0

    def encoder(batch):
        patches = sum(4 * int(row["image_mask"].sum() + row["video_mask"].sum()) for row in batch)
        return of_patch * patches + of_sound * sum(int(row["audio_mask"].sum()) for row in batch)

    theirs, ours = (waits(both[f"{side}_{kind}"], (encoder, length)) for side in ("theirs", "ours"))
    assert ours - 1 < (theirs - 1) / 2, (theirs, ours)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_what_one_process_trains(kind, folder, both):
    """The mean over all label tokens of each step."""
    ours = both[f"ours_{kind}"]
    model = hugging_face(folder, folder_of(kind))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = trained(model, ours, loss_of)
    assert tiny_vision.difference(one, before) > 1e-2
    for rank in ours:
        state = {name.removeprefix("thinker."): value for name, value in rank["state"].items()}
        assert tiny_vision.difference(state, one) <= TRAINS
