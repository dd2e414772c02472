"""Sequence: one row's tokens, limits and sampling parameters."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

_ids = itertools.count()
UNKNOWN = -1  # placeholder for a token that the device has chosen but the host has not read yet


@dataclass(eq=False)
class Sequence:
    """One row being decoded. The loop updates `tokens`, `num_steps` and `finished`; the caller sets everything else.

    Attributes:
        tokens: prompt and output ids, without padding.
        max_length: maximum number of tokens, prompt included.
        eos_token_ids: any of these ends the sequence (and is kept as its last token).
        do_sample: draw from the target's distribution (True) or take its argmax.
        seed: int64 key of the row's own random stream, which does not depend on the other rows of the batch.
        processors: the `NodeProcessors` applied to the target's logits (see sampling/processors.py), or None.
        row: index of the row in the caller's batch.
        shown_prompt: the row's ids in the caller's batch, masked ones included. Logits processors and stopping criteria see
            them, as they do in transformers. None: the prompt itself.
        wants_prompt_logits: keep the logits of the prompt's tokens (`StepTensors.prompt_logits`); no cached prefix is used.
        chunked_length: number of leading tokens that layers with a recurrent state read in chunk form; None: the prompt's length.
        num_speculative_tokens: this row's own draft length; None: the method's, 0: no drafts.
        draft_room: most nodes of this row's next draft; None: as many as the method makes. What exceeds it is cut off.
        prediction: a `candidate_generators.prediction.Prediction` of what follows the prompt; it drafts where the text follows it.
        drafter: name of the drafter that drafts for this row; None: the first (method "per_request") or the fastest ("auto").
        is_text: the prompt's ids alone determine its keys and values, so it can be recomputed, and prompts with equal ids can share
            blocks. False: the prompt has images, embeddings or placeholder ids.
        image_prompt: the prompt if the model itself reads it, alone, whenever the row has no blocks; None: it reads ids, or nothing.
        position_offset: position minus index of every token after the prompt (negative with M-RoPE); per axis where they differ.
        source: what the encoder of an encoder-decoder model has read for this row (`model.encoder_decoder.Source`); None: no encoder has.
        is_shared: what is learnt from this text may help to draft others, and what look-ups have learnt from others may help to draft it.
        space: name of the look-up tables that this text reads and adds to, if `is_shared`; texts of another space use other tables.
        adapter: name of the adapter that computes this row, "__base__" for none of them; None: those that are active in the model.
        files: files that the drafter has written for this sequence: kind of content → path. Complete once the sequence has left the
            decoder.
    """

    tokens: list[int]
    max_length: int
    eos_token_ids: frozenset[int] = frozenset()
    do_sample: bool = False
    seed: int = 0
    processors: Any = None
    row: int = 0
    shown_prompt: list[int] | None = None
    num_speculative_tokens: int | None = None
    draft_room: int | None = None
    prediction: Any = None
    drafter: str | None = None
    wants_prompt_logits: bool = False
    is_text: bool = True
    position_offset: int | tuple[int, ...] = 0
    chunked_length: int | None = None
    source: Any = None
    image_prompt: Any = None
    is_shared: bool = True
    space: str = ""
    adapter: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    id: int = field(default_factory=lambda: next(_ids))
    num_steps: int = 0  # verification rounds so far: part of the key of rejection sampling's noise
    finished: bool = False
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def shown_tokens(self) -> list[int]:
        """`tokens` as transformers would show them: with the masked ids of the caller's batch."""
        if self.shown_prompt is None:
            return self.tokens
        return self.shown_prompt + self.tokens[self.prompt_length :]

    @property
    def read_ids(self) -> list[int]:
        """The ids that an encoder has read for this row, which its text may repeat."""
        return [] if self.source is None else self.source.ids

    @property
    def num_generated(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - self.prompt_length

    def num_chunked(self, start: int, end: int) -> int:
        """Of the tokens from `start` to `end`, layers with a recurrent state read this many in chunk form: the first ones."""
        chunked = self.prompt_length if self.chunked_length is None else self.chunked_length
        return max(0, min(end, chunked) - start)

    def accept(self, new_tokens: list[int]) -> list[int]:
        """Append verified tokens up to the first end-of-sequence token or `max_length`; returns those appended."""
        room = self.max_length - len(self.tokens)
        kept = new_tokens[:room]
        if self.eos_token_ids:
            ends = [i for i, token in enumerate(kept) if token in self.eos_token_ids]
            if ends:
                kept = kept[: ends[0] + 1]
                self.finished = True
        self.tokens += kept
        self.finished = self.finished or len(self.tokens) >= self.max_length
        return kept


def end_ids(given: int | Iterable[int] | None) -> frozenset[int]:
    """A configuration's `eos_token_id`, which may be one id, several, or none."""
    return frozenset([given] if isinstance(given, int) else given or ())


def cut_at_end(rows: list[list[int]], ends: Collection[int]) -> list[list[int]]:
    """Each row up to and including its first end token, without padding."""
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in rows]


def stream_seeds(seed: int, prompts: list[list[int]], adapters: list[str] | None = None) -> list[int]:
    """A 63-bit key of a random stream for each row, hashed from the seed, the row's prompt and its rank among rows with this prompt and
    this adapter.

    So a row's stream does not depend on its place in the batch or on the other rows, and copies of one prompt
    (`num_return_sequences`) get different streams.
    """
    copies: dict[tuple[bytes, str], int] = {}
    seeds = []
    for prompt, adapter in zip(prompts, adapters or [""] * len(prompts), strict=True):
        content = b"".join(token.to_bytes(8, "little", signed=True) for token in prompt)
        rank = copies[content, adapter] = copies.get((content, adapter), -1) + 1
        key = hashlib.blake2b(content + rank.to_bytes(8, "little"), key=seed.to_bytes(8, "little"), digest_size=8)
        seeds.append(int.from_bytes(key.digest(), "little") >> 1)
    return seeds
