"""Layers of two kinds by their attention: which run of them stands for all, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from tiny_families import TINY, tiny, write_config
from transformers import Gemma3TextConfig

from dflop import ProfileError
from dflop.models import load_adapter
from dflop.models.layer_kinds import FULL, SLIDING, run_like_all
from dflop.profiling.cases import attention_case
from dflop.profiling.families import load_pieces
from dflop.profiling.pieces import PieceSettings

SETTINGS = PieceSettings(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("num_layers", "run", "share"),
    # Gemma 3 4B: 5 of 34 layers see all tokens, of the first seven one. 12B: 8 of 48. 27B: 10 of 62.
    [(34, 7, 5 / 34), (48, 6, 1 / 6), (62, 6, 10 / 62), (6, 6, 1 / 6)],
)
def test_a_run_has_nearly_the_share_of_all(num_layers, run, share):
    text = Gemma3TextConfig(num_hidden_layers=num_layers)
    assert text.layer_types.count(FULL) == pytest.approx(share * num_layers)
    assert run_like_all(text) == run
    assert text.layer_types[:run].count(FULL) / run == pytest.approx(share, abs=0.006)


def test_runs_of_other_patterns():
    def run_of(kinds):
        layer_types = [FULL if kind == "f" else SLIDING for kind in kinds]
        return run_like_all(
            SimpleNamespace(model_type="gemma3_text", layer_types=layer_types, num_hidden_layers=len(kinds))
        )

    assert run_of("ffff") == run_of("ssss") == 1
    assert run_of("fsfsfs") == 2
    # Nothing short has both kinds: all layers.
    assert run_of("s" * 11 + "f") == 12


def test_attention_alone_is_that_of_the_layers_that_are_run(tmp_path):
    """Times of a run are divided by its layers, as those of the layers are."""
    piece = tiny(tmp_path, "gemma3")[0]["llm_layer"]
    kind = piece.attention(SETTINGS)
    assert piece.num_layers == 3
    assert kind.windows == (5, 5, None)
    assert kind.picture_tokens == 16
    case = attention_case("attention", kind, 40, SETTINGS)
    # 32 segments at most, in three layers.
    assert case.copies == 32 * 3
    outputs = case.forward()
    assert [out.shape for out in outputs] == [(1, 32 * 40, 4, 12)] * 3
    case.backward(outputs)
    case.reset()


TEXT = TINY["gemma3"]["text_config"]
REFUSED = [
    (
        {
            "layer_types": [SLIDING, "chunked_attention", FULL],
            # transformers 5.17 asks for them of each kind.
            "rope_parameters": dict.fromkeys((SLIDING, "chunked_attention", FULL), {"rope_type": "default"}),
            "rope_scaling": None,
        },
        "`text_config.layer_types` is ",
    ),
    ({"layer_types": [SLIDING] * 3}, "and the latter for one at least"),
    ({"sliding_window": None}, "`text_config.sliding_window` is None, must be a number of tokens"),
    ({"attn_logit_softcapping": 50.0}, "`text_config.attn_logit_softcapping` is 50.0, must be null"),
    ({"final_logit_softcapping": 30.0}, "`text_config.final_logit_softcapping` is 30.0, must be null"),
    (
        {"use_bidirectional_attention": True},
        "`text_config.use_bidirectional_attention` is True, must be false",
    ),
    ({"attention_dropout": 0.1}, "`text_config.attention_dropout` is 0.1, must be 0"),
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "`text_config.rope_parameters.full_attention.rope_type` is dynamic",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_not_done_is_refused_by_name(tmp_path, change, message):
    directory = write_config(tmp_path, "gemma3", {**TINY["gemma3"], "text_config": {**TEXT, **change}})
    with pytest.raises(ProfileError) as error:
        load_adapter(directory)
    assert message in str(error.value)


@pytest.mark.parametrize("load", [load_adapter, load_pieces])
def test_another_number_of_features_is_refused_by_name(tmp_path, load):
    directory = write_config(tmp_path, "gemma3", {**TINY["gemma3"], "mm_tokens_per_image": 9})
    with pytest.raises(ProfileError, match="`mm_tokens_per_image` is 9, must be the square of a number"):
        load(directory)
