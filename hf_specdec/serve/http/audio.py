"""The endpoints that read audio: a recording is transcribed window by window, and a window is one request to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import Field
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from ..engine.encoder import EncoderInput
from ..engine.params import SamplingParams
from ..engine.sounds import read_recording
from ..engine.speech import Segment, Speech
from ..ipc.messages import Update
from .bodies import Body, checked
from .endpoints import EventStream, ignored_header, sse
from .errors import bad_request, shown, unavailable
from .guard import SPACE
from .lanes import LONG_BYTES
from .server import Answer, Server

MOST_SECONDS = 3600  # of a recording: its features take 115 MB then, and making them 1.8 GB for a moment
_MOST_FIELDS, _MOST_BYTES_OF_FIELD = 64, 1 << 16
_LISTS = {"timestamp_granularities[]": "timestamp_granularities", "include[]": "include"}


class AudioRequest(Body):
    """POST /v1/audio/transcriptions and /v1/audio/translations, without the recording."""

    media_type: ClassVar = "multipart/form-data"
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: float = Field(0.0, ge=0, le=1)
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    stream: bool = False
    seed: int | None = None

    @property
    def wants_words(self) -> bool:
        """Whether the answer has times of words."""
        return "word" in (self.timestamp_granularities or [])

    def check(self, speech: Speech) -> None:
        """Raise ApiError for what this Whisper model cannot do."""
        if self.wants_words and not speech.aligns:
            message = "Times of words need alignment_heads in the generation config of a model that is not sharded: ask for 'segment' only."
            raise bad_request(message, "timestamp_granularities")
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise bad_request("timestamp_granularities needs response_format verbose_json.", "timestamp_granularities")
        if self.stream and self.response_format not in ("json", "text"):
            raise bad_request(f"A stream has no {self.response_format}: use json or text.", "response_format")


async def read_form(raw: bytes, headers: dict[str, str]) -> tuple[dict[str, Any], bytes]:
    """The fields of a form, and the file in it. Raises ApiError: 400, it has none, or is no such form."""
    kind = headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise bad_request(f"The body has the type {kind!r}: send multipart/form-data, with the recording as file.")

    async def stream() -> AsyncGenerator[bytes, None]:
        yield raw

    limits: dict[str, Any] = {"max_files": 1, "max_fields": _MOST_FIELDS, "max_part_size": _MOST_BYTES_OF_FIELD}
    parser = MultiPartParser(Headers(headers), stream(), **limits)
    parser.spool_max_size = len(raw) + 1  # keep the file in memory
    try:
        form = await parser.parse()
    except (MultiPartException, UnicodeDecodeError) as error:
        raise bad_request(f"The body is no form: {getattr(error, 'message', error)}") from None
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if isinstance(value, str) and name in _LISTS:
            fields.setdefault(_LISTS[name], []).append(value)
        elif name in fields:
            raise bad_request(f"{name} is given twice.", name)
        else:
            fields[name] = value
    file = fields.pop("file", None)
    if not isinstance(file, UploadFile):
        raise bad_request("file must be an uploaded recording.", "file")
    if wrong := [name for name, value in fields.items() if isinstance(value, UploadFile)]:
        raise bad_request(f"{wrong[0]} must be a text, not a file.", wrong[0])
    return fields, await file.read()


@dataclass
class Window:
    """A part of a transcript that is complete: its segments, words and when they begin and end, text, and the mean log-probability of the
    tokens written for it."""

    segments: list[Segment]
    words: list[dict[str, Any]]
    text: str
    mean_logprob: float


class Transcription:
    """One client's request. A lane makes it, perhaps in another process, whose copy of the server it leaves behind."""

    def __init__(self, server: Server, task: str, raw: bytes, headers: dict[str, str]):
        speech = server.check_reads("audio")
        fields, file = asyncio.run(read_form(raw, headers))
        self.server, self.task = server, task
        self.body = body = checked(AudioRequest, fields, strict=False)
        server.check_model(body.model)
        body.check(speech)
        try:
            samples = read_recording(file, speech.extractor.sampling_rate, MOST_SECONDS)
            self.seconds = len(samples) / speech.extractor.sampling_rate
            self.features = speech.features(samples, speech.extractor.sampling_rate)
        except ValueError as error:
            raise bad_request(f"file: {error}", "file") from None
        # The shape of the features counts padding.
        self.num_frames = math.ceil(self.seconds * speech.frames_per_second) if body.wants_words else 0
        is_long = self.features.shape[1] > speech.num_frames  # [bins, frames]
        # by the times that the model then writes, a long recording is cut into windows
        self.has_timestamps = is_long or body.response_format in ("verbose_json", "srt", "vtt")
        text = (body.prompt or "").strip()
        # ids of the text before the transcript
        self.previous = server.text_ids(f" {text}", "prompt", add_special_tokens=False) if text else []
        if not server.tokenizer.added_tokens_decoder.keys().isdisjoint(self.previous):
            raise bad_request("prompt must be a text without special tokens.", "prompt")
        try:
            language = None if body.language is None else body.language.lower()
            self.beginning = speech.beginning(task, language, self.has_timestamps)
            speech.prompt(self.previous, self.beginning)
            self.params = SamplingParams(
                temperature=body.temperature, max_tokens=None, seed=body.seed,
                logprobs=0 if body.response_format == "verbose_json" else None,
            )  # fmt: skip
        except ValueError as error:
            raise bad_request(str(error), str(error).partition(" ")[0].rstrip(":")) from None
        self.answers: list[Answer] = []  # that of the present window, to be released

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "server": None}

    @classmethod
    async def respond(cls, task: str, server: Server, request: Request, raw: bytes) -> Response:
        """Serve a request, whose body is `raw`: return the whole transcript, or a stream. Raises ApiError: it cannot be served."""
        _ = server.running_worker
        # Few bytes may be an hour: no recording is read where short bodies are.
        self = await server.lanes.run(max(len(raw), LONG_BYTES + 1), cls, task, raw, dict(request.headers))
        self.server = server
        headers, space = ignored_header(self.body.unknown_fields), request.scope.get(SPACE, "")
        with contextlib.ExitStack() as at_end:
            at_end.callback(lambda: server.release(self.answers))
            if self.body.stream:
                return EventStream(self.stream(space), at_end.pop_all().close, headers)
            windows = [part async for part in self.parts(space) if isinstance(part, Window)]
        return self.answer(windows, headers)

    async def parts(self, space: str) -> AsyncIterator[Window | str | None]:
        """Yield complete windows, and the text of a stream before them where it cannot change; None: nothing for a while."""
        speech, seek, total = self.server.check_reads("audio"), 0, self.features.shape[1]
        most, began = self.server.limits.answer_seconds, time.monotonic()
        while seek < total:
            left = None if most is None else most - (time.monotonic() - began)
            if left is not None and left <= 0:
                return
            ids, beginning = speech.prompt(self.previous, self.beginning)
            num_frames = self.num_frames and max(1, min(speech.num_frames, self.num_frames - seek))
            given = EncoderInput([], speech.window(self.features, seek), beginning, self.has_timestamps, num_frames)
            self.answers = [
                self.server.submit(ids, self.params, space=space, max_time=left, encoder=given, waits=not seek)
            ]
            updates: list[Update] = []
            async for item in self.server.updates(self.answers):
                if item is not None:
                    updates.append(item[1])
                if item is None or (self.body.stream and not self.has_timestamps):
                    yield None if item is None else item[1].text
            self.server.release(self.answers)
            if updates[-1].finish_reason == "abort":  # the rest of the window would be missing in the middle
                raise unavailable("The transcript was aborted, as the engine pauses or sleeps: send it again later.")
            tokens = [token for update in updates for token in update.token_ids]
            if beginning and tokens:
                self.beginning = [tokens[:1], *self.beginning[1:]]  # the language that the model has said
            entries = [entry for update in updates for entry in update.logprobs or []]
            scored = [entry[token].logprob for entry, token in zip(entries, tokens, strict=False)]
            written, times = tokens[len(beginning) :], (updates[-1].token_times or [])[len(beginning) :]
            written = written[:-1] if written and written[-1] in speech.end else written
            segments, offset = speech.segments(written, seek, min(speech.num_frames, total - seek), times)
            text = self.decoded([token for segment in segments for token in segment.tokens])
            said = speech.words(self.server.tokenizer, segments, self._language()) if self.num_frames else []
            yield Window(segments, said, text, float(np.mean(scored[len(beginning) :] or [0.0])))
            seek += offset

    def decoded(self, tokens: list[int]) -> str:
        """The text of these ids, without special tokens."""
        return self.server.tokenizer.decode(tokens, skip_special_tokens=True)

    async def stream(self, space: str) -> AsyncIterator[bytes]:
        """Yield server-sent events of OpenAI's kinds. An error ends the stream with an event that holds it."""
        sent = ""
        try:
            async for part in self.parts(space):
                if part is None:
                    yield b": ping\n\n"
                    continue
                shows = isinstance(part, Window) == self.has_timestamps  # else the same text comes in another form
                piece = (part.text if isinstance(part, Window) else part) if shows else ""
                piece = piece if sent else piece.lstrip()
                sent += piece
                if piece:
                    yield sse({"type": "transcript.text.delta", "delta": piece})
            yield sse({"type": "transcript.text.done", "text": sent, "usage": self.usage()})
        except Exception as error:
            yield sse(shown(error).body)

    def usage(self) -> dict[str, Any]:
        """The field `usage`: the recording's length."""
        return {"type": "duration", "seconds": math.ceil(self.seconds)}

    def answer(self, windows: list[Window], headers: dict[str, str]) -> Response:
        """The whole transcript in the form that the client wants."""
        form, text = self.body.response_format, "".join(window.text for window in windows).lstrip()
        segments = [(segment, window) for window in windows for segment in window.segments]
        if form == "text":
            return PlainTextResponse(text + "\n", headers=headers)
        if form in ("srt", "vtt"):
            is_vtt = form == "vtt"
            cues = [self._cue(segment, "." if is_vtt else ",") for segment, _ in segments]
            cues = ["WEBVTT\n", *cues] if is_vtt else [f"{i}\n{cue}" for i, cue in enumerate(cues, 1)]
            return PlainTextResponse("\n".join(cues), headers=headers)
        if form == "json":
            return JSONResponse({"text": text, "usage": self.usage()}, headers=headers)
        of = self.body.timestamp_granularities or ["segment"]
        parts: dict[str, list] = {"word": [word for window in windows for word in window.words]}
        parts["segment"] = [self._segment(i, *segment) for i, segment in enumerate(segments)]
        return JSONResponse(
            {
                "task": self.task, "language": self._language(),
                "duration": self.seconds, "text": text, "usage": self.usage(),
                **{f"{part}s": parts[part] for part in parts if part in of},
            },
            headers=headers,
        )  # fmt: skip

    def _cue(self, segment: Segment, point: str) -> str:
        """A subtitle. Its text has no arrows and no empty lines, which would end it."""
        text = " ".join(self.decoded(segment.tokens).replace("-->", "->").split())
        return f"{_clock(segment.start, point)} --> {_clock(segment.end, point)}\n{text}\n"

    def _language(self) -> str:
        """The language's English name."""
        from transformers.models.whisper.tokenization_whisper import LANGUAGES

        languages = self.server.check_reads("audio").languages
        codes = [code for code, number in languages.items() if [number] == self.beginning[0]] if languages else ["en"]
        return LANGUAGES.get(codes[0], codes[0]) if codes else "unknown"

    def _segment(self, number: int, segment: Segment, window: Window) -> dict[str, Any]:
        raw = window.text.encode()
        return {
            "id": number, "seek": segment.seek, "start": round(segment.start, 2), "end": round(segment.end, 2),
            "text": self.decoded(segment.tokens), "tokens": segment.tokens, "temperature": self.body.temperature,
            "avg_logprob": window.mean_logprob, "compression_ratio": len(raw) / len(zlib.compress(raw)), "no_speech_prob": None,
        }  # fmt: skip


def _clock(seconds: float, point: str) -> str:
    """A time of subtitles: 00:01:02.345."""
    thousandths = round(1000 * seconds)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
