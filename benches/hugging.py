"""Hugging Face's way to train the demo's model on two CPU ranks: `transformers.Trainer` with DDP, and FSDP2.

Each rank reads its part of every global batch as one packed row, in which each sample attends to itself
alone; the parts are filled by LLM tokens, as people pack. Loss and gradient are those of the global batch:
summed, and divided by its label tokens. Rows are decoded before training, or by workers of torch's
`DataLoader` during it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from forked import run_forked

NUM_RANKS = 2


def kinds_of(folder: Path) -> list[str]:
    """Of each sample: what its media are, `text` where it has none."""
    from dflop._native import Dataset

    data = Dataset(str(folder / "dflop.yaml"), str(folder / "data_profile.parquet"))
    media = [data.encode(index).media for index in range(len(data))]
    return ["video" if any(m.kind == "video" for m in own) else "image" if own else "text" for own in media]


def packed_by_tokens(
    batch: list[int], tokens: list[int], num_parts: int, kinds: list[str]
) -> list[list[int]]:
    """A global batch in parts of about equal LLM tokens: the longest sample first, to the emptiest part.

    Each part first gets one sample with images and one with a video: the model encodes images and videos by
    calls of their own, and under FSDP2 a rank that does not come to one hangs the others.

    Raises:
        SystemExit: The batch has too few of a kind for that.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts

    def put(sample: int, part: int) -> None:
        parts[part].append(sample)
        loads[part] += tokens[sample]

    left = sorted(batch, key=lambda s: -tokens[s])
    for kind in ("image", "video"):
        first = [sample for sample in left if kinds[sample] == kind][:num_parts]
        if 0 < len(first) < num_parts:
            message = (
                f"error: a global batch of {len(batch)} has {len(first)} of kind `{kind}`, FSDP2 needs one "
                f"for each of {num_parts} ranks: take larger batches (`--batch`)"
            )
            raise SystemExit(message)
        order = sorted(range(num_parts), key=lambda part: loads[part])
        for sample, part in zip(first, order, strict=False):
            put(sample, part)
            left.remove(sample)
    for sample in left:
        put(sample, loads.index(min(loads)))
    return parts


class Rows:
    """Packed rows by position: those of one rank."""

    def __init__(self, folder: Path, parts: list[list[int]], *, are_kept: bool) -> None:
        """Reads the data profile of `folder`.

        Args:
            folder: Of data and model.
            parts: The samples of each row.
            are_kept: Whether to decode all rows now and keep them; else each is decoded when asked for.
        """
        from dflop._native import Dataset
        from dflop.data.loader import SampleLoader
        from dflop.models import load_adapter

        self.data = Dataset(str(folder / "dflop.yaml"), str(folder / "data_profile.parquet"))
        self.loader = SampleLoader(self.data, load_adapter(folder / "model"), 1 << 32 if are_kept else 0)
        self.parts = parts
        self.rows = {tuple(part): self.row(part) for part in parts} if are_kept else {}

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        part = self.parts[index]
        return self.rows[tuple(part)] if self.rows else self.row(part)

    def row(self, part: list[int]) -> dict[str, Any]:
        """One packed row, as the model takes it."""
        import torch

        samples = [self.loader.sample(index) for index in part]
        lengths = [len(sample.input_ids_T) for sample in samples]
        # `labels` are shifted by the model: what predicts the first token of a sample is masked.
        labels = [torch.cat([torch.tensor([-100]), sample.targets_T[:-1]]) for sample in samples]
        row: dict[str, Any] = {
            "input_ids": torch.cat([sample.input_ids_T for sample in samples])[None],
            "labels": torch.cat(labels)[None],
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
            "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0).int(),
        }
        pictures, sizes, counts, videos = [], [], [], []
        for index, sample in zip(part, samples, strict=True):
            tiles = self.loader.tiles(index, None).split([grid.num_inputs for grid in sample.media])
            own = [(grid, t) for grid, t in zip(sample.media, tiles, strict=True) if grid.kind != "video"]
            pictures += [t for _, t in own]
            sizes += [[grid.height, grid.width] for grid, _ in own]
            counts += [len(own)] if own else []
            videos += [t for grid, t in zip(sample.media, tiles, strict=True) if grid.kind == "video"]
        if pictures:
            most = max(len(t) for t in pictures)
            padded = [torch.cat([t, t.new_zeros(most - len(t), *t.shape[1:])]) for t in pictures]
            row |= {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor(sizes)}
            row["batch_num_images"] = torch.tensor(counts)
        if len({t.shape[0] for t in videos}) > 1:
            message = (
                "videos of one packed row must have as many frames each: set `video_max_frames` to fewer"
            )
            raise ValueError(message)
        if videos:
            row["pixel_values_videos"] = torch.stack(videos)
        return row


