"""From samples to packed tensors: next-token shift, decode cache, errors that name sample and file."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from dflop import ProfileError
from dflop.data.cache import ByteBoundedCache
from dflop.data.collate import encoder_input, llm_input
from dflop.data.dataset import sample_from_encoded
from dflop.data.loader import SampleLoader
from dflop.data.shares import share_of
from dflop.models.media import MediaBytes

SIZE = 4


def media(path, num_tiles, num_features):
    sizes = {"num_tiles": num_tiles, "height": 9, "width": 8, "num_features": num_features}
    sizes["parts"] = [(1, num_tiles, num_features)]
    place = {"is_local": True, "held_bytes": 0}
    kept = {
        "patches": None,
        "first_patches": None,
        "last_patches": None,
        "sampled_fps": None,
        "last_segment_tokens": None,
        **sizes,
    }
    return SimpleNamespace(path=path, kind="image", frame_indices=[], **place, **kept)


def encoded(name="s", **changes):
    """Two prompt tokens, two features, three answer tokens."""
    fields = {
        "id": name,
        "input_ids": [10, 11, 99, 99, 20, 21, 22],
        "feature_mask": [False, False, True, True, False, False, False],
        "labels": [-100, -100, -100, -100, 20, 21, 22],
        "media": [media("a.png", 1, 2)],
        "notice": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def test_each_position_predicts_the_next_token_of_its_own_sample():
    """By hand: the position before the first answer token predicts it; a sample's last predicts nothing."""
    one = sample_from_encoded(0, encoded(), CountingAdapter)
    text = sample_from_encoded(
        1,
        encoded("t", input_ids=[5, 6, 7], feature_mask=[False] * 3, labels=[-100, 6, 7], media=[]),
        CountingAdapter,
    )
    batch = llm_input([one, text, one])
    assert one.targets_T.tolist() == [-100, -100, -100, 20, 21, 22, -100]
    assert batch.targets_T.tolist() == one.targets_T.tolist() + [6, 7, -100] + one.targets_T.tolist()
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6]
    assert batch.cu_seqlens.tolist() == [0, 7, 10, 17]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.feature_mask_T.sum() == 4
    assert batch.input_ids_T.tolist()[7:10] == [5, 6, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": [-100] * 6}, "sample `s` \\(3\\): 7 ids, 7 mask entries, 6 labels"),
        ({"media": [media("a.png", 1, 3)]}, "its media fill 3 LLM tokens, its feature mask has 2 places"),
        ({"labels": [10, 11, -100, -100, 20, 21, 22]}, "its first token carries loss"),
    ],
)
def test_a_sample_that_contradicts_itself_is_named(changes, message):
    """Before it reaches a rank's model, where it would be a shape error of some packed tensor."""
    with pytest.raises(ProfileError, match=message):
        sample_from_encoded(3, encoded(**changes), CountingAdapter)


class CountingAdapter:
    """Decodes a file name to tiles of its length, and counts."""

    input_shape = (3, SIZE, SIZE)

    def __init__(self):
        self.decoded = []
        self.lock = threading.Lock()

    @staticmethod
    def positions(input_ids_T, feature_mask_T, media):  # noqa: D102
        return torch.arange(len(input_ids_T))

    def pixels(self, path, kind, frame_indices, grid):  # noqa: D102
        with self.lock:
            self.decoded.append(str(path))
        if "broken" in str(path):
            message = "not a picture"
            raise ValueError(message)
        return torch.full((1, 3, SIZE, SIZE), float(len(str(path))))


class ListDataset:
    """Samples of a list."""

    def __init__(self, samples):
        self.encode = samples.__getitem__


TILE_BYTES = 3 * SIZE * SIZE * 4


def test_tiles_are_decoded_once_and_the_oldest_leave_first():
    """Room for two samples of one tile each."""
    samples = [encoded(f"s{k}", media=[media("x" * (k + 1), 1, 2)]) for k in range(3)]
    adapter = CountingAdapter()
    loader = SampleLoader(ListDataset(samples), adapter, cache_bytes=2 * TILE_BYTES, num_threads=1)
    loader.prefetch([(0, None), (1, None)], with_tiles=True)
    assert [float(loader.tiles(k)[0, 0, 0, 0]) for k in (0, 1, 0)] == [1.0, 2.0, 1.0]
    assert sorted(adapter.decoded) == ["x", "xx"]
    loader.tiles(2)
    loader.tiles(0)
    assert adapter.decoded.count("x") == 1, "0 was used after 1, so 1 left"
    loader.tiles(1)
    assert adapter.decoded.count("xx") == 2
    loader.close()


