"""A directory of a tiny Qwen2.5-VL with its processor, and chats with pictures and without, as fine-tuners have them."""

from __future__ import annotations

import json
import random
from importlib.metadata import version

import torch

IS_OLD = version("transformers").partition(".")[0] == "4"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
)
SPECIAL += ("<|video_pad|>",)
CHAT_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}\
{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def byte_tokens():
    """A tokenizer, of which every byte of text is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    return tokens


def tokenizer_of_bytes():
    """The same for transformers, with the special tokens of Qwen2.5-VL."""
    import transformers

    # The processor of Qwen2.5-VL takes no other one in transformers 4.
    kind = transformers.Qwen2TokenizerFast if IS_OLD else transformers.PreTrainedTokenizerFast
    return kind(
        tokenizer_object=byte_tokens(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[
            token for token in SPECIAL if token not in ("<|im_end|>", "<|endoftext|>")
        ],
    )


def write_model(directory, seed=0):
    """Configuration, weights in float32 and processor; every byte of text is a token."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = tokenizer_of_bytes()
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    small = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**small),
        tokenizer,
        Qwen2VLVideoProcessor(**small),
        chat_template=CHAT_TEMPLATE,
    )
    config = Qwen2_5_VLConfig(
        vision_config={
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_heads": 2,
            "depth": 2,
            "hidden_size": 16,
            "out_hidden_size": 24,
            "intermediate_size": 32,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            **(
                {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}
                if IS_OLD
                else {
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
                }
            ),
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "bos_token_id": None,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def write_judge(directory, seed=0):
    """A tiny Qwen2 that gives one number for a text, with the tokenizer."""
    from transformers import Qwen2ForSequenceClassification

    _write_text_model(directory, Qwen2ForSequenceClassification, seed, num_labels=1)


def write_text_model(directory, seed=0):
    """A tiny Qwen2, with the tokenizer."""
    from transformers import Qwen2ForCausalLM

    _write_text_model(directory, Qwen2ForCausalLM, seed)


def _write_text_model(directory, kind, seed, **given):
    from transformers import Qwen2Config

    tokenizer = tokenizer_of_bytes()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **given,
    )
    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def chats(folder, count=26, seed=0):
    """Of each sample its question, its answer and the paths of its pictures; every third has none."""
    from PIL import Image

    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for sample in range(count):
        pictures = []
        for place in range(0 if sample % 3 == 2 else draw.randrange(1, 3)):
            width, height = draw.randrange(28, 150), draw.randrange(28, 150)
            picture = Image.effect_noise((width, height), draw.randrange(20, 90)).convert("RGB")
            path = folder / f"{sample}_{place}.png"
            picture.save(path)
            pictures.append(str(path))
        # Of very uneven lengths, so that balanced microbatches have uneven counts.
        found.append((words(draw, 1, 8), words(draw, *draw.choice([(1, 9), (1, 9), (25, 40)])), pictures))
    return found


def words(draw, least, most):
    return " ".join(
        draw.choice(["red", "a", "tree", "of", "boat", "seven"]) for _ in range(draw.randrange(least, most))
    )


def write_pairs(path, samples):
    """As LLaMA-Factory's example of preferences has them: another answer beside the right one."""
    draw = random.Random(1)
    rows = [
        {
            "conversations": [{"from": "human", "value": "<image>" * len(pictures) + question}],
            "chosen": {"from": "gpt", "value": answer},
            "rejected": {"from": "gpt", "value": words(draw, *draw.choice([(1, 5), (1, 5), (60, 80)]))},
            "images": pictures,
        }
        for question, answer, pictures in samples
    ]
    path.write_text(json.dumps(rows))


def write_answers(path, samples, *, are_chats):
    """Pairs of texts, as Axolotl's preferences read them (chats), and its reward models."""
    draw = random.Random(1)
    lines = []
    for question, answer, _ in samples:
        both = {
            "chosen": answer,
            "rejected": words(draw, *draw.choice([(1, 5), (1, 5), (60, 80)])),
        }
        row = {"system": "", "input": question, **both}
        if are_chats:
            asked = {"role": "user", "content": question}
            row = {name: [asked, {"role": "assistant", "content": content}] for name, content in both.items()}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))


def write_sharegpt(path, samples):
    """As LLaMA-Factory's multimodal example has it: `messages` with `<image>`, and `images`."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": "<image>" * len(pictures) + question},
                {"role": "assistant", "content": answer},
            ],
            "images": pictures,
        }
        for question, answer, pictures in samples
    ]
    path.write_text(json.dumps(rows))


def write_messages(path, samples):
    """As OpenAI and Axolotl have them: pictures are parts of a message; texts are texts where there are none."""
    lines = []
    for question, answer, pictures in samples:
        parts = [{"type": "image", "path": picture} for picture in pictures]
        asked = [*parts, {"type": "text", "text": question}]
        given = [{"type": "text", "text": answer}]
        if not any(pictures for _, _, pictures in samples):
            asked, given = question, answer
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": given}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))


def difference(found, expected):
    """The largest relative error of a parameter, of two state dictionaries with the same names."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - value).norm() / value.norm().clamp(min=1e-6)) for name, value in expected.items()
    )
