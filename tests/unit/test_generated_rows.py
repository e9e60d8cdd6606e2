"""Samples that TRL generated: cut out of a batch, sent as bytes, joined to another batch."""

from __future__ import annotations

import pytest
import torch

from dflop.integrations.generated_rows import cut, join
from dflop.integrations.sent_rows import _packed, _unpacked

pytest.importorskip("trl")

PADDING = 9


def batch_of(prompts, completions, **others):
    """As TRL pads: prompts on the left, completions on the right, to the longest of the rank."""
    width, length = max(map(len, prompts)) + 2, max(map(len, completions)) + 3
    ids = torch.tensor([[PADDING] * (width - len(p)) + p for p in prompts])
    answers = torch.tensor([c + [PADDING] * (length - len(c)) for c in completions])
    return {
        "prompt_ids": ids,
        "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": answers,
        "completion_mask": torch.tensor([[1] * len(c) + [0] * (length - len(c)) for c in completions]),
        "advantages": torch.arange(len(prompts), dtype=torch.float32),
        "num_items_in_batch": torch.tensor(7),
        "ref_per_token_logps": answers * 0.5,
        "importance_sampling_ratio": torch.full((len(prompts), 1), 2.0),
        **others,
    }


PROMPTS, COMPLETIONS = [[1, 2, 3], [4]], [[5, 6], [7, 8, 1, 2]]


