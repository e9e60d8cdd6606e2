"""Of a tensor group one rank decodes media, and sends the others what the encoder reads of them."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
import torch._dynamo  # noqa: F401  (FSDP2 asks for it in its first hook: once, for all forked ranks)
import torch.utils.tensorboard  # noqa: F401  (imported once, for all forked ranks)
from conformance import SETTINGS
from demo_run import lines, request, run_training, write_demo
from ranks import results, run_ranks
from test_conformance_ranks import Case, shared_out
from test_training import BATCH, MICROBATCHES, Oracle, config_with, layout_of
from toy_run import CPU, write_plan

from dflop._native import Plan
from dflop.models import load_adapter
from dflop.models.adapter import EncoderInput
from dflop.models.sums import Sums
from dflop.runtime import trainer  # noqa: F401
from dflop.runtime.ahead import begin
from dflop.runtime.options import Options
from dflop.runtime.stage import Stage

DEGREES = {"encoder_tp": 2, "llm_tp": 2}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """20 samples: an epoch of global batches of 8, 8 and 4."""
    return write_demo(tmp_path_factory.mktemp("demo"), 20, BATCH, MICROBATCHES)


def asked(demo, tmp_path, layout, workers=1, **changes):
    """A request; without a learning rate the weights stay what they are."""
    config = config_with(demo, learning_rate=0.0, weight_decay=0.0, workers=workers)
    return request(
        demo, tmp_path / "run", **{**layout_of(demo, tmp_path, layout), "config": config, **changes}
    )


def counting(demo, directory):
    """Has each rank, and the processes that decode for it, note what they decode."""

    def before(index):
        kind = type(load_adapter(demo / "model"))
        pixels = kind.pixels

        def noting(self, file, *arguments, **options):
            noted = os.open(directory / f"decoded{index}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(noted, f"{file}\n".encode())
            os.close(noted)
            return pixels(self, file, *arguments, **options)

        kind.pixels = noting

    return before


def decoded(directory, num_ranks):
    """How often each rank has decoded each file."""
    paths = [directory / f"decoded{index}" for index in range(num_ranks)]
    return [Counter(path.read_text().split() if path.exists() else []) for path in paths]


@pytest.mark.some(1, 2)
@pytest.mark.parametrize(
    ("layout", "workers"),
    [
        ((1, 1, 1, DEGREES | {"llm_tp": 1}), 1),
        ((1, 0, DEGREES), 0),
        ((1, 1, 1, DEGREES), 0),
        ((2, 3, DEGREES), 1),
    ],
    ids=str,
)
def test_the_first_rank_of_a_group_decodes_and_all_train(layout, workers, demo, tmp_path):
    """An epoch: each file once on one rank, and the losses are those of one process."""
    wanted = asked(demo, tmp_path, layout, workers)
    num_ranks = wanted["num_ranks"]
    assert set(results(run_training(wanted, tmp_path, counting(demo, tmp_path)))) == {0}
    oracle = Oracle(demo, tmp_path / "pretrained")
    turns, metrics = (lines(tmp_path / f"run/{name}.jsonl") for name in ("schedules", "metrics"))
    for turn, m in zip(turns, metrics, strict=True):
        assert m["loss"] == pytest.approx(oracle.backward(turn["samples"]), rel=1e-5)
    by_rank = decoded(tmp_path, num_ranks)
    plan = Plan.read(wanted["plan"])
    encoders = [rank for rank in range(num_ranks) if 0 in plan.stages(rank)]
    assert len(encoders) == 2 * plan.encoder_replicas
    assert [rank for rank, files in enumerate(by_rank) if files] == encoders[::2]
    if plan.encoder_replicas == 1:
        trained = [sample for turn in turns for sample in turn["samples"]]
        assert by_rank[0] == Counter(
            medium.path for sample in trained for medium in oracle.dataset.encode(sample).media
        )


@pytest.mark.more
@pytest.mark.parametrize(
    ("layout", "workers"), [((1, 1, {"llm_tp": 2}), 1), ((2, 3, {"llm_tp": 2}), 0)], ids=str
)
def test_ranks_with_whole_encoders_decode_what_they_encode(layout, workers, demo, tmp_path):
    """An epoch: each part of a sample is decoded on the rank that encodes it, and the losses are those of one process."""
    wanted = asked(demo, tmp_path, layout, workers)
    num_ranks = wanted["num_ranks"]
    assert set(results(run_training(wanted, tmp_path, counting(demo, tmp_path)))) == {0}
    oracle = Oracle(demo, tmp_path / "pretrained")
    turns, metrics = (lines(tmp_path / f"run/{name}.jsonl") for name in ("schedules", "metrics"))
    for turn, m in zip(turns, metrics, strict=True):
        assert m["loss"] == pytest.approx(oracle.backward(turn["samples"]), rel=1e-5)
    by_rank = decoded(tmp_path, num_ranks)
    for rank, files in enumerate(by_rank):
        encoded = [column[rank] for turn in turns for column in turn["schedule"]["encoder"]]
        samples = {share if isinstance(share, int) else share[0] for shares in encoded for share in shares}
        own = {medium.path for sample in samples for medium in oracle.dataset.encode(sample).media}
        assert set(files) <= own, "nobody decodes what others encode"
        assert files, "the group's media are divided"


@pytest.mark.more
def test_a_run_goes_on_after_a_checkpoint(demo, tmp_path):
    """The ranks that decode nothing begin with the same step as the one that decodes for them."""
    layout, losses = (1, 1, 1, DEGREES | {"llm_tp": 1}), {}
    for name, parts in {"whole": [3], "parts": [2, 3]}.items():
        directory = tmp_path / name
        directory.mkdir()
        for steps in parts:
            wanted = asked(demo, directory, layout)
            config = wanted["config"]
            config["train"]["learning_rate"] = 1e-3
            config["checkpoint"] = {"every": 2, "keep": 2}
            more = {"steps": steps, "resume": "auto" if steps > parts[0] else None}
            ranks = run_training(wanted | more, directory, counting(demo, directory))
            assert set(results(ranks)) == {0}
        losses[name] = [m["loss"] for m in lines(directory / "run/metrics.jsonl")]
        assert [bool(files) for files in decoded(directory, 3)] == [True, False, False]
    assert len(losses["whole"]) == 3
    assert losses["parts"] == losses["whole"]


def test_only_the_first_rank_has_workers_and_room(demo, tmp_path):
    """Two encoder replicas of two ranks, and the LLM's rank."""
    wanted = asked(demo, tmp_path, (2, 1, 1, DEGREES | {"llm_tp": 1}), workers=2)
    plan = Plan.read(wanted["plan"])

    def rank(index):
        ahead = begin(Options.of_request(wanted), plan, {"RANK": str(index)})
        found = (0 if ahead.workers is None else len(ahead.workers.processes), ahead.arena is not None)
        ahead.close()
        return found

    assert results(run_ranks(5, rank, tmp_path)) == [(2, True), (0, False)] * 2 + [(0, False)]


