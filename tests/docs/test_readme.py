"""The README's blocks run as they stand."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

from test_integrations_page import BEFORE

import warm

ROOT = Path(__file__).parent.parent.parent
AFTER = """
assert asked == ["data_profile.parquet"], asked
assert sorted(i for bucket in loader.batch_sampler for i in bucket) == list(range(len(data)))
assert [model(**model_inputs(batch)).logits.shape[0] > 0 for batch in loader]
distributed.destroy_process_group()
"""


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


def test_every_python_block_runs() -> None:
    found = blocks("python")
    assert found
    for block in found:
        # The lines for a trainer stand for themselves only where there is a dataset and a model.
        is_of_trainer = "balance_encoder(model)" in block
        warm.run(["-c", BEFORE + block + AFTER if is_of_trainer else block], check=True, cwd=ROOT)


def test_the_numbers_of_the_first_screen_stand_in_the_table_of_all_numbers() -> None:
    """A gain that is measured anew, and changed in one of the two alone, is noticed."""
    table = re.search(r"^\| layout \| by .*?\n\n", (ROOT / "README.md").read_text(), flags=re.S | re.M)
    assert table
    all_numbers = (ROOT / "results/README.md").read_text()
    named = re.findall(r"\d\.\d+(?=x| to |\))|\d,\d{3}(?= ms)", table[0])
    assert len(named) > 12
    assert not [number for number in named if number not in all_numbers]


def raw(name: str) -> dict:
    """The raw data of a benchmark."""
    return json.loads((ROOT / f"results/data/2026-11_{name}.json").read_text())


def with_interval(ratio: float, low: float, high: float) -> str:
    return f"{ratio:.3f}x ({low:.3f} to {high:.3f})"


def test_the_numbers_of_the_first_screen_are_those_of_the_raw_data() -> None:
    """A run that replaces the raw data of an earlier one changes the README too."""
    table = re.search(r"^\| layout \| by .*?\n\n", (ROOT / "README.md").read_text(), flags=re.S | re.M)
    assert table
    shown = table[0].replace("*", "")
    adopt = {
        (arm["layout"], arm["arm"]): with_interval(arm["best_over_it"], arm["low"], arm["high"])
        for arm in raw("cpu2_adopt")["arms"]
    }
    for layout, arm in (("ddp", "line"), ("fsdp2", "line"), ("fsdp2", "both")):
        assert adopt[layout, arm] in shown
    # A loss stands without its interval.
    assert f"{adopt['ddp', 'both'].split(' ')[0]}, a loss" in shown
    padded = {arm["arm"]: arm for arm in raw("cpu2_adopt_padded")["arms"]}
    for arm in ("line", "line-padded", "line-unpadded"):
        assert with_interval(*(padded[arm][name] for name in ("best_over_it", "low", "high"))) in shown
    for case in raw("cpu2_train")["cases"].values():
        assert with_interval(case["ratio"], case["ratio_low"], case["ratio_high"]) in shown
    for run in ("latest", "later"):
        best = raw(f"cpu2_demo_{run}")["best"]
        assert with_interval(best["ratio"], best["ratio_low"], best["ratio_high"]) in shown
    plan = raw("h100_plan_64")
    others = {name: row["step_ms"] for name, row in plan["baselines"].items() if row["is_of_others"]}
    best_name = min(others, key=lambda name: others[name])
    step_ms, best_ms = plan["plans"][0]["step_ms"], others[best_name]
    assert best_name == "fsdp-tokens"
    expected = f"{step_ms:,.0f} ms a step; token-packed FSDP, the best of the others, {best_ms:,.0f} ms: "
    assert (
        expected + f"{best_ms / step_ms:.2f}x; Megatron, balanced, {others['megatron-balanced']:,.0f} ms"
        in shown
    )
    medians, worst = gains_of_pipelines()
    assert (
        f"{min(medians):.2f} to {max(medians):.2f}x in the median, {worst:.2f}x in the worst of ten" in shown
    )


def gains_of_pipelines() -> tuple[list[float], float]:
    """The best baseline's time over ours: the median of ten seeds in each case, and the worst of all."""
    cases: dict[tuple, list[tuple[bool, float, list[int]]]] = {}
    for row in raw("makespan"):
        spans = [seed["makespan_ns"] for seed in row["seeds"]]
        if None not in spans:
            key = (row["num_ranks"], row["layout"], row["num_microbatches"])
            cases.setdefault(key, []).append((row["is_baseline"], statistics.median(spans), spans))
    medians, worst = [], []
    for rows in cases.values():
        _, _, baseline = min(row for row in rows if row[0])
        _, _, ours = min(row for row in rows if not row[0])
        ratios = [other / mine for other, mine in zip(baseline, ours, strict=True)]
        medians.append(statistics.median(ratios))
        worst.append(min(ratios))
    return medians, min(worst)


def test_the_short_table_has_three_layouts_and_numbers_of_the_long_one() -> None:
    """Directly below the figure; what is measured anew changes both."""
    readme = (ROOT / "README.md").read_text()
    short = re.search(r"docs/figure\.svg\)\n\n\| layout \| gain .*\n\|[-|]+\|\n((?:\|.*\n)+)", readme)
    long = re.search(r"^\| layout \| by .*?\n\n", readme, flags=re.S | re.M)
    assert short
    assert long
    assert len(short[1].splitlines()) == 3
    numbers = re.findall(r"\d\.\d+x(?: \([\d.]+ to [\d.]+\))?", short[1].replace("*", ""))
    assert len(numbers) == 5
    assert not [number for number in numbers if number not in long[0].replace("*", "")]
    assert "a loss" in short[1]


def test_importing_and_balancing_needs_no_torch() -> None:
    code = (
        "import sys, dflop\n"
        "answer = dflop.balance([3, 0, 7, 2], [4, 5, 1, 2], 2)\n"
        "assert sorted(set(answer.assignment)) == [0, 1], answer\n"
        "sampler = dflop.BalancedBatchSampler([(3, 4), (0, 5), (7, 1), (2, 2)], batch_size=2)\n"
        "assert sorted(i for batch in sampler for i in batch) == [0, 1, 2, 3]\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)


def test_the_two_commands_are_make_targets() -> None:
    commands = re.findall(r"^\s*(make [a-z]+)", "\n".join(blocks("console") + blocks("sh")), flags=re.M)
    assert {"make demo", "make test"} <= set(commands)
    makefile = (ROOT / "Makefile").read_text()
    for command in commands:
        assert re.search(rf"^{command.split()[1]}:", makefile, flags=re.M), command
