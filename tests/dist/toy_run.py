"""A tiny LLaVA-OneVision as the runtime's tests need it: samples, plans, schedules, one rank's parts."""

from __future__ import annotations

import json
from functools import lru_cache

import tiny_llava
import torch

from dflop._native import Plan, Schedule
from dflop.data.dataset import Sample
from dflop.data.shares import share_of
from dflop.models import load_adapter
from dflop.models.expert_ranks import add_exchange
from dflop.models.recipes import freeze, trains_tower
from dflop.models.sums import Sums
from dflop.models.tensor import add_collectives
from dflop.runtime.build import border_widths, stages_of
from dflop.runtime.executor import Executor
from dflop.runtime.mesh import join
from dflop.runtime.messages import Messages
from dflop.runtime.sharded import gradients_of, is_cut
from dflop.runtime.spans import SpanRecorder
from dflop.runtime.work import prepare

SEED = 5
CPU = torch.device("cpu")

# What each sample holds: (media, answer tokens). Text alone, one image of some size, several images, video.
CONTENTS = [
    ([("image", 126, 126, 0)], 9),
    ([], 14),
    ([("image", 300, 140, 0)], 5),
    ([("multi_image", 90, 200, 0), ("multi_image", 126, 126, 0)], 7),
    ([], 3),
    ([("video", 126, 126, 3)], 11),
    ([("image", 60, 250, 0)], 1),
    ([], 20),
]


class ToySample:
    """A sample of the tiny model, in the form of the oracle and in that of the runtime."""

    def __init__(self, index):
        media, num_text = CONTENTS[index]
        self.oracle = tiny_llava.Sample(media, num_text, seed=100 + index)
        ids = torch.tensor(self.oracle.ids)
        self.sample = Sample(
            index=index,
            id=f"toy-{index}",
            input_ids_T=ids,
            feature_mask_T=(ids == tiny_llava.IMAGE_TOKEN) | (ids == tiny_llava.VIDEO_TOKEN),
            targets_T=torch.tensor(self.oracle.targets),
            positions_T=torch.arange(len(ids)),
            media=tuple(self.oracle.grids),
            files=(),
            num_features=sum(g.num_features for g in self.oracle.grids),
            parts=tuple(tiny_llava.parts(grid) for grid in self.oracle.grids),
        )

    def tiles(self, parts):
        """The pixels of a share."""
        tiles = self.oracle.pixels.split([grid.num_tiles for grid in self.oracle.grids])
        runs = share_of(self.sample, parts).runs
        return torch.cat([tiles[r.medium][r.first_tile : r.first_tile + r.grid.num_tiles] for r in runs])


@lru_cache
def toy_sample(index):
    return ToySample(index)


def warm_model_dir(directory):
    """A model directory; everything that forked ranks need is imported and made once, here."""
    torch.set_num_threads(1)
    for index in range(len(CONTENTS)):
        toy_sample(index)
    model_dir = tiny_llava.write_model_dir(directory)
    load_adapter(model_dir)
    return model_dir


def has_media(index):
    return bool(CONTENTS[index][0])


def label_tokens(samples):
    return sum(sum(label != -100 for label in toy_sample(s).oracle.labels) for s in samples)


def write_plan(
    path,
    encoder_dp,
    llm_dp,
    llm_pp,
    num_microbatches,
    order="1f1b",
    global_batch_size=None,
    recompute="none",
    encoder_pp=1,
    encoder_tp=1,
    llm_tp=1,
    **sharding,
):
    """A plan of that layout, read by the native module; `sharding`: other fields of the layout, as in the file."""
    layout = {
        "encoder": degrees(pp=encoder_pp, dp=encoder_dp, tp=encoder_tp),
        "llm": degrees(pp=llm_pp, dp=llm_dp, tp=llm_tp),
        **sharding,
    }
    prediction = {
        "step_ns_mean": 1, "step_ns_half_width": 0, "bubble_ratio": 0.0,
        "encoder_memory_bytes_peak": 0, "llm_memory_bytes_peak": 0, "extrapolated_ratio": 0.0,
    }  # fmt: skip
    best = {
        "layout": layout,
        "num_microbatches": num_microbatches,
        "pipeline_order": order,
        "recompute": recompute,
        "prediction": prediction,
    }
    plan = {
        "dflop": "plan",
        "format_version": 1,
        "made_from": {},
        "global_batch_size": global_batch_size or len(CONTENTS),
        "seed": 0,
        "num_sampled_batches": 1,
        "best": best,
        "runners_up": [],
        "rejections": [],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plan))
    return Plan.read(str(path))


