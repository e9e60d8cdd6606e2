"""Model directories with a whole processor of transformers: configuration, processor and a tokenizer of bytes."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

if TYPE_CHECKING:
    from pathlib import Path

BOS, EOS = "<s>", "</s>"

_TEMPLATE = (
    "{{% for message in messages %}}[{{{{ message['role'] }}}}]"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}"
    "{{% else %}}{{% for part in message['content'] %}}"
    "{{% if part['type'] == 'text' %}}{{{{ part['text'] }}}}{media}{{% endif %}}{{% endfor %}}{{% endif %}}"
    "</s>{{% endfor %}}"
)


def template(marks: dict[str, str]) -> str:
    """A chat template that writes `marks` for media, by kind."""
    media = "".join(
        f"{{% elif part['type'] == '{kind}' %}}{{{{ {mark!r} }}}}" for kind, mark in marks.items()
    )
    return _TEMPLATE.format(media=media)


def byte_tokenizer(tokens: list[str], named: dict[str, str], first_id: int = 0) -> PreTrainedTokenizerFast:
    """Every byte is a token; `tokens` and those `named` are special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: index for index, word in enumerate(alphabet)}
    core = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    every = list(dict.fromkeys([BOS, EOS, "<pad>", *tokens, *named.values()]))
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in every])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BOS, eos_token=EOS, pad_token="<pad>", extra_special_tokens=named
    )


def _class_of(names: Any, model_type: str) -> Any:
    found = names[model_type]
    if isinstance(found, dict):
        found = found.get("torchvision") or found["pil"]
    return getattr(transformers, found)


def write(
    folder: Path,
    model_type: str,
    config: dict[str, Any],
    *,
    tokens: list[str],
    named: dict[str, str] | None = None,
    marks: dict[str, str],
    ids: dict[str, str],
    parts: dict[str, dict[str, Any]] | None = None,
    classes: dict[str, str] | None = None,
    start: str = "",
    chat_template: str | None = None,
    **own: Any,
) -> Any:
    """Writes a model directory with all files but the weights.

    `tokens` are special tokens, `named` those that the tokenizer knows by a name; `marks` is what the chat
    template writes for each kind, `ids` says which field of `config.json` is the id of which token; `parts` are
    fields of the parts of the processor by their names, `classes` their classes; `own` those of the processor. `start` begins each text; `chat_template` takes the place of
    the usual one.
    """
    tokenizer = byte_tokenizer(tokens, named or {})
    parts, classes = parts or {}, classes or {}
    config = {**config, "model_type": model_type}
    inner = config.get("thinker_config", config)
    inner.update({field: tokenizer.convert_tokens_to_ids(token) for field, token in ids.items()})
    text = inner.get("text_config", inner)
    text["vocab_size"] = max(len(tokenizer) + 8, text.get("vocab_size", 0))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    AutoConfig.from_pretrained(folder)
    kind_names = {
        "image_processor": IMAGE_PROCESSOR_MAPPING_NAMES,
        "video_processor": VIDEO_PROCESSOR_MAPPING_NAMES,
        "feature_extractor": FEATURE_EXTRACTOR_MAPPING_NAMES,
        "audio_processor": FEATURE_EXTRACTOR_MAPPING_NAMES,
    }
    family = (
        getattr(transformers, classes["processor"])
        if "processor" in classes
        else _class_of(PROCESSOR_MAPPING_NAMES, model_type)
    )
    made: dict[str, Any] = {}
    for name in family.get_attributes():
        if name == "tokenizer":
            made[name] = tokenizer
            continue
        part = (
            getattr(transformers, classes[name])
            if name in classes
            else _class_of(kind_names[name], model_type)
        )
        made[name] = part(**parts.get(name, {}))
    known = inspect.signature(family.__init__).parameters
    assert not set(own) - set(known), (set(own) - set(known), list(known))
    written = chat_template or start + template(marks)
    processor = family(**made, **own, chat_template=written)
    processor.save_pretrained(folder)
    return processor
