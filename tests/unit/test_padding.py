"""`remove_padding` computes no padding, and leaves loss and gradients what they are with the padded batch, in each family."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref

import pytest
import tiny_families
import torch
from tiny_media import FAMILIES, make_model, microbatch
from torch.nn import functional as F

from dflop.integrations import padding, remove_padding
from dflop.integrations.backbone import backbone_of

TOLERANCE = 1e-5
"""Relative, in float32: the order of sums differs, nothing else."""
MEDIA = {
    "llava_onevision": [[("image", 240, 250, 1)], [], [("video", 126, 126, 3)]],
    "internvl": [3, 0, 1],
    "qwen2_audio": [3, 0, 1],
    "audioflamingo3": [3, 0, 1],
    "voxtral": [3, 0, 1],
    "idefics3": [2, 0, 2],
    "lfm2_vl": [[(6, 4), (4, 4)], [], [(2, 4)]],
    "lighton_ocr": [[(56, 84)], [], [(56, 84), (56, 84)]],
    "minicpmv4_6": [[(8, 4), (4, 4)], [], [(4, 8)]],
    "mistral3": [[(56, 84)], [], [(56, 84), (56, 84)]],
    "paddleocr_vl": [[("image", 1, 4, 6)], [], [("image", 1, 4, 6), ("image", 1, 2, 4)]],
    "smolvlm": [2, 0, 2],
    "qwen2_vl": [[("image", 1, 16, 12), ("image", 1, 4, 4)], [], [("video", 3, 8, 6)]],
    "llava": [4, 0, 1],
    "gemma3": [4, 0, 1],
    "gemma4": [[("image", 8, 6), ("image", 4, 4)], [], [("video", 2, 4, 4)]],
    "gemma4-e2b": [[("sound", 41), ("image", 8, 6)], [], [("video", 2, 4, 4), ("sound", 16)]],
    **dict.fromkeys(("aya_vision", "cohere2_vision", "paligemma"), [3, 0, 1]),
    "llava_next": [[(112, 112)], [], [(56, 112), (112, 112)]],
}
# GLM's model takes images or videos in one call.
MEDIA["glm4v"] = MEDIA["glm4v_moe"] = MEDIA["glm46v"] = MEDIA["glm_ocr"] = [
    MEDIA["qwen2_vl"][0],
    [],
    [("image", 1, 8, 6)],
]
MEDIA["qwen3_5"] = MEDIA["qwen3_5_moe"] = MEDIA["qwen2_5_vl"] = MEDIA["qwen3_vl"] = MEDIA["qwen3_vl_moe"] = (
    MEDIA["qwen2_vl"]
)
MEDIA["qwen2_5_omni"] = [[("sound", 41), ("image", 1, 16, 12)], [], [("video", 3, 8, 6), ("sound", 16)]]
MEDIA["qwen3_omni_moe"] = [[("sound", 241), ("image", 1, 16, 12)], [], [("video", 3, 8, 6), ("sound", 116)]]
NOT_PACKED, RIGHT_ALONE = ("llama4", "paligemma"), ("aya_vision", "cohere2_vision")
"""Families without the line, and those whose batches are packed where their padding is on the right."""
OF_TOKENS = {"input_ids": 0, "attention_mask": 0, "labels": -100, "mm_token_type_ids": 0, "token_type_ids": 0}
"""What has an entry a token, and what stands at padding."""

# Some models warn of their own at every start.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def padded(rows, side="right"):
    """A batch as collators make it: rows as long as the longest, media one after the other."""
    width = max(row["input_ids"].shape[1] for row in rows)
    batch = {"use_cache": False}
    for name, value in OF_TOKENS.items():
        if name not in rows[0] and name != "attention_mask":
            continue
        found = []
        for row in rows:
            given = row.get(name, torch.ones_like(row["input_ids"]))
            gap = width - given.shape[1]
            found.append(F.pad(given, (0, gap) if side == "right" else (gap, 0), value=value))
        batch[name] = torch.cat(found)
    for name in sorted({name for row in rows for name in row} - set(batch)):
        parts = [row[name] for row in rows if name in row]
        most = max((part.shape[1] for part in parts if part.dim() > 1), default=0)
        # Pictures of LLaVA have as many tiles as the largest.
        tiled = [
            torch.cat([p, p.new_zeros(p.shape[0], most - p.shape[1], *p.shape[2:])], dim=1)
            if p.dim() == 5
            else p
            for p in parts
        ]
        # MiniCPM-V has patches of all pictures side by side.
        is_row = name == "pixel_values" and "target_sizes" in rows[0]
        batch[name] = torch.cat(tiled, dim=-1 if is_row else 0)
    return batch


def batch_of(name, side="right"):
    rows = [microbatch(name, media, seed, 5 + 9 * seed) for seed, media in enumerate(MEDIA[name])]
    return padded(rows, side)


def gradients(model, batch):
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_equal(found, expected, tolerance=TOLERANCE):
    (loss, of), (expected_loss, expected_of) = found, expected
    assert torch.isclose(loss, expected_loss, rtol=TOLERANCE)
    assert of.keys() == expected_of.keys()
    for name, gradient in of.items():
        # Of a gradient that is nothing but rounding, such as that of a key's bias, the size is no measure.
        size = max(float(expected_of[name].norm()), 2e-4)
        assert float((gradient - expected_of[name]).norm()) / size < tolerance, name


@pytest.mark.some(10, 15)
@pytest.mark.parametrize(
    ("name", "side"),
    [
        (name, side)
        for name in FAMILIES
        for side in ("right", "left")
        if name not in NOT_PACKED and not (name in RIGHT_ALONE and side == "left")
    ],
)
def test_gradients_are_those_of_the_padded_batch(name, side, tmp_path, quiet):
    tolerance = TOLERANCE * tiny_families.CONDITION.get(name, 1)
    model = make_model(name, tmp_path)
    batch = batch_of(name, side)
    expected = gradients(model, batch)
    rows = []
    layer = backbone_of(model).layers[0]
    layer.register_forward_pre_hook(lambda _, args, given: rows.append(args[0].shape[:2]), with_kwargs=True)
    handle = remove_padding(model)
    check_equal(gradients(model, batch), expected, tolerance)
    num_tokens = int(batch["attention_mask"].sum())
    assert rows == [(1, num_tokens)]
    assert (handle.num_tokens, handle.num_padded_tokens) == (num_tokens, batch["attention_mask"].numel())
    assert handle.padding_ratio == handle.num_padded_tokens / num_tokens > 1.3
    # With recomputation, whose second forward runs when the call is over.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_equal(gradients(model, batch), expected, tolerance)
    model.gradient_checkpointing_disable()
    handle.remove()
    rows.clear()
    check_equal(gradients(model, batch), expected, tolerance)
    assert rows == [tuple(batch["attention_mask"].shape)]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_prompts_that_are_seen_whole_are_computed_with_their_padding(implementation, tmp_path, quiet):
    """PaliGemma makes its masks before it calls its backbone; a batch without padding, evaluation and recomputation too."""
    model = make_model("paligemma", tmp_path)
    model.set_attn_implementation(implementation)
    batch = batch_of("paligemma")
    whole = padded([microbatch("paligemma", 1, seed, 9) for seed in range(2)])
    expected, expected_whole = gradients(model, batch), gradients(model, whole)
    handle = remove_padding(model)
    with pytest.warns(
        UserWarning, match="padding is computed, because the attention mask is not one of shape"
    ):
        check_equal(gradients(model, batch), expected)
    check_equal(gradients(model, whole), expected_whole)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_equal(gradients(model, batch), expected)
    assert handle.num_tokens == 0


def test_chunks_of_attention_are_refused(tmp_path, quiet):
    with pytest.raises(ValueError, match="`Llama4TextModel`: it has layers of kind `chunked_attention`"):
        remove_padding(make_model("llama4", tmp_path))


@pytest.mark.more
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5"])
def test_compiled_layers_are_compiled_for_no_number_of_samples(name, tmp_path, quiet):
    """Once for the first batch and once for any size, as without the line; gradients are those of the padded batch."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model = make_model(name, tmp_path)
    batches = [
        padded([microbatch(name, MEDIA[name][seed % 3], seed, 5 + 9 * seed) for seed in range(num)])
        for num in (2, 3, 4, 5, 2)
    ]
    expected = gradients(model, batches[-1])
    remove_padding(model)
    for layer in backbone_of(model).layers:
        layer.compile(backend=backend)
    num_graphs = []
    for batch in batches:
        found = gradients(model, batch)
        num_graphs.append(len(graphs))
    check_equal(found, expected, TOLERANCE * tiny_families.CONDITION.get(name, 1))
    assert 0 < num_graphs[0] < num_graphs[1] == num_graphs[-1]