def write_colocated(path, dp, num_microbatches, encoder_tp=1, llm_tp=1, **sharding):
    """A plan whose `dp` ranks, or tensor groups, each hold the encoder and the LLM.

    Where the LLM alone is cut, each rank of a group holds an encoder replica.
    """
    encoder_dp, degrees = dp * llm_tp // encoder_tp, {"encoder_tp": encoder_tp, "llm_tp": llm_tp}
    return write_plan(path, encoder_dp, dp, 1, num_microbatches, placement="colocated", **degrees, **sharding)


def degrees(pp, dp, tp=1):
    return {"tensor_parallel_degree": tp, "pipeline_parallel_degree": pp, "data_parallel_degree": dp}


def make_schedule(llm, encoder_dp, step=0, actions=(), encoder=None):
    """The schedule whose LLM side is `llm[microbatch][replica]`; encoder replicas get its samples in turn.

    In reverse order, so that rows which came in the encoder's order would be at the wrong places. `actions` are the
    lists of all ranks, as in `0F3`; without, the plan's are run. `encoder` says it otherwise, with shares as in the
    file: a sample, or [sample, first part, number of parts].
    """
    if encoder is None:
        encoder = []
        for replicas in llm:
            with_media = [s for samples in replicas for s in samples if has_media(s)]
            encoder.append([with_media[e::encoder_dp][::-1] for e in range(encoder_dp)])
    samples = [s for replicas in llm for samples in replicas for s in samples]
    return Schedule.from_json(
        json.dumps(
            {
                "step": step,
                "llm": llm,
                "encoder": encoder,
                "actions": actions,
                "label_tokens": label_tokens(samples),
                "predicted_makespan_ns": 0,
                "max_load_ns": 0,
                "lower_bound_ns": 0,
            }
        )
    )


class RankParts:
    """One rank of a run without its loop: mesh, model piece, executor, gradients."""

    def __init__(
        self,
        plan,
        model_dir,
        store,
        rank,
        timeout_s=200.0,
        device=CPU,
        prepare_pieces=None,
        dtype=torch.float32,
        recipe="full",
    ):
        torch.set_num_threads(1)
        self.mesh = join(
            plan, device, timeout_s, init_method=f"file://{store}", rank=rank, num_ranks=plan.num_ranks
        )
        adapter = load_adapter(model_dir)
        self.dtype = dtype
        self.pieces = {stage: self.build(adapter, stage).train() for stage in self.mesh.stages}
        self.recipe = recipe
        for piece in self.pieces.values():
            freeze(piece, recipe)
        if prepare_pieces is not None:
            prepare_pieces(self.pieces)
        for stage, piece in self.pieces.items():
            group = self.mesh.group_of(stage)
            if group is not None:
                add_collectives(piece, Sums(group))
            if self.mesh.expert_group is not None:
                add_exchange(piece, Sums(self.mesh.expert_group))
        self.gradients = gradients_of(self.pieces, self.mesh, dtype)
        self.recorder = SpanRecorder(rank, device)
        self.adapter = adapter
        stages = stages_of(self.pieces, self.mesh, self.gradients, recipe)
        messages = Messages(self.mesh, border_widths(plan, adapter), dtype)
        self.executor = Executor(self.mesh, stages, self.recorder, messages)

    def build(self, adapter, stage):
        """The piece of a stage."""
        dtype = torch.float32 if is_cut(self.mesh, stage) else self.dtype
        tensor = self.mesh.tensor_rank(stage)
        if self.mesh.is_encoder_stage(stage):
            first, num = self.mesh.plan.encoder_layers(stage, adapter.num_run_layers)
            layers = range(first, first + num)
            return adapter.build_encoder(self.mesh.device, dtype, SEED, layers, tensor=tensor)
        first, num = self.mesh.plan.llm_layers(stage, adapter.num_llm_layers)
        dealt = {"tensor": tensor, "experts": self.mesh.expert_rank}
        return adapter.build_llm_stage(first, num, self.mesh.device, dtype, SEED, **dealt)

    def sample(self, index):
        """In the form of the runtime."""
        return toy_sample(index).sample

    def tiles(self, index, parts):
        """What the encoder reads of a share; of the ranks that share its layers the first alone decodes."""
        assert self.mesh.tensor_of(0) == 0
        return toy_sample(index).tiles(parts)

    def work(self, schedule):
        """This rank's share of a step."""
        return prepare(
            self.mesh,
            schedule,
            self.sample,
            self.tiles,
            self.dtype,
            self.adapter,
            trains_tower=trains_tower(self.recipe),
        )

    def run_actions(self, schedule, watch=None):
        """Runs all actions; this rank's share of the loss."""
        work = self.work(schedule)
        return self.executor.run_step(work, self.executor.prepare(work, schedule), watch)

    def step(self, schedule):
        """Runs all actions and reduces the gradients; this rank's share of the loss."""
        self.gradients.gather()
        self.recorder.begin()
        loss = self.run_actions(schedule)
        self.gradients.reduce()
        return loss
