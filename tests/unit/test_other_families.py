"""Families of transformers that dflop has no rules for: which of the lines they take, as docs/other_families.md says."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from other_families import TOKENS, build
from other_rows import OF_SOUNDS, padded, sample
from torch import nn
from trainer_settings import trainer_arguments

import dflop
from dflop.integrations import cost_of_parameters, costs_of_rows, measure_cost, remove_padding, token_loss
from dflop.integrations.backbone import backbone_of
from dflop.integrations.encoder_families import find_families
from dflop.integrations.trainer_loss import keep_the_mean

TOLERANCE = 1e-5
"""Relative, in float32: the order of sums differs, nothing else."""
BATCH_NORM = "yes; a warning: BatchNorm in the encoder"
POSITIONS = "yes; a warning: transformers numbers the images of a microbatch together"
YES, WARNED = "yes", "1, with a warning"
MASK = "padding stays, with a warning: it makes its own masks"
RIGHT = "yes, if padding is on the right"
WINDOW = "padding stays in rows beyond the sliding window"
REFUSED = "refused: {}"
INDEXED, NO_NAME = REFUSED.format("indexed attention"), REFUSED.format("attention has no name")
SHARED, NOT_SHARED = "yes", "refused"
TABLE = {
    # First line; encoder tokens of a feature; third line; second line.
    "aria": (YES, WARNED, RIGHT, NOT_SHARED),
    "cohere_compass": (YES, "4", YES, SHARED),
    "cosmos3_edge": (YES, "4", YES, NOT_SHARED),
    "cosmos3_omni": (YES, "4", YES, SHARED),
    "deepseek_vl": (YES, "1", YES, SHARED),
    "ernie4_5_vl_moe": (YES, "4", YES, SHARED),
    "exaone4_5": (YES, "4", YES, SHARED),
    "fun_asr_nano": (YES, "1", YES, NOT_SHARED),
    "gemma4_unified": (YES, "1", MASK, NOT_SHARED),
    "glm5_next": (YES, "4", INDEXED, NOT_SHARED),
    "glmasr": (YES, "4", YES, NOT_SHARED),
    "glmga": (YES, "4", YES, SHARED),
    "got_ocr2": (YES, "16", YES, NOT_SHARED),
    "granite_speech": (BATCH_NORM, "5", RIGHT, NOT_SHARED),
    "granite_speech_plus": (BATCH_NORM, "5", RIGHT, NOT_SHARED),
    "hunyuan_vl": (POSITIONS, "4", YES, NOT_SHARED),
    "hyperclovax_vision_v2": (YES, "4", RIGHT, SHARED),
    "idefics2": (YES, WARNED, YES, NOT_SHARED),
    "janus": (YES, "1", YES, NOT_SHARED),
    "kimi_k25": (YES, "4", RIGHT, NOT_SHARED),
    "lfm3_vl": (YES, "4", REFUSED.format("short convolutions"), NOT_SHARED),
    "llava_next_video": (YES, "1", YES, SHARED),
    "minicpm_ocr": (YES, "4", YES, NOT_SHARED),
    "minimax_m3_vl": (YES, "4", RIGHT, NOT_SHARED),
    "mistral_large4": (YES, "4", INDEXED, SHARED),
    "molmo2": (YES, "4", MASK, NOT_SHARED),
    "moss_transcribe_diarize": (YES, "4", YES, NOT_SHARED),
    "muse_glimmer": (YES, "4", RIGHT, NOT_SHARED),
    "nemotron_h_omni": (YES, "4", NO_NAME, NOT_SHARED),
    "ovis2": (YES, "1", YES, NOT_SHARED),
    "phi4_multimodal": (YES, "4", REFUSED.format("encoders inside of the backbone"), NOT_SHARED),
    "pp_chart2table": (YES, "16", YES, NOT_SHARED),
    "qianfan_ocr": (YES, "4", YES, NOT_SHARED),
    "qwen3_asr": (YES, "1", YES, NOT_SHARED),
    "qwen4_exp": (YES, "4", NO_NAME, SHARED),
    "step3p7": (YES, "16", WINDOW, NOT_SHARED),
    "video_llama_3": (YES, "1", YES, NOT_SHARED),
    "vipllava": (YES, "1", YES, SHARED),
}
"""What was found of each family, and what is checked below."""
WHY = {
    INDEXED: "layers of kind `indexed_attention`",
    NO_NAME: "does not take attention by name",
    REFUSED.format("short convolutions"): "layers of kind `conv`",
    REFUSED.format("encoders inside of the backbone"): "holds its encoders itself",
    MASK: "attention mask is not one of shape",
    WINDOW: "the layers attend within a window",
    RIGHT: "a row begins with padding",
}
EXTRA = {"llava_next_video": 1, "nemotron_h_omni": 10, "qianfan_ocr": 1, "vipllava": 1}
"""Tokens of a tile that become no feature: of the class, and registers."""
WITH_NEWLINES = ("hunyuan_vl", "llava_next_video", "phi4_multimodal")
"""Families that end lines of features with one of their own, which is counted as any other."""
ROUNDED = {
    "glm5_next": 5,
    "minicpm_ocr": 3,
    "molmo2": 3,
    "qwen4_exp": 3,
    "granite_speech": 3,
    "granite_speech_plus": 3,
}
"""How much larger rounding is: recurrences, and gradients of biases of keys, which are nothing else."""
# Some models warn of their own at every start.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("quiet")]


def rows_of(model, name):
    """Two media and text; text alone; a medium and text."""
    return [sample(model, name, 0, 2), sample(model, name, 1, 0, 20), sample(model, name, 2, 1, 5)]


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_equal(found, expected, tolerance):
    for name in found.keys() | expected.keys():
        both = [of.get(name, torch.zeros(())) for of in (found, expected)]
        # What keys add has no gradient but rounding, which is another one on each processor.
        size = max(float(both[1].norm()), 4e-4)
        assert float((both[0] - both[1]).norm()) / size < tolerance, name


def num_labels(row):
    return int(row["labels"][..., 1:].ne(-100).sum())


def trainer_of(model, folder):
    from transformers import Trainer

    trainer = Trainer(model, trainer_arguments(folder, ddp_backend=None))
    keep_the_mean(trainer)
    return trainer


@pytest.mark.some(7, 31)
@pytest.mark.parametrize("name", TABLE)
def test_a_batch_has_the_gradient_of_its_samples(name, tmp_path):
    """The first line: the loss is summed and divided by the label tokens of the step, whatever shares a microbatch."""
    model = build(name)
    for module in model.modules():
        if TABLE[name][0] == BATCH_NORM and isinstance(module, nn.BatchNorm1d):
            module.eval()
    trainer = trainer_of(model, tmp_path)
    rows = rows_of(model, name)
    if TABLE[name][0] == POSITIONS:
        rows = rows[:2]
    tokens = torch.tensor(sum(map(num_labels, rows)))

    def of(batch):
        return gradients(model, trainer.compute_loss(model, copy.copy(batch), num_items_in_batch=tokens))

    alone = [of(row) for row in rows]
    # That the loss is what it should be, too: of logits, by hand.
    logits = model(**{key: value for key, value in rows[0].items() if key != "labels"}).logits
    by_hand = gradients(model, token_loss(logits, rows[0]["labels"], tokens))
    tolerance = TOLERANCE * ROUNDED.get(name, 1)
    check_equal(alone[0], by_hand, tolerance)
    expected = {key: sum(one[key] for one in alone if key in one) for key in set().union(*alone)}
    check_equal(of(padded(rows)), expected, tolerance)


def encoder_tokens(model, row):
    """Tokens that the first layers behind the media read in a forward: those of the encoder."""
    inside = {id(module) for module in backbone_of(model).layers.modules()}
    seen, hooks = [], []
    for one in model.modules():
        if isinstance(one, nn.ModuleList) and len(one) > 1 and id(one) not in inside:

            def read(_, args, given, group=one):
                hidden = args[0] if args else given["hidden_states"]
                seen.append((id(group), hidden.shape[:-1].numel()))

            hooks.append(one[0].register_forward_pre_hook(read, with_kwargs=True))
    with torch.no_grad():
        model(**row)
    for hook in hooks:
        hook.remove()
    return sum(count for group, count in seen if group == seen[0][0]) if seen else 0


@pytest.mark.parametrize("name", ["granite_speech", "hunyuan_vl", "vipllava"])
def test_samples_that_depend_on_their_neighbours_are_told_of(name, tmp_path):
    from transformers import Trainer

    from dflop.integrations.transformers import balance

    model = build(name)
    rows = [{key: value[0] for key, value in row.items()} for row in rows_of(model, name)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        balance(Trainer(model, trainer_arguments(tmp_path, ddp_backend=None), train_dataset=rows))
    told = [str(one.message) for one in said if "depends on those beside it" in str(one.message)]
    assert len(told) == (TABLE[name][0] != YES)


@pytest.mark.some(7, 31)
@pytest.mark.parametrize("name", TABLE)
def test_rows_are_counted(name):
    """Costs of rows with `input_ids` of a list, beside what the encoder reads and the parameters that are there."""
    model = build(name)
    rows = rows_of(model, name)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        counted = costs_of_rows(rows, model)
    cost = cost_of_parameters(model)
    kind = "audio" if name in OF_SOUNDS else "image"
    told = [one for one in said if f"a feature of its {kind}s: one is taken" in str(one.message)]
    is_warned = TABLE[name][1] == WARNED
    assert bool(told) == is_warned
    token = TOKENS[kind]
    merged = 1 if is_warned else int(TABLE[name][1])
    numbers = [int((row["input_ids"] == token).sum()) for row in rows]
    shapes = [(merged * num, row["input_ids"].numel()) for num, row in zip(numbers, rows, strict=True)]
    expected = dflop.costs([cost(shape) for shape in shapes])
    assert list(counted.encoder_ns) == pytest.approx(list(expected.encoder_ns))
    assert list(counted.llm_ns) == pytest.approx(list(expected.llm_ns))
    assert min(numbers[0], numbers[2]) > 0
    if not is_warned and name not in WITH_NEWLINES and name != "gemma4_unified":
        for row, (tokens, _), num_media in zip(rows, shapes, (2, 0, 1), strict=True):
            assert tokens + EXTRA.get(name, 0) * num_media == encoder_tokens(model, row)
    linear = [module for module in backbone_of(model).layers.modules() if isinstance(module, nn.Linear)]
    assert cost.llm_token >= 6 * sum(module.weight.numel() for module in linear[:4])
    assert cost.encoder_token > 0
    assert cost.llm_pair > 0


@pytest.mark.some(7, 31)
@pytest.mark.parametrize("name", TABLE)
def test_padding_is_removed_or_refused(name):
    """The third line; a batch that is computed with its padding has its gradient, too."""
    model, kind = build(name), TABLE[name][2]
    if kind.startswith("refused"):
        with pytest.raises(ValueError, match=WHY[kind]):
            remove_padding(model)
        return
    rows = rows_of(model, name)
    for side in ("right", "left"):
        batch = padded(rows, side)
        expected = gradients(model, model(**batch).loss)
        handle = remove_padding(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = gradients(model, model(**batch).loss)
        check_equal(found, expected, TOLERANCE * ROUNDED.get(name, 1))
        is_packed = kind == YES or (kind == RIGHT and side == "right")
        assert (handle.num_tokens == int(batch["attention_mask"].sum())) == is_packed
        told = [str(one.message) for one in said if "remove_padding" in str(one.message)]
        assert bool(told) != is_packed
        assert all(WHY[kind] in one for one in told)
        handle.remove()


@pytest.mark.some(4, 34)
@pytest.mark.parametrize("name", TABLE)
def test_towers_are_known_or_refused(name):
    """The second line, as far as one process can see; `tests/dist/test_other_families_ranks.py` compares gradients."""
    model = build(name)
    if TABLE[name][3] == NOT_SHARED:
        with pytest.raises(ValueError, match="holds no model with an encoder of"):
            find_families(model)
        return
    assert [tower.config.model_type for tower in find_families(model)] == [name]


@pytest.mark.some(3, 35)
@pytest.mark.parametrize("name", TABLE)
def test_costs_are_measured(name):
    model = build(name)
    rows = [
        sample(model, name, seed, num, text)
        for seed, (num, text) in enumerate([(2, 7), (0, 20), (1, 5), (1, 30)])
    ]
    counts = [int((row["input_ids"] >= TOKENS["audio"]).sum()) for row in rows]
    shapes = [(count, row["input_ids"].numel()) for count, row in zip(counts, rows, strict=True)]
    cost = measure_cost(model, rows.__getitem__, shapes, num_samples=4, repeats=1)
    assert cost.num_samples == 4
    assert cost((1, 10))[1] > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_page_has_the_table():
    page = (Path(__file__).parents[2] / "docs" / "other_families.md").read_text()
    lines = [f"| `{name}` | {' | '.join(cells)} |" for name, cells in TABLE.items()]
    assert "\n".join(lines) in page