def test_a_cache_smaller_than_a_step_decodes_nothing_twice():
    """What was decoded ahead waits for its first use outside the cache."""
    samples = [encoded(f"s{k}", media=[media("x" * (k + 1), 1, 2)]) for k in range(4)]
    adapter = CountingAdapter()
    loader = SampleLoader(ListDataset(samples), adapter, cache_bytes=0, num_threads=2)
    loader.prefetch([(k, None) for k in range(4)], with_tiles=True)
    assert [float(loader.tiles(k)[0, 0, 0, 0]) for k in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert len(adapter.decoded) == 4
    loader.close()


def test_a_file_that_cannot_be_decoded_is_named_with_its_sample():
    """Also when it was decoded ahead, in a thread."""
    samples = [encoded("good"), encoded("bad", media=[media("dir/broken.png", 1, 2)])]
    loader = SampleLoader(ListDataset(samples), CountingAdapter())
    loader.prefetch([(0, None), (1, None)], with_tiles=True)
    loader.tiles(0)
    with pytest.raises(ProfileError, match=r"sample `bad` \(1\), file `dir/broken.png`: not a picture"):
        loader.tiles(1)
    wrong = SampleLoader(ListDataset([encoded("two", media=[media("a", 2, 2)])]), CountingAdapter())
    with pytest.raises(ProfileError, match=r"file `a`: decoded to tiles of shape \(1, 3, 4, 4\)"):
        wrong.tiles(0)
    for each in (loader, wrong):
        each.close()


def test_media_that_changed_are_told_once_and_counted(capfd):
    samples = [encoded("a", notice="`a` changed"), encoded("b"), encoded("c", notice="`c` changed")]
    loader = SampleLoader(ListDataset(samples), CountingAdapter(), token_bytes=0)
    for index in (0, 1, 2, 0):
        loader.sample(index)
    assert capfd.readouterr().err == "warning: `a` changed\n"
    loader.close()
    assert capfd.readouterr().err == "warning: 2 samples have such media\n"


def test_a_medium_that_is_no_file_is_read_and_counted():
    """Its bytes go to the adapter under its name; those that a record holds count against the cache."""
    cell = media("table.parquet/row 3", 1, 2)
    cell.is_local, cell.held_bytes, cell.read = False, 4, lambda: b"four"
    adapter = CountingAdapter()
    seen = []
    adapter.pixels = lambda file, kind, frames, grid: (
        seen.append((file, kind)) or torch.zeros(1, 3, SIZE, SIZE)
    )
    loader = SampleLoader(ListDataset([encoded(media=[cell])]), adapter)
    loader.tiles(0)
    assert seen == [(MediaBytes("table.parquet/row 3", b"four"), "image")]
    assert loader.sample(0).num_bytes == sample_from_encoded(0, encoded(), CountingAdapter).num_bytes + 4

    def gone():
        message = "cannot read `s3://b/k`: 404: there is no such object"
        raise ProfileError(message)

    cell.read, cell.path = gone, "s3://b/k"
    missing = SampleLoader(ListDataset([encoded(media=[cell])]), adapter)
    with pytest.raises(ProfileError, match=r"sample `s` \(0\): cannot read `s3://b/k`: 404"):
        missing.tiles(0)
    for each in (loader, missing):
        each.close()


def test_tiles_of_several_samples_are_packed_in_order():
    """And a count that differs from the media's is named."""
    one, two = (
        sample_from_encoded(0, encoded("a"), CountingAdapter),
        sample_from_encoded(1, encoded("b"), CountingAdapter),
    )
    tiles = [torch.full((1, 3, SIZE, SIZE), value) for value in (1.0, 2.0)]
    batch = encoder_input([share_of(two), share_of(one)], [tiles[1], tiles[0]], torch.bfloat16)
    assert batch.inputs_N[:, 0, 0, 0].tolist() == [2.0, 1.0]
    assert batch.inputs_N.dtype == torch.bfloat16
    assert len(batch.media) == 2
    with pytest.raises(ValueError, match=r"sample `a` \(0\): 2 inputs of the encoder, its media have 1"):
        encoder_input([share_of(one)], [torch.cat(tiles)], torch.float32)


def mixed():
    """An image of 3 tiles, a video of 4 frames, of which the last has a newline, and an image of 1 tile."""
    image = media("image", 3, 7)
    video = media("video", 4, 9)
    video.kind, video.frame_indices, video.parts = "video", [2, 5, 8, 11], [(3, 1, 2), (1, 1, 3)]
    last = media("last", 1, 5)
    ids = [1, *[99] * 21, 2]
    return encoded(
        "mixed", input_ids=ids, feature_mask=[i == 99 for i in ids], labels=[-100] * 22 + [2],
        media=[image, video, last],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "runs", "rows"),
    [
        (None, [(0, 0, 3, True), (1, 0, 4, True), (2, 0, 1, True)], (0, 21)),
        ((0, 1), [(0, 0, 3, True)], (0, 7)),
        ((0, 3), [(0, 0, 3, True), (1, 0, 2, False)], (0, 11)),
        ((2, 2), [(1, 1, 2, False)], (9, 13)),
        ((3, 3), [(1, 2, 2, True), (2, 0, 1, True)], (11, 21)),
        ((0, 6), [(0, 0, 3, True), (1, 0, 4, True), (2, 0, 1, True)], (0, 21)),
    ],
)
def test_a_share_has_the_tiles_and_rows_of_its_parts(parts, runs, rows):
    """Medium, first tile, tiles, and whether the medium ends there: by hand."""
    share = share_of(sample_from_encoded(0, mixed(), CountingAdapter), parts)
    found = [(run.medium, run.first_tile, run.grid.num_tiles, run.grid.is_end) for run in share.runs]
    assert (found, share.rows) == (runs, range(*rows))
    assert sum(run.grid.num_features for run in share.runs) == len(share.rows)
    batch = encoder_input([share], [torch.zeros(share.num_inputs, 3, SIZE, SIZE)], torch.float32)
    assert [grid.num_tiles for grid in batch.media] == [tiles for _, _, tiles, _ in runs]


