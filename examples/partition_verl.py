"""verl's partitions of sequences, by the drop-in: `get_seqlen_balanced_partitions`."""

from __future__ import annotations

import random

from dflop.integrations.verl import get_seqlen_balanced_partitions


def main() -> None:
    draw = random.Random(0)
    lengths = [64 + int(draw.lognormvariate(6, 1)) for _ in range(64)]
    for equal_size in (True, False):
        parts = get_seqlen_balanced_partitions(lengths, k_partitions=8, equal_size=equal_size)
        loads = [sum(lengths[i] for i in part) for part in parts]
        print(f"equal_size={equal_size}: heaviest over mean {max(loads) / (sum(loads) / 8):.4f}")


if __name__ == "__main__":
    main()
