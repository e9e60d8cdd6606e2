"""What Hugging Face's own towers make of inputs, and its masks: oracles of the pieces that the profiler runs."""

import importlib
import math

import torch
from tiny_families import OF_SOUND, TINY
from torch import nn

from dflop.models.families.gemma4 import positions_of

CPU = torch.device("cpu")
QWEN_VL = tuple(name for name in TINY if name.startswith(("qwen2_vl", "qwen2_5", "qwen3", "glm")))
"""Families whose pictures are patches, with M-RoPE."""
# (frames, rows, columns) in patches, for Gemma 4.
SQUARES = [(1, 10, 6), (1, 4, 12)]
# (rows, columns) in patches.
SLICES = [(8, 4), (4, 8), (4, 4)]
PAGES = [(10, 6), (4, 12)]
# (frame pairs, rows, columns) in patches: windows are 8 x 8, so that most here are cut off at the edge.
PICTURES = [(1, 10, 6), (2, 4, 12)]


def encoder_inputs(name, model):
    """(argument of the embedding, further ones), and what Hugging Face's tower and projector make of it."""
    inner = model.model
    if name in QWEN_VL:
        patches_TC = torch.randn(sum(math.prod(picture) for picture in PICTURES), 3 * 2 * 14 * 14)
        # As GLM's model does with videos, one grid a frame pair.
        frames = torch.tensor([(1, *sides) for pairs, *sides in PICTURES for _ in range(pairs)])
        with torch.no_grad():
            found = inner.visual(patches_TC, frames)
        return patches_TC, torch.cat([found.pooler_output, *found.get("deepstack_features", [])], dim=1)
    if name in OF_SOUND:
        mel_NBF = torch.randn(2, 8, 40)
        if name == "voxtral":
            with torch.no_grad():
                return mel_NBF, inner.get_audio_features(mel_NBF).pooler_output
        whole = {"input_features_mask": torch.ones(2, 40)} if name == "audioflamingo3" else {}
        with torch.no_grad():
            wanted = inner.multi_modal_projector(inner.audio_tower(mel_NBF, **whole).last_hidden_state)
        return mel_NBF, wanted.flatten(0, 1)
    if name == "paddleocr_vl":
        patches, grid = torch.randn(60 + 48, 3, 14, 14), torch.tensor([(1, *sides) for sides in PAGES])
        with torch.no_grad():
            found = inner.get_image_features(patches, grid).pooler_output
        return patches.flatten(1), torch.cat(found)
    if name == "lfm2_vl":
        patches, counts = torch.randn(2, 24, 3 * 14 * 14), torch.tensor([24, 8])
        sizes, mask = torch.tensor([(6, 4), (2, 4)]), torch.arange(24)[None] < counts[:, None]
        with torch.no_grad():
            found = inner.get_image_features(patches, sizes, mask.int()).pooler_output
        return patches[mask], torch.cat(found)
    if name.startswith("minicpm"):
        sizes = torch.tensor(SLICES)
        patches = torch.randn(int(sizes.prod(1).sum()), 3, 14, 14)
        with torch.no_grad():
            found = inner.get_image_features(
                patches.permute(1, 2, 0, 3).flatten(2)[None], sizes
            ).pooler_output
        return patches.flatten(1), torch.cat(found)
    if name.startswith(("mistral3", "lighton")):
        pixels, sizes = torch.randn(2, 3, 70, 56), [(70, 28), (28, 56)]
        with torch.no_grad():
            found = inner.get_image_features(pixels, sizes).pooler_output
        cut = [
            p[:, :h, :w].reshape(3, h // 14, 14, w // 14, 14) for p, (h, w) in zip(pixels, sizes, strict=True)
        ]
        return torch.cat([p.permute(1, 3, 0, 2, 4).reshape(-1, 588) for p in cut]), torch.cat(found)
    if name.startswith("gemma4"):
        # The second is shorter, and filled up for Hugging Face's model.
        patches_TC, positions_T2 = torch.rand(60 + 48, 48), positions_of(SQUARES, CPU)[0]
        padded = [patches_TC[:60], nn.functional.pad(patches_TC[60:], (0, 0, 0, 12))]
        places = [positions_T2[:60], nn.functional.pad(positions_T2[60:], (0, 0, 0, 12), value=-1)]
        with torch.no_grad():
            found = inner.get_image_features(torch.stack(padded), torch.stack(places)).pooler_output
        return patches_TC, torch.cat(found)
    pixels_NCHW = torch.randn(6, 3, 56, 56)
    with torch.no_grad():
        if name == "llava_next":
            # A photograph of 2 x 2 tiles and their base, and one tile alone.
            photograph, tile = pixels_NCHW[:5], pixels_NCHW[5:]
            found = inner.get_image_features(photograph, torch.tensor([[480, 640]])).pooler_output[0]
            alone = inner.vision_tower(tile, output_hidden_states=True).hidden_states[-2][:, 1:]
            alone = inner.multi_modal_projector(alone)[0]
            return pixels_NCHW, torch.cat([found, alone, inner.image_newline[None]])
        if name in ("idefics3", "smolvlm"):
            return pixels_NCHW, torch.cat(tuple(inner.get_image_features(pixels_NCHW[None]).pooler_output))
        found = inner.get_image_features(pixels_NCHW).pooler_output
        return pixels_NCHW, torch.cat(found) if name.startswith("llava") else found.flatten(0, 1)


def masks_of_pictures(name, model, mask_t):
    """What Gemma's whole model gives its backbone: masks in which each picture sees itself whole."""
    kind = name.partition("-")[0]
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    device = {"device": CPU} if name.startswith("gemma4") else {}
    return modeling.create_masks_for_vision_model(
        # By place: the name of the cache is another from transformers 5.24 on.
        *(model.config.text_config, torch.zeros(1, len(mask_t), 48), None, None, None),
        block_sequence_ids=modeling.get_block_sequence_ids_for_mask(mask_t[None].long(), **device),
    )
