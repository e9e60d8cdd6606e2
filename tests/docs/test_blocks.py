"""No block of code stands on a page without something that runs it.

A block names its language; `text` is a picture or an output. For each other block `RUN_BY` names what runs it. The pages
of `WALKED` are run here as a reader would, after the lines that the page takes for granted; those of the guide by
`test_guide.py`. Walking takes a minute or two, so `make site` does it, and `make test` only looks at the table.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from walking import walk

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "crates/README.md", "results/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

HERE = "tests/docs/test_blocks.py"
# It walks each `sh` and `python` of the pages of the guide.
GUIDE = "tests/docs/test_guide.py"
# What runs each block of a page, in their order; blocks of `text` are not counted. `make` stands for the two commands, which
# `.ci/run` runs.
RUN_BY = {
    "README.md": ["make", "tests/docs/test_readme.py", "tests/docs/test_readme.py", *[HERE] * 4],
    "CONTRIBUTING.md": ["tests/unit/test_family.py"],
    "docs/index.md": ["make"],
    "docs/analytic.md": [HERE] * 2,
    "docs/cost_model.md": [HERE],
    "docs/data.md": [
        HERE,
        "tests/unit/test_processor_rule.py",
        "tests/unit/test_processor_rule.py",
        HERE,
        HERE,
    ],
    "docs/families.md": ["tests/unit/test_voxtral.py"],
    "docs/frameworks.md": [
        *["tests/frameworks/test_swift.py"] * 2,
        *["tests/frameworks/test_llamafactory.py"] * 2,
        "tests/frameworks/test_axolotl.py",
        "tests/frameworks/test_nemo.py",
        "tests/frameworks/test_verl.py",
        "tests/frameworks/test_easyr1.py",
        "tests/frameworks/test_veomni.py",
        "tests/frameworks/test_lmms.py",
        "tests/dist/test_loaded.py",
        "tests/unit/test_row_costs.py",
    ],
    "docs/integrations.md": ["tests/docs/test_integrations_page.py"] * 8,
    "docs/second_line.md": ["tests/docs/test_integrations_page.py"],
    "docs/third_line.md": ["tests/docs/test_integrations_page.py"],
    "docs/planner.md": [HERE],
    "docs/rehearsal.md": [HERE] * 2,
    "docs/sampler.md": ["tests/docs/test_sampler_page.py"] * 2,
    "docs/simulator.md": ["crates/sim/tests/document.rs"] * 2 + ["crates/sim/src/lib.rs"],
    "docs/weights.md": [HERE] * 2,
    "docs/guide/dataset.md": [GUIDE, GUIDE, HERE, HERE],
    # The first one installs the wheel.
    "docs/guide/quick_start.md": ["tools/try_wheel.py", *[GUIDE] * 5],
}

A_DEMO = "dflop demo-data . --samples 96\n"
SHORT = "--budget-seconds 5 --recompute none"
# Estimated: what these pages show is not how long a step takes.
TRAIN = (
    "dflop profile data && dflop profile model --estimate --hardware h100 && dflop plan"
    " && dflop train --other-device --steps 1"
)
OTHERS = (
    "echo 'data: {mixture: data/mixture.yaml}' >> dflop.yaml; echo 'cluster: {num_ranks: 2}' >> dflop.yaml"
)
# How each page is walked: a number is a block of it (text and `make` are not counted), a string is what the page takes
# for granted, in bash. A block of YAML becomes `dflop.yaml`.
WALKED: dict[str, list[int | str]] = {
    "README.md": [
        A_DEMO,
        "mkdir path; ln -s ../data path/to; ln -s ../model data/llava-onevision",
        2,
        3,
        4,
        5,
    ],
    "docs/analytic.md": [A_DEMO, "dflop profile data", 0, 1],
    "docs/cost_model.md": [A_DEMO, "dflop profile data", 0],
    "docs/data.md": [
        A_DEMO,
        0,
        4,
        3,
        "echo 'data: {mixture: data/mixture.yaml}' >> dflop.yaml",
        "dflop profile data",
    ],
    "docs/guide/dataset.md": [
        A_DEMO,
        "cp -r data/media/* .; cp data/videos.json chats.json; rm dflop.yaml",
        'python -c \'import json, pyarrow as pa, pyarrow.parquet as pq; rows = json.load(open("data/videos.json"));'
        ' turns = [[turn["value"] for turn in row["conversations"][:2]] for row in rows];'
        ' pq.write_table(pa.table({"clip": [row["video"] for row in rows], "prompt": [t[0] for t in turns],'
        ' "answer": [t[1] for t in turns]}), "videos.parquet")\'',
        3,
        "mv dflop.yaml mixture.yaml",
        2,
        "printf 'model: {dir: model}\ndata: {mixture: mixture.yaml}\n' >> dflop.yaml",
        "dflop profile data",
    ],
    "docs/planner.md": [
        A_DEMO,
        "cp data/videos.json my_conversations.json; mv data/media/* .; rm dflop.yaml",
        0,
        "dflop plan",
    ],
    "docs/rehearsal.md": [
        A_DEMO,
        "dflop profile data",
        "dflop profile model --estimate --hardware h100",
        0,
        1,
    ],
    "docs/weights.md": [
        A_DEMO,
        TRAIN,
        "dflop export run --out llava-onevision",
        0,
        OTHERS,
        f"{TRAIN} --out align\ndflop export align --out aligned",
        1,
        OTHERS,
        f"{TRAIN} --out full",
    ],
}
# The reader's own numbers, as large as this machine.
INSTEAD = {
    "global_batch_size: 256, steps: 1000": "global_batch_size: 16, num_microbatches: 4, steps: 2, init: random",
    "num_ranks: 8, device: cuda": "num_ranks: 2",
    " steps: 1000}": " steps: 1, global_batch_size: 16, num_microbatches: 4}",
    " steps: 5000}": " steps: 1, global_batch_size: 16, num_microbatches: 4}",
    "profile model &&": f"profile model {SHORT} &&",
    "--tensor-parallel 2": f"--tensor-parallel 2 {SHORT}",
    "--steps 20": "--steps 2",
}


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each block of a page; code that is only indented has the language ``."""
    text = page.read_text()
    found = re.findall(r"^```([^\n]*)\n(.*?)^```", text, flags=re.S | re.M)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return found + [
        ("", line) for line in re.findall(r"^ {4}(?:dflop|import|model:|torchrun) .*$", rest, flags=re.M)
    ]


