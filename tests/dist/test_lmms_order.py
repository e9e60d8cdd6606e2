"""Ranks of lmms-engine that hold the samples of a dataset in other orders are told apart."""

from __future__ import annotations

import io
from types import SimpleNamespace

import datasets
import torch.distributed as dist
from PIL import Image
from ranks import free_port, results, run_ranks

from dflop.integrations.lmms_engine import _check_order

COUNT = 300
"""Rows, of which about every one is compared; all have equal lengths."""


def said(rows_of, directory):
    """What two ranks say of their datasets."""
    port = free_port()

    def check(rank):
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        try:
            _check_order(SimpleNamespace(data_list=rows_of(rank), data_lengths=[9] * COUNT))
        except ValueError as error:
            return str(error)
        finally:
            dist.destroy_process_group()
        return None

    return results(run_ranks(2, check, directory))


def texts(rank, *, swaps):
    found = [{"messages": f"number {place}"} for place in range(COUNT)]
    if rank and swaps:
        found[7], found[8] = found[8], found[7]
    return found


def pictures(rank, *, swaps):
    """As columns that decode what they hold: of each picture another object in memory."""
    stored = []
    for place in range(COUNT):
        file = io.BytesIO()
        Image.new("RGB", (2, 2), (place % 256, place // 256, 0)).save(file, "PNG")
        stored.append({"image": {"bytes": file.getvalue(), "path": None}})
    if rank and swaps:
        stored[7], stored[8] = stored[8], stored[7]
    return datasets.Dataset.from_list(stored).cast_column("image", datasets.Image())


def test_swapped_rows_of_equal_length_are_found(tmp_path):
    for number, kind in enumerate((texts, pictures)):
        for rank in said(lambda rank, kind=kind: kind(rank, swaps=True), tmp_path / str(number)):
            assert rank.startswith("rank 1 has the samples of the dataset in another order than rank 0")


def test_equal_orders_are_equal(tmp_path):
    for number, kind in enumerate((texts, pictures)):
        assert said(lambda rank, kind=kind: kind(rank, swaps=False), tmp_path / str(number)) == [None, None]
