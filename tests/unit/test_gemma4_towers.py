"""Units of Gemma 4's towers: a picture, a frame or a whole sound is encoded alone as it is beside others, with padding."""

from __future__ import annotations

import pytest
import tiny_gemma4
import torch
from tiny_media import make_model

from dflop.integrations.encoder_families import find_families
from dflop.integrations.encoder_tiles import Media

pytestmark = pytest.mark.usefixtures("quiet")
TOLERANCE = 1e-5
"""Relative, in float32: the order of sums differs, nothing else."""
MEDIA = {
    "vision_tower": [("image", 8, 12), ("image", 4, 4), ("image", 2, 8)],
    "audio_tower": [("sound", 41), ("sound", 64), ("sound", 3)],
}


@pytest.fixture
def model(tmp_path):
    return make_model("gemma4-e2b", tmp_path)


def given(name, seed=0):
    """Media as the processor gives them, and the other argument of the tower by its name."""
    arguments, *_ = tiny_gemma4.media_arguments(MEDIA[name], torch.Generator().manual_seed(seed))
    if name == "vision_tower":
        return arguments["pixel_values"], {"pixel_position_ids": arguments["image_position_ids"]}
    return arguments["input_features"], {"attention_mask": arguments["input_features_mask"]}


def found(family, tower, media):
    """Features, and the gradient of each parameter of what they are weighted with."""
    tower.zero_grad(set_to_none=True)
    features = torch.cat([family.features(family.encode(tower, one)) for one in media])
    weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(1))
    (features * weights).sum().backward()
    return features.detach(), {name: p.grad.clone() for name, p in tower.named_parameters()}


@pytest.mark.parametrize("name", MEDIA)
def test_a_unit_is_encoded_alone_as_beside_others(name, model):
    """Features and gradients; what stands in the padding is of no account."""
    family = next(one for one in find_families(model) if one.tower == name)
    tower = getattr(model.model, name)
    rows, extra = given(name)
    media = family.media(rows, extra)
    counts = [family.rows_in(grid) for grid in media.grids]
    alone = [Media(own, [grid], {}) for own, grid in zip(media.rows.split(counts), media.grids, strict=True)]
    assert sum(counts) == len(media.rows) < rows.shape[0] * rows.shape[1]
    features, gradients = found(family, tower, alone)
    together, of_together = found(family, tower, [media])
    assert len(features) == sum(family.rows_out(grid) for grid in media.grids)
    torch.testing.assert_close(features, together, rtol=TOLERANCE, atol=TOLERANCE)
    for parameter, gradient in gradients.items():
        size = max(float(of_together[parameter].norm()), 1e-4)
        assert float((gradient - of_together[parameter]).norm()) / size < TOLERANCE, parameter
    # The tower as the model calls it, with other numbers in the padding.
    hidden = (extra["pixel_position_ids"] < 0).any(-1) if name == "vision_tower" else ~extra["attention_mask"]
    noisy = rows + hidden[..., None] * torch.randn(rows.shape, generator=torch.Generator().manual_seed(2))
    assert bool(hidden.any())
    torch.testing.assert_close(
        family.features(tower(noisy, **extra)), together, rtol=TOLERANCE, atol=TOLERANCE
    )
    # What the model reads has the shape that the tower gives.
    own, as_shared = tower(rows, **extra), family.output(features)
    assert own.last_hidden_state.shape == as_shared.last_hidden_state.shape
    if name == "audio_tower":
        assert torch.equal(own.attention_mask, as_shared.attention_mask)


def test_a_part_of_a_sound_is_not_encoded_alone(model):
    """Its tokens see those before them: half of a sound has other features than in its place."""
    (_, family), tower = find_families(model), model.model.audio_tower
    rows, extra = given("audio_tower")
    longest = family.media(rows[1:2], {"attention_mask": extra["attention_mask"][1:2]})
    whole = family.features(family.encode(tower, longest))
    half = family.features(family.encode(tower, Media(longest.rows[32:], [(32, 1)], {})))
    assert whole.shape == (16, 24)
    assert half.shape == (8, 24)
    assert not torch.allclose(half, whole[8:], atol=1e-2)


def test_a_model_without_an_encoder_of_sounds_has_one_tower(tmp_path):
    assert [family.tower for family in find_families(make_model("gemma4", tmp_path))] == ["vision_tower"]


def test_media_of_another_form_are_refused(model):
    pictures, sounds = find_families(model)
    rows, extra = given("vision_tower")
    positions = extra["pixel_position_ids"].clone()
    positions[1, 3] = torch.tensor([0, 0])
    with pytest.raises(ValueError, match="patches of picture 1 must lie row by row, 2 or a multiple of it"):
        pictures.media(rows, {"pixel_position_ids": positions})
    odd = extra["pixel_position_ids"].clone()
    odd[2] = -1
    with pytest.raises(ValueError, match="patches of picture 2 must lie row by row"):
        pictures.media(rows, {"pixel_position_ids": odd})
    rows, extra = given("audio_tower")
    for change, frames in (((0, 5), 40), ((2, slice(None)), 0)):
        mask = extra["attention_mask"].clone()
        mask[change] = False
        with pytest.raises(
            ValueError, match=f"of sound {change[0]} shows {frames} mel frames, must show one at least"
        ):
            sounds.media(rows, {"attention_mask": mask})
    with pytest.raises(ValueError, match="`bias` are of this rank's media alone"):
        sounds.media(rows, {**extra, "bias": rows})
