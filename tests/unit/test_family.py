"""A function of Python as a shape rule: the example of CONTRIBUTING.md, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

import dflop
from dflop._native import Dataset, run_cli
from dflop.data.family import CallableFamily, describe, load

ROOT = Path(__file__).parent.parent.parent
NUM_SAMPLES = 24


def example() -> str:
    """The module that CONTRIBUTING.md shows."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.S)[0]


def make_demo(folder: Path, module: str, source: str) -> SimpleNamespace:
    """The demo as a model of a family that dflop does not know, with a rule beside its configuration."""
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", str(NUM_SAMPLES)]) == (0, None)
    config = folder / "dflop.yaml"
    config.write_text(config.read_text().replace("model:\n", f"model:\n  family: {module}:shape\n", 1))
    assert f"family: {module}:shape" in config.read_text()
    model = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps({**model, "model_type": "clip_tiles"}))
    (folder / f"{module}.py").write_text(source)
    return SimpleNamespace(folder=folder, config=str(config), profile=str(folder / "shapes_profile"))


def dflop_profile(demo: SimpleNamespace) -> subprocess.CompletedProcess[str]:
    """`dflop profile data` in a process of its own, from a directory that is not the configuration's."""
    command = [sys.executable, "-m", "dflop", "profile", "data", "-c", demo.config, "--out", demo.profile]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT / "docs"
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> SimpleNamespace:
    """The demo with the example's rule, profiled."""
    made = make_demo(tmp_path_factory.mktemp("family") / "demo", "clip_tiles", example())
    done = dflop_profile(made)
    assert done.returncode == 0, done.stderr
    return made


def test_the_example_profiles_and_encodes(demo):
    """577 encoder tokens and 576 features a tile, by `model.family` and by the function itself."""
    by_name = Dataset(demo.config, demo.profile)
    function = load("clip_tiles:shape", demo.folder).function
    by_function = Dataset(demo.config, demo.profile, family=function)
    kinds = Counter()
    for sample in range(NUM_SAMPLES):
        encoded = by_name.encode(sample)
        tiles = sum(medium.num_tiles for medium in encoded.media)
        assert by_name.shape(sample)[0] == 577 * tiles
        assert sum(encoded.feature_mask) == 576 * tiles
        for medium in encoded.media:
            assert medium.num_tiles == (len(medium.frame_indices) or 1)
            assert medium.kind == "video" or medium.frame_indices == []
        assert by_function.encode(sample).input_ids == encoded.input_ids
        kinds[by_name.kind(sample)] += 1
    assert kinds["image"] > 0
    assert kinds["video"] > 0


def test_without_a_rule_the_family_is_unknown(demo, capfd):
    """The same model, with the line of the rule taken out."""
    config = demo.folder / "plain.yaml"
    config.write_text(Path(demo.config).read_text().replace("  family: clip_tiles:shape\n", ""))
    assert run_cli(["dflop", "profile", "data", "-c", str(config)]) == (2, None)
    assert "`model_type` is `clip_tiles`, known are" in capfd.readouterr().err
    with pytest.raises(dflop.ProfileError, match="`model_type` is `clip_tiles`"):
        Dataset(str(config), demo.profile)


def test_an_edited_rule_makes_the_profile_stale(demo):
    """The profile holds which function it was made with."""
    function = load("clip_tiles:shape", demo.folder)
    edited = CallableFamily(function.name, "0" * 64, function.marks, function.function)
    with pytest.raises(dflop.ProfileError, match="family_version"):
        Dataset(demo.config, demo.profile, family=edited)
    other = CallableFamily("other:shape", function.version, function.marks, function.function)
    with pytest.raises(dflop.ProfileError, match="another `family`: clip_tiles:shape, now other:shape"):
        Dataset(demo.config, demo.profile, family=other)


BODIES = {
    "raise ValueError('too thin')": "`BAD:shape` raised ValueError: too thin",
    "return {'segments': [(1, 577)]}": "`BAD:shape` gave something else than a shape: '`pieces` is missing'",
    "return {'segments': [(1, 577)], 'pieces': [-1]}": "`BAD:shape` gave something else than a shape",
    "return {'segments': [(1, 577)], 'pieces': [0]}": "a number of `pieces` must be at least 1",
    "return {'segments': [], 'pieces': [1]}": "`segments` must hold at least one",
    "return {'segments': [(1, 577)], 'pieces': [1], 'frame_indices': [0] * (kind == 'image')}": (
        "`frame_indices` must name the frames of a video"
    ),
}


@pytest.mark.parametrize("body", BODIES)
def test_what_the_function_does_wrong_is_said(tmp_path, body, capfd):
    """Each bad sample names the function, the medium and what is wrong."""
    # A name of its own: Python imports a module once.
    module = f"bad_rule_{list(BODIES).index(body)}"
    marks = {kind: ("<image>", "<image>") for kind in ("image", "video")}
    source = f"def shape(kind, **rest):\n    {body}\n\nshape.marks = {marks}\n"
    bad = make_demo(tmp_path / "demo", module, source)
    # In this process: an import of torch for each would take longer than the test.
    arguments = ["dflop", "profile", "data", "-c", bad.config, "--out", bad.profile]
    status, request = run_cli(arguments)
    assert status == 0
    assert request is not None
    asked = request
    assert asked["verb"] == "profile_data"
    family = load(asked["arguments"]["family"], asked["arguments"]["directory"])
    assert run_cli(arguments, family) == (2, None)
    error = capfd.readouterr().err
    assert BODIES[body].replace("BAD", module) in error, error
    assert "no python shape for" in error


def test_what_cannot_be_imported_is_said(tmp_path):
    with pytest.raises(
        dflop.ProfileError, match="`nowhere:shape`, it cannot be imported: ModuleNotFoundError"
    ):
        load("nowhere:shape", tmp_path)
    (tmp_path / "half_a_rule.py").write_text("def shape(**rest):\n    return {}\nnumber = 3\n")
    with pytest.raises(dflop.ProfileError, match="it cannot be imported: AttributeError"):
        load("half_a_rule:form", tmp_path)
    with pytest.raises(dflop.ProfileError, match="`half_a_rule:shape` must have `marks`"):
        load("half_a_rule:shape", tmp_path)
    with pytest.raises(dflop.ProfileError, match="is of type `int`, must be a function"):
        load("half_a_rule:number", tmp_path)


def test_marks_are_checked():
    def shape(**_):
        return {}

    for marks in [{"picture": ("a", "b")}, {"image": "a"}, {"image": ("a", "")}, {}]:
        shape.marks = marks
        with pytest.raises(dflop.ProfileError, match="must have `marks`"):
            describe(shape)
    shape.marks = {"image": ["a", "b"]}
    described = describe(shape)
    assert dict(described.marks) == {"image": ("a", "b")}
    assert described.name == f"{__name__}:test_marks_are_checked.<locals>.shape"
    assert describe(described) is described


def test_an_object_serves_as_well_as_a_dict(demo):
    """Attributes of what the function gives, and a callable object as the function."""

    class Rule:
        marks = {"image": ("<image>", "<image>"), "video": ("<video>", "<video>")}

        def __call__(self, kind, num_frames, **rest):
            count = min(num_frames, rest["max_frames"] or 8) if kind == "video" else 1
            return SimpleNamespace(
                segments=[(count, 577)],
                pieces=[576] * count,
                frame_indices=list(range(count)) if kind == "video" else None,
                num_tiles=count,
            )

    arguments = ["dflop", "profile", "data", "-c", demo.config, "--out", str(demo.folder / "object_profile")]
    assert run_cli(arguments, Rule()) == (0, None)
