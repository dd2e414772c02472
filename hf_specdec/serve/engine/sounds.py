"""Recordings: files of the usual formats, and what the processors of models that hear take."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np

INSTALL = "pip install 'hf-specdec[audio]'"
NO_SOUNDS = f"hears no audio, or its processor of it could not be loaded, as the log then says ({INSTALL})"
MOST_SOUNDS = 32  # of a conversation
AUDIO_PART = {"type": "audio", "audio": ""}  # for chat templates, some of which look for the key
_RATES = 1_000, 400_000  # Hz
_FRAMES_AT_ONCE = 1 << 16
_SECONDS = 30  # that models hear of a recording if their processor does not say


def read_recording(raw: bytes, wanted: int, most_seconds: float) -> np.ndarray:
    """The samples float32 [n] of a recording, at `wanted` Hz, its channels mixed.

    Raises:
        ValueError: it is none, empty or too long.
        ImportError: soundfile or soxr is not installed.
    """
    try:
        import soundfile
        import soxr
    except ImportError as error:
        raise ImportError(f"Audio needs soundfile and soxr: {INSTALL}") from error
    pieces, num_frames, wrong = [], 0, None
    try:
        with soundfile.SoundFile(io.BytesIO(raw)) as file:
            rate = file.samplerate
            if not _RATES[0] <= rate <= _RATES[1]:
                wrong = f"{rate} samples a second are not from {_RATES[0]} to {_RATES[1]}."
            resampled = None if rate == wanted or wrong else soxr.ResampleStream(rate, wanted, 1, "float32")
            for block in () if wrong else file.blocks(_FRAMES_AT_ONCE, dtype="float32", always_2d=True):
                num_frames += len(block)
                if num_frames > most_seconds * rate:
                    wrong = f"the recording is longer than {most_seconds} s: send it in parts."
                    break
                mixed = block.mean(1)
                pieces.append(mixed if resampled is None else resampled.resample_chunk(mixed))
            if resampled is not None:
                pieces.append(resampled.resample_chunk(np.empty(0, np.float32), last=True))
    except (RuntimeError, TypeError, ValueError) as error:  # libsndfile's
        reason = str(error).rpartition(">: ")[2]  # without the buffer's address
        raise ValueError(f"it cannot be read as audio ({reason}): send wav, flac, ogg or mp3.") from None
    samples = np.concatenate(pieces or [np.empty(0, np.float32)])
    if wrong or not len(samples):
        raise ValueError(wrong or "the recording is empty.")
    return samples


def resampled(samples: np.ndarray, rate: Any, wanted: int) -> np.ndarray:
    """Samples float32 [n] of one channel at another rate in Hz. Raises ValueError: other dimensions, or no rate of a recording;
    ImportError: soxr is not installed."""
    try:
        number = int(rate)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if samples.ndim != 1:
        raise ValueError(f"The samples have the shape {list(samples.shape)}: pass those of one channel, [n].")
    if number == wanted:
        return samples
    if not _RATES[0] <= number <= _RATES[1]:  # few samples of a second would become very many
        raise ValueError(f"{rate!r} samples a second are not from {_RATES[0]} to {_RATES[1]}.")
    try:
        import soxr
    except ImportError as error:
        raise ImportError(f"Resampling audio needs soxr: {INSTALL}") from error
    return soxr.resample(samples, number, wanted)


def sound_url(part: dict[str, Any]) -> str:
    """The data URL of a message's part of OpenAI's type "input_audio". Raises ValueError: it is none."""
    given = part.get("input_audio")
    given = given if isinstance(given, dict) else {}
    if not isinstance(given.get("data"), str) or given.get("format") not in ("wav", "mp3"):
        raise ValueError('a part with audio has {"input_audio": {"data": base64, "format": "wav" or "mp3"}}.')
    return f"data:audio/{given['format']};base64,{given['data']}"


def hears(processor: Any) -> bool:
    """True for a processor of audio."""
    return getattr(processor, "feature_extractor", None) is not None


def heard(processor: Any, recordings: Iterable[Any]) -> list[np.ndarray]:
    """The samples of recordings as a processor takes them. Of a longer one it would leave out the end, which is refused.

    Args:
        recordings: bytes of files, or (samples, samples a second).

    Raises:
        ValueError: one cannot be read, is too long, or holds what is no finite number; or there are too many.
        ImportError: see `read_recording`.
    """
    extractor, sounds = processor.feature_extractor, []
    wanted, most = extractor.sampling_rate, getattr(extractor, "chunk_length", _SECONDS)
    for number, given in enumerate(recordings, 1):
        if number > MOST_SOUNDS:
            raise ValueError(f"There are more than {MOST_SOUNDS} recordings.")
        if isinstance(given, bytes):
            try:
                samples = read_recording(given, wanted, most)
            except ValueError as error:
                raise ValueError(f"Recording {number}: {error}") from None
        else:
            if not isinstance(given, (tuple, list)) or len(given) != 2:
                raise ValueError("Audio is given as (samples, samples a second).")
            samples = resampled(np.asarray(given[0], np.float32), given[1], wanted)
        if not 0 < len(samples) <= most * wanted:
            raise ValueError(
                f"Recording {number} has {len(samples) / wanted:.1f} s; this model hears at most {most} s."
            )
        if not np.isfinite(samples).all():
            raise ValueError(f"Recording {number} has samples that are not finite.")
        sounds.append(samples)
    return sounds
