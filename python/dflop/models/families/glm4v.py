"""GLM-4.1V, and GLM-4.6V-Flash: patches with learnt positions, a convolution and a gated MLP as projector.

    patches_NC --embed, norm, learnt positions--> hidden_NV --layers--> hidden_NV
    hidden_NV --norm, convolution over a feature's patches, MLP--> features_ED

A learnt position is of sixteen places of a grid (bicubic). Each frame pair of a video stands between texts of
its own, which say its time: positions count no seconds. Shape letters: see `models/patches.py`; E features.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from transformers import Glm4vConfig, Glm4vForConditionalGeneration, Glm4vVisionConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vModel

from dflop.models.patches import PatchFamily, patch_plan
from dflop.models.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from dflop.models.patch_layout import Geometry, Patches
    from dflop.models.tensor import LayerPlan


def embed(tower: Any, inputs_NC: torch.Tensor, patches: Patches, geometry: Geometry) -> torch.Tensor:
    """Hidden states before the first layer.

    Args:
        tower: Hugging Face's.
        inputs_NC: pixels.
        patches: where they lie, with `points_T2`.
        geometry: of the model.

    Returns:
        hidden_NV.
    """
    assert geometry.grid_side is not None, "this family's positions are learnt"
    assert patches.points_T2 is not None, "and bicubic"
    hidden_NV = tower.post_conv_layernorm(tower.patch_embed(inputs_NC))
    embeddings = tower.embeddings
    table_V = embeddings.position_embedding.weight.unflatten(0, (geometry.grid_side, geometry.grid_side))
    # In float32, as Hugging Face's module computes it, which asks the device for the sizes of pictures.
    learnt_1VN1 = F.grid_sample(
        table_V.permute(2, 0, 1)[None].float(),
        patches.points_T2[None, :, None],
        mode=embeddings.interpolated_method,
        align_corners=False,
        padding_mode="border",
    )
    return hidden_NV + learnt_1VN1[0, :, :, 0].t().to(hidden_NV.dtype)


def project(tower: Any, hidden_NV: torch.Tensor) -> torch.Tensor:
    """Features of all pictures, one after the other.

    Args:
        tower: Hugging Face's.
        hidden_NV: after the last layer; the patches of a feature follow each other.

    Returns:
        features_ED.
    """
    merge = tower.downsample.kernel_size
    normed_NV = tower.post_layernorm(hidden_NV)
    squares = normed_NV.view(-1, *merge, normed_NV.shape[-1]).permute(0, 3, 1, 2)
    return tower.merger(tower.downsample(squares).flatten(1))


class Glm4v(PatchFamily):
    """`ModelAdapter` of GLM-4.1V."""

    family = "glm4v"
    config_class: Any = Glm4vConfig
    model_class: Any = Glm4vForConditionalGeneration
    model_methods: Any = Glm4vModel
    is_bicubic = True
    vision_class: Any = Glm4vVisionConfig
    embed = staticmethod(embed)
    mergers = staticmethod(lambda tower: [functools.partial(project, tower)])
    # Those of GLM-4.6V give the same pixels; which frames they are of, the data profile says.
    image_processor_class = "Glm4vImageProcessorPil"
    video_processor_class = "Glm4vVideoProcessor"

    @property
    def encoder_width(self) -> int:
        """See `PatchFamily.encoder_width`."""
        return self.vision.hidden_size

    @property
    def grid_side(self) -> int | None:
        """See `PatchFamily.grid_side`."""
        return self.vision.image_size // self.vision.patch_size

    @property
    def head_size(self) -> int:
        """Values of a head of the backbone."""
        return self.text.hidden_size // self.text.num_attention_heads

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        tower = model.visual
        return [tower.patch_embed, tower.post_conv_layernorm, tower.embeddings]

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        # The width of the layers' MLP; `intermediate_size` is that of the projector's.
        width = ("vision_config.out_hidden_size", self.vision.out_hidden_size)
        return patch_plan(self.vision.num_heads, ("gate_proj", "up_proj"), "down_proj", width)

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        vision, text, tower = self.vision, self.text, self.vision_class
        kind, frames, sides = vision.model_type, vision.temporal_patch_size, ("image_size", "patch_size")
        head = self.head_size
        own_head = getattr(text, "head_dim", None)
        rope = text.rope_parameters
        turned = int(head * rope.get("partial_rotary_factor", 1.0))
        sections = rope.get("mrope_section", [8, 12, 12])
        named = json.loads((self.model_dir / "config.json").read_bytes()).get("text_config")
        return [
            # Of a file with these fields at its top, transformers takes none.
            Rule("text_config", named, isinstance(named, dict), "a section with the backbone's fields"),
            Rule("vision_config.model_type", kind, isinstance(vision, tower), tower.model_type),
            Rule("vision_config.temporal_patch_size", frames, frames == 2, "2: times are of frame pairs"),
            *(
                Rule(f"vision_config.{name}", side, isinstance(side, int), "one side, in pixels")
                for name, side in ((name, getattr(vision, name)) for name in sides)
            ),
            Rule(
                "vision_config.out_hidden_size",
                vision.out_hidden_size,
                vision.out_hidden_size == text.hidden_size,
                f"`text_config.hidden_size`, {text.hidden_size}",
            ),
            Rule(
                "text_config.head_dim",
                own_head,
                own_head in (None, head),
                f"`hidden_size` over `num_attention_heads`, {head}",
            ),
            Rule(
                "text_config.rope_parameters.mrope_section",
                sections,
                2 * sum(sections) == turned,
                f"three numbers whose sum is {turned // 2}: half the values of a head that are rotated",
            ),
        ]


ADAPTER = Glm4v
