"""The shape rule that calls a model's own processor, once for each size.

model directory -> AutoProcessor -> ProcessorRule(kind, sizes) -> blank medium -> the whole processor
                -> pieces (expansion.py) and segments (layout.py)
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dflop._native import ProfileError
from dflop.data.processor import blank, expansion, layout
from dflop.models.errors import hinted

if TYPE_CHECKING:
    from collections.abc import Mapping

_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
)
_PARTS = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("audio_processor", "feature_extractor"),
}
_ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
_OWN_RULE = "write a function for the family, and name it in `model.family` (CONTRIBUTING.md)"

_TRIAL = {
    "height": 96,
    "width": 144,
    "num_images": 1,
    "num_frames": 8,
    "fps": 2.0,
    "duration_s": 4.0,
    "sample_rate": 16_000,
    "max_frames": None,
    "sample_fps": None,
}
"""What a rule is tried with before it is used."""


class _Answer(NamedTuple):
    """What the processor made of equal media."""

    written: str
    """In place of each placeholder."""
    tensors: Mapping[str, Any]
    frame_indices: list[int]


class _Call(NamedTuple):
    """A call of the processor."""

    output: dict[str, Any]
    words: str
    """The text that it gave its tokenizer."""
    asked_with: dict[str, Any]
    """What it asked the tokenizer with."""


class ProcessorRule:
    """A processor as a shape rule: called with sizes it gives segments and pieces.

    Calls wait for each other: a processor is made for one thread. The native module keeps the answers.
    """

    def __init__(self, directory: str | Path) -> None:
        """Loads the processor of a model and tries it with a small medium of each kind.

        Args:
            directory: Of the model, with the files of its processor.

        Raises:
            ProfileError: transformers is not installed, knows no processor for the model, or the
                processor cannot be asked.
        """
        self.directory = Path(directory)
        self.config, self.processor = _loaded(self.directory)
        self.tokenizer: Any = self.processor.tokenizer
        self._lock = threading.Lock()
        self._faults: dict[str, str] = {}
        self._features: dict[str, tuple[str, int]] = {}
        self.marks: dict[str, tuple[str, str]] = {}
        """(placeholder, feature token) of each kind that the processor reads."""
        for kind in _PARTS:
            if (placeholder := self._placeholder(kind)) is not None:
                self.marks[kind] = (placeholder, placeholder)
                self._try(kind)
        if not self.marks or len(self._faults) == len(self.marks):
            why = "; ".join(self._faults.values()) or f"{self._class} has no token for a medium"
            raise self._unusable(why)

    @property
    def _class(self) -> str:
        return type(self.processor).__name__

    def version(self) -> str:
        """Which processor it is: class, version of transformers, and a hash of the processor's files.

        Returns:
            For example `AyaVisionProcessor of transformers 5.23.0, sha256:..`.
        """
        import transformers

        digest = hashlib.sha256()
        for name in _FILES:
            path = self.directory / name
            text = path.read_bytes() if path.is_file() else b""
            digest.update(f"{name} {len(text)}\n".encode() + text)
        return f"{self._class} of transformers {transformers.__version__}, sha256:{digest.hexdigest()}"

    def __call__(self, **question: Any) -> dict[str, Any]:
        """The shape of a medium.

        Args:
            **question: As CONTRIBUTING.md lists it: `kind`, sizes, and what is asked of videos.

        Returns:
            `segments`, `pieces` and, of a video, `frame_indices`.

        Raises:
            ValueError: The processor refuses the medium.
            ProfileError: What it gives cannot be read.
        """
        kind = question["kind"]
        if kind in self._faults:
            raise self._unusable(self._faults[kind])
        with self._lock:
            try:
                return self._shape(question)
            except (layout.UnknownLayoutError, RuntimeError) as error:
                raise self._unusable(str(error)) from error

    def _shape(self, question: Mapping[str, Any]) -> dict[str, Any]:
        kind = question["kind"]
        count = max(question["num_images"], 1) if kind == "image" else 1
        answer = self._ask(kind, question, count)
        segments = layout.segments(kind, answer.tensors, self.config, count)
        pieces = expansion.pieces_of(answer.written, self._features[kind][0])
        found: dict[str, Any] = {"segments": segments, "pieces": pieces}
        if kind == "video":
            found["frame_indices"] = answer.frame_indices
        return found

    def _ask(self, kind: str, question: Mapping[str, Any], count: int) -> _Answer:
        """Calls the processor with `count` equal media."""
        media, keywords = self._medium(kind, question)
        text = expansion.asking(self.marks[kind][0], count)
        frames: list[int] = []
        if kind == "video":
            call, frames = self._of_clip(text, question, media)
        else:
            call = self._called(text, kind, [media] * count, keywords)
        written = expansion.between(call.words, count)
        if any(one != written[0] for one in written[1:]):
            message = f"it writes other words for the second of {count} equal {kind}s than for the first"
            raise RuntimeError(message)
        ids = [int(token) for token in call.output["input_ids"][0]]
        feature = self._features.get(kind) or self._feature(kind, written[0], ids)
        if feature[0] not in written[0]:
            message = f"{self._class} of transformers makes no feature of it"
            raise ValueError(message)
        self._features[kind] = feature
        if kind == "audio":
            self._check_whole(media, call.output)
        expansion.check_tokens(self.tokenizer, call.asked_with, call.words, ids, feature)
        tensors = {k: tensor for k, tensor in call.output.items() if k not in ("input_ids", "attention_mask")}
        return _Answer(written[0], tensors, frames)

    def _check_whole(self, samples: Any, output: Mapping[str, Any]) -> None:
        """Refuses a sound that the processor cuts off, as extractors of one window do without a word."""
        features, hop = output.get("input_features"), int(getattr(self._part("audio"), "hop_length", 0))
        if features is None or not hop:
            return
        heard = features.shape[0] * features.shape[-1] * hop
        if heard + hop <= len(samples):
            rate = int(self._part("audio").sampling_rate)
            message = f"{self._class} of transformers reads {heard / rate:g} s and cuts off the rest"
            raise ValueError(message)

    def _of_clip(self, text: str, question: Mapping[str, Any], video: Any) -> tuple[_Call, list[int]]:
        """The call for a video, within the limit of frames; and the frames that it reads."""
        keywords, limit = self._video_keywords(question), question["max_frames"]
        call, frames = self._of_frames(text, question, video, keywords)
        if limit is None or question["num_frames"] <= limit or len(frames) <= limit:
            return call, frames
        keywords = {**keywords, "num_frames": limit, "do_sample_frames": True}
        keywords.pop("fps", None)
        if getattr(self._part("video"), "fps", None) is not None:
            # It takes a number or a rate, and has a rate of its own.
            keywords["fps"] = None
        call, frames = self._of_frames(text, question, video, keywords)
        if len(frames) > limit:
            message = f"{self._class} reads {len(frames)} frames, `data.video_max_frames` is {limit}"
            raise ValueError(message)
        return call, frames

    def _of_frames(
        self, text: str, question: Mapping[str, Any], video: Any, keywords: Mapping[str, Any]
    ) -> tuple[_Call, list[int]]:
        call = self._called(text, "video", [video], keywords)
        default = getattr(self._part("video"), "do_sample_frames", False)
        is_sampled = bool(keywords.get("do_sample_frames", default))
        frames = _frames(call.output, question, is_sampled=is_sampled)
        if not frames:
            message = f"{self._class} of transformers chooses frames, and does not say which"
            raise ValueError(message)
        return call, frames

    def _medium(self, kind: str, question: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A blank medium, and what the processor is called with beside it."""
        if kind == "image":
            return blank.image(question["height"], question["width"]), {}
        if kind == "video":
            frames, _ = blank.video(question)
            return frames, self._video_keywords(question)
        rate = int(self._part("audio").sampling_rate)
        samples = blank.sound(question["duration_s"], question["sample_rate"], rate)
        return samples, {"sampling_rate": rate}

    def _video_keywords(self, question: Mapping[str, Any]) -> dict[str, Any]:
        part, fps, limit = self._part("video"), question["sample_fps"], question["max_frames"]
        is_sampled = bool(getattr(part, "do_sample_frames", False)) or fps is not None
        if not is_sampled:
            # It reads all frames of a file.
            blank.check_frames(question, min(question["num_frames"], limit or question["num_frames"]))
        _, metadata = blank.video(question)
        keywords = {"video_metadata": [metadata], "return_metadata": True}
        if not is_sampled and limit is not None and question["num_frames"] > limit:
            return {**keywords, "num_frames": limit, "do_sample_frames": True}
        return keywords if fps is None else {**keywords, "fps": fps, "do_sample_frames": True}

    def _called(self, text: str, kind: str, media: list[Any], keywords: Mapping[str, Any]) -> _Call:
        """Calls the processor with a text and its media."""
        with expansion.heard(self.tokenizer) as calls:
            try:
                output = self.processor(
                    text=[text], **{_ARGUMENTS[kind]: media}, return_tensors="pt", **keywords
                )
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                message = f"{self._class} of transformers refuses it by {cause}"
                raise ValueError(message) from error
        words = [one[0] if isinstance(one, (list, tuple)) and len(one) == 1 else one for one, _ in calls]
        whole = [k for k, one in enumerate(words) if isinstance(one, str)]
        if not whole:
            message = "it hands its tokenizer no text"
            raise RuntimeError(message)
        return _Call(dict(output), str(words[whole[-1]]), calls[whole[-1]][1])

    def _part(self, kind: str) -> Any:
        """The part of the processor that reads media of this kind."""
        names = _PARTS[kind]
        return next((found for name in names if (found := getattr(self.processor, name, None))), None)

    def _placeholder(self, kind: str) -> str | None:
        """What stands for a medium in the text that the processor takes; None where it reads none."""
        if self._part(kind) is None:
            return None
        for name in (f"{kind}_token", "boi_token" if kind == "image" else ""):
            token = getattr(self.processor, name, None) if name else None
            if token is not None and str(token):
                return str(token)
        return None

    def _feature(self, kind: str, written: str, ids: list[int]) -> tuple[str, int]:
        """The token of one feature: the first that the files name and that the processor writes."""
        candidates = {}
        for name in (f"{kind}_token_id", f"{kind}_token_index", "image_token_id", "image_patch_id"):
            for place in (getattr(self.config, "thinker_config", self.config), self.processor):
                token_id = getattr(place, name, None)
                if not isinstance(token_id, int) or token_id not in ids:
                    continue
                token = self.tokenizer.convert_ids_to_tokens(token_id)
                candidates[name] = token
                if isinstance(token, str) and token in written:
                    return token, token_id
        message = (
            f"none of `{kind}_token_id`, `{kind}_token_index` and `image_token_id` of config.json is a token "
            f"that it writes for {kind}: {written[:80]!r} ({candidates})"
        )
        raise RuntimeError(message)

    def _try(self, kind: str) -> None:
        """Asks for a small medium, alone and in a conversation; keeps why that fails."""
        question = {"kind": kind, **_TRIAL}
        if kind != "video":
            question["num_frames"] = 0
        try:
            answer = self._ask(kind, question, 1)
            layout.segments(kind, answer.tensors, self.config, 1)
            self.marks[kind] = (self.marks[kind][0], self._features[kind][0])
            self._check_conversation(kind, question, answer)
        except (layout.UnknownLayoutError, RuntimeError, ValueError) as error:
            self._faults[kind] = f"{kind}: {error}"

    def _check_conversation(self, kind: str, question: Mapping[str, Any], answer: _Answer) -> None:
        """Checks that the processor writes nothing else into a text than what stands for a medium."""
        placeholder = self.marks[kind][0]
        text = self._rendered(kind) or f"{placeholder}What is it?"
        if text.count(placeholder) != 1:
            return
        media, keywords = self._medium(kind, question)
        words = self._called(text, kind, [media], keywords).words
        if words != (ours := text.replace(placeholder, answer.written)):
            at = next((k for k, (a, b) in enumerate(zip(words, ours, strict=False)) if a != b), len(ours))
            message = (
                f"{self._class} changes a text besides its media, which dflop does not follow: at character "
                f"{at} it has {words[at : at + 20]!r}, must have {ours[at : at + 20]!r}"
            )
            raise RuntimeError(message)

    def _rendered(self, kind: str) -> str | None:
        """A question as the model's chat template writes it; None where it has none for such a medium."""
        content = [{"type": kind}, {"type": "text", "text": "What is it?"}]
        try:
            return str(
                self.processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
            )
        except Exception:
            # The template is rendered again, by Rust, which says what is wrong with it.
            return None

    def _unusable(self, why: str) -> ProfileError:
        message = f"`{self.directory}`: {self._class} of transformers is no shape rule: {why}"
        return hinted(ProfileError(message), _OWN_RULE)


