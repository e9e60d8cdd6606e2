"""`dflop plan --emit torchtitan`: its own parser reads what is printed as it was meant."""

from __future__ import annotations

import os
import shlex

import pytest

import warm

CONFIG = """\
model: {name: llava-onevision-qwen2-7b}
data: {mixture: data/mixture.yaml, video_max_frames: 4}
cluster: {device: h100, num_ranks: 16, ranks_per_node: 8}
train: {global_batch_size: 16}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emit")
    done = warm.run(["-m", "dflop", "demo-data", ".", "--samples", "16"], cwd=folder, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    (folder / "dflop.yaml").write_text(CONFIG)
    return folder


@pytest.mark.more
@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("colocated=true,zero=3,llm.tp=2,recompute=none", (2, 1, 8, "NoneType")),
        ("colocated=true,zero=3,llm.tp=1,recompute=selective", (1, 1, 16, "SelectiveAC.Config")),
        ("colocated=false,llm.pp=2,llm.tp=1,zero=1,recompute=full", (1, 2, 8, "FullAC.Config")),
    ],
)
def test_its_parser_reads_the_arguments(only, expected, folder):
    # Here, as each process of the tests would import it.
    config_of = pytest.importorskip("torchtitan.config").ConfigManager().parse_args
    flags = ["--only", only, "--emit", "torchtitan"]
    done = warm.run(["-m", "dflop", "plan", *flags], cwd=folder, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    words = [
        word for line in done.stdout.splitlines() if not line.startswith("#") for word in shlex.split(line)
    ]
    config = config_of(["--module", "llama3", "--config", "llama3_debugmodel", *words])
    parallel = config.parallelism
    found = (
        parallel.tensor_parallel_degree,
        parallel.pipeline_parallel_degree,
        parallel.data_parallel_shard_degree,
        type(config.activation_checkpoint).__qualname__,
    )
    assert found == expected
    assert config.training.global_batch_size == 16
