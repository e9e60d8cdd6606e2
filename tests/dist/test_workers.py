"""Workers: what they decode is what the rank would decode; they end with it, and one that ends early is named."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from ranks import results, run_ranks

from dflop.data.arena import Arena, ArenaClosedError, Block
from dflop.data.loader import BadSampleError, HangingDecoderError, SampleLoader
from dflop.data.workers import WorkerError, Workers

SIZE = 4
TILE_BYTES = 4 * 3 * SIZE * SIZE


def medium(path, num_tiles=1):
    return SimpleNamespace(
        path=path,
        is_local=True,
        held_bytes=0,
        kind="image",
        frame_indices=[],
        num_tiles=num_tiles,
        height=SIZE,
        width=SIZE,
        num_features=num_tiles,
        parts=[(1, num_tiles, num_tiles)],
        patches=None,
        first_patches=None,
        last_patches=None,
        sampled_fps=None,
        last_segment_tokens=None,
    )


def encoded(index, *media):
    num_features = sum(m.num_features for m in media)
    return SimpleNamespace(
        id=f"s{index}",
        input_ids=[7] * (num_features + 2),
        feature_mask=[False, *[True] * num_features, False],
        labels=[-100] * (num_features + 1) + [7],
        media=list(media),
        notice=None,
    )


class ListDataset:
    """Samples of a list."""

    def __init__(self, samples):
        self.samples = samples

    def encode(self, index):
        return self.samples[index]


class NumberAdapter:
    """A file named `12` holds a picture of twelves; `12x3` three tiles of it; others cannot be decoded."""

    input_shape = (3, SIZE, SIZE)

    def positions(self, input_ids_T, feature_mask_T, media):
        return torch.arange(len(input_ids_T))

    def pixels(self, file, kind, frame_indices, grid=None):
        name = file.name
        if name == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "hang":
            # A FIFO that nobody writes into.
            return torch.full((1, *self.input_shape), float(file.read_text()))
        if name == "process":
            return torch.full((1, *self.input_shape), float(os.getpid()))
        number, _, count = name.partition("x")
        if not number.isdecimal():
            message = f"cannot decode `{file}`: no number"
            raise ValueError(message)
        return torch.full((int(count or 1), *self.input_shape), float(number))


def loader_of(names, arena_bytes, num_workers, cache_bytes=0, limit_s=None):
    """A loader of samples with one file each, as (name, tiles)."""
    samples = [encoded(k, medium(name, tiles)) for k, (name, tiles) in enumerate(names)]
    arena = Arena(arena_bytes)
    workers = Workers(num_workers, NumberAdapter(), [arena]) if num_workers else None
    loader = SampleLoader(
        ListDataset(samples),
        NumberAdapter(),
        cache_bytes,
        num_threads=max(1, num_workers),
        arena=arena,
        workers=workers,
        limit_s=limit_s,
    )
    return loader, arena, workers


def in_a_rank(function, directory):
    """The result of a function in a process of its own, as a rank is one; workers are forked from that."""
    return results(run_ranks(1, lambda _: function(), directory, timeout_s=120))[0]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_samples_come_in_order_within_the_room(num_workers, tmp_path):
    """Forty samples of one to three tiles through room for four tiles; one is larger than that."""
    names = [(f"{k}x{1 + k % 3}", 1 + k % 3) for k in range(40)]
    names[17] = ("17x9", 9)

    def run():
        loader, arena, workers = loader_of(names, 4 * TILE_BYTES, num_workers)
        shares = [(k, None) for k in range(len(names))]
        loader.prefetch(shares, True)
        found = []
        for index, parts in shares:
            tiles = loader.tiles(index, parts)
            found.append((tuple(tiles.shape), tiles.unique().tolist()))
            del tiles
        left, peak = arena.used_bytes, arena.peak_bytes
        loader.close()
        if workers is not None:
            workers.close()
        return found, left, peak

    found, left, peak = in_a_rank(run, tmp_path)
    assert found == [((tiles, 3, SIZE, SIZE), [float(k)]) for k, (_, tiles) in enumerate(names)]
    assert left == 0
    assert 0 < peak <= 4 * TILE_BYTES


def test_a_cache_keeps_copies_and_frees_the_room(tmp_path):
    def run():
        loader, arena, workers = loader_of([("1", 1), ("2", 1)], TILE_BYTES, 1, cache_bytes=10 * TILE_BYTES)
        loader.prefetch([(0, None), (1, None)], True)
        first, second = loader.tiles(0), loader.tiles(1)
        again = loader.tiles(0)
        used = arena.used_bytes
        loader.close()
        workers.close()
        return first.unique().item(), second.unique().item(), again is first, used

    assert in_a_rank(run, tmp_path) == (1.0, 2.0, True, 0)


def test_workers_decode_in_other_processes_and_are_gone_at_the_end(tmp_path):
    def run():
        loader, _, workers = loader_of([("process", 1)], TILE_BYTES, 2)
        loader.prefetch([(0, None)], True)
        # A float32 has 24 bits, a process id may have 22.
        who = int(loader.tiles(0).unique().item())
        ids = list(workers.processes.values())
        loader.close()
        workers.close()
        alive = []
        for process in ids:
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                continue
            alive.append(process)
        return who in ids, who != os.getpid(), alive

    assert in_a_rank(run, tmp_path) == (True, True, [])


def test_a_run_that_ends_early_leaves_no_worker_and_no_thread(tmp_path):
    """With everything under way: shares that decode, that wait for room, and that nobody will ask for."""

    def run():
        names = [(f"{k}x3", 3) for k in range(50)]
        loader, _, workers = loader_of(names, 4 * TILE_BYTES, 3)
        loader.prefetch([(k, None) for k in range(50)], True)
        ids = list(workers.processes.values())
        loader.close()
        workers.close()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and threading.active_count() > 1:
            time.sleep(0.05)
        return threading.active_count(), [process for process in ids if is_running(process)]

    assert in_a_rank(run, tmp_path) == (1, [])


def test_what_cannot_be_decoded_names_sample_and_file_and_takes_no_room(tmp_path):
    def run():
        loader, arena, workers = loader_of(
            [("1", 1), ("dir/broken", 1), ("3", 2), ("4", 1)], 4 * TILE_BYTES, 2
        )
        loader.prefetch([(k, None) for k in range(4)], True)
        said = []
        for index in range(4):
            try:
                loader.tiles(index)
            except BadSampleError as error:
                said.append((error.sample, str(error)))
        left = arena.used_bytes
        loader.close()
        workers.close()
        return said, left

    (broken, wrong), left = in_a_rank(run, tmp_path)
    assert broken == (1, "sample `s1` (1): cannot decode `dir/broken`: no number")
    assert wrong == (
        2,
        "sample `s2` (2), file `3`: decoded to tiles of shape (1, 3, 4, 4), profiled as (2, 3, 4, 4)",
    )
    assert left == 0


def test_a_worker_that_is_killed_is_an_error_with_the_sample(tmp_path):
    def run():
        loader, _, workers = loader_of([("1", 1), ("die", 1)], 4 * TILE_BYTES, 1)
        loader.prefetch([(0, None), (1, None)], True)
        loader.tiles(0)
        try:
            loader.tiles(1)
        except BadSampleError:
            return "a bad sample"
        except WorkerError as error:
            return str(error), error.__notes__
        finally:
            loader.close()
            workers.close()

    message, hints = in_a_rank(run, tmp_path)
    assert message.startswith("sample `s1` (1): the process that decodes it (")
    assert message.endswith("was killed by SIGKILL")
    assert "out-of-memory" in hints[0]


@pytest.mark.parametrize("where", ["worker", "thread", "without a turn", "no arena holds it"])
def test_a_decoder_that_hangs_is_named_with_its_file(where, tmp_path):
    """Within the limit, whoever decodes; no worker is left."""
    fifo = tmp_path / "hang"
    os.mkfifo(fifo)

    def run():
        room = 1 if where == "no arena holds it" else 8 * TILE_BYTES
        num_workers = 1 if where == "worker" else 0
        loader, _, workers = loader_of([("1", 1), (str(fifo), 1)], room, num_workers, limit_s=lambda: 0.5)
        shares = [(0, None), (1, None)]
        loader.prefetch(shares[:1] if where == "without a turn" else shares, True)
        good = loader.tiles(0).unique().item()
        ids = [] if workers is None else list(workers.processes.values())
        try:
            loader.tiles(1)
        except HangingDecoderError as error:
            said = str(error), error.__notes__
        loader.close()
        if workers is not None:
            workers.close()
        return good, said, [process for process in ids if is_running(process)]

    good, (message, hints), left = in_a_rank(run, tmp_path)
    assert good == 1.0
    assert message == f"sample `s1` (1), file `{fifo}`: reading and decoding has not ended in 0.5 s"
    assert "`train.timeout_seconds`" in hints[0]
    assert left == []


def test_a_record_that_cannot_be_read_in_time_is_named(tmp_path):
    class SlowDataset(ListDataset):
        def encode(self, index):
            threading.Event().wait()

    def run():
        loader = SampleLoader(SlowDataset([]), NumberAdapter(), limit_s=lambda: 0.5)
        with pytest.raises(
            HangingDecoderError, match=r"^sample 3: reading and decoding has not ended in 0.5 s"
        ):
            loader.sample(3)
        loader.close()
        return True

    assert in_a_rank(run, tmp_path)


def test_workers_end_with_a_rank_that_is_killed_and_not_by_the_signals_of_a_terminal(tmp_path):
    """`kill -9` of the rank leaves no one; Ctrl-C is for the rank to answer."""
    read, write = os.pipe()
    rank = os.fork()
    if rank == 0:
        try:
            workers = Workers(2, NumberAdapter(), [Arena(TILE_BYTES)])
            for process in workers.processes.values():
                # Once it ignores them.
                time.sleep(0.2)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    os.kill(process, number)
            time.sleep(0.2)
            alive = [p for p in workers.processes.values() if os.waitpid(p, os.WNOHANG) == (0, 0)]
            os.write(write, (" ".join(map(str, alive)) + "\n").encode())
            time.sleep(600)
        finally:
            os._exit(1)
    ids = [int(word) for word in os.read(read, 1000).split()]
    assert len(ids) == 2
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(is_running(process) for process in ids):
        time.sleep(0.05)
    assert not any(is_running(process) for process in ids)


def is_running(process):
    """Whether there is such a process that has not ended; one nobody has waited for has."""
    try:
        with open(f"/proc/{process}/stat") as file:  # noqa: PTH123
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_arena_gives_room_in_turn():
    """The third would fit at once, and waits for the second, which waits for the first to be freed."""
    arena = Arena(128)
    turns = [arena.turn() for _ in range(4)]
    first = arena.reserve(turns[0], 100)
    got = []

    def take(turn, size):
        got.append((turn, arena.reserve(turns[turn], size)))

    threads = [threading.Thread(target=take, args=each, daemon=True) for each in ((2, 1), (1, 128))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    assert got == []
    arena.free(first)
    threads[1].join(60)
    assert got == [(1, Block(0, 128))]
    arena.free(got[0][1])
    threads[0].join(60)
    assert got[1] == (2, Block(0, 64))
    arena.give_up(turns[3])
    waits = threading.Thread(target=lambda: pytest.raises(ArenaClosedError, take, 3, 128), daemon=True)
    turns[3] = arena.turn()
    waits.start()
    arena.close()
    waits.join(60)
    assert not waits.is_alive()
    assert arena.peak_bytes == 128
