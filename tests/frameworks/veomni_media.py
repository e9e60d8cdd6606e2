"""The oracle of samples with media: transformers' own model on one of them alone."""

from __future__ import annotations

import tiny_media
import torch

CLASSES = {
    "text": "Qwen2ForCausalLM",
    "model": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "experts": "Qwen3VLMoeForConditionalGeneration",
    "omni": "Qwen2_5OmniThinkerForConditionalGeneration",
}


def hugging_face(folder, name):
    """Transformers' own model; of Qwen2.5-Omni the thinker."""
    import transformers
    from safetensors.torch import load_file

    config = transformers.AutoConfig.from_pretrained(folder / name)
    maker = getattr(transformers, CLASSES[name])
    config = config.thinker_config if name == "omni" else config
    model = maker._from_config(config, attn_implementation="eager")
    weights = load_file(folder / name / "model.safetensors")
    model.load_state_dict({key.removeprefix("thinker."): value for key, value in weights.items()})
    return model


def loss_of(model, row):
    """Sum over the label tokens of a sample."""
    ids = row["input_ids"].clone()
    for kind in tiny_media.KINDS:
        if f"{kind}_mask" in row and bool(row[f"{kind}_mask"].any()):
            ids[row[f"{kind}_mask"]] = getattr(model.config, f"{kind}_token_id")
    names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    given = {name: row[name] for name in names if name in row}
    if "input_features" in row:
        # As its processor has them: sounds padded to the longest.
        lengths = row["audio_feature_lengths"].tolist()
        sounds = row["input_features"].split(lengths)
        given["input_features"] = torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True).transpose(1, 2)
        given["feature_attention_mask"] = torch.tensor(
            [[k < n for k in range(max(lengths))] for n in lengths]
        )
    # Without a mask a sample with media would be taken for several, as their positions stand still.
    given["attention_mask"] = torch.ones_like(ids)[None]
    logits = model(input_ids=ids[None], position_ids=row["position_ids"][:, None], **given).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, row["labels"][1:], ignore_index=-100, reduction="sum")
