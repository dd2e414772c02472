"""Recorder, which keeps the target's hidden states while texts are written, and LearntTexts, the texts to learn from."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ..core.outcome import StepOutcome
from ..core.output import PackedOutput, Taps
from ..core.sequence import Sequence
from ..kernels.transfer import upload
from ..training.batch import Batch


@dataclass
class Text:
    """A text, or the end of one that is long or whose beginning was cached, with the target's hidden states after each token.

    Attributes:
        token_ids: int64 [n].
        is_answer: bool [n], tokens that the target wrote.
        states: hidden states [n, H], by name: "last" for the final ones, i for those of layer i.
    """

    token_ids: np.ndarray
    is_answer: np.ndarray
    states: dict[str | int, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of the hidden states."""
        return sum(states.nbytes for states in self.states.values())


@dataclass
class _Record:
    """What is kept of a running text: hidden states of its tokens from `start` on."""

    start: int
    length: int = 0
    pieces: list[dict[str | int, torch.Tensor]] = field(default_factory=list)

    def add(self, piece: dict[str | int, torch.Tensor], count: int, longest: int) -> None:
        """Append the states of the next `count` tokens. As soon as there are twice `longest` tokens, only the newest `longest` are kept."""
        self.pieces.append(piece)
        self.length += count
        if self.length >= 2 * longest:
            self.pieces = [self.joined(slice(self.length - longest, None))]
            self.start, self.length = self.start + self.length - longest, longest

    def joined(self, part: slice) -> dict[str | int, torch.Tensor]:
        """The states of a part of the tokens, in memory of their own."""
        return {name: torch.cat([piece[name] for piece in self.pieces])[part].clone() for name in self.pieces[0]}


class Recorder:
    """Keeps the hidden states in `taps`, which steps compute anyway."""

    LONGEST = 1024  # newest tokens of a text that are kept: they bound the memory, and the time of a step of training

    def __init__(self, taps: Taps):
        self.taps = taps
        self._records: dict[int, _Record] = {}

    def observe(self, outcome: StepOutcome) -> None:
        """Take the hidden states of the tokens that a step fed."""
        if not outcome.chunks or outcome.output is None or outcome.num_own is None:
            return
        sequences, rows, counts = outcome.read_rows()
        taken = self._taken(outcome.output, rows)
        first = 0
        for seq, (_, end), num_own, count in zip(sequences, outcome.chunks, outcome.num_own, counts, strict=True):
            piece = {name: states[first : first + count] for name, states in taken.items()}
            first += count
            if not seq.is_text or not seq.is_shared:
                continue
            record = self._records.get(seq.id)
            if record is None or record.start + record.length != end - num_own:  # a new text, or one that is read again
                record = self._records[seq.id] = _Record(end - num_own)
            record.add(piece, count, self.LONGEST)

    def _taken(self, output: PackedOutput, rows: np.ndarray) -> dict[str | int, torch.Tensor]:
        tapped: dict[str | int, torch.Tensor] = {index: output.layers[index] for index in self.taps.layers}
        if self.taps.last_hidden:
            assert output.last_hidden is not None
            tapped["last"] = output.last_hidden
        return {name: states.index_select(0, upload(rows, states.device)).cpu() for name, states in tapped.items()}

    def ended(self, seq: Sequence) -> Text | None:
        """The text of a sequence that leaves; None if too little of it was seen."""
        record = self._records.pop(seq.id, None)
        if record is None or record.length < 4 or seq.num_generated < 2:
            return None
        at = np.arange(record.start, record.start + record.length)
        tokens = np.asarray(seq.tokens, dtype=np.int64)
        at = at[at < len(tokens)]
        newest = slice(max(0, len(at) - self.LONGEST), len(at))
        return Text(tokens[at[newest]], at[newest] >= seq.prompt_length, record.joined(newest))


class LearntTexts:
    """The newest texts, some of them held out. The oldest are dropped when the hidden states to train on take more than `most_bytes`."""

    HELD_OUT = 6  # every sixth text is held out
    MOST_HELD_OUT = 12

    def __init__(self, most_bytes: int):
        self.most_bytes, self.count, self.num_tokens, self.num_bytes = most_bytes, 0, 0, 0
        self.training: deque[Text] = deque()
        self.held_out: deque[Text] = deque(maxlen=self.MOST_HELD_OUT)

    def add(self, text: Text) -> None:
        """Hold the text out, or keep it to train on."""
        self.count += 1
        self.num_tokens += len(text.token_ids)
        if self.count % self.HELD_OUT == 2:
            self.held_out.append(text)
            return
        self.training.append(text)
        self.num_bytes += text.num_bytes
        while self.num_bytes > self.most_bytes and len(self.training) > 1:
            self.num_bytes -= self.training.popleft().num_bytes

    def drawn(self, num_tokens: int, rng: random.Random) -> Batch:
        """A batch of about `num_tokens` tokens, of randomly drawn texts to train on; newer ones are drawn more often."""
        texts, count = [], 0
        while count < num_tokens:
            text = self.training[max(rng.randrange(len(self.training)), rng.randrange(len(self.training)))]
            texts.append(text)
            count += len(text.token_ids)
        return batch_of(texts)


def batch_of(texts: SequenceOf[Text]) -> Batch:
    """Texts padded on the right, float32."""
    lengths = torch.tensor([len(text.token_ids) for text in texts])
    ids = pad_sequence([torch.from_numpy(text.token_ids) for text in texts], batch_first=True)
    answers = pad_sequence([torch.from_numpy(text.is_answer) for text in texts], batch_first=True)
    states = {
        name: pad_sequence([text.states[name].float() for text in texts], batch_first=True) for name in texts[0].states
    }
    layers = {name: padded for name, padded in states.items() if isinstance(name, int)}
    return Batch(ids, lengths, answers, states.get("last"), layers)
