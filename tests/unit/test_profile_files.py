"""What profiling reads and writes: its request, its records, the artifact, and who reads what it prints."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dflop
from dflop.profiling import hash_config, write_artifact
from dflop.profiling.artifact import hash_parts, to_text
from dflop.profiling.records import Records, key_of
from dflop.profiling.request import Request
from dflop.profiling.timer import Timing


def test_a_request_is_checked():
    with pytest.raises(ValueError, match="`model_dir` is missing"):
        Request.parse({"max_llm_tokens": 5})
    with pytest.raises(ValueError, match="`dtype` is int8, must be one of float32"):
        Request.parse({"model_dir": "x", "max_llm_tokens": 5, "dtype": "int8"})
    request = Request.parse({"model_dir": "x", "max_llm_tokens": 5})
    assert (request.max_segment_tokens, request.max_label_tokens, request.num_neighbours) == (5, 5, 0)
    assert (request.recompute, request.tensor_parallel_degrees) == ((), ())
    with pytest.raises(ValueError, match="`recompute` is some, must be of"):
        Request.parse({"model_dir": "x", "max_llm_tokens": 5, "recompute": ["none", "some"]})


def test_hashes_are_over_length_prefixed_parts(tmp_path):
    expected = hashlib.sha256(b"\x02\0\0\0\0\0\0\0ab" + b"\x01\0\0\0\0\0\0\0c").hexdigest()
    assert hash_parts([b"ab", b"c"]) == f"sha256:{expected}"
    (tmp_path / "config.json").write_bytes(b"ab")
    assert hash_config(tmp_path) == hash_parts([b"ab"])


def test_the_text_is_laid_out_as_rust_does():
    text = to_text({"made_from": {"model_config": "sha256:0"}, "family": "f", "num_llm_layers": 4})
    assert text == (
        '{\n"dflop": "model_profile",\n"format_version": 2,\n"made_from": {"model_config":"sha256:0"},\n'
        '"family": "f",\n"num_llm_layers": 4\n}\n'
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_named_with_its_file(tmp_path):
    path = tmp_path / "records.jsonl"
    records = Records(path, "key")
    # Only now: to be read, it has no end.
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*records\.jsonl"):
        records.add_number("case", 1)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_reader_that_left_is_no_error(is_read):
    """`dflop profile model | head -1`: what is printed may find no reader, at the last flush too."""
    command = "from dflop.profiling.worker import _say; _say(['one', 'two'])"
    child = subprocess.Popen(
        [sys.executable, "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if is_read:
        assert child.communicate() == ("one\ntwo\n", "")
    else:
        child.stdout.close()
        assert child.stderr.read() == ""
        child.stderr.close()
    assert child.wait() == 0


def test_a_failed_write_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "new" / "profile.json"
    write_artifact(path, {"family": "old"})
    old = path.read_text()
    assert json.loads(old) == {"dflop": "model_profile", "format_version": 2, "family": "old"}

    # No file has a longer name, so the neighbour that would take this one cannot be made.
    longest = path.with_name("p" * 255)
    longest.write_text(old)
    with pytest.raises(dflop.ArtifactError, match=r"cannot write `.*/p+`: File name too long"):
        write_artifact(longest, {"family": "new"})
    assert longest.read_text() == old
    assert sorted(p.name for p in path.parent.iterdir()) == [longest.name, "profile.json"]
    with pytest.raises(dflop.ArtifactError, match="cannot write"):
        write_artifact(path / "below.json", {})


def test_a_write_follows_links_and_replaces_model_profiles_alone(tmp_path):
    link, path = tmp_path / "link.json", tmp_path / "profile.json"
    link.symlink_to(path.name)
    write_artifact(link, {"family": "first"})
    assert link.is_symlink()
    assert json.loads(path.read_text())["family"] == "first"
    path.write_text('{"dflop": "plan"}')
    os.mkfifo(tmp_path / "pipe")
    for taken, found in ((link, "a plan"), (tmp_path / "pipe", "a device, pipe or socket")):
        with pytest.raises(dflop.ArtifactError, match=rf"`: it is {found}, must be "):
            write_artifact(taken, {"family": "second"})
    assert path.read_text() == '{"dflop": "plan"}'


def test_records_of_another_key_and_broken_lines_are_left_out(tmp_path):
    path = tmp_path / "records.jsonl"
    ours = Records(path, key_of({"threads": 1}))
    ours.add_timing("a", Timing((5, 7)))
    ours.add_number("b", 3)
    Records(path, key_of({"threads": 2})).add_timing("a", Timing((100, 100)))
    with path.open("a") as file:
        file.write('[1]\n{"key": "x"}\nnonsense')
    again = Records(path, key_of({"threads": 1}))
    assert dict(again.timings) == {"a": [Timing((5, 7))]}
    assert again.numbers == {"b": 3}
    assert again.spent_ns == 12
    again.add_timing("a", Timing((6, 6)))
    assert Records(path, key_of({"threads": 1})).timings["a"] == [Timing((5, 7)), Timing((6, 6))]


def test_the_profile_of_an_h100_is_of_the_catalogues_model(tmp_path):
    """Whoever writes that model's files can plan with it; it predicts without leaving what was measured."""
    from dflop._native import run_cli
    from dflop._native.testing import CostModel

    path = Path(__file__).parents[2] / "fixtures" / "profiles" / "h100_internvl3-8b.json"
    recorded = json.loads(path.read_text())
    assert run_cli(["dflop", "models", "--write", recorded["model"], str(tmp_path)])[0] == 0
    assert recorded["made_from"] == {"model_config": hash_config(tmp_path)}
    assert not recorded["is_estimated"]
    model = CostModel.read(str(path))
    forward, backward, is_extrapolated = model.llm_stage([2_000] * 4, 200, 28, True, True)
    assert not is_extrapolated
    # 28 layers of 233 million parameters: no device is faster than its peak, and this one was within twice that.
    least_ns = 2 * 28 * 233_057_792 * 8_000 / 989.4e12 * 1e9
    assert least_ns < forward < 2.5 * least_ns
    assert 1.5 * forward < backward < 3 * forward
