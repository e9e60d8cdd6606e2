"""Links between ranks as torchrun starts them, here on two nodes of two ranks."""

import json
import os

import torch.distributed as dist
from ranks import results, run_ranks

from dflop.profiling import exchange
from dflop.profiling.artifact import write_artifact
from dflop.profiling.network import measure_network, update_network

RANKS, PER_NODE = 4, 2


def test_ranks_of_several_nodes_measure_both_spans(tmp_path):
    path = tmp_path / "model_profile.json"
    write_artifact(path, {"network": {}})

    def play(rank):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(PER_NODE)}
        exchange._LARGEST_BYTES = {"cpu": 1 << 12}
        exchange._QUICK_LARGEST_BYTES = 1 << 12
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=RANKS)
        request = {"out": str(path), "device": "cpu", "num_neighbours": 0, "budget_s": 0.0}
        whole = update_network(request)
        quick = measure_network("cpu", 0, is_quick=True)
        dist.destroy_process_group()
        return whole, quick

    answers = results(run_ranks(RANKS, play, tmp_path / "ranks"))
    assert all(answer == answers[0] for answer in answers), "ranks differ"
    whole, quick = answers[0]
    names = {(link["collective"], link["span"], link["num_ranks"]) for link in whole["links"]}
    collectives = ("all_reduce", "all_gather", "reduce_scatter")
    assert names == {("point_to_point", "node", 2), ("point_to_point", "cluster", 2)} | {
        (collective, *group)
        for collective in collectives
        for group in (("node", 2), ("cluster", 2), ("cluster", 4))
    }
    assert all(link["bandwidth_bytes_per_s"] > 0 for link in whole["links"])
    assert [(link["collective"], link["span"]) for link in quick["links"]] == [("point_to_point", "node")]
    assert json.loads(path.read_text())["network"] == whole
