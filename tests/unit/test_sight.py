"""Who sees whom: as in Hugging Face's masks, sample by sample, on every path that attention takes."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import Gemma3TextConfig, Gemma4TextConfig
from transformers.models.gemma3.modeling_gemma3 import (
    create_masks_for_vision_model,
    get_block_sequence_ids_for_mask,
)
from transformers.models.gemma4 import modeling_gemma4 as gemma4

from dflop.models.sight import BLOCK, picture_places, sees, sights

# Of each sample runs of text and of pictures, in turn, text first. Pictures stand at both ends of samples, so that
# those of neighbours touch.
SMALL = [[3, 16, 2], [0, 9], [0, 4, 1, 30, 7, 2, 3], [40], [1], [12, 9, 1, 9]]
LARGE = [[70, 256, 5, 256, 40], [0, 200], [0, 256, 300], [513]]
WINDOWS = (None, 5, 8, 130)


def pack(samples):
    """(places of features, bounds, tokens of each sample)."""
    places = [torch.arange(count) >= count * (k % 2 == 0) for runs in samples for k, count in enumerate(runs)]
    tokens = [sum(runs) for runs in samples]
    return torch.cat(places), torch.tensor([0, *tokens]).cumsum(0).to(torch.int32), tokens


def seen(samples, windows=WINDOWS, has_pictures=True, whole=None):
    places, bounds, tokens = pack(samples)
    return sights(windows, places, bounds, tokens, has_pictures, whole)


def hugging_face(places_t, window):
    """[t, t] bool: what its model makes of `token_type_ids` of one sample."""
    count = len(places_t)
    config = Gemma3TextConfig(
        vocab_size=8, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        num_hidden_layers=2, sliding_window=window or 4096,
    )  # fmt: skip
    config._attn_implementation = "eager"
    masks = create_masks_for_vision_model(
        # By place: the name of the cache is another from transformers 5.24 on.
        *(config, torch.zeros(1, count, 8), None, None, None),
        block_sequence_ids=get_block_sequence_ids_for_mask(places_t[None].long()),
    )
    return masks["full_attention" if window is None else "sliding_attention"][0, 0] == 0


@pytest.mark.parametrize("window", WINDOWS)
def test_each_sample_sees_what_hugging_face_lets_it_see(window):
    places, _, tokens = pack(SMALL)
    masks = seen(SMALL)[window].masks(torch.float32)
    assert len(masks) == len(SMALL)
    for places_t, mask in zip(places.split(tokens), masks, strict=True):
        wanted = hugging_face(places_t, window)
        if mask is None:
            assert torch.equal(wanted, torch.ones_like(wanted).tril())
        else:
            assert torch.equal(mask == 0, wanted)
            assert set(mask.unique().tolist()) <= {0.0, float("-inf")}
    # Text that fits into the window needs none.
    assert [mask is None for mask in masks] == [
        len(runs) == 1 and (window is None or sum(runs) <= window) for runs in SMALL
    ]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("samples", [SMALL, LARGE, [[128]], [[100, 156], [128, 128]]])
def test_blocks_are_those_of_pytorch(samples, window):
    """PyTorch tries each pair of tokens; dflop computes with each block's first and last."""
    one = seen(samples)[window]
    count = len(one.first_T)
    wanted = create_block_mask(sees(one.first_T, one.last_T), None, None, count, count, device="cpu")
    assert one.blocks.shape == wanted.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(one.blocks, name), getattr(wanted, name)), name
    for name in ("kv", "full_kv", "q", "full_q"):
        numbers = getattr(wanted, f"{name}_num_blocks")[0, 0].tolist()
        ours, theirs = (getattr(blocks, f"{name}_indices")[0, 0] for blocks in (one.blocks, wanted))
        for row, number in enumerate(numbers):
            assert torch.equal(ours[row, :number], theirs[row, :number])


@pytest.mark.parametrize("window", WINDOWS)
def test_in_gemma_4_pictures_are_seen_whole_within_windows_alone(window):
    places, _, tokens = pack(SMALL)
    masks = seen(SMALL, whole=(5, 8, 130))[window].masks(torch.float32)
    for places_t, mask in zip(places.split(tokens), masks, strict=True):
        wanted = gemma4_sees(places_t, window)
        assert torch.equal(wanted, torch.ones_like(wanted).tril() if mask is None else mask == 0)
    assert window is not None or masks == [None] * len(SMALL)


def gemma4_sees(places_t, window):
    """[t, t] bool: what Gemma 4's model makes of `mm_token_type_ids` of one sample."""
    count = len(places_t)
    config = Gemma4TextConfig(
        vocab_size=8, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=window or 4096,
    )  # fmt: skip
    config._attn_implementation = "eager"
    masks = gemma4.create_masks_for_vision_model(
        # By place: the name of the cache is another from transformers 5.24 on.
        *(config, torch.zeros(1, count, 8), None, None, None),
        block_sequence_ids=gemma4.get_block_sequence_ids_for_mask(places_t[None].long(), torch.device("cpu")),
    )
    return masks["full_attention" if window is None else "sliding_attention"][0, 0] == 0


def states(count, heads=(4, 2, 2), size=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, number, count, size, generator=generator).to(dtype) for number in heads]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("samples", [SMALL, LARGE])
def test_blocks_give_what_masks_give(samples, window):
    """The way of GPUs, not compiled, on a CPU."""
    one = seen(samples)[window]
    query, key, value = states(len(one.first_T))
    found = one.attend_blocks(query, key, value, 0.3, flex_attention)
    wanted = one.attend(query, key, value, 0.3)
    assert wanted.shape == (1, len(one.first_T), 4, 16)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 8])
def test_a_sample_is_alone_in_a_pack(window):
    """To the bit, its gradients too."""
    one, (_, _, tokens) = seen(SMALL)[window], pack(SMALL)
    whole = [tensor.requires_grad_() for tensor in states(sum(tokens))]
    out = one.attend(*whole, 0.3)
    out.square().sum().backward()
    begin = 0
    for runs, size in zip(SMALL, tokens, strict=True):
        own = [t.detach()[:, :, begin : begin + size].clone().requires_grad_() for t in whole]
        alone = seen([runs])[window].attend(*own, 0.3)
        alone.square().sum().backward()
        assert torch.equal(out[:, begin : begin + size], alone)
        for mine, packed in zip(own, whole, strict=True):
            assert torch.equal(mine.grad, packed.grad[:, :, begin : begin + size])
        begin += size


def test_without_pictures_nothing_is_seen_ahead():
    samples = [[7], [20], [1]]
    found = seen(samples, has_pictures=False)
    assert found[None].masks(torch.float32) == [None] * 3
    assert [mask is None for mask in found[8].masks(torch.float32)] == [True, False, True]
    # A window that no sample fills is none.
    assert found[130].window is None
    assert found[8].window == 8


def test_measured_samples_have_usual_pictures():
    places = picture_places([700, 30], 256, torch.device("cpu"))
    runs = [256, 86, 256, 86, 16, 30]
    wanted = [k % 2 == 0 for k, count in enumerate(runs[:5]) for _ in range(count)] + [True] * 30
    assert places.tolist() == wanted
    assert not picture_places([5, 4], None, torch.device("cpu")).any()
    assert BLOCK == 128
