"""Random datasets in every form of a source: what is read of each sample is what was written, by pyarrow and tarfile."""

from __future__ import annotations

import io
import json
import os
import random
import tarfile
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import ipc
from pyarrow import parquet as pq

from dflop._native import Dataset, run_cli

SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261130"))
WORDS = [
    "cat",
    " ",
    "\u00e9",
    "\u65e5\u672c",
    "\U0001f642",
    "a\nb",
    '"',
    "\\",
    "\t",
    "<imag",
    "{{x}}",
    "\u2028",
    "\r\n",
]
SPEAKERS = {"user": "human", "assistant": "gpt"}


def picture(draw: random.Random) -> bytes:
    file = io.BytesIO()
    color = (draw.randrange(256), draw.randrange(256), draw.randrange(256))
    Image.new("RGB", (20 + draw.randrange(9), 20), color).save(file, "PNG")
    return file.getvalue()


def conversation(draw: random.Random) -> list[tuple[str, list[Any]]]:
    """Turns: who speaks, and texts and pictures."""
    turns = []
    for _ in range(draw.randint(1, 2)):
        parts: list[Any] = []
        for _ in range(draw.choice([0, 1, 1, 2])):
            parts += [picture(draw), "\n"][: draw.randint(1, 2)]
        words = ["say", *draw.choices(WORDS, k=4)]
        turns += [("user", [*parts, " ".join(words)]), ("assistant", ["x".join(words)])]
    return turns


def media_of(turns: list[tuple[str, list[Any]]]) -> list[bytes]:
    return [part for _, parts in turns for part in parts if isinstance(part, bytes)]


def marked(parts: list[Any]) -> str:
    return "".join(part if isinstance(part, str) else "<image>" for part in parts)


