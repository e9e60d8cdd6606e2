"""One epoch of `transformers.Trainer` on two CPU ranks, by who chooses the batches: seconds, ratios, losses.

Usage: python benches/adopt.py OUT.json [--rounds 6] [--samples 160] [--layouts ddp,fsdp2] [--padded]

A small InternVL trains on mixed samples (a third text alone, tiles and words lognormal), packed, each
attending to itself alone. Every arm trains each sample once, from the same parameters, with as many
samples a step on average; a round runs all arms in another order.

    arrival     equal counts in the shuffled order, as the trainer's own sampler
    grouped     the trainer's `group_by_length`, by LLM tokens
    rebalanced  the trainer's `batch_rebalance`, by LLM tokens
    packed      microbatches filled up to a number of LLM tokens
    line        dflop's first line: the global batches of `arrival`, balanced
    both        the first line on the LLM's work, and the encoder shared out

The first four are what there is without dflop; the ratio is that of the fastest of them (by its mean over the
rounds) to `line` under DDP and to `both` under FSDP2, with its 95 % interval. Under FSDP2 a rank with text
alone hangs the trainer; so that the others run at all they get our guard against that, which shares nothing.

With `--padded` rows are padded, as collators of transformers make them, and the arms under DDP are

    arrival, grouped, rebalanced, line      as above
    line-padded                             the first line, told of it: `is_padded=True`
    arrival-unpadded, line-unpadded         with `remove_padding`: the LLM's layers compute real tokens alone
    loaded-unpadded                         the same; read as in `arrival`, then samples move (`when_loaded`)

and the ratio is that of the fastest of the first three to `line-unpadded`.

`loss_difference_max` is over the steps of `arrival` and of dflop's arms, which train the same global batches.
`simulated_ratio` is of 64 ranks under DDP, by costs alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from forked import run_forked
from ratio import ratio_of

NUM_RANKS, BATCH_SIZE, SEED = 2, 4, 11
OTHERS = ("arrival", "grouped", "rebalanced", "packed")
OURS = ("line", "both")
OF_PADDED = ("arrival", "grouped", "rebalanced")
OURS_OF_PADDED = ("line", "line-padded", "arrival-unpadded", "line-unpadded", "loaded-unpadded")
# The arm that the ratio of a layout is of.
CHOSEN = {"ddp": "line", "fsdp2": "both"}
CHOSEN_OF_PADDED = {"ddp": "line-unpadded"}
VOCABULARY, IMAGE_TOKEN, TILE, TOKENS_PER_TILE = 512, 511, 112, 16


def draw_sizes(count: int, seed: int) -> list[tuple[int, int]]:
    """(tiles, words) of each sample."""
    draw = random.Random(seed)
    return [
        (
            0 if draw.random() < 1 / 3 else min(12, 1 + int(draw.lognormvariate(0.6, 0.9))),
            min(400, 16 + int(draw.lognormvariate(3.8, 0.8))),
        )
        for _ in range(count)
    ]


def llm_tokens(size: tuple[int, int]) -> int:
    """What the LLM reads of a sample."""
    return size[0] * TOKENS_PER_TILE + size[1]


def batches_of(
    arm: str, sizes: list[tuple[int, int]], costs: list[tuple[int, int]], num_ranks: int, meets: Any
) -> list[list[list[int]]]:
    """Samples of [rank][microbatch] of an epoch."""
    from dflop import BalancedBatchSampler

    arm = arm.removesuffix("-unpadded")
    lengths = [llm_tokens(size) for size in sizes]
    plain = BalancedBatchSampler(costs, BATCH_SIZE, num_buckets=num_ranks, seed=SEED)
    num_steps = len(plain) // num_ranks
    # The same samples a step as the balanced ones, in their order: that of the data, shuffled.
    steps = [sorted(i for bucket in plain.buckets(step) for i in bucket) for step in range(num_steps)]
    for step in steps:
        random.Random(SEED + step[0]).shuffle(step)
    if arm in ("arrival", "loaded"):
        return [
            [step[rank * len(step) // num_ranks : (rank + 1) * len(step) // num_ranks] for step in steps]
            for rank in range(num_ranks)
        ]
    if arm in ("line", "line-padded", "both"):
        mine = [(0, llm) for _, llm in costs] if arm == "both" else costs
        ranks = [
            BalancedBatchSampler(
                mine, BATCH_SIZE, num_ranks, rank, seed=SEED, meets=meets, is_padded=arm == "line-padded"
            )
            for rank in range(num_ranks)
        ]
        return [list(sampler) for sampler in ranks]
    if arm == "rebalanced":
        from transformers.trainer_pt_utils import BatchRebalanceSampler

        size = BATCH_SIZE * num_ranks
        return [
            [
                list(b)
                for b in BatchRebalanceSampler(
                    lengths, size, num_ranks, 1, seed=SEED, rank=rank, drop_last=False
                )
            ]
            for rank in range(num_ranks)
        ]
    if arm == "grouped":
        import torch
        from transformers.trainer_pt_utils import LengthGroupedSampler

        generator = torch.Generator().manual_seed(SEED)
        order = list(LengthGroupedSampler(BATCH_SIZE * num_ranks, lengths=lengths, generator=generator))
        whole = [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]
    else:
        # As many tokens a microbatch as in the mean of the others.
        budget = sum(lengths) / (num_steps * num_ranks)
        whole, room = [[]], budget
        for sample in (i for step in steps for i in step):
            if whole[-1] and lengths[sample] > room:
                whole.append([])
                room = budget
            whole[-1].append(sample)
            room -= lengths[sample]
    # What is left at the end joins the microbatches before it: ranks have equally many.
    while len(whole) % num_ranks:
        rest = whole.pop()
        whole[-1].extend(rest)
    return [whole[rank::num_ranks] for rank in range(num_ranks)]


class Samples:
    """Tokens and pixels by position, drawn from it."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        tiles, words = self.sizes[index]
        generator = torch.Generator().manual_seed(index)
        answer = torch.randint(3, IMAGE_TOKEN, (words,), generator=generator)
        image = torch.full((tiles * TOKENS_PER_TILE,), IMAGE_TOKEN)
        labels = torch.cat([torch.full_like(image, -100), answer])
        # What predicts the first token of a sample is the last of the one before.
        labels[0] = -100
        pixels = torch.randn(tiles, 3, TILE, TILE, generator=generator)
        return {"input_ids": torch.cat([image, answer]), "labels": labels, "pixel_values": pixels}


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One packed row."""
    import torch

    lengths = [len(row["input_ids"]) for row in rows]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    batch = {
        "input_ids": torch.cat([row["input_ids"] for row in rows])[None],
        "labels": torch.cat([row["labels"] for row in rows])[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": bounds,
        "segment_tokens": lengths,
    }
    pixels = torch.cat([row["pixel_values"] for row in rows])
    return {**batch, "pixel_values": pixels} if len(pixels) else batch


def collate_padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows as long as the longest, padded on the right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }
    pixels = torch.cat([row["pixel_values"] for row in rows])
    return {**batch, "pixel_values": pixels} if len(pixels) else batch


def make_model(is_padded: bool = False) -> Any:
    """Encoder and LLM of about equal work on these data."""
    import torch
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    from dflop.models.packing import PACKED

    torch.manual_seed(0)
    config = InternVLConfig(
        vision_config={
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 512,
            "image_size": [TILE, TILE],
            "patch_size": [14, 14],
        },
        text_config={
            "model_type": "qwen2",
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "use_cache": False,
        },
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    )
    model: Any = InternVLForConditionalGeneration(config)
    if not is_padded:
        model.config.text_config._attn_implementation = PACKED
    return model.train()


def measure_costs(sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(encoder, LLM) nanoseconds of each sample: forward and backward of a tile, of a token; medians."""
    model = make_model()

    def seconds(tiles: int, words: int) -> float:
        size = Samples([(tiles, words)] * 4)
        batch = collate([size[0]] * 4)
        found = []
        for _ in range(6):
            start = time.perf_counter()
            model(**batch).loss.backward()
            found.append(time.perf_counter() - start)
        return statistics.median(found[1:])

    short, long, pictures = seconds(0, 40), seconds(0, 200), seconds(4, 40)
    token_ns = max(1.0, (long - short) / (4 * 160) * 1e9)
    tile_ns = max(1.0, (pictures - short) / 16 * 1e9 - TOKENS_PER_TILE * token_ns)
    return [(round(tiles * tile_ns), round(llm_tokens((tiles, words)) * token_ns)) for tiles, words in sizes]