def test_rows_have_no_padding_and_joined_ones_as_little_as_they_need():
    rows = cut(batch_of(PROMPTS, COMPLETIONS))
    assert [row["prompt_ids"].tolist() for row in rows] == PROMPTS
    assert [row["completion_ids"].tolist() for row in rows] == COMPLETIONS
    assert "num_items_in_batch" not in rows[0], "what belongs to all stays where it is"
    alone = join(rows[1:], PADDING)
    assert alone["prompt_ids"].tolist() == [[4]]
    assert alone["ref_per_token_logps"].tolist() == [[3.5, 4.0, 0.5, 1.0]]
    both = join(rows[::-1], PADDING)
    assert both["prompt_ids"].tolist() == [[PADDING, PADDING, 4], [1, 2, 3]]
    assert both["prompt_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert both["completion_ids"].tolist() == [[7, 8, 1, 2], [5, 6, PADDING, PADDING]]
    assert both["completion_mask"].tolist() == [[1] * 4, [1, 1, 0, 0]]
    assert both["advantages"].tolist() == [1.0, 0.0]
    assert both["importance_sampling_ratio"].tolist() == [[2.0], [2.0]]
    wide = join(rows, PADDING, multiple_of=8)
    assert wide["prompt_ids"].shape == wide["completion_ids"].shape == (2, 8)


def test_a_completion_that_is_masked_as_a_whole_keeps_a_token():
    batch = batch_of(PROMPTS, COMPLETIONS)
    batch["completion_mask"][1] = 0
    rows = cut(batch)
    assert rows[1]["completion_ids"].tolist() == [7]
    assert rows[1]["completion_mask"].tolist() == [0]


def test_patches_and_grids_follow_their_sample_and_text_alone_joins_them():
    """The first rank has Qwen's pictures, two and one; the second has text alone, and none of their fields."""
    grids = torch.tensor([[1, 2, 2], [1, 2, 1], [1, 1, 3]])
    kinds = torch.zeros(2, 5 + 7, dtype=torch.int64)
    kinds[0, 2:4], kinds[1, 4] = 1, 1
    of_pictures = batch_of(
        PROMPTS,
        COMPLETIONS,
        pixel_values=torch.arange(9.0)[:, None],
        image_grid_thw=grids,
        num_images=[2, 1],
        mm_token_type_ids=kinds,
    )
    first, second = cut(of_pictures)
    (text,) = cut(batch_of([[1, 1]], [[2]]))
    found = join([second, text, first], PADDING)
    assert found["pixel_values"].flatten().tolist() == [6, 7, 8, 0, 1, 2, 3, 4, 5]
    assert found["image_grid_thw"].tolist() == grids[[2, 0, 1]].tolist()
    assert found["num_images"] == [1, 0, 2]
    assert found["mm_token_type_ids"].tolist() == [
        [0, 0, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
    ]
    assert "pixel_values" not in join([text], PADDING)


def test_pictures_that_are_padded_to_those_of_the_rank_are_padded_to_those_of_the_microbatch():
    """Idefics pads the tiles of a sample: three on the first rank, one on the second."""
    many = cut(
        batch_of(
            PROMPTS,
            COMPLETIONS,
            pixel_values=torch.ones(2, 3, 1, 2, 2),
            pixel_attention_mask=torch.ones(2, 3, 2, 2, dtype=torch.bool),
            num_images=[3, 1],
        )
    )
    one = cut(
        batch_of(
            [[1]],
            [[2]],
            pixel_values=torch.ones(1, 1, 1, 4, 2),
            pixel_attention_mask=torch.ones(1, 1, 4, 2, dtype=torch.bool),
            num_images=[1],
        )
    )
    (text,) = cut(batch_of([[1, 1]], [[2]]))
    found = join([*one, *many, text], PADDING)
    assert found["pixel_values"].shape == (4, 3, 1, 4, 2)
    assert found["pixel_values"].sum(dim=(1, 2, 3, 4)).tolist() == [8, 12, 12, 0]
    assert found["pixel_attention_mask"].dtype == torch.bool
    assert found["pixel_attention_mask"].sum(dim=(1, 2, 3)).tolist() == [8, 12, 12, 0]


def test_a_rank_whose_pictures_have_one_tile_each_tells_no_numbers_of_tiles():
    """TRL counts tiles (InternVL) only where a rank has more of them than pictures."""
    pixels = {"pixel_values": torch.ones(4, 1, 2, 2), "num_images": [1, 1], "num_tiles": [3, 1]}
    small = {"pixel_values": torch.ones(2, 1, 2, 2), "num_images": [2]}
    rows = [*cut(batch_of(PROMPTS, COMPLETIONS, **pixels)), *cut(batch_of([[1]], [[2]], **small))]
    found = join([rows[2], rows[0]], PADDING)
    assert found["num_tiles"] == [2, 3]
    assert len(found["pixel_values"]) == 5


def test_samples_without_a_picture_have_no_pixels_where_others_of_their_rank_have():
    pixels = {"pixel_values": torch.ones(1, 1, 2, 2), "num_images": [1, 0]}
    _, text = cut(batch_of(PROMPTS, COMPLETIONS, **pixels))
    assert "pixel_values" not in join([text], PADDING)


def test_padding_is_that_of_trl():
    """A ratio of 1 and a mask of ones change nothing; TRL's losses read some of them unmasked."""
    ratios = torch.full((2, 7), 1.5)
    batch = batch_of(PROMPTS, COMPLETIONS, tool_mask=torch.zeros(2, 7, dtype=torch.int64))
    found = join(cut({**batch, "importance_sampling_ratio": ratios}), PADDING)
    assert found["importance_sampling_ratio"].tolist() == [[1.5, 1.5, 1, 1], [1.5] * 4]
    assert found["tool_mask"].tolist() == [[0, 0, 1, 1], [0] * 4]


def test_a_mask_of_tools_that_one_rank_has_is_one_of_ones_for_the_others():
    rows = cut(batch_of(PROMPTS, COMPLETIONS))
    rows[0]["tool_mask"] = torch.tensor([1, 0])
    assert join(rows, PADDING)["tool_mask"].tolist() == [[1, 0, 1, 1], [1] * 4]


def test_values_that_some_samples_lack_are_refused():
    rows = cut(batch_of(PROMPTS, COMPLETIONS))
    del rows[1]["ref_per_token_logps"]
    with pytest.raises(ValueError, match="`ref_per_token_logps` is there for samples of some ranks, must be"):
        join(rows, PADDING)


def test_a_row_is_the_same_after_it_was_bytes():
    values = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    (row,) = cut(
        batch_of(
            [[1, 2]],
            [[3]],
            pixel_values=values,
            image_grid_thw=torch.tensor([[1, 1, 1]]),
            num_images=[1],
            flags=torch.tensor([[True, False, True]]),
        )
    )
    back = _unpacked(_packed(row, torch.device("cpu")))
    assert back.keys() == row.keys()
    assert type(back["pixel_values"]) is type(row["pixel_values"])
    assert torch.equal(back["pixel_values"][0], values)
    assert back["num_images"] == 1
    for name, value in row.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(back[name], value)
            assert back[name].dtype == value.dtype


def test_what_is_not_of_each_sample_is_refused_by_its_name():
    with pytest.raises(ValueError, match="`hints` of a microbatch of 2 samples is of length 3: what is not"):
        cut(batch_of(PROMPTS, COMPLETIONS, hints=torch.zeros(3)))
