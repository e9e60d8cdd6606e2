"""Packs of even work in a task encoder of Megatron-Energon; here without its shards, on a buffer of samples."""

from __future__ import annotations

import random

from megatron.energon import DefaultTaskEncoder

from dflop.integrations.energon import BalancedPacking


class TaskEncoder(BalancedPacking, DefaultTaskEncoder):
    """`get_train_dataset(..., task_encoder=TaskEncoder(), packing_buffer_size=256)` calls it."""

    work_per_pack = 20_000.0  # the same on all ranks: their packs take the same time
    tokens_max = 8_192

    def work(self, sample):
        return sample["encoder"] + sample["llm"]

    def num_tokens(self, sample):
        return sample["tokens"]

    def pack_selected_samples(self, samples):
        return samples  # yours: the tensors of the samples, one after the other


def main() -> None:
    draw = random.Random(0)
    encoder = TaskEncoder()
    for rank in range(2):
        buffer = []
        for _ in range(128):
            tokens = 50 + int(draw.lognormvariate(5, 1))
            buffer.append(
                {
                    "tokens": min(tokens, 8_000),
                    "llm": tokens * 3.0,
                    "encoder": draw.choice([0, 0, 500.0, 4_000.0]),
                }
            )
        packs = [encoder.pack_selected_samples(pack) for pack in encoder.select_samples_to_pack(buffer)]
        work = [round(sum(map(encoder.work, pack))) for pack in packs]
        print(f"rank {rank}: {len(packs)} packs, work {min(work)} to {max(work)}")


if __name__ == "__main__":
    main()