@pytest.mark.parametrize("parts", [(5, 2), (6, 1), (0, 0), (-1, 2)])
def test_parts_that_a_sample_does_not_have_are_named(parts):
    """A schedule of other data."""
    with pytest.raises(ValueError, match=r"sample `mixed` \(0\): parts .* it has 6"):
        share_of(sample_from_encoded(0, mixed(), CountingAdapter), parts)


def test_only_the_frames_of_a_share_are_decoded():
    """The adapter is asked for the frames of the run; shares of a sample are kept apart."""
    asked = []

    class FrameAdapter(CountingAdapter):
        def pixels(self, path, kind, frame_indices, grid):
            asked.append((str(path), list(frame_indices)))
            return torch.arange(len(frame_indices) or {"image": 3, "last": 1}[str(path)]).reshape(
                -1, 1, 1, 1
            ) + torch.zeros(1, 3, SIZE, SIZE)

    loader = SampleLoader(ListDataset([mixed()]), FrameAdapter(), num_threads=1)
    loader.fill([(0, (1, 2)), (0, (3, 3))], with_tiles=True)
    assert sorted(asked) == [("last", []), ("video", [2, 5]), ("video", [8, 11])]
    assert loader.tiles(0, (1, 2)).shape[0] == 2
    assert loader.tiles(0, (3, 3)).shape[0] == 3
    assert loader.tiles(0).shape[0] == 8
    assert asked[3:] == [("image", []), ("video", [2, 5, 8, 11]), ("last", [])]
    loader.close()


def test_the_cache_never_exceeds_its_bound():
    """Values larger than the bound pass through."""
    cache = ByteBoundedCache(10)
    for index, size in enumerate([4, 4, 4, 11, 2]):
        cache.put(index, f"value {index}", size)
        assert cache.num_bytes <= 10
    assert [index in cache for index in range(5)] == [False, True, True, False, True]
