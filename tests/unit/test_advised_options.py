"""What `dflop advise` prints for a framework is taken by what reads it there."""

from __future__ import annotations

import ast
import json

import pytest
import yaml

from dflop._native import run_cli
from dflop.integrations.yaml_options import checked

TRAINERS = ("swift", "llamafactory", "axolotl", "nemo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A demo with its data profile."""
    folder = tmp_path_factory.mktemp("advised") / "demo"
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", "96"]) == (0, None)
    assert run_cli(["dflop", "profile", "data", "--config", str(folder / "dflop.yaml")]) == (0, None)
    return folder


def advised(folder, capfd, *further):
    """The answer, of samples whose encoder has half of the work."""
    command = [
        "advise",
        str(folder / "data_profile.parquet"),
        "--json",
        "--batch-size",
        "4",
        "--num-ranks",
        "4",
        *further,
    ]
    capfd.readouterr()
    assert run_cli(["dflop", *command]) == (0, None)
    return json.loads(capfd.readouterr().out)


def options_of(trainer, code):
    """What the lines give to `checked`, and the keys beside."""
    if trainer == "swift":
        (call,) = [line for line in code if line.startswith("register(")]
        keywords = ast.parse(call, mode="eval").body.keywords
        return {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords}, {}
    keys = yaml.safe_load("\n".join(line for line in code if not line.startswith("torchrun"))) or {}
    return keys.pop("dflop", None), keys


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_what_is_printed_is_taken(trainer, accumulation, folder, capfd, tmp_path):
    """As advised: which lines, and where ranks meet in a microbatch."""
    costs = tmp_path / "costs.csv"
    with_encoder = ["--model", "llava-onevision-qwen2-0.5b", "--hardware", "h100", "--meets", "step"]
    seen = set()
    for further in (with_encoder, ["--costs", str(costs)]):
        costs.write_text("encoder_ns,llm_ns\n" + "".join(f"0,{100 + 37 * i % 91}\n" for i in range(96)))
        found = advised(folder, capfd, "--trainer", trainer, "--accumulation", str(accumulation), *further)
        assert found["is_padded"]
        if found["advice"] == "nothing":
            assert found["code"] == []
            continue
        options, beside = options_of(trainer, found["code"])
        taken = checked(options)
        is_both = found["advice"] == "both"
        seen.add((is_both, found["removes_padding"]))
        expected = {"balance_encoder": is_both, "remove_padding": found["removes_padding"]}
        expected = {name: True for name, is_asked in expected.items() if is_asked}
        # The recipe of Automodel decides it by the strategy of its ranks.
        if is_both and accumulation > 1 and trainer != "nemo":
            expected["meets"] = "phase"
        assert taken == expected
        if trainer == "llamafactory":
            assert beside == ({"use_reentrant_gc": False} if is_both else {})
        elif trainer == "axolotl":
            assert beside == {"plugins": ["dflop.integrations.axolotl.BalancePlugin"]}
        elif trainer == "nemo":
            assert beside == {"recipe": "dflop.integrations.nemo.recipe.BalancedRecipeForVLM"}
    assert any(removes for _, removes in seen), seen