def _loaded(directory: Path) -> tuple[Any, Any]:
    """Configuration and processor of a model directory, without network."""
    try:
        from transformers import AutoConfig, AutoProcessor
    except ImportError as error:
        message = f"`model.family` is `transformers`, which cannot be imported: {error}"
        raise hinted(ProfileError(message), "pip install 'dflop[train]'") from error
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        processor = AutoProcessor.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error).strip()}"
        message = f"transformers cannot load a processor from `{directory}`: {cause}"
        hint = "put the processor's files beside config.json (`processor.save_pretrained`)"
        if isinstance(error, ImportError):
            hint = "pip install torchvision pillow"
        raise hinted(ProfileError(message), hint) from error
    if not hasattr(processor, "tokenizer"):
        message = f"transformers has a {type(processor).__name__} in `{directory}`, must have a processor"
        raise hinted(ProfileError(message), _OWN_RULE)
    return config, processor


def _frames(output: Mapping[str, Any], question: Mapping[str, Any], *, is_sampled: bool) -> list[int]:
    """Positions of the frames that were read; empty where the processor chose some and does not say which."""
    metadata = output.get("video_metadata")
    found = getattr(metadata[0], "frames_indices", None) if metadata else None
    if found is not None:
        return [int(index) for index in found]
    return [] if is_sampled else list(range(question["num_frames"]))