def shown(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Who speaks, and what, with marks for pictures."""
    texts = [[part.get("text", "<image>") for part in message["content"]] for message in messages]
    return [(message["role"], "".join(text)) for message, text in zip(messages, texts, strict=True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources") / "demo"
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", "8"]) == (0, None)
    return folder / "model"


def profiled(folder, model, source):
    config = folder / "dflop.yaml"
    data = json.dumps({"mixture": str(source)})
    config.write_text(f"model: {{dir: {model}}}\ndata: {data}\n")
    assert run_cli(["dflop", "profile", "data", "-c", str(config)]) == (0, None)
    return Dataset(str(config), str(folder / "data_profile.parquet"))


def compare(dataset, samples, order):
    """Every sample, read alone and in any order: id, turns and the bytes of its pictures."""
    assert len(dataset) == len(samples)
    order.shuffle(indices := list(range(len(samples))))
    for index in indices:
        name, turns = samples[index]
        encoded = dataset.encode(index)
        assert encoded.id == name
        assert shown(json.loads(dataset.messages(index))) == [(who, marked(parts)) for who, parts in turns]
        assert [medium.read() for medium in encoded.media] == media_of(turns)


def column_types(draw: random.Random) -> tuple[Any, Any]:
    texts = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
    cells = [pa.binary(), pa.large_binary(), pa.binary_view()]
    return draw.choice(texts), draw.choice(cells)


def table(draw: random.Random, samples: list[Any]) -> pa.Table:
    """Columns in any order, of any type for text, bytes and lists, in chunks; others beside them."""
    text, cell = column_types(draw)
    lists = draw.choice([pa.list_, pa.large_list])
    medium = draw.choice([cell, pa.struct([("bytes", cell), ("path", pa.string())])])
    is_nested = pa.types.is_struct(medium)
    cells = [
        [{"bytes": b, "path": draw.choice([None, "a.png"])} if is_nested else b for b in media_of(turns)]
        for _, turns in samples
    ]
    talk = [[{"from": SPEAKERS[who], "value": marked(parts)} for who, parts in turns] for _, turns in samples]
    count = len(samples)
    columns = {
        "id": pa.array([name for name, _ in samples], pa.string()).cast(pa.large_string()),
        "conversations": pa.array(talk, lists(pa.struct([("from", pa.string()), ("value", text)]))),
        "images": pa.array([found or draw.choice([None, []]) for found in cells], lists(medium)),
        "score": pa.array([draw.choice([None, 0.5, float("nan")]) for _ in range(count)]),
        "tags": pa.array([[None] * draw.randrange(3) for _ in range(count)], pa.list_(pa.null())),
        "map": pa.array([[("k", 1)]] * count, pa.map_(pa.string(), pa.int8())),
        "more": pa.array([{"a": [{"b": "x"}, None]}] * count),
    }
    names = draw.sample(list(columns), len(columns))
    whole = pa.table([columns[name] for name in names], names=names)
    cuts = sorted(draw.randrange(count + 1) for _ in range(draw.randrange(4)))
    edges = [0, *cuts, count]
    return pa.concat_tables([whole.slice(a, b - a) for a, b in zip(edges, edges[1:], strict=False)])


def write_parquet(draw: random.Random, rows: pa.Table, path: Any) -> None:
    pq.write_table(
        rows,
        path,
        version=draw.choice(["1.0", "2.6"]),
        data_page_version=draw.choice(["1.0", "2.0"]),
        compression=draw.choice(["none", "snappy", "gzip", "lz4", "zstd"]),
        row_group_size=draw.choice([1, 3, 1000]),
        data_page_size=draw.choice([1, 64, 1 << 20]),
        write_batch_size=draw.choice([1, 1024]),
        use_dictionary=draw.random() < 0.5,
        write_page_index=draw.random() < 0.5,
        store_schema=draw.random() < 0.5,
        use_compliant_nested_type=draw.random() < 0.5,
    )


def write_arrow(draw: random.Random, rows: pa.Table, path: Any) -> None:
    is_stream = draw.random() < 0.5
    options = ipc.IpcWriteOptions(
        compression=draw.choice([None, "lz4", "zstd"]),
        emit_dictionary_deltas=is_stream and draw.random() < 0.5,
        unify_dictionaries=not is_stream,
    )
    with (ipc.new_stream if is_stream else ipc.new_file)(path, rows.schema, options=options) as writer:
        writer.write_table(rows, max_chunksize=draw.choice([None, 1, 2]))


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_tables_are_read_as_pyarrow_wrote_them(write, model, tmp_path):
    print(f"DFLOP_TEST_SEED={SEED}")
    draw, num_read = random.Random(SEED), 0
    while num_read < 8:
        samples = [(f"{index}\u00e9", conversation(draw)) for index in range(draw.choice([1, 3, 9]))]
        rows = table(draw, samples)
        path = tmp_path / f"rows \u00fc.{write.__name__.removeprefix('write_')}"
        try:
            write(draw, rows, path)
        except pa.ArrowNotImplementedError as error:
            # pyarrow writes no slices of these.
            assert "View" in str(error)  # noqa: PT017
            continue
        compare(profiled(tmp_path, model, path), samples, draw)
        num_read += 1


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_shards_are_read_as_tarfile_wrote_them(form, model, tmp_path):
    """Members of a sample in any order, long names, names beside them that belong to no sample."""
    draw = random.Random(SEED)
    for folder in ["flat", "d" * 60, "a.b/\u65e5" * 8]:
        samples, path = [], tmp_path / "shard.tar"
        with tarfile.open(path, "w", format=form, encoding="utf-8") as shard:
            for index in range(4):
                turns, key = conversation(draw), f"{folder}/{'e' * 40}{index}"
                talk = [{"from": who, "value": marked(parts)} for who, parts in turns]
                members = {f"{k}.PNG": picture for k, picture in enumerate(media_of(turns))}
                name = key.rpartition("/")[2]
                record = {"conversations": talk, "images": [f"{name}.{suffix}" for suffix in members]}
                members |= {"json": json.dumps(record).encode(), "npy": b"\x93NUMPY"}
                for suffix in draw.sample(list(members), len(members)):
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size = len(members[suffix])
                    if form == tarfile.PAX_FORMAT:
                        info.pax_headers = {"comment": "x" * draw.choice([1, 600])}
                    shard.addfile(info, io.BytesIO(members[suffix]))
                shard.addfile(tarfile.TarInfo(f"{folder}/._{index}.json"))
                samples.append((key, turns))
        compare(profiled(tmp_path, model, path), samples, draw)


def test_a_packing_that_is_not_read_is_named(model, tmp_path, capfd):
    """Brotli is sound Parquet: the file is not called damaged."""
    rows = pa.table({"question": ["What?"], "answer": ["That."], "other": ["x"]})
    path = tmp_path / "rows.parquet"
    packed: dict[str, Any] = {"question": "zstd", "answer": "brotli", "other": "none"}
    pq.write_table(rows, path, compression=packed)  # pyright: ignore[reportArgumentType]
    config = tmp_path / "dflop.yaml"
    config.write_text(f"model: {{dir: {model}}}\ndata: {{mixture: rows.parquet}}\n")
    assert run_cli(["dflop", "profile", "data", "-c", str(config)])[0] == 2
    assert (
        "rows.parquet`: column `answer` is compressed with Brotli, must be with Zstandard"
        in capfd.readouterr().err
    )
    # A column that is not read may be compressed in any way.
    packed |= {"answer": "gzip", "other": "brotli"}
    pq.write_table(rows, path, compression=packed)  # pyright: ignore[reportArgumentType]
    assert len(profiled(tmp_path, model, path)) == 1
