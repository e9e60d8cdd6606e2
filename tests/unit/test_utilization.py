"""Operations of a model are those that PyTorch counts in the whole of it; their share of a peak rate."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_llava
import torch
from demo_run import write_demo
from torch.utils.flop_counter import FlopCounterMode

from dflop._native import Dataset, ModelFlops, peak_gflops
from dflop.data.dataset import sample_from_encoded
from dflop.models import load_adapter
from dflop.runtime import utilization
from dflop.runtime.utilization import Utilization


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("demo"), 12, 6, 2)


@pytest.fixture(scope="module")
def dataset(demo):
    return Dataset(str(demo / "dflop.yaml"), str(demo / "data_profile.parquet"))


def text_of(demo):
    return (demo / "model/config.json").read_text()


def test_operations_are_those_of_the_whole_model(demo, dataset, tmp_path):
    """Forward and backward of Hugging Face's model; it computes logits of all tokens, ours of those with a label."""
    adapter = load_adapter(demo / "model")
    model = tiny_llava.pretrained(demo / "model", tmp_path, 0)
    flops = ModelFlops(text_of(demo), "full", 0)
    kinds = set()
    for index in range(len(dataset)):
        kinds.add(dataset.kind(index))
        encoded = dataset.encode(index)
        sample = sample_from_encoded(index, encoded, adapter)
        tiles = [adapter.pixels(Path(m.path), m.kind, m.frame_indices) for m in encoded.media]
        own = SimpleNamespace(
            ids=encoded.input_ids,
            labels=encoded.labels,
            targets=sample.targets_T.tolist(),
            grids=sample.media,
            pixels=torch.cat(tiles) if tiles else None,
        )
        with FlopCounterMode(display=False) as counter:
            tiny_llava.labels_loss(model, own).backward()
        _, llm_tokens, label_tokens = dataset.shape(index)
        more = llm_tokens - label_tokens
        logits = 6 * more * adapter.hidden_size * adapter.vocab_size
        assert flops.of(dataset, [index]) == counter.get_total_flops() - logits, dataset.kind(index)
    assert {"text", "image"} <= kinds


def test_samples_add_up_and_what_is_frozen_takes_less(demo, dataset):
    recipes = ("full", "frozen-encoder", "lora", "projector")
    flops = {recipe: ModelFlops(text_of(demo), recipe, 4) for recipe in recipes}
    every = list(range(len(dataset)))
    for one in flops.values():
        assert one.of(dataset, every) == sum(one.of(dataset, [index]) for index in every)
    found = [one.of(dataset, every) for one in flops.values()]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 4


def test_peak_rates_are_those_of_the_table():
    assert peak_gflops("NVIDIA H100 80GB HBM3", "bfloat16") == 989_400
    assert peak_gflops("NVIDIA A100-SXM4-80GB", "float32") == 19_500
    # Another device than the SXM one of the table.
    assert peak_gflops("NVIDIA H100 PCIe", "bfloat16") is None


def test_mfu_is_the_share_of_all_ranks(demo, dataset, monkeypatch):
    monkeypatch.setattr(utilization.torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    gpus = Utilization(demo / "model", "full", 0, "bfloat16", torch.device("cuda", 0), 4)
    assert gpus.reason is None
    clock_ns = dict.fromkeys(("schedule", "pack", "agree", "write"), 0) | {
        "step": 500_000,
        "checkpoint": 10**12,
        "evaluation": 10**12,
        "end": 1,
    }
    found = gpus.of(dataset, [0, 1], clock_ns)
    flops = ModelFlops(text_of(demo), "full", 0).of(dataset, [0, 1])
    assert found["model_flops"] == flops
    # 312 TFLOP/s a rank: 156e6 in half a millisecond... of four.
    assert found["mfu"] == pytest.approx(flops / (4 * 312e12 * 0.0005))
    assert found["samples_per_s"] == pytest.approx(2 / 0.0005)


def test_what_cannot_be_counted_has_a_reason(demo, dataset, tmp_path):
    cpu = Utilization(demo / "model", "full", 0, "float32", torch.device("cpu"), 2)
    assert cpu.reason == "no vendor's peak rate of a CPU is known here"
    config = json.loads(text_of(demo)) | {"model_type": "unheard_of"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    unknown = Utilization(tmp_path, "full", 0, "float32", torch.device("cpu"), 2)
    assert "unheard_of" in unknown.reason
    clock_ns = dict.fromkeys(utilization.WORK, 10)
    assert unknown.of(dataset, [0], clock_ns)["model_flops"] is None
