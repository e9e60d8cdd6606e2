"""Who computes which samples of a step that were read already: microbatches in rows of ranks, under a limit."""

from __future__ import annotations

import copy
import pickle
import random
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from dflop import ScheduleError
from dflop.integrations.read_rows import ReadRows
from dflop.integrations.spread import even_buckets


def drawn(count, seed=0):
    """Costs of samples of which two thirds have media."""
    draw = random.Random(seed)
    return [
        (draw.choice([0, draw.lognormvariate(3, 1), draw.lognormvariate(3, 1)]), draw.lognormvariate(4, 1))
        for _ in range(count)
    ]


def waits(pairs, buckets, num_ranks):
    """Time of a step in which ranks meet behind the encoder and behind the LLM of each microbatch."""
    rows = [buckets[start : start + num_ranks] for start in range(0, len(buckets), num_ranks)]
    return sum(max(sum(pairs[s][part] for s in bucket) for bucket in row) for row in rows for part in (0, 1))


@pytest.mark.parametrize("seed", range(5))
def test_samples_of_like_work_meet_where_each_is_a_microbatch(seed):
    """As many samples as microbatches: `per_device_train_batch_size` 1, and what is chosen is who meets whom."""
    num_ranks, num_buckets = 8, 32
    pairs = drawn(num_buckets, seed)
    buckets = even_buckets(pairs, num_ranks, num_buckets, "phase", 0)
    assert sorted(map(tuple, buckets)) == [(sample,) for sample in range(num_buckets)]
    as_read = waits(pairs, [[sample] for sample in range(num_buckets)], num_ranks)
    by_work = sorted(range(num_buckets), key=lambda sample: -sum(pairs[sample]))
    assert waits(pairs, buckets, num_ranks) <= 0.8 * as_read
    assert waits(pairs, buckets, num_ranks) <= waits(pairs, [[sample] for sample in by_work], num_ranks)


def test_too_few_samples_leave_microbatches_empty():
    assert even_buckets([(1, 1), (2, 2)], 2, 4, "phase", 0) == [[0], [1], [], []]


def test_a_limit_on_tokens_is_kept_or_refused():
    pairs, tokens = [(0, 9), (0, 1), (0, 1), (0, 1)], [4, 4, 4, 4]
    buckets = even_buckets(pairs, 2, 2, "phase", 0, tokens=tokens, max_tokens=8)
    assert sorted(map(len, buckets)) == [2, 2]
    free = even_buckets(pairs, 2, 2, "phase", 0, tokens=tokens, max_tokens=100)
    assert sorted(map(len, free)) == [1, 3]
    with pytest.raises(ScheduleError, match="a bucket holds at most 7"):
        even_buckets(pairs, 2, 2, "phase", 0, tokens=tokens, max_tokens=7)


def test_rows_come_from_a_worker_with_their_own_numbers_alone():
    """As bytes, of its own type, and without the tensor that a row is a part of."""

    class Kind(ReadRows):
        pass

    globals()["Kind"] = Kind
    Kind.__qualname__ = "Kind"
    large = torch.arange(100_000)
    rows = [{"input_ids": large[:3]}, {"input_ids": large[3:5]}]
    sent = pickle.dumps(Kind(rows))
    assert len(sent) < 5_000
    for found in (pickle.loads(sent), copy.deepcopy(Kind(rows))):
        assert type(found) is Kind
        assert [row["input_ids"].tolist() for row in found.rows] == [[0, 1, 2], [3, 4]]


@pytest.mark.skipif(find_spec("veomni") is not None, reason="VeOmni is installed")
def test_the_command_without_veomni_says_what_to_install(tmp_path):
    """And names the script that is not there first."""
    script = tmp_path / "train_vlm.py"
    command = [sys.executable, "-m", "dflop.integrations.veomni", str(script), "config.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = f"`{script}` is no file: name VeOmni's script, such as tasks/train_vlm.py\n"
    assert (done.returncode, done.stderr) == (1, said)
    script.write_text("")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (
        1,
        "`veomni` is not installed beside dflop: pip install veomni==0.1.12\n",
    )
