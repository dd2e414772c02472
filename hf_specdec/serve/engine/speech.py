"""Speech: Whisper's prompts, the windows of its audio, and the segments of its transcripts. Rules are those of its `generate()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.errors import UnsupportedModel
from ...core.ranks import ranks_of
from ...core.sequence import end_ids
from .sounds import resampled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SECONDS_PER_FRAME = 0.01
_SECONDS_PER_STATE = 0.02


@dataclass
class Segment:
    """A part of a transcript. `start`, `end`: seconds; `seek`: the first frame of its window; `times`: seconds at which its tokens end."""

    start: float
    end: float
    tokens: list[int]
    seek: int
    times: list[float]


@dataclass
class Speech:
    """How a Whisper model is asked, and what its answers mean. It crosses between processes."""

    extractor: Any  # transformers' feature extractor
    start: int  # id of the token that begins a transcript
    previous: int | None  # that begins a text before it; None: the model has no such token
    no_timestamps: int  # that says that it has no timestamps, whose ids follow this one
    end: frozenset[int]  # ids that end a transcript
    languages: dict[str, int]  # ids by code ("en"); empty: the model knows one
    tasks: dict[str, int]  # ids by name ("transcribe"); empty: the model knows one
    num_frames: int  # of a window
    aligns: bool  # the model can tell when its tokens are spoken
    max_previous: int  # maximum number of tokens of the text before a transcript

    @classmethod
    def of(cls, model: PreTrainedModel, extractor: Any) -> Speech:
        """By a model's generation config. Raises UnsupportedModel: it is of an old form."""
        given: Any = model.generation_config
        if getattr(given, "no_timestamps_token_id", None) is None:
            raise UnsupportedModel(
                f"{type(model).__name__} has a generation config of an old form, without no_timestamps_token_id: take the one of the "
                "present checkpoint on the Hub."
            )
        is_multilingual = bool(getattr(given, "is_multilingual", False))
        languages = getattr(given, "lang_to_id", {}) if is_multilingual else {}
        return cls(
            extractor, given.decoder_start_token_id, getattr(given, "prev_sot_token_id", None), given.no_timestamps_token_id,
            end_ids(given.eos_token_id), {token[2:-2]: number for token, number in languages.items()},
            dict(getattr(given, "task_to_id", {})) if is_multilingual else {}, 2 * model.config.max_source_positions,
            bool(getattr(given, "alignment_heads", None)) and ranks_of(model) is None,
            model.config.max_target_positions // 2 - 1,
        )  # fmt: skip

    @property
    def frames_per_second(self) -> float:
        """Of the features."""
        return self.extractor.sampling_rate / self.extractor.hop_length

    def features(self, samples: np.ndarray, sampling_rate: Any) -> np.ndarray:
        """Features float32 [bins, frames] of a recording, float32 [n], padded to a window if it is shorter.

        Raises:
            ValueError: the model does not come from a folder, or the recording has other dimensions, no rate of one, or samples that
                are not finite.
            ImportError: it must be resampled, and soxr is not installed.
        """
        if self.extractor is None:
            raise ValueError("A model that was loaded elsewhere has no feature extractor: pass its folder to LLM.")
        wanted = self.extractor.sampling_rate
        samples = resampled(samples, sampling_rate, wanted)
        whole = {} if len(samples) <= self.extractor.n_samples else {"truncation": False, "padding": "longest"}
        features = self.extractor(samples, sampling_rate=wanted, return_tensors="np", **whole)["input_features"][0]
        if not np.isfinite(features).all():
            raise ValueError("A sample is not finite, or its square is not: samples are from -1 to 1.")
        return features

    def window(self, features: np.ndarray, seek: int) -> np.ndarray:
        """The features of the window that begins at frame `seek`, padded with zeros."""
        part = features[:, seek : seek + self.num_frames]
        return np.pad(part, ((0, 0), (0, self.num_frames - part.shape[1]))).astype(np.float32)

    def beginning(self, task: str, language: str | None, has_timestamps: bool) -> list[list[int]]:
        """Per place after the start token, the ids of which one must stand there. `language` None: the model says which it is.

        Raises:
            ValueError: the model does not know this task or language.
        """
        wanted: list[list[int]] = []
        if self.languages:
            if language is not None and language not in self.languages:
                raise ValueError(
                    f"language {language!r} is not one of the model's: {', '.join(sorted(self.languages))}."
                )
            codes = list(self.languages.values()) if language is None else [self.languages[language]]
            wanted = [codes, [self.tasks[task]]]
        elif task != "transcribe" or language not in (None, "en"):
            raise ValueError(
                "The model transcribes English only: leave out language, and do not ask for a translation."
            )
        return wanted if has_timestamps else [*wanted, [self.no_timestamps]]

    def prompt(self, previous: list[int], beginning: list[list[int]]) -> tuple[list[int], list[list[int]]]:
        """The decoder's prompt, and what is left of `beginning`: the places from the first that the model chooses.

        Args:
            previous: ids of a text before the transcript; of a long one, the last.

        Raises:
            ValueError: the model knows no text before a transcript.
        """
        if previous and self.previous is None:
            raise ValueError("prompt: the model's generation config has no prev_sot_token_id.")
        before = [] if self.previous is None or not previous else [self.previous, *previous[-self.max_previous :]]
        known = next((i for i, ids in enumerate(beginning) if len(ids) > 1), len(beginning))
        return [*before, self.start, *(ids[0] for ids in beginning[:known])], beginning[known:]

    def segments(self, tokens: list[int], seek: int, num_frames: int, times: list[float]) -> tuple[list[Segment], int]:
        """The segments of a window's transcript, and the number of frames after which the next window begins.

        Args:
            tokens: without the language, the task and the end token.
            seek, num_frames: the window's first frame, and how many of its frames are the recording's.
            times: seconds after the window's beginning at which the tokens end; empty: nobody wants them.
        """
        if not tokens:
            return [], num_frames
        from transformers import WhisperForConditionalGeneration

        seconds = torch.tensor([seek * _SECONDS_PER_FRAME], dtype=torch.float64)
        parts, offset = WhisperForConditionalGeneration._retrieve_segment(
            seek_sequence=torch.tensor(tokens), seek_outputs=[{"token_timestamps": torch.tensor(times)}], time_offset=seconds,
            timestamp_begin=self.no_timestamps + 1,
            seek_num_frames=torch.tensor([num_frames]), time_precision=_SECONDS_PER_STATE, time_precision_features=_SECONDS_PER_FRAME,
            input_stride=2, prev_idx=0, idx=0, return_token_timestamps=bool(times), decoder_input_ids=torch.zeros(1, 0),
        )  # fmt: skip
        segments = [
            Segment(
                float(part["start"]), float(part["end"]), part["tokens"].tolist(), seek,
                part["token_timestamps"].tolist() if times else [],
            )
            for part in parts
        ]  # fmt: skip
        return segments, int(offset) or num_frames  # a model that goes nowhere would be asked for ever

    def words(self, tokenizer: Any, segments: list[Segment], language: str) -> list[dict[str, Any]]:
        """The words of a window's segments, as OpenAI's answers have them: a word begins where the token before it ends. `language`: its
        English name."""
        from transformers.models.whisper.tokenization_whisper import _collate_word_timestamps

        special, begin = {*self.end, *tokenizer.all_special_ids}, segments[0].start if segments else 0.0
        tokens, spans = [], []
        for segment in segments:
            for token, end in zip(segment.tokens, segment.times, strict=True):
                if token <= self.no_timestamps and token not in special:
                    tokens.append(token)
                    spans.append((round(begin, 2), round(end, 2)))
                begin = end
        words = _collate_word_timestamps(tokenizer, tokens, spans, language, False)
        return [
            {"word": word["text"].strip(), **dict(zip(("start", "end"), word["timestamp"], strict=True))}
            for word in words
        ]
