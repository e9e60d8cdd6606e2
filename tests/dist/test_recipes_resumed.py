"""A run that goes on with another recipe, or with adapters of another scale: what cannot be is refused by name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.utils.tensorboard  # noqa: F401  (imported once, for all forked ranks)
from demo_run import lines, request, run_training, write_demo
from test_resume import config, tensors

from dflop.runtime.failure import RankError
from dflop.runtime.resume import MANIFEST, VERSION, find, step_dir

RECIPES = ("full", "projector", "frozen-encoder", "frozen-llm", "lora")
GOES_ON = {
    ("full", "projector"),
    ("full", "frozen-encoder"),
    ("full", "frozen-llm"),
    ("frozen-encoder", "projector"),
    ("frozen-llm", "projector"),
    *((recipe, recipe) for recipe in RECIPES),
}
"""What trains less than before has all that it needs. Adapters are others' names."""
ANEW = "write its weights with `dflop export` and begin a new run from them, as `model.dir`"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("demo"), 20, 8, 4)


def train(demo, out, directory, recipe, steps, resume="auto", **changes):
    """A run of two ranks."""
    asked = config(demo, every=2, recipe=recipe, **changes)
    return run_training(request(demo, out, steps=steps, config=asked, resume=resume), directory)


@pytest.fixture(scope="module")
def runs(demo, tmp_path_factory):
    """Two steps under each recipe, trained once."""
    folder = tmp_path_factory.mktemp("runs")
    trained = {}

    def of(recipe):
        if recipe not in trained:
            ranks = train(demo, folder / recipe, folder / f"ranks {recipe}", recipe, 2)
            assert [rank.result for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
            trained[recipe] = folder / recipe
        return trained[recipe]

    return of


@pytest.mark.some(5)
@pytest.mark.parametrize(("then", "now"), [(then, now) for then in RECIPES for now in RECIPES if then != now])
def test_a_recipe_goes_on_from_another_where_the_checkpoint_has_all_of_it(then, now, runs, demo, tmp_path):
    """The other cases would lack AdamW's moments, or whole parameters; what was trained stays as it was."""
    out = tmp_path / "run"
    shutil.copytree(runs(then), out)
    ranks = train(demo, out, tmp_path / "ranks", now, 3)
    path = step_dir(out, 2)
    then_and_now = f"`{path}` was trained with `train.recipe: {then}`, this run has `{now}`"
    if (then, now) not in GOES_ON:
        assert [rank.result for rank in ranks] == [1, 1]
        said = f"error: [all ranks] {then_and_now}: it lacks part of what would be trained\n"
        assert f"{said}hint: set `train.recipe: {then}`, or {ANEW}\n" in ranks[0].stderr
        assert ranks[1].stderr == ""
        assert len(lines(out / "metrics.jsonl")) == 2
        return
    assert [rank.result for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert f"note: {then_and_now}: the rest stays as it is there\n" in ranks[0].stderr
    before, after = tensors(path), tensors(step_dir(out, 3))
    moved = {name for name, value in before.items() if not torch.equal(after.get(name, value), value)}
    in_encoder = [name for name in moved if "vision_tower" in name]
    in_llm = [name for name in moved if "language_model" in name or "lm_head" in name]
    assert bool(in_encoder) == (now == "frozen-llm")
    assert bool(in_llm) == (now == "frozen-encoder")
    assert any("multi_modal_projector" in name for name in moved)


@pytest.mark.parametrize(("name", "now"), [("lora_alpha", 64.0), ("lora_rank", 8)])
def test_adapters_of_another_scale_are_refused(name, now, runs, demo, tmp_path):
    """Another alpha is another model on the same weights; another rank does not fit them."""
    out = tmp_path / "run"
    shutil.copytree(runs("lora"), out)
    then = config(demo)["train"][name]
    assert then != now
    ranks = train(demo, out, tmp_path / "ranks", "lora", 3, **{name: now})
    assert [rank.result for rank in ranks] == [1, 1]
    said = f"`{step_dir(out, 2)}` was trained with `train.{name}: {then}`, this run has {now}: its adapters would"
    assert f"error: [all ranks] {said}" in ranks[0].stderr
    assert f"hint: set `train.{name}: {then}`, or {ANEW}\n" in ranks[0].stderr
    assert "--force" not in ranks[0].stderr
    # Another recipe has no adapters to scale.
    shutil.rmtree(out)
    shutil.copytree(runs("full"), out)
    ranks = train(demo, out, tmp_path / "full", "full", 3, **{name: now})
    assert [rank.result for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]


@pytest.mark.parametrize("then", RECIPES)
@pytest.mark.parametrize("now", RECIPES)
def test_which_recipes_go_on_from_which(then, now, tmp_path):
    """All pairs, by what a checkpoint says of itself; one that does not say it is judged by its tensors."""
    path = step_dir(tmp_path, 2)
    path.mkdir(parents=True)

    def manifest(**model):
        about = {"place": {}, "made_from": {}, "guard": {}, "files": {}, **model}
        (path / MANIFEST).write_text(json.dumps({"format_version": VERSION, "step": 2, **about}))

    asked = {"recipe": now, "lora_rank": 16, "lora_alpha": 32.0}
    manifest()
    assert find("auto", tmp_path, {}, asked).step == 2
    manifest(model={**asked, "recipe": then})
    if (then, now) in GOES_ON:
        assert find("auto", tmp_path, {}, asked).step == 2
    else:
        with pytest.raises(RankError, match=f"`train.recipe: {then}`, this run has `{now}`") as refused:
            find("auto", tmp_path, {}, asked)
        assert refused.value.is_of_all
