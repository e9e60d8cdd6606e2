"""What the encoder reads of a sound, by the mel frames that a processor makes of it.

| encoder (`model_type` of `audio_config`) | tokens |
|---|---|
| like Whisper's | n windows of frames / 2, silence of a window included |
| Qwen2.5-Omni's | windows of `2 n_window` frames, halved once |
| Qwen3-Omni's, Qwen3-ASR's | chunks of `2 n_window` frames, halved thrice; windows of `n_window_infer` |
| Phi-4-multimodal's | frames / `time_reduction` in one window; in windows of 500 where there are more |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_LIKE_WHISPER = (
    "audioflamingo3_encoder",
    "glmasr_encoder",
    "qwen2_audio_encoder",
    "voxtral_encoder",
    "whisper",
)
_HALVED_ONCE = ("qwen2_5_omni_audio_encoder",)
_HALVED_THRICE = ("qwen3_asr_encoder", "qwen3_omni_moe_audio_encoder")
_CONFORMER = ("phi4_multimodal_audio",)
KNOWN = _LIKE_WHISPER + _HALVED_ONCE + _HALVED_THRICE + _CONFORMER
"""Kinds of `audio_config` whose tokens are known."""

_CONV_STRIDE = 2
_MASKS = ("feature_attention_mask", "input_features_mask")
# Phi4MultimodalAudioModel.forward of transformers 5.23: `max_seq_len`.
_CONFORMER_TOKENS = 500


def segments(tensors: Mapping[str, Any], audio: Any) -> list[int]:
    """Tokens of each window of all sounds.

    Args:
        tensors: What the processor made of them.
        audio: The section `audio_config` of the model's configuration.

    Returns:
        A number for each window; empty where the layout is unknown.
    """
    kind = getattr(audio, "model_type", "")
    features = tensors.get("audio_input_features" if kind in _CONFORMER else "input_features")
    shape = tuple(getattr(features, "shape", ()))
    if len(shape) != 3:
        return []
    if kind in _LIKE_WHISPER:
        return [shape[-1] // _CONV_STRIDE] * shape[0]
    if kind in _CONFORMER:
        return _conformer(shape[1], int(audio.time_reduction)) * shape[0]
    mask = next((tensors[name] for name in _MASKS if name in tensors), None)
    if mask is None or kind not in _HALVED_ONCE + _HALVED_THRICE:
        return []
    chunk = 2 * int(audio.n_window)
    window = int(audio.n_window_infer) if kind in _HALVED_THRICE else chunk
    halvings = 3 if kind in _HALVED_THRICE else 1
    if window % chunk:
        return []
    lengths = [int(one.sum()) for one in mask]
    return [tokens for frames in lengths for tokens in _windows(frames, window, chunk, halvings)]


def _windows(num_frames: int, window: int, chunk: int, halvings: int) -> list[int]:
    """Tokens of windows of `window` frames, each cut into chunks that are halved, rounded up."""

    def tokens(frames: int) -> int:
        factor = 2**halvings
        return frames // chunk * -(-chunk // factor) + -(-(frames % chunk) // factor)

    return [tokens(min(window, num_frames - at)) for at in range(0, num_frames, window)]


def _conformer(num_frames: int, reduction: int) -> list[int]:
    """Tokens of the windows of one sound; several are all filled up."""
    tokens = -(-num_frames // reduction)
    if tokens <= _CONFORMER_TOKENS:
        return [tokens]
    return [_CONFORMER_TOKENS] * -(-tokens // _CONFORMER_TOKENS)
