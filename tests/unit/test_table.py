"""The data profile as other programs see it: a plain Parquet table, and what its footer says."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from dflop._native import Dataset, profile_shapes, run_cli

NUM_SAMPLES = 32


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demo with one sample that cannot be read, left out."""
    folder = tmp_path_factory.mktemp("table") / "demo"
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", str(NUM_SAMPLES)]) == (0, None)
    config = folder / "dflop.yaml"
    config.write_text(config.read_text().replace("on_bad_sample: fail", "on_bad_sample: skip"))
    lines = (folder / "data/images.jsonl").read_text().splitlines()
    lines[2] = '{"id": "cut off",'
    (folder / "data/images.jsonl").write_text("\n".join(lines) + "\n")
    assert run_cli(["dflop", "profile", "data", "-c", str(config)]) == (0, None)
    return folder


def test_columns_are_those_that_are_documented(demo):
    schema = parquet.read_schema(demo / "data_profile.parquet")
    names = pa.dictionary(pa.int32(), pa.string())

    def groups(*fields):
        group = pa.struct([pa.field(name, pa.uint32(), nullable=False) for name in fields])
        return pa.list_(pa.field("element", group, nullable=False))

    expected = {
        "id": pa.string(), "source": names, "position": pa.uint64(), "kind": names,
        "segments": groups("count", "tokens", "tower"),
        "parts": groups("count", "segments", "feature_tokens"),
        "encoder_tokens": pa.uint64(), "feature_tokens": pa.uint32(), "llm_tokens": pa.uint32(),
        "label_tokens": pa.uint32(), "media_bytes": pa.uint64(), "media_ms": pa.uint64(), "file": pa.uint32(),
        "start": pa.uint64(), "len": pa.uint64(), "record_hash": pa.uint64(), "media_hash": pa.uint64(),
        "source_index": pa.uint32(),
    }  # fmt: skip
    assert dict(zip(schema.names, schema.types, strict=True)) == expected
    assert not any(field.nullable for field in schema)


def test_rows_say_what_the_dataset_says(demo):
    path = demo / "data_profile.parquet"
    rows = parquet.read_table(path).to_pylist()
    dataset = Dataset(str(demo / "dflop.yaml"), str(path))
    assert len(rows) == len(dataset) == NUM_SAMPLES - 1
    for index, row in enumerate(rows):
        assert (row["encoder_tokens"], row["llm_tokens"], row["label_tokens"]) == dataset.shape(index)
        assert row["kind"] == dataset.kind(index)
        assert row["encoder_tokens"] == sum(s["count"] * s["tokens"] for s in row["segments"])
        assert (row["encoder_tokens"] > 0) == (row["kind"] != "text")
        assert row["feature_tokens"] == sum(p["count"] * p["feature_tokens"] for p in row["parts"])
        num_segments = sum(s["count"] for s in row["segments"])
        assert num_segments == sum(p["count"] * p["segments"] for p in row["parts"])
        # A video has a part a frame; an image is one, whatever its tiles.
        assert (sum(p["count"] for p in row["parts"]) == num_segments) or row["kind"] == "image"
    # The bad one is record 2 of the first source.
    indices = [index for index in range(NUM_SAMPLES) if index != 2]
    expected = [(i, row["encoder_tokens"], row["llm_tokens"]) for i, row in zip(indices, rows, strict=True)]
    assert profile_shapes(str(path)) == (expected, 1)
    # The record itself, found by its place.
    header = json.loads(parquet.read_metadata(path).metadata[b"dflop"])
    row = rows[-1]
    with Path(header["files"][row["file"]]["path"]).open("rb") as file:
        file.seek(row["start"])
        assert json.loads(file.read(row["len"]))["id"] == row["id"]
    assert header["sources"][row["source_index"]] == row["source"]


def test_the_footer_says_the_rest(demo):
    metadata = parquet.read_metadata(demo / "data_profile.parquet")
    header = json.loads(metadata.metadata[b"dflop"])
    assert list(header) == [
        "kind", "format_version", "made_from", "family", "settings", "sources", "files", "strata", "part",
        "problems", "content_hash", "num_rows",
    ]  # fmt: skip
    assert (header["kind"], header["format_version"], header["part"]) == ("data_profile", 2, None)
    assert header["family"] == "llava_onevision"
    assert set(header["made_from"]) == {"dataset", "processor", "tokenizer"}
    assert header["num_rows"] == metadata.num_rows == NUM_SAMPLES - 1
    assert header["problems"] == {"record": 1}
    with (demo / "data_profile.problems.csv").open(newline="") as file:
        (problem,) = csv.DictReader(file)
    assert (problem["source"], problem["position"], problem["fault"]) == ("images.jsonl", "2", "record")
    assert problem["file"].endswith("data/images.jsonl")
    with Path(problem["file"]).open("rb") as file:
        file.seek(int(problem["offset"]))
        assert file.readline() == b'{"id": "cut off",\n'