def run_arm(
    layout: str, arm: str, data: Samples, batches: list[list[int]], folder: str, is_padded: bool
) -> dict[str, Any]:
    """Trains one epoch on this rank: seconds from the first step's begin to the last's end, and losses."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from dflop.integrations import attend_encoder, balance_encoder, remove_padding
    from dflop.integrations.accelerate import keep_batches
    from dflop.integrations.transformers import balance

    class Clock(TrainerCallback):
        first = last = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if self.first == 0.0:
                torch.distributed.barrier()
                self.first = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.last = time.perf_counter()

    model = make_model(is_padded)
    unpadded = remove_padding(model) if arm.endswith("-unpadded") else None
    collated = collate_padded if is_padded else collate
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    if layout == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for layer in [*model.model.vision_tower.encoder.layer, *model.model.language_model.layers]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if arm == "both":
        balance_encoder(model)
    elif layout == "fsdp2":
        # Text alone would hang the others.
        attend_encoder(model)
    clock = Clock()
    trainer = Trainer(model, arguments, collated, data, callbacks=[clock])  # type: ignore[arg-type]
    if layout == "fsdp2":
        # accelerate knows no FSDP on a CPU: the model comes sharded, and is not to be wrapped again.
        accelerator: Any = trainer.accelerator
        accelerator.prepare_model = lambda module, **_: module
    loader: DataLoader[Any] = DataLoader(data, batch_sampler=batches, collate_fn=collated)  # type: ignore[arg-type]
    trainer.get_train_dataloader = lambda: keep_batches(trainer.accelerator, loader)
    if arm.startswith("loaded"):
        balance(trainer, when_loaded=True)
    # The trainer says on stdout what it logs; stdout is ours.
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = {"seconds": clock.last - clock.first, "losses": losses}
    return found if unpadded is None else {**found, "padding_ratio": unpadded.padding_ratio}


def work(rank: int, asked: argparse.Namespace, sizes: Any, costs: Any, out: Path, folder: str) -> None:
    """All rounds of all layouts on one rank; rank 0 writes what it measured."""
    data = Samples(sizes)
    rows = []
    for layout in asked.layouts:
        meets = "step" if layout == "ddp" else "phase"
        batches = {arm: batches_of(arm, sizes, costs, NUM_RANKS, meets)[rank] for arm in asked.arms}
        start = time.perf_counter()
        for index in range(-asked.warmup, asked.rounds):
            arms = list(asked.arms)
            random.Random(SEED + index).shuffle(arms)
            for arm in arms:
                found = run_arm(layout, arm, data, batches[arm], folder, asked.padded)
                if index >= 0 and rank == 0:
                    rows.append({"layout": layout, "round": index, "arm": arm, **found})
            if rank == 0:
                done, num_rounds = index + asked.warmup + 1, asked.warmup + asked.rounds
                passed = time.perf_counter() - start
                left = passed / done * (num_rounds - done)
                print(
                    f"{layout}: round {done} of {num_rounds}, {passed:.0f} s, {left:.0f} s left",
                    file=sys.stderr,
                )
    if rank == 0:
        out.write_text(json.dumps(rows))


def launch(asked: argparse.Namespace, sizes: Any, costs: Any) -> list[dict[str, Any]]:
    """What the ranks measured, each a process forked from this one after one import."""
    for name in (
        "torch.distributed.fsdp",
        "transformers.trainer",
        "dflop.integrations.encoder",
        "dflop.integrations.padding",
    ):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        run_forked(NUM_RANKS, lambda rank: work(rank, asked, sizes, costs, out, folder))
        return json.loads(out.read_text())


def simulated(count: int = 4096, num_ranks: int = 64) -> dict[str, float]:
    """Time of an epoch over the work bound, by arm, where ranks meet once a step: costs alone."""
    sizes = draw_sizes(count, SEED)
    # A tile costs as many tokens as its patches, in a model of equal widths.
    costs = [((tiles * 65), llm_tokens((tiles, words))) for tiles, words in sizes]
    total = [encoder + llm for encoder, llm in costs]
    found = {}
    for arm in (*OTHERS, "line"):
        ranks = batches_of(arm, sizes, costs, num_ranks, "step")
        steps = [[sum(total[i] for i in batch) for batch in column] for column in zip(*ranks, strict=True)]
        found[arm] = sum(map(max, steps)) / (sum(total) / num_ranks)
    return found


def summarise(
    rows: list[dict[str, Any]], chosen: dict[str, str], others: tuple[str, ...], ours: tuple[str, ...]
) -> dict[str, Any]:
    """The numbers and the table; `chosen` names the arm of each layout whose ratio stands above the table."""
    result: dict[str, Any] = {"arms": []}
    gap = 0.0
    for layout in chosen:
        seconds = {
            arm: [row["seconds"] for row in rows if (row["layout"], row["arm"]) == (layout, arm)]
            for arm in (*others, *ours)
        }
        best = min(others, key=lambda arm: statistics.fmean(map(math.log, seconds[arm])))
        for arm in (*others, *ours):
            ratio, low, high = ratio_of(seconds[best], seconds[arm])
            result["arms"].append(
                {
                    "layout": layout,
                    "arm": arm,
                    "seconds": statistics.geometric_mean(seconds[arm]),
                    "best_over_it": ratio,
                    "low": low,
                    "high": high,
                    "rounds": seconds[arm],
                }
            )
            if arm == chosen[layout]:
                result[f"{layout}_best_other"] = best
                result[f"{layout}_ratio"], result[f"{layout}_ratio_low"] = ratio, low
        arrival = next(row["losses"] for row in rows if (row["layout"], row["arm"]) == (layout, "arrival"))
        for row in rows:
            if row["layout"] == layout and row["arm"] in ours:
                pairs = zip(arrival, row["losses"], strict=True)
                gap = max(gap, max(abs(a - b) for a, b in pairs))
    return {**result, "loss_difference_max": gap}


def main() -> int:
    """Measures, writes and prints.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=1, help="rounds before those that are measured")
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=["ddp", "fsdp2"])
    parser.add_argument("--padded", action="store_true", help="rows that are padded, under DDP")
    asked = parser.parse_args()
    if asked.rounds < 2 or not set(asked.layouts) <= set(CHOSEN):
        parser.error(f"at least 2 rounds, and layouts of {', '.join(CHOSEN)}")
    if asked.padded:
        others, ours, chosen = OF_PADDED, OURS_OF_PADDED, CHOSEN_OF_PADDED
    else:
        others, ours, chosen = OTHERS, OURS, {layout: CHOSEN[layout] for layout in asked.layouts}
    asked.arms, asked.layouts = (*others, *ours), list(chosen)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    sizes = draw_sizes(asked.samples, SEED)
    load = os.getloadavg()[0]
    costs = measure_costs(sizes)
    rows = launch(asked, sizes, costs)
    epochs = simulated()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    result = {
        "bench": "adopt",
        "commit": commit.strip() or None,
        "hardware": {
            "cores": os.cpu_count(),
            "load": load,
            "system": platform.platform(),
            "torch": torch.__version__,
        },
        "rounds": asked.rounds,
        "samples": asked.samples,
        "encoder_share": sum(e for e, _ in costs) / sum(e + llm for e, llm in costs),
        "is_padded": asked.padded,
        "padding_ratio": next((row["padding_ratio"] for row in rows if "padding_ratio" in row), None),
        **summarise(rows, chosen, others, ours),
        "simulated_ratio": min(epochs[arm] for arm in OTHERS) / epochs["line"],
        "simulated_over_bound": epochs,
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'layout':<8}{'arm':<12}{'s an epoch':>12}{'best of the others over it (95 %)':>40}")
    for row in result["arms"]:
        interval = f"{row['best_over_it']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        print(f"{row['layout']:<8}{row['arm']:<12}{row['seconds']:>12.2f}{interval:>40}")
    print(
        f"losses differ by {result['loss_difference_max']:.2e} at most; "
        f"encoder {result['encoder_share']:.0%} of the work"
    )
    over = ", ".join(f"{arm} {value:.3f}" for arm, value in epochs.items())
    print(f"simulated, 64 ranks, over the work bound: {over}")
    print(f"wrote {asked.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