def counted(page: str) -> list[tuple[str, str]]:
    """The blocks of a page that are not `text`."""
    return [(language, text) for language, text in blocks(ROOT / page) if language != "text"]


def test_each_block_is_run_somewhere() -> None:
    for page in (path.relative_to(ROOT).as_posix() for path in PAGES):
        found = counted(page)
        if page.startswith("docs/guide/") and page not in RUN_BY:
            assert {language for language, _ in found} <= {"sh", "python"}, page
        else:
            assert len(RUN_BY.get(page, [])) == len(found), page


@pytest.mark.parametrize("page", sorted(RUN_BY))
def test_what_runs_a_block_names_its_page(page: str) -> None:
    steps = [step for step in WALKED.get(page, []) if isinstance(step, int)]
    walked = [walkable(page)[step] for step in steps]
    for by, block in zip(RUN_BY[page], counted(page), strict=True):
        if by == "make":
            assert {"make test", "make demo"} <= set((ROOT / ".ci/run").read_text().splitlines())
        elif by == HERE:
            assert block in walked, block
        elif by == GUIDE:
            assert block[0] in {"sh", "python"}, block
        else:
            assert Path(page).name in (ROOT / by).read_text()


def walkable(page: str) -> list[tuple[str, str]]:
    """The blocks of a page that a reader runs or writes down."""
    return [
        (language, text)
        for language, text in blocks(ROOT / page)
        if language != "text" and "make demo" not in text
    ]


@pytest.mark.site
@pytest.mark.parametrize("page", sorted(WALKED))
def test_a_page_works_as_written(page: str, tmp_path: Path) -> None:
    example = re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.S | re.M)[
        0
    ]
    (tmp_path / "my_rules.py").write_text(example)
    steps = []
    for step in WALKED[page]:
        language, text = ("sh", step) if isinstance(step, str) else walkable(page)[step]
        for own, ours in INSTEAD.items():
            text = text.replace(own, ours)
        steps.append((language, text))
    walk(steps, tmp_path)
