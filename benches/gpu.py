"""Profiles of published models on this GPU, and the error of the cost and memory models on them.

Usage: python benches/gpu.py OUT_DIR [--models NAME,...] [--profile-seconds 60] [--measure-seconds 40]

Each model of the catalogue (`dflop models`) is measured in bfloat16 from its configuration, with
recomputation and one rank's part under tensor parallelism, into OUT_DIR/NAME.json, a model profile as `dflop
plan` reads it. Where the family cuts pictures into tiles, `benches/cost.py` then holds whole stages of it, of
8 layers of the LLM backbone, against the predictions: OUT_DIR/NAME.error.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Encoder tokens of a medium, the most of a microbatch; whether the encoder reads tiles of one size.
ENCODERS = {
    "llava-onevision-qwen2-7b": (729, 16 * 729, True),
    "internvl3-8b-hf": (1025, 16 * 1025, True),
    "qwen2.5-vl-7b": (8_192, 16_384, False),
}
LLM = {"max_llm_tokens": 16_384, "max_segment_tokens": 8_192, "max_label_tokens": 2_048}
DEGREES = [1, 2, 4]
# As `dflop` sets it for what it starts on a GPU.
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def measure(name: str, out: Path, profile_s: float, error_s: float) -> int:
    """One model: its profile, and the errors of what is predicted by it. Gives the exit status."""
    from dflop.profiling.launch import launch

    segment, most, has_tiles = ENCODERS[name]
    profile = out / f"{name}.json"
    with tempfile.TemporaryDirectory() as folder:
        # The profile has the folder's name.
        model = Path(folder) / name
        subprocess.run([sys.executable, "-m", "dflop", "models", "--write", name, str(model)], check=True)
        start = time.monotonic()
        status = launch(
            {
                "model_dir": str(model),
                "out": str(profile),
                "device": "cuda",
                "dtype": "bfloat16",
                "environment": ENVIRONMENT,
                "budget_s": profile_s,
                "recompute": ["none", "selective", "full"],
                "tensor_parallel_degrees": DEGREES,
                "max_encoder_tokens": most,
                "max_encoder_segment_tokens": segment,
                **LLM,
            }
        )
        print(f"{name}: measured in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        if status == 0 and has_tiles and error_s > 0:
            command = [
                sys.executable,
                str(Path(__file__).with_name("cost.py")),
                str(out / f"{name}.error.json"),
            ]
            command += ["--model", str(model), "--profile", str(profile), "--device", "cuda"]
            command += ["--dtype", "bfloat16", "--measure-seconds", str(error_s)]
            status = subprocess.run(command, env={**ENVIRONMENT, **os.environ}).returncode
        return status


def main() -> int:
    """Measures each model.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default=",".join(ENCODERS))
    parser.add_argument("--profile-seconds", type=float, default=60.0)
    parser.add_argument("--measure-seconds", type=float, default=40.0, help="0: no errors")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    # One that fails, for want of memory, say, leaves the others their turn.
    names = asked.models.split(",")
    statuses = [measure(name, asked.out, asked.profile_seconds, asked.measure_seconds) for name in names]
    return max(statuses, key=abs)


if __name__ == "__main__":
    sys.exit(main())
