"""What a server makes of a loaded model: a thread that runs its engine, and the facts that the HTTP side must know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..integration import model_lock
from .followers import RankedWorker, Serve
from .llm import LLM
from .messages import response_template_of
from .params import SamplingParams
from .worker import EngineWorker, Update


@dataclass
class Facts:
    """What the HTTP side must know about a model.

    Attributes:
        defaults: sampling parameters for requests that leave them out.
        max_model_len: maximum number of tokens of a prompt and its answer together.
        response_template: see `response_template_of`.
    """

    defaults: SamplingParams
    max_model_len: int
    response_template: dict | None


def facts_of(llm: LLM, tokenizer: Any) -> Facts:
    """What the HTTP side must know about a model. `tokenizer`: the one that the HTTP side uses."""
    return Facts(llm.get_default_sampling_params(), llm.max_model_len, response_template_of(tokenizer, llm.model))


def worker_of(llm: LLM, deliver: Callable[[list[Update]], None]) -> EngineWorker:
    """The thread that will run the engine, not started yet. With several ranks, the other ranks are told to serve, too."""
    if llm.ranks is None:
        return EngineWorker(llm.engine, deliver, model_lock(llm.model))
    llm.ranks.same_object(Serve())
    return RankedWorker(llm.engine, deliver, model_lock(llm.model), llm.ranks)