def make_model(folder: Path) -> Any:
    """The model of the directory, with the weights that stand there, in float32."""
    import torch

    from dflop.models import load_adapter
    from dflop.models.packing import PACKED

    adapter: Any = load_adapter(folder / "model")
    model = adapter.model_class.from_pretrained(folder / "model", dtype=torch.float32)
    model.config.text_config._attn_implementation = PACKED
    model.config.text_config.use_cache = False
    return model.train()


def train(
    folder: Path, layout: str, rows: Rows, timed: range, num_workers: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Trains all rows on this rank, one a step: seconds of the steps in `timed`, and all losses."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from dflop.integrations.accelerate import keep_batches

    class Clock(TrainerCallback):
        first = last = 0.0
        count = 0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if self.count == timed.start:
                torch.distributed.barrier()
                self.first = time.perf_counter()
            self.count += 1

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if self.count == timed.stop:
                self.last = time.perf_counter()

    model = make_model(folder)
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=1,
        max_steps=len(rows),
        learning_rate=settings["learning_rate"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    if layout == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        layers = [
            module for name, module in model.named_modules() if name.rpartition(".")[0].endswith(".layers")
        ]
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    clock = Clock()
    trainer = Trainer(model, arguments, collate_row, rows, callbacks=[clock])  # type: ignore[arg-type]
    if layout == "fsdp2":
        # accelerate knows no FSDP on a CPU: the model comes sharded, and is not to be wrapped again.
        accelerator: Any = trainer.accelerator
        accelerator.prepare_model = lambda module, **_: module
    dataset: Any = rows
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=1, shuffle=False, collate_fn=collate_row, num_workers=num_workers
    )
    trainer.get_train_dataloader = lambda: keep_batches(trainer.accelerator, loader)
    # The trainer says on stdout what it logs; stdout is ours.
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"seconds": clock.last - clock.first, "losses": losses}


def collate_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A row is packed already."""
    return rows[0]


def run(
    folder: Path,
    layout: str,
    parts: list[list[list[int]]],
    timed: range,
    settings: dict[str, Any],
    *,
    num_workers: int = 0,
) -> dict[str, Any]:
    """Trains `parts[step][rank]` on two ranks, each a process forked from this one; what rank 0 measured.

    Args:
        folder: Of data and model.
        layout: `ddp` or `fsdp2`.
        parts: Samples by step and rank.
        timed: Steps on the clock.
        settings: Of the optimizer.
        num_workers: Processes of each rank that decode during training, each two rows ahead; 0: all rows are
            decoded before it.

    Raises:
        RuntimeError: A rank failed.
    """
    import importlib

    for name in ("torch.distributed.fsdp", "transformers.trainer", "dflop.integrations.accelerate"):
        importlib.import_module(name)
    out = folder / "hugging.json"

    def work(rank: int) -> None:
        rows = Rows(folder, [step[rank] for step in parts], are_kept=num_workers == 0)
        found = train(folder, layout, rows, timed, num_workers, settings)
        if rank == 0:
            out.write_text(json.dumps(found))

    run_forked(NUM_RANKS, work)
    return json.loads(out.read_text())
