"""A record of every step of a call: what was drafted, what became of it, and where the time went. Key `trace`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from ..core.clock import clock_for
from ..core.outcome import StepOutcome
from ..core.sequence import Sequence
from .profile import PHASES, Phases


class Trace(list[dict[str, Any]]):
    """The verified steps of a call, in order, a dictionary per row and step, as values for JSON.

    Keys: `step`; `row`; `drafter` (where there are several); `drafted`, `accepted` and `rejected`, ids of tokens (`drafted` has a tree's
    nodes, parents first); `written`, the ids that the step added to the text, with the model's own token at the end; and
    `propose_ms`, `forward_ms`, `verify_ms`, `observe_ms` of the whole step, which its rows share: drafting, the target's forward, scores
    with the choice of tokens, and what the drafter does with the result. Milliseconds are those of `clock_for`.
    """

    def with_text(self, tokenizer: Any) -> list[dict[str, Any]]:
        """The same with the tokens as lists of texts."""
        lists = ("drafted", "accepted", "rejected", "written")
        return [{**step, **{key: [tokenizer.decode([i]) for i in step[key]] for key in lists}} for step in self]

    def to_json(self, tokenizer: Any) -> str:
        """`with_text` as JSON text, a line per row and step."""
        return "\n".join(json.dumps(step, ensure_ascii=False) for step in self.with_text(tokenizer))

    def table(self, tokenizer: Any, most: int = 12) -> str:
        """`with_text` as a table: of the rejected tokens at most `most`, and the number of the others."""
        titles = ("step", "row", *(f"{name} ms" for name in PHASES), "accepted + own", "rejected")
        lines: list[tuple[str, ...]] = [titles]
        for step in self.with_text(tokenizer):
            accepted, rejected = step["accepted"], step["rejected"]
            added = step["written"][len(accepted) :]
            more = f" and {len(rejected) - most} more" if len(rejected) > most else ""
            times = [f"{step[f'{name}_ms']:.2f}" for name in PHASES]
            texts = f"{_shown(accepted)} + {_shown(added)}", _shown(rejected[:most]) + more
            lines.append((str(step["step"]), str(step["row"]), *times, *texts))
        widths = [max(len(line[i]) for line in lines) for i in range(len(titles) - 1)]
        aligned = [[cell.rjust(width) for cell, width in zip(line[:-2], widths, strict=False)] for line in lines]
        return "\n".join(
            "  ".join([*numbers, line[-2].ljust(widths[-1]), line[-1]]).rstrip()
            for numbers, line in zip(aligned, lines, strict=True)
        )


def _shown(tokens: list[str]) -> str:
    return "|".join(token.replace("\n", "\\n") for token in tokens) or "–"


class Tracer(Phases):
    """Times the phases of a step and keeps what became of its drafts. It waits for the device after each phase.

    Args:
        drafter_of: the name of the drafter of a sequence's draft, where there are several.
    """

    def __init__(self, device: torch.device, drafter_of: Callable[[Sequence], str | None]):
        self.trace, self._drafter_of = Trace(), drafter_of
        self._device, self._clock = device, clock_for(device)
        self._last = 0.0
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._num_steps = 0

    def begin(self, first: bool = False) -> None:
        """Go on with the clock. `first`: a step begins."""
        if first:
            self._seconds.update(dict.fromkeys(PHASES, 0.0))
        self._last = self._clock()

    def end(self, phase: str) -> None:
        """Add the time since the last call to a phase."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = self._clock()
        self._seconds[phase] += now - self._last
        self._last = now

    def record(self, outcome: StepOutcome) -> None:
        """Keep a step that has ended. Steps that only read prompts are left out."""
        milliseconds = {f"{name}_ms": 1e3 * seconds for name, seconds in self._seconds.items()}
        tokens, trees = outcome.trees.tokens.tolist(), outcome.trees
        for i, seq in enumerate(outcome.sequences):
            drafted, path = tokens[i][: trees.lengths[i]], outcome.accepted[i]
            name = self._drafter_of(seq) if drafted else None
            self.trace.append(
                {
                    "step": self._num_steps, "row": seq.row, **({} if name is None else {"drafter": name}),
                    "drafted": drafted, "accepted": [drafted[node] for node in path],
                    "rejected": [token for node, token in enumerate(drafted) if node not in path],
                    "written": list(outcome.new_tokens[i]), **milliseconds,
                }
            )  # fmt: skip
        self._num_steps += bool(outcome.sequences)
