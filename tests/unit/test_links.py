"""Links: which are measured, what is fitted to them, and that ranks on this machine can measure them."""

import json
import random

import pytest
import torch

from dflop import ProfileError
from dflop.profiling.artifact import write_artifact
from dflop.profiling.links import (
    ALL_GATHER,
    ALL_REDUCE,
    CLUSTER,
    COLLECTIVES,
    NODE,
    POINT_TO_POINT,
    REDUCE_SCATTER,
    Link,
    fit,
    link_profile,
    links_of,
    sizes_of,
    wire_ratio,
)
from dflop.profiling.network import measure_network, summary, update_network


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def test_a_line_is_recovered_exactly():
    latency, slope = fit([(x, 5_000 + 0.25 * x) for x in (1024, 4096, 65536, 1 << 20)])
    assert latency == pytest.approx(5_000, rel=1e-6)
    assert slope == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_a_line_is_recovered_from_noise_and_one_disturbed_size(seed):
    draw = random.Random(seed)
    sizes = [1 << k for k in range(10, 27, 2)]
    points = [(x, (20_000 + 0.1 * x) * draw.uniform(0.97, 1.03)) for x in sizes]
    at = draw.randrange(len(points))
    points[at] = (points[at][0], points[at][1] * 4)
    latency, slope = fit(points)
    assert latency == pytest.approx(20_000, rel=0.08)
    assert slope == pytest.approx(0.1, rel=0.08)


def test_neither_latency_nor_slope_is_negative():
    assert fit([(1, 1.0), (2, 3.0)])[0] == 0.0
    latency, slope = fit([(1024, 900.0), (4096, 500.0)])
    assert slope == 0.0
    assert 500 <= latency <= 900
    assert fit([(1024, 700.0)])[1] >= 0
    for broken in ([], [(1, 0.0)]):
        with pytest.raises(ValueError, match="times above 0"):
            fit(broken)


@pytest.mark.parametrize(
    ("collective", "num_ranks", "ratio"),
    [
        (POINT_TO_POINT, 2, 1.0),
        (ALL_REDUCE, 2, 1.0),
        (ALL_REDUCE, 4, 1.5),
        (ALL_GATHER, 4, 0.75),
        (REDUCE_SCATTER, 8, 0.875),
    ],
)
def test_a_ring_puts_its_share_on_the_wire(collective, num_ranks, ratio):
    assert wire_ratio(collective, num_ranks) == ratio
    link = Link(collective, NODE, (tuple(range(num_ranks)),))
    # 10 us and 2 GB/s.
    medians = [(size, 10_000 + ratio * size / 2) for size in (1024, 65_536, 1 << 22)]
    profile = link_profile(link, medians)
    assert profile["latency_ns"] == pytest.approx(10_000, rel=1e-3)
    assert profile["bandwidth_bytes_per_s"] == pytest.approx(2_000_000_000, rel=1e-3)
    assert profile["num_ranks"] == num_ranks
    assert [point["bytes"] for point in profile["points"]] == [1024, 65_536, 1 << 22]


def test_times_that_do_not_rise_still_give_a_bandwidth():
    profile = link_profile(Link(POINT_TO_POINT, NODE, ((0, 1),)), [(1000, 9_000.0), (2000, 8_000.0)])
    assert profile["bandwidth_bytes_per_s"] == 2000 * 1e9 / 8_000


def test_links_of_one_node():
    names = {(link.collective, link.span, link.num_ranks) for link in links_of(4, 4)}
    assert names == {(POINT_TO_POINT, NODE, 2)} | {(c, NODE, n) for c in COLLECTIVES for n in (2, 4)}
    assert [link.collective for link in links_of(4, 4, is_quick=True)] == [POINT_TO_POINT]


def test_links_of_several_nodes():
    links = links_of(6, 2)
    names = [(link.collective, link.span, link.num_ranks) for link in links]
    assert len(set(names)) == len(names)
    groups = {(link.collective, link.span, link.num_ranks): link.groups for link in links}
    assert groups[POINT_TO_POINT, NODE, 2] == ((0, 1), (2, 3), (4, 5))
    assert groups[POINT_TO_POINT, CLUSTER, 2] == ((0, 2),)
    assert groups[ALL_REDUCE, CLUSTER, 2] == ((0, 2), (1, 3))
    assert groups[ALL_REDUCE, CLUSTER, 3] == ((0, 2, 4), (1, 3, 5))
    assert groups[ALL_REDUCE, CLUSTER, 6] == ((0, 1, 2, 3, 4, 5),)
    for link in links:
        flat = [rank for group in link.groups for rank in group]
        assert len(set(flat)) == len(flat), "groups of one link share a rank"


def test_links_of_nodes_with_one_rank():
    assert {link.span for link in links_of(2, 1)} == {CLUSTER}
    assert links_of(2, 1, is_quick=True) == [Link(POINT_TO_POINT, CLUSTER, ((0, 1),))]


def test_sizes_are_whole_elements_on_every_rank():
    link = Link(ALL_GATHER, NODE, ((0, 1, 2),))
    sizes = sizes_of(link, 1 << 20, 4)
    assert all(size % 12 == 0 for size in sizes)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1020
    assert sizes_of(Link(POINT_TO_POINT, NODE, ((0, 1),)), 1 << 14, 4) == [1024, 4096, 16384]


def test_ranks_of_this_machine_measure_all_collectives(monkeypatch, tmp_path):
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr("dflop.profiling.exchange._LARGEST_BYTES", {"cpu": 1 << 14})
    monkeypatch.setattr("dflop.profiling.exchange._MAX_ROUNDS", 4)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "model_profile.json"
    write_artifact(path, {"family": "f", "network": {}, "optimizer_ns_per_million": 7})
    request = {"out": str(path), "device": "cpu", "num_neighbours": 2, "budget_s": 0.0}
    network = update_network(request)
    assert network["backend"] == "gloo"
    assert network["is_assumed"] is False
    names = [(link["collective"], link["span"], link["num_ranks"]) for link in network["links"]]
    assert names == [(POINT_TO_POINT, NODE, 2)] + [(c, NODE, n) for n in (2, 3) for c in COLLECTIVES]
    for link in network["links"]:
        assert link["latency_ns"] > 0
        assert link["bandwidth_bytes_per_s"] > 0
        assert all(point["ns"] > 0 for point in link["points"])
    written = json.loads(path.read_text())
    assert list(written) == ["dflop", "format_version", "family", "network", "optimizer_ns_per_million"]
    assert written["network"] == network
    assert len(summary(network)) == len(names)


def test_the_quick_way_measures_one_pair(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("dflop.profiling.network.QUICK_BUDGET_S", 0.0)
    network = measure_network("cpu", 5, is_quick=True)
    assert [(link["collective"], link["num_ranks"]) for link in network["links"]] == [(POINT_TO_POINT, 2)]


def test_one_rank_has_no_links(tmp_path, caplog):
    assert measure_network("cpu", 0)["links"] == []
    assert "nothing to measure" in caplog.text
    path = tmp_path / "model_profile.json"
    write_artifact(path, {"network": {"links": [1]}})
    before = path.read_text()
    request = {"out": str(path), "device": "cpu", "num_neighbours": 0, "budget_s": 1.0}
    with pytest.raises(ProfileError, match="keeps those it has"):
        update_network(request)
    assert path.read_text() == before
