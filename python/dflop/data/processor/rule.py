"""The shape rule that calls a model's own processor, once for each size.

model directory -> AutoProcessor -> ProcessorRule(kind, sizes) -> blank medium -> the whole processor
                -> pieces (expansion.py) and segments (layout.py)
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dflop._native import ProfileError
from dflop.data.processor import blank, expansion, files, layout
from dflop.models.errors import hinted

if TYPE_CHECKING:
    from collections.abc import Mapping

_PARTS = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("audio_processor", "feature_extractor"),
}
_ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}

_TRIAL = {
    "height": 96,
    "width": 144,
    "num_images": 1,
    "fps": 2.0,
    "duration_s": 4.0,
    "sample_rate": 16_000,
    "max_frames": None,
    "sample_fps": None,
}
"""What a rule is tried with before it is used."""
_TRIAL_FRAMES = (8, 64)
"""Frames of a clip that it is tried with; some processors refuse short ones."""
_QUESTION, _REPLY = "What is it?", "That."


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
        self.config, self.processor = files.load(self.directory)
        self.tokenizer: Any = self.processor.tokenizer
        self._patch_size: Any = getattr(self.processor, "patch_size", None)
        self._has_suffix = "suffix" in inspect.signature(type(self.processor).__call__).parameters
        self._lock = threading.Lock()
        self._faults: dict[str, str] = {}
        self._features: dict[str, tuple[str, int]] = {}
        self._trials: dict[str, dict[str, Any]] = {}
        self._around: dict[str, tuple[str, str]] = dict.fromkeys(_PARTS, ("", ""))
        self.marks: dict[str, tuple[str, str]] = {}
        """(placeholder, feature token) of each kind that the processor reads."""
        if (kind := files.two_texts(self.config)) is not None:
            why = f"`{kind}` has an encoder and a decoder of text, what its LLM reads is not one text"
            raise self._unusable(why)
        for kind in _PARTS:
            if (placeholder := self._placeholder(kind)) is not None:
                self.marks[kind] = (placeholder, placeholder)
                for num_frames in _TRIAL_FRAMES if kind == "video" else (0,):
                    self._trials[kind] = {"kind": kind, **_TRIAL, "num_frames": num_frames}
                    if self._passes(kind):
                        break
        self._try_pairs()
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
        return files.version(self.directory, self._class)

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
        segments = self._segments(question, answer, count)
        pieces = expansion.pieces_of(answer.written, self._features[kind][0])
        found: dict[str, Any] = {"segments": segments, "pieces": pieces}
        if kind == "video":
            found["frame_indices"] = answer.frame_indices
        return found

    def _ask(self, kind: str, question: Mapping[str, Any], count: int) -> _Answer:
        """Calls the processor with `count` equal media."""
        media, keywords = self._medium(kind, question)
        before, after = self._around[kind]
        text = expansion.asking(f"{before}{self.marks[kind][0]}{after}", count)
        frames: list[int] = []
        if kind == "video":
            call, frames = self._of_clip(text, question, media)
        else:
            call = self._called(text, {_ARGUMENTS[kind]: [media] * count}, keywords)
        written = [
            one.removeprefix(before).removesuffix(after) for one in expansion.between(call.words, count)
        ]
        if any(one != written[0] for one in written[1:]):
            message = (
                f"{self._class} of transformers writes other words for the second of {count} equal {kind}s "
                "than for the first, which a shape rule cannot follow"
            )
            raise ValueError(message)
        ids = [int(token) for token in call.output["input_ids"][0]]
        feature = self._features.get(kind) or self._feature(kind, written[0], ids)
        if feature[0] not in written[0]:
            message = f"{self._class} of transformers makes no feature of it"
            raise ValueError(message)
        self._features[kind] = feature
        expansion.check_tokens(self.tokenizer, call.asked_with, call.words, ids, feature)
        tensors = {k: tensor for k, tensor in call.output.items() if k not in ("input_ids", "attention_mask")}
        return _Answer(written[0], tensors, frames)

    def _segments(self, question: Mapping[str, Any], answer: _Answer, count: int) -> list[tuple[int, int]]:
        """What the encoder reads of one of `count` equal media."""
        kind = question["kind"]
        found = layout.segments(kind, answer.tensors, self.config, count, self._patch_size)
        if kind == "audio":
            self._check_whole(self._medium(kind, question)[0], answer.tensors)
        return found

    def _check_whole(self, samples: Any, output: Mapping[str, Any]) -> None:
        """Refuses a sound that the processor cuts off, as extractors of one window do without a word."""
        part, features = self._part("audio"), output.get("input_features")
        hop, mels = int(getattr(part, "hop_length", 0)), getattr(part, "feature_size", None)
        if features is None or not hop or mels not in features.shape[1:]:
            return
        heard = features.numel() // mels * hop
        if heard + hop <= len(samples):
            rate = int(part.sampling_rate)
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
        call = self._called(text, {"videos": [video]}, keywords)
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

    def _called(self, text: str, media: Mapping[str, list[Any]], keywords: Mapping[str, Any]) -> _Call:
        """Calls the processor with a text and its media."""
        with expansion.heard(self.tokenizer) as calls:
            try:
                output = self.processor(text=[text], **media, return_tensors="pt", **keywords)
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
        for name in (f"{kind}_placeholder_token", f"{kind}_token", "boi_token" if kind == "image" else ""):
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
                    self._check_most(kind, token, ids)
                    return token, token_id
        message = (
            f"none of `{kind}_token_id`, `{kind}_token_index` and `image_token_id` of config.json is a token "
            f"that it writes for {kind}: {written[:80]!r} ({candidates})"
        )
        raise RuntimeError(message)

    def _check_most(self, kind: str, token: str, ids: list[int]) -> None:
        """Refuses a token of features where another special token stands there more often."""
        special = Counter(ids[at] for at in range(len(ids)) if ids[at] in self.tokenizer.added_tokens_decoder)
        [(most, times)] = special.most_common(1)
        found = special[self.tokenizer.convert_tokens_to_ids(token)]
        if times > max(found, 2):
            other = self.tokenizer.convert_ids_to_tokens(most)
            message = (
                f"`{token}` is the token of a feature by config.json, but for {kind} it writes `{other}` "
                f"{times} times and `{token}` {found} times: the ids of config.json do not fit the tokenizer"
            )
            raise RuntimeError(message)

    def _passes(self, kind: str) -> bool:
        """Asks for a small medium, alone and in a conversation; keeps why that fails."""
        question = self._trials[kind]
        try:
            answer = self._ask_first(kind, question)
            self._segments(question, answer, 1)
            self.marks[kind] = (self.marks[kind][0], self._features[kind][0])
            self._check_conversation(kind, question, answer)
            self._check_neighbours(kind, question, answer)
        except (layout.UnknownLayoutError, RuntimeError, ValueError) as error:
            self._faults[kind] = f"{kind}: {error}"
            return False
        self._faults.pop(kind, None)
        return True

    def _ask_first(self, kind: str, question: Mapping[str, Any]) -> _Answer:
        """Asks for one medium; between its tokens where the processor wants it so."""
        try:
            return self._ask(kind, question, 1)
        except ValueError:
            tokens = [getattr(self.processor, f"{kind}_{place}_token", None) for place in ("start", "end")]
            if not all(isinstance(token, str) for token in tokens):
                raise
            self._around[kind] = (str(tokens[0]), str(tokens[1]))
            return self._ask(kind, question, 1)

    def _check_conversation(self, kind: str, question: Mapping[str, Any], answer: _Answer) -> None:
        """Checks that the processor writes nothing else into a text than what stands for a medium."""
        placeholder = self.marks[kind][0]
        if self._has_suffix:
            self._check_suffix(kind, question, answer)
            return
        before, after = self._around[kind]
        text = self._rendered(kind, _QUESTION) or f"{before}{placeholder}{after}{_QUESTION}"
        if text.count(placeholder) == 1:
            self._compare(kind, question, text, text.replace(placeholder, answer.written))

    def _check_suffix(self, kind: str, question: Mapping[str, Any], answer: _Answer) -> None:
        """Checks that the chat template writes what the processor makes of a text and its suffix."""
        placeholder = self.marks[kind][0]
        text = self._rendered(kind, _QUESTION, _REPLY)
        if text is None or text.count(placeholder) != 1:
            message = (
                f"{self._class} takes a text and the answer as its `suffix`, so the model needs a chat "
                f"template that writes `{placeholder}` once for {kind}, then the text as the processor has "
                "it, the answer and the end (docs/data.md has one)"
            )
            raise RuntimeError(message)
        self._compare(
            kind,
            question,
            f"{placeholder}{_QUESTION}",
            text.replace(placeholder, answer.written),
            suffix=[_REPLY],
        )

    def _check_neighbours(self, kind: str, question: Mapping[str, Any], answer: _Answer) -> None:
        """Checks that what stands for a medium does not depend on what stands beside it."""
        placeholder, start = self.marks[kind][0], self.tokenizer.bos_token or self.tokenizer.eos_token or ""
        end = self.tokenizer.eos_token or "."
        if self._has_suffix:
            # Its media stand at the beginning.
            return
        for count in (1, 2):
            try:
                self._ask(kind, question, count)
            except (RuntimeError, ValueError):
                # It takes one in a text, or names the second otherwise: a sample with more is refused then.
                continue
            text = f"{start}{placeholder.join(self._around[kind]) * count}{end}"
            self._compare(kind, question, text, text.replace(placeholder, answer.written), count)

    def _try_pairs(self) -> None:
        """Checks media of two kinds in a text: some processors number all of them together."""
        kinds = [kind for kind in self.marks if kind not in self._faults]
        for first, second in itertools.permutations(kinds, 2):
            asked, media, keywords, written = "", {}, {}, ""
            for kind in (first, second):
                question = self._trials[kind]
                medium, more = self._medium(kind, question)
                media[_ARGUMENTS[kind]] = [medium]
                keywords |= more
                asked += self.marks[kind][0].join(self._around[kind])
                one = self._ask(kind, question, 1).written
                written += one.join(self._around[kind])
            start = self.tokenizer.bos_token or self.tokenizer.eos_token or ""
            try:
                words = self._called(start + asked, media, keywords).words
            except ValueError:
                # It does not take both, and a trainer gets the same error.
                continue
            if words != start + written:
                self._faults[second] = (
                    f"{second}: beside {first} {self._class} writes other words for it than alone"
                )

    def _compare(  # noqa: PLR0913 - what is asked, and what must come
        self,
        kind: str,
        question: Mapping[str, Any],
        text: str,
        ours: str,
        count: int = 1,
        **more: Any,
    ) -> None:
        """Checks that the processor makes `ours` of a text with `count` media."""
        medium, keywords = self._medium(kind, question)
        call = self._called(text, {_ARGUMENTS[kind]: [medium] * count}, {**keywords, **more})
        words = call.words + "".join(call.asked_with.get("text_pair") or [])
        if words != ours:
            at = next((k for k, (a, b) in enumerate(zip(words, ours, strict=False)) if a != b), len(ours))
            start = self.tokenizer.bos_token or self.tokenizer.eos_token or ""
            if words == start + ours:
                message = (
                    f"{self._class} puts `{start}` before a text that does not begin with it: the model "
                    "needs a chat template that begins with it, in `data.chat_template`"
                )
                raise RuntimeError(message)
            message = (
                f"{self._class} changes a text besides its media, which dflop does not follow: at character "
                f"{at} it has {words[at : at + 20]!r}, must have {ours[at : at + 20]!r}"
            )
            raise RuntimeError(message)

    def _rendered(self, kind: str, question: str, reply: str | None = None) -> str | None:
        """A question as the model's chat template writes it; None where it has none for such a medium."""
        content = [{"type": kind}, {"type": "text", "text": question}]
        turns: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if reply is not None:
            turns.append({"role": "assistant", "content": [{"type": "text", "text": reply}]})
        try:
            return str(self.processor.apply_chat_template(turns, tokenize=False))
        except Exception:
            # The template is rendered again, by Rust, which says what is wrong with it.
            return None

    def _unusable(self, why: str) -> ProfileError:
        message = f"`{self.directory}`: {self._class} of transformers is no shape rule: {why}"
        return hinted(ProfileError(message), files.OWN_RULE)


def _frames(output: Mapping[str, Any], question: Mapping[str, Any], *, is_sampled: bool) -> list[int]:
    """Positions of the frames that were read; empty where the processor chose some and does not say which."""
    metadata = output.get("video_metadata")
    found = getattr(metadata[0], "frames_indices", None) if metadata else None
    if found is not None and not isinstance(found, blank.AllFrames):
        return [int(index) for index in found]
    return [] if is_sampled else list(range(question["num_frames"]))
