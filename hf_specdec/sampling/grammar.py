"""A grammar that a text has to follow: which tokens may come next, after the text and after every node of its draft."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.generation.logits_process import LogitsProcessor

from ..core.draft_trees import DraftTrees

MOST_FORCED = 16  # tokens that a grammar adds to a draft


class Reasoning(NamedTuple):
    """How a model thinks before it answers. The grammar begins after that."""

    opens: tuple[int, ...]  # ids that begin the reasoning, if there is any; empty: the prompt has begun it
    closes: tuple[str, ...]  # texts that end the reasoning
    end: tuple[int, ...] = ()  # ids of the first of these texts, with which a budget ends the reasoning


@dataclass
class _State:
    """The state of the grammar after one prefix."""

    matcher: Any  # llguidance's; it may be shared, and is copied before it reads a token; None: the answer is free
    num_opened: int = 0  # ids of `Reasoning.opens` that have been read
    thought: str | None = None  # the last characters of the reasoning so far; None: it has not begun, or is over
    num_thought: int = 0  # tokens of the reasoning
    answering: bool = True  # the reasoning is over, or the text has none
    dead: bool = False  # the prefix has a token that the grammar does not allow: nothing is known about what may follow
    bits: np.ndarray | None = None  # uint8 [V / 8], the tokens that may follow; None: not computed yet


class GrammarLogitsProcessor(LogitsProcessor):
    """Masks the tokens that one sequence's grammar does not allow.

    The state after every node of a draft is a copy of its parent's, so trees are masked node by node. Rows in a dead state, and rows in
    which the mask would remove every token, are left unmasked: `accept` reports the error when a token is appended.

    Args:
        matcher: llguidance's `LLMatcher` at the beginning of the grammar; None: only the reasoning has a limit.
        vocab_size: width of the matcher's masks; at least the width of the logits.
        prompt_length: number of leading tokens that the grammar does not apply to.
        ends: end-of-sequence ids, the only ids allowed after a text that the grammar cannot continue.
        reasoning: the reasoning that comes before the grammar; None: the grammar applies from the first token.
        text_of: the text of one token; needed with `reasoning`.
        budget: after so many tokens of reasoning its end must follow; None: at any time.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        prompt_length: int,
        ends: frozenset[int] = frozenset(),
        reasoning: Reasoning | None = None,
        text_of: Callable[[int], str] = str,
        budget: int | None = None,
    ):
        self.prompt_length, self.ends, self.reasoning = prompt_length, sorted(ends), reasoning
        self._text_of, self._budget = text_of, math.inf if budget is None else budget
        self._vocab_size = -(-vocab_size // 32) * 32  # masks are rows of 32-bit words
        begun = reasoning is not None and not reasoning.opens
        self._first = _State(matcher, thought="" if begun else None, answering=reasoning is None)
        self._state, self._num_read = self._first, 0
        self._after: dict[tuple[int, ...], _State] = {(): self._first}

    def accept(self, token: int) -> bool:
        """Append a token to the text. False: the grammar does not allow it (see `error`)."""
        self._state, self._num_read = self._next(self._state, token), self._num_read + 1
        self._after = {(): self._state}
        return not self._state.dead

    @property
    def finished(self) -> bool:
        """True if nothing may follow."""
        return not self._state.dead and self._ends_at(self._state)

    @property
    def error(self) -> str:
        """Why the last token was not accepted."""
        matcher = self._state.matcher
        if matcher is not None and matcher.is_error():
            return f"The grammar is too complex to follow: {shortened(matcher.get_error())}"
        return "The grammar allows none of the tokens that the other options leave (logit_bias, allowed_token_ids, bad_words)."

    def _read(self, tokens: list[int]) -> None:
        """Catch up with the sequence."""
        new = tokens[self.prompt_length :]
        if len(new) < self._num_read:  # the last tokens were taken back
            self._state, self._num_read = self._first, 0
            self._after = {(): self._state}
        for token in new[self._num_read :]:
            self.accept(token)

    def _next(self, state: _State, token: int) -> _State:
        if state.dead:
            return state
        if state.answering:
            return self._answer(state, token)
        assert self.reasoning is not None
        opens, closes, end = self.reasoning
        if state.thought is None:
            if token != opens[state.num_opened]:
                is_answer = not state.num_opened or state.matcher is None
                return self._answer(replace(state, answering=True), token) if is_answer else _dead(state)
            count = state.num_opened + 1
            return replace(state, num_opened=count, thought="" if count == len(opens) else None, bits=None)
        thought, over = state.thought + self._text_of(token), state.num_thought - self._budget
        if over >= 0 and token != end[int(over)]:
            return _dead(state)
        if any(close in thought for close in closes) or over == len(end) - 1:
            return replace(state, thought=None, answering=True, bits=None)
        return replace(state, thought=thought[-max(map(len, closes)) :], num_thought=state.num_thought + 1, bits=None)

    @staticmethod
    def _ends_at(state: _State) -> bool:
        """True if nothing of the grammar may follow."""
        return state.answering and state.matcher is not None and state.matcher.is_stopped()

    @staticmethod
    def _answer(state: _State, token: int) -> _State:
        if state.matcher is None:
            return replace(state, bits=None)
        if state.matcher.is_stopped() or state.matcher.validate_tokens([token]) != 1:
            return _dead(state)
        matcher = state.matcher.deep_copy()
        return _State(matcher, dead=not matcher.consume_token(token))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores [1, V] after one prefix [1, S]."""
        return self.along(input_ids[0].tolist(), None, scores)

    def along(self, tokens: list[int], paths: list[torch.Tensor] | None, scores: torch.Tensor) -> torch.Tensor:
        """Scores [R, V] of R nodes; node r's prefix is the sequence's `tokens` and the drafted ids `paths[r]` (None: no draft)."""
        self._read(tokens)
        rows, is_free = np.full((len(scores), -(-scores.shape[1] // 8)), 255, dtype=np.uint8), True
        for row, path in zip(rows, [()] * len(scores) if paths is None else _on_host(paths), strict=True):
            state = self._state_after(path)
            if not state.dead and state.bits is None:
                state.bits = self._allowed(state)
            if not state.dead and state.bits is not None:  # otherwise any token may follow
                row[:], is_free = state.bits[: len(row)], False
        if is_free:
            return scores
        allowed = np.unpackbits(rows, axis=1, count=scores.shape[1], bitorder="little").view(bool)
        masked = scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -math.inf)
        return torch.where(masked.amax(1, keepdim=True) > -math.inf, masked, scores)

    def possible(self, tokens: list[int], drafted: list[int], parents: list[int]) -> list[int]:
        """The nodes of a draft that the grammar allows. `drafted`, `parents`: ids and parents of the nodes (-1: the last of `tokens`)."""
        self._read(tokens)
        paths: dict[int, tuple[int, ...]] = {-1: ()}  # of the nodes that are allowed
        for i, (token, parent) in enumerate(zip(drafted, parents, strict=True)):
            if parent in paths and not self._state_after((*paths[parent], token)).dead:
                paths[i] = (*paths[parent], token)
        return list(paths)[1:]

    def forced(self, tokens: list[int], drafted: list[int], most: int) -> list[int]:
        """Up to `most` ids that the grammar leaves no choice about after `tokens` and drafted ids: the only one that it allows, or
        the usual tokens of the only text that it allows.
        """
        self._read(tokens)
        forced: list[int] = []
        while len(forced) < most:
            state = self._state_after((*drafted, *forced))
            if state.dead or self._ends_at(state):
                break
            if state.bits is None:
                state.bits = self._allowed(state)
            only = () if state.bits is None else np.flatnonzero(state.bits)
            if len(only) == 1 and state.bits[only[0]].bit_count() == 1:  # type: ignore[index]
                ids = [8 * int(only[0]) + int(state.bits[only[0]]).bit_length() - 1]  # type: ignore[index]
            else:
                ids = state.matcher.compute_ff_tokens() if state.answering and state.matcher is not None else []
            if not ids:
                break
            forced += ids
        return forced[: max(most, 0)]

    def _state_after(self, path: tuple[int, ...]) -> _State:
        known = len(path)
        while path[:known] not in self._after:
            known -= 1
        state = self._after[path[:known]]
        for i in range(known, len(path)):
            state = self._after[path[: i + 1]] = self._next(state, path[i])
        return state

    def _allowed(self, state: _State) -> np.ndarray | None:
        """The tokens that may follow; None: any token, or the state is dead."""
        if state.thought is not None:
            if state.num_thought >= self._budget:
                return self._only([self.reasoning.end[int(state.num_thought - self._budget)]])  # type: ignore[union-attr]
            # with a grammar, no end of sequence inside the reasoning: the answer must follow
            return None if state.matcher is None else ~self._only(self.ends)
        if state.matcher is None:
            return None
        if state.num_opened and not state.answering:
            return self._only([self.reasoning.opens[state.num_opened]])  # type: ignore[union-attr]
        matcher = state.matcher
        if matcher.is_stopped():
            return self._only(self.ends) if self.ends else None
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)[: self._vocab_size // 8]
        if matcher.is_error():
            state.dead = True
            return None
        return bits if state.answering else bits | self._only([self.reasoning.opens[0]])  # type: ignore[union-attr]

    def _only(self, ids: list[int]) -> np.ndarray:
        allowed = np.zeros(self._vocab_size, dtype=bool)
        allowed[ids] = True
        return np.packbits(allowed, bitorder="little")


def along_grammars(sequences: list[Any], trees: DraftTrees, rooms: list[int]) -> tuple[DraftTrees, list[int]]:
    """Drafts without the nodes that the rows' grammars forbid, and with the tokens that these force after each draft's first path; and how
    many nodes of each row come before the forced ones.

    A draft that was drawn from a distribution keeps its nodes: which of them to verify must not depend on what was drawn.

    Args:
        rooms: the most tokens on a path of each row's draft; 0: leave the draft as it is.
    """
    rows = {i: seq.processors.grammar for i, seq in enumerate(sequences) if rooms[i] and seq.processors is not None}
    rows = {i: grammar for i, grammar in rows.items() if grammar is not None}
    if trees.probs is None and any(trees.lengths[i] for i in rows):
        keep, drafted = trees.valid.copy(), trees.tokens.tolist()
        for i, grammar in rows.items():
            nodes, parents = drafted[i][: trees.lengths[i]], trees.parent_index[i].tolist()
            keep[i] = False
            keep[i, grammar.possible(sequences[i].shown_tokens, nodes, parents[: len(nodes)])] = True
        trees = trees.kept(keep)
    lengths, forced, after = trees.lengths, [[] for _ in sequences], [-1] * len(sequences)
    drafted = trees.tokens.tolist() if rows else []
    for i, grammar in rows.items():
        path = trees.first_path(i)
        after[i] = path[-1] if path else -1
        ids = [drafted[i][node] for node in path]
        forced[i] = grammar.forced(sequences[i].shown_tokens, ids, rooms[i] - len(ids))
    return (trees.extended(forced, after) if any(forced) else trees), lengths


def shortened(text: str) -> str:
    """The beginning of an error message of llguidance. The rest of such a message is llguidance's internal state."""
    return " ".join(text.partition("<state>")[0].split())[:300]


def _dead(state: _State) -> _State:
    return replace(state, dead=True, bits=None)


def _on_host(paths: list[torch.Tensor]) -> list[tuple[int, ...]]:
    """Paths as tuples, copied to the host at once."""
    ids = torch.cat(paths).tolist()
    ends = np.cumsum([len(path) for path in paths]).tolist()
    return [tuple(ids[end - len(path) : end]) for path, end in zip(paths, ends, strict=True)]
