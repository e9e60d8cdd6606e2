"""Decoding: from files to sound with one channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflop.models.errors import profile_error
from dflop.models.media import opened

if TYPE_CHECKING:
    import numpy as np

    from dflop.models.media import MediaFile


def decode_sound(file: MediaFile, sampling_rate: int) -> np.ndarray:
    """The first sound of a file, its channels averaged, at one rate.

    Args:
        file: whatever PyAV reads: WAV, FLAC, MP3, Ogg, Opus, M4A, ...
        sampling_rate: samples a second of the result.

    Returns:
        [samples] float32 in -1 to 1; ceil(samples of the file x sampling_rate / its own rate), as librosa and
        soxr count.

    Raises:
        FileNotFoundError: there is no such file.
        ProfileError: the file cannot be decoded; the message names it.
    """
    try:
        return _decode(file, sampling_rate)
    except FileNotFoundError:
        raise
    except Exception as error:
        message = f"cannot decode `{file}`: {error}"
        raise profile_error(message) from error


def _decode(file: MediaFile, sampling_rate: int) -> np.ndarray:
    import av
    import numpy as np

    with av.open(opened(file)) as container:
        if not container.streams.audio:
            message = "it has no sound"
            raise ValueError(message)
        stream = container.streams.audio[0]
        stream.codec_context.thread_count = 1
        rate = stream.codec_context.sample_rate
        # `fltp`: floats, with a row for each channel. The sampling rate stays that of the file.
        to_floats = av.AudioResampler(format="fltp")
        parts = [f.to_ndarray() for frame in container.decode(stream) for f in to_floats.resample(frame)]
    if not parts:
        message = "it has no samples of sound"
        raise ValueError(message)
    mono = np.concatenate(parts, axis=1).mean(axis=0, dtype=np.float32)
    return mono if rate == sampling_rate else _resample(mono, rate, sampling_rate)


def _resample(mono: np.ndarray, rate: int, sampling_rate: int) -> np.ndarray:
    """Sound at another rate, by FFmpeg's own resampler."""
    import av
    import numpy as np

    resampler: Any = av.AudioResampler(format="fltp", layout="mono", rate=sampling_rate)
    frame = av.AudioFrame.from_ndarray(mono[None], format="fltp", layout="mono")
    frame.sample_rate = rate
    found = [part.to_ndarray()[0] for each in (frame, None) for part in resampler.resample(each)]
    wanted = -(-len(mono) * sampling_rate // rate)
    resampled = np.concatenate(found)[:wanted]
    # The resampler may give fewer samples: for the last ones its filter needs sound past the end. They are 0.
    return np.pad(resampled, (0, wanted - len(resampled)))
