"""The tokens of a sample by Hugging Face's own processor: chat template, tokenizer, places of features."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop.models.processor_files import processor_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.checking.reference import Medium


class Processor:
    """The whole processor of a model directory, where transformers can make it."""

    def __init__(self, adapter: Any, model_dir: str, chat_template: str | None) -> None:
        """Reads the files of the processor.

        Args:
            adapter: Of the family; a `ModelAdapter`.
            model_dir: Of the model.
            chat_template: File of a template to use in place of the model's own; none: that one.
        """
        from transformers import AutoProcessor

        self._adapter = adapter
        self._processor: Any = None
        self._template: str | None = None
        self.fault: str | None = None
        """Why there is none."""
        try:
            self._processor = AutoProcessor.from_pretrained(model_dir)
            if chat_template is not None:
                self._template = Path(chat_template).read_text(encoding="utf-8")
            else:
                # Older directories have it in the tokenizer's file alone.
                of_tokenizer = self._processor.tokenizer.chat_template
                self._template = self._processor.chat_template or of_tokenizer
        # Its files may lack anything, and its packages too.
        except Exception as error:  # noqa: BLE001
            self.fault = f"transformers makes no processor of `{model_dir}`: {first_line(error)}"

    def tokens(
        self, messages: Sequence[Any] | Mapping[str, Any] | str, media: Sequence[Medium]
    ) -> tuple[list[int] | None, str]:
        """The ids of a conversation.

        Args:
            messages: As the chat template takes them, or `{"messages", "tools"}` where there are tools; of a
                document its text, which no template writes.
            media: In the order of their places.

        Returns:
            The ids, and "". Or none, and why: a video's tokens depend on how its frames were sampled, which
            the processor would do on its own.
        """
        if self.fault is not None:
            return None, self.fault
        if any(medium.kind == "video" for medium in media):
            return None, "the processor would sample the frames of videos anew"
        given: dict[str, Any] = {}
        if images := [medium.pictures[0] for medium in media if medium.kind == "image"]:
            # A list for each conversation.
            given["images"] = [images]
            if self._adapter.family == "gemma3":
                # Its processor crops where the call says so, whatever its file says; dflop follows the file.
                fields = processor_fields(self._adapter.model_dir, "image_processor")
                given["do_pan_and_scan"] = bool(fields.get("do_pan_and_scan"))
        if sounds := [medium.sound for medium in media if medium.sound is not None]:
            given["audio"] = sounds
            given["sampling_rate"] = self._processor.feature_extractor.sampling_rate
        try:
            is_document = isinstance(messages, str)
            text = messages if isinstance(messages, str) else self._written(messages)
            tokenizer = self._processor.tokenizer
            # As `apply_chat_template` with `tokenize`: the template has written it already.
            if tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token):
                given["add_special_tokens"] = False
            ids = list(self._processor(text=[text], **given)["input_ids"][0])
            end = tokenizer.eos_token_id
            if is_document and end is not None and ids[-1:] != [end]:
                ids.append(end)
            return ids, ""
        except Exception as error:  # noqa: BLE001
            return None, f"transformers' processor does not take the sample: {first_line(error)}"

    def _written(self, said: Sequence[Any] | Mapping[str, Any]) -> str:
        messages, tools = (said["messages"], said["tools"]) if isinstance(said, Mapping) else (said, None)
        return self._processor.apply_chat_template(
            messages, chat_template=self._template, tools=tools, tokenize=False, add_generation_prompt=False
        )


def difference(found: Sequence[int], expected: Sequence[int]) -> str | None:
    """Where two lists of ids part.

    Args:
        found: By dflop.
        expected: By the processor.

    Returns:
        In words; none where they are equal.
    """
    if list(found) == list(expected):
        return None
    pairs = enumerate(zip(found, expected, strict=False))
    at = next((k for k, (a, b) in pairs if a != b), min(len(found), len(expected)))
    return f"{len(found)} tokens, transformers has {len(expected)}; they part at token {at}"


def first_line(error: Exception) -> str:
    """What an error of another package says, without its details.

    Args:
        error: Any.

    Returns:
        One line.
    """
    return (str(error) or type(error).__name__).strip().splitlines()[0]