@pytest.fixture
def text_model(quiet):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**tiny_families.TEXT)).train()


def text_batch(lengths):
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 290, (1, length), generator=generator) for length in lengths]
    return padded([{"input_ids": row, "labels": row} for row in ids])


def test_a_sample_never_sees_another(text_model):
    """Other neighbours, and another padding: the same logits, bit for bit where nothing else changes."""
    remove_padding(text_model)
    batch, other = text_batch([9, 4, 17]), text_batch([9, 4, 17])
    other["input_ids"][0] = 7
    alone = {name: value[1:2, :4] if name != "use_cache" else value for name, value in batch.items()}
    found = text_model(**batch).logits[1, :4]
    torch.testing.assert_close(text_model(**other).logits[1, :4], found, rtol=0, atol=0)
    torch.testing.assert_close(text_model(**alone).logits[0], found)


def test_a_model_generates_in_training_mode_as_without_the_line(text_model):
    """A call with keys and values of earlier tokens is computed as without the line."""
    batch = text_batch([9, 4])
    asked = {name: batch[name].flip(1) for name in ("input_ids", "attention_mask")}
    generate = functools.partial(
        text_model.generate, **asked, max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    expected = generate()
    handle = remove_padding(text_model)
    with pytest.warns(UserWarning, match="keys and values of earlier tokens are given"):
        found = generate()
    assert torch.equal(found, expected)
    assert handle.num_tokens == 0


def test_two_models_of_a_process_keep_their_own(text_model):
    """As a policy and its reward model."""
    other = copy.deepcopy(text_model)
    batch = text_batch([9, 4])
    expected = gradients(text_model, batch)
    first, second = remove_padding(text_model), remove_padding(other)
    check_equal(gradients(text_model, batch), expected)
    assert (first.num_tokens, second.num_tokens) == (13, 0)
    check_equal(gradients(other, batch), expected)
    first.remove()
    check_equal(gradients(other, batch), expected)
    assert (first.num_tokens, second.num_tokens) == (13, 26)


def test_a_copy_keeps_the_line_and_has_weights_of_its_own(tmp_path, quiet):
    """An average of weights is a `copy.deepcopy`, in training or later: under both lines it computes with its own."""
    from dflop.integrations import balance_encoder

    model = make_model("llava", tmp_path)
    batch = batch_of("llava")
    handle = remove_padding(model)
    balance_encoder(model)
    expected = gradients(model, batch)
    twin = copy.deepcopy(model)
    counted = handle.num_tokens
    check_equal(gradients(twin, batch), expected)
    assert handle.num_tokens == counted, "of the copy"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    # Neither its tower nor its backbone reads the first model's weights, in training or evaluation.
    check_equal(gradients(twin, batch), expected)
    twin.eval()
    assert torch.isclose(twin(**batch).loss, expected[0], rtol=TOLERANCE)
    handle.remove()
    check_equal(gradients(twin.train(), batch), expected)


def test_evaluation_and_generation_are_as_before(text_model):
    batch = text_batch([9, 4])
    text_model.set_attn_implementation("eager")
    prompt = {"input_ids": batch["input_ids"][:1], "attention_mask": batch["attention_mask"][:1]}
    text_model.eval()
    logits = text_model(**batch).logits
    words = text_model.generate(**prompt, max_new_tokens=5, do_sample=False)
    handle = remove_padding(text_model)
    found = text_model(**batch, output_attentions=True)
    torch.testing.assert_close(found.logits, logits, rtol=0, atol=0)
    assert len(found.attentions) == 3
    assert torch.equal(text_model.generate(**prompt, max_new_tokens=5, do_sample=False), words)
    assert handle.num_tokens == 0


@pytest.mark.more
def test_evaluation_is_as_before_where_accelerate_compiles_the_layers(text_model):
    """Its model is a copy, which is trained and evaluated without the model that had the line."""
    from accelerate.utils import compile_regions

    handle, batch = remove_padding(text_model), text_batch([9, 4, 17])
    compiled = compile_regions(text_model, backend="eager").eval()
    compiled(**batch)
    assert handle.num_tokens == 0
    compiled.train()
    compiled(**batch)
    assert (handle.num_tokens, handle.num_padded_tokens) == (30, 51)


def test_what_is_saved_knows_nothing_of_it(text_model, tmp_path):
    remove_padding(text_model)
    text_model.save_pretrained(tmp_path)
    assert "dflop" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_eager_attention_and_adapters(before, text_model):
    peft = pytest.importorskip("peft")
    text_model.set_attn_implementation(before)
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    model = peft.get_peft_model(text_model, settings)
    batch = text_batch([30, 8, 3])
    expected = gradients(model, batch)
    assert expected[1]
    handle = remove_padding(model)
    check_equal(gradients(model, batch), expected)
    assert handle.padding_ratio == 90 / 41
    handle.remove()
    assert text_model.config._attn_implementation == before


def test_rows_beyond_a_window_are_computed_with_their_padding(quiet):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**tiny_families.TEXT, sliding_window=12)).train()
    short, long = text_batch([12, 5]), text_batch([13, 5])
    expected = [gradients(model, batch) for batch in (short, long)]
    handle = remove_padding(model)
    check_equal(gradients(model, short), expected[0])
    assert handle.num_tokens == 17
    with pytest.warns(UserWarning, match="a row has 13 tokens, the layers attend within a window of 12"):
        check_equal(gradients(model, long), expected[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(model, long)
        gradients(model, text_batch([14, 5]))
    assert handle.num_tokens == 17


def test_what_cannot_be_done_is_said(text_model):
    remove_padding(text_model)
    with pytest.raises(
        ValueError, match="`Qwen2Model` computes no padding already: call `remove_padding` once"
    ):
        remove_padding(text_model)
    with pytest.raises(ValueError, match="`Linear` has no LLM backbone"):
        remove_padding(torch.nn.Linear(1, 1))
    batch = text_batch([9, 4])
    square = torch.zeros(2, 1, 9, 9)
    with pytest.warns(UserWarning, match="the attention mask is not one of shape"):
        text_model(**{**batch, "attention_mask": square})
    with pytest.warns(UserWarning, match="`output_hidden_states` is asked for"):
        assert len(text_model(**batch, output_hidden_states=True).hidden_states) == 4
    text_model.config.output_hidden_states = True
    assert text_model(**batch).hidden_states[0].shape[:2] == (2, 9)
    with pytest.raises(ValueError, match="`DataParallel` runs one model in several threads"):
        remove_padding(torch.nn.DataParallel(text_model))


def test_models_that_it_would_compute_wrongly_are_refused(quiet):
    """Soft caps, sinks, an encoder that is attended to; layers that do not hand on what they are told, in the first step."""
    import transformers as t

    small = {**tiny_families.TEXT, "head_dim": 12}
    for model, why in [
        (t.Gemma2ForCausalLM(t.Gemma2Config(**small)), "soft caps"),
        (t.GptOssForCausalLM(t.GptOssConfig(**small, num_local_experts=2)), "sinks"),
        (
            t.BloomForCausalLM(t.BloomConfig(vocab_size=300, hidden_size=48, n_layer=1, n_head=4)),
            "no LLM backbone|by name",
        ),
    ]:
        with pytest.raises(ValueError, match=why):
            remove_padding(model)
    model = t.NemotronForCausalLM(t.NemotronConfig(**tiny_families.TEXT)).train()
    remove_padding(model)
    with pytest.raises(ValueError, match="is not told which tokens are a sample's"):
        model(**text_batch([9, 4]))
    model = t.OPTForCausalLM(
        t.OPTConfig(vocab_size=300, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, ffn_dim=64,
                    max_position_embeddings=64, word_embed_proj_dim=48, dropout=0.0)
    ).train()  # fmt: skip
    rows = [{"input_ids": torch.full((1, n), 7), "labels": torch.full((1, n), 7)} for n in (9, 4)]
    batch = padded(rows, "left")
    expected = gradients(model, batch)
    remove_padding(model)
    with pytest.warns(UserWarning, match="a row begins with padding, and how `opt` then counts positions"):
        check_equal(gradients(model, batch), expected)


def test_a_call_that_raises_leaves_nothing_behind(text_model):
    batch = text_batch([9, 4])
    expected = gradients(text_model, batch)
    remove_padding(text_model)
    layer = text_model.model.layers[1]

    for error in (KeyError, KeyboardInterrupt):

        def fail(*_, error=error):
            raise error

        hook = layer.register_forward_pre_hook(fail)
        with pytest.raises(error):
            text_model(**batch)
        hook.remove()
        # Straight after it another kind of call, whose tokens stand elsewhere.
        text_model.eval()
        assert text_model(**text_batch([5, 3])).logits.shape == (2, 5, 300)
        text_model.train()
        check_equal(gradients(text_model, batch), expected)


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_layers_of_a_padded_call_are_computed_again_as_before(before, text_model):
    """With recomputation, whose second forward runs between calls."""
    text_model.set_attn_implementation(before)
    text_model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = text_batch([9, 4])
    square = torch.ones(9, 9).tril().bool().expand(2, 1, 9, 9)
    batch["attention_mask"] = square if before == "sdpa" else square.logical_not() * -1e9
    expected = gradients(text_model, batch)
    remove_padding(text_model)
    with pytest.warns(UserWarning, match="the attention mask is not one of shape"):
        check_equal(gradients(text_model, batch), expected)


def test_a_model_is_let_go(tmp_path):
    """Transformers keeps the registered attention for ever, but not the model."""
    model = make_model("qwen2_vl", tmp_path)
    remove_padding(model)
    held = weakref.ref(model.get_decoder())
    assert len(padding.IN_FORCE) > 0
    del model
    gc.collect()
    assert held() is None


def test_calls_that_are_not_packed_have_gemmas_masks(tmp_path, quiet):
    """Its model makes them before it calls the backbone: in evaluation, and where no mask is given."""
    model = make_model("gemma3", tmp_path)
    batch = batch_of("gemma3", "left")
    unmasked = {name: value for name, value in batch.items() if name != "attention_mask"}
    expected = [gradients(model, unmasked), model.eval()(**batch).logits]
    handle = remove_padding(model)
    found = [gradients(model.train(), unmasked), model.eval()(**batch).logits]
    assert torch.equal(found[1], expected[1])
    check_equal(found[0], expected[0])
    assert handle.num_tokens == 0


def test_text_of_gemma_longer_than_its_window_is_packed(quiet):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    text = tiny_families.TINY["gemma3"]["text_config"]
    model = Gemma3ForCausalLM(Gemma3TextConfig(**text)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    batch = text_batch([30, 4, 17])
    expected = gradients(model, batch)
    handle = remove_padding(model)
    check_equal(gradients(model, batch), expected)
    assert (handle.num_tokens, handle.num_padded_tokens) == (51, 90)