@pytest.mark.parametrize("family", ["qwen2_audio", pytest.param("audioflamingo3", marks=pytest.mark.layouts)])
def test_each_stage_that_reads_inputs_has_them_once_a_group(family, tmp_path):
    """All stages of such an encoder hide silence: the first rank of each stage decodes for the other."""
    assert family in SETTINGS
    case = Case(family, tmp_path)
    assert load_adapter(case.model_dir).runs_read_inputs
    last = len(case.samples) - 1
    llm = [[[last, 0]], [[]], [list(range(1, last))]]
    degrees = {"encoder_pp": 2, "encoder_tp": 2, "global_batch_size": len(case.samples)}
    plan = write_plan(tmp_path / "plan.json", 2, 1, 1, len(llm), **degrees)
    case.check(plan, llm, shared_out(case.samples, llm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_others_get_the_values_of_the_first(dtype, demo, tmp_path):
    """Whatever the order in memory is that a processor left: here the channels come last."""
    inputs = torch.arange(2 * 3 * 4 * 4).view(2, 3, 4, 4).to(dtype).to(memory_format=torch.channels_last)

    class Kept(torch.nn.Module):
        def forward(self, batch):
            return batch.inputs_N

    def rank(index):
        group = torch.distributed
        group.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=index, world_size=3)
        stage = Stage(Kept(), False, CPU, gives_features=False, sums=Sums(group.group.WORLD))
        own = inputs if index == 0 else torch.empty(2, 3, 4, 4, dtype=dtype, device="meta")
        with torch.no_grad():
            found = stage.forward(0, EncoderInput(own, []), None, 1)
        return found.dtype == dtype and torch.equal(found, inputs)

    assert all(results(run_ranks(3, rank, tmp_path)))


def test_a_group_whose_first_rank_has_gone_says_so(tmp_path):
    """It ends before it sends: the others wait for nobody."""

    def rank(index):
        group = torch.distributed
        group.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=index, world_size=2)
        if index == 0:
            return None
        stage = Stage(torch.nn.Identity(), False, CPU, sums=Sums(group.group.WORLD))
        batch = EncoderInput(torch.empty(1, 2, device="meta"), [])
        with pytest.raises(RuntimeError, match="cannot share what the encoder reads, another rank stopped"):
            stage.forward(0, batch, None, 1)

    results(run_ranks(2, rank, tmp_path))
