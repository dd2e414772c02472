"""SpeculativeConfig: what every method has in common, how a configuration is checked, how it is written and read."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

VERIFICATION_RULES = ("greedy", "coupled", "rejection")
_RULE_ALIASES = {"standard": "rejection"}
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")


class SpeculativeConfigError(ValueError):
    """A speculative configuration that cannot work; the message names the key and what to do."""


@dataclass
class SpeculativeConfig:
    """Fields common to every method; each method subclasses this beside its generator (as PEFT does with its tuners).

    Keys are vLLM's where vLLM has the concept. Instances are plain data: they serialise to JSON and back.
    """

    name: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()
    default_num_speculative_tokens: ClassVar[int] = 5

    method: str = field(default="", metadata={"help": "which drafter proposes tokens; `hf-specdec models` lists them"})
    num_speculative_tokens: int | None = field(
        default=None, metadata={"help": "draft tokens per round (K) in a chain, depth in a tree"}
    )
    rejection_sample_method: str | None = field(
        default=None,
        metadata={
            "help": "how drafts are verified when sampling: 'coupled' (default) or 'rejection' (alias 'standard'); "
            "'greedy' refuses to sample"
        },
    )
    draft_sample_method: str | None = field(
        default=None,
        metadata={"help": "how a model drafts when sampling: 'probabilistic' (default) or 'greedy'"},
    )
    seed: int | None = field(
        default=None, metadata={"help": "seed of the per-row sampling streams; drawn from torch's generator if absent"}
    )
    block_size: int = field(default=16, metadata={"help": "tokens per KV block"})
    num_blocks: int | None = field(
        default=None, metadata={"help": "KV blocks in the pool; by default as many as the batch can need"}
    )
    prefill_chunk_size: int = field(
        default=2048, metadata={"help": "most prompt tokens put through one forward (bounds activation memory)"}
    )
    prepack_weights: bool | None = field(
        default=None,
        metadata={"help": "on a CPU, keep a second, faster copy of the weights; by default if memory is plentiful"},
    )

    def __post_init__(self) -> None:
        self.method = self.method or self.name
        if self.method != self.name:
            raise SpeculativeConfigError(
                f"{type(self).__name__} is the configuration of {self.name!r}, not {self.method!r}."
            )
        if self.num_speculative_tokens is None:
            self.num_speculative_tokens = self.default_num_speculative_tokens
        if isinstance(self.rejection_sample_method, str):
            self.rejection_sample_method = _RULE_ALIASES.get(self.rejection_sample_method, self.rejection_sample_method)
        self.check_int("num_speculative_tokens", minimum=1)
        self.check_int("block_size", minimum=1)
        self.check_int("num_blocks", minimum=1, optional=True)
        self.check_int("prefill_chunk_size", minimum=1)
        self.check_int("seed", minimum=0, maximum=2**63 - 1, optional=True)
        self.check_choice("rejection_sample_method", VERIFICATION_RULES, optional=True)
        self.check_choice("draft_sample_method", DRAFT_SAMPLE_METHODS, optional=True)
        self.check_bool("prepack_weights", optional=True)

    # ---- checks, each one clear error -------------------------------------------------------------------------------

    def fail(self, key: str, what: str) -> SpeculativeConfigError:
        """An error about `key` of this method; the caller raises it."""
        return SpeculativeConfigError(f"speculative_config[{key!r}] of method {self.method!r} {what}")

    def check_int(self, key: str, minimum: int, maximum: int | None = None, optional: bool = False) -> None:
        """Raise SpeculativeConfigError unless the value of `key` is an integer in [minimum, maximum]."""
        value = getattr(self, key)
        if value is None and optional:
            return
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or value < minimum
            or (maximum is not None and value > maximum)
        ):
            bound = f"at least {minimum}" + (f" and at most {maximum}" if maximum is not None else "")
            raise self.fail(key, f"must be an integer of {bound}, not {value!r}.")

    def check_number(self, key: str, minimum: float, maximum: float | None = None) -> None:
        """Raise SpeculativeConfigError unless the value of `key` is a number in [minimum, maximum]."""
        value = getattr(self, key)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (
            not is_number or not value >= minimum or (maximum is not None and not value <= maximum)
        ):  # so written, NaN fails
            bound = f"at least {minimum}" + (f" and at most {maximum}" if maximum is not None else "")
            raise self.fail(key, f"must be a number of {bound}, not {value!r}.")

    def check_bool(self, key: str, optional: bool = False) -> None:
        """Raise SpeculativeConfigError unless the value of `key` is true or false."""
        if getattr(self, key) is None and optional:
            return
        if not isinstance(getattr(self, key), bool):
            raise self.fail(key, f"must be true or false, not {getattr(self, key)!r}.")

    def check_text(self, key: str) -> None:
        """Raise SpeculativeConfigError unless the value of `key` is None or non-empty text."""
        value = getattr(self, key)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.fail(key, f"must be text, not {value!r}.")

    def check_choice(self, key: str, choices: tuple[str, ...], optional: bool = False) -> None:
        """Raise SpeculativeConfigError, with the nearest choice, unless the value of `key` is one of `choices`."""
        value = getattr(self, key)
        if value is None and optional:
            return
        if value not in choices:
            raise self.fail(
                key, f"must be one of {', '.join(map(repr, choices))}, not {value!r}{nearest_hint(value, choices)}."
            )

    # ---- reading and writing ----------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpeculativeConfig:
        """Build from a dict; an unknown key is an error naming the nearest valid one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                hint = nearest_hint(key, known)
                raise SpeculativeConfigError(
                    f"speculative_config has no key {key!r} for method {cls.name!r}{hint}. Valid keys: {', '.join(sorted(known))}."
                )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """`method` and everything that differs from its defaults: JSON-serialisable, read back by `parse_config`."""
        out: dict[str, Any] = {"method": self.method}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            default = self.default_num_speculative_tokens if f.name == "num_speculative_tokens" else f.default
            if f.name != "method" and value != default:
                out[f.name] = value
        return out

    def to_json(self) -> str:
        """`to_dict()` as JSON text with sorted keys."""
        return json.dumps(self.to_dict(), sort_keys=True)


def nearest_hint(word: Any, choices: Iterable[str]) -> str:
    """' (did you mean ...?)' for the choice nearest to `word`, or an empty string."""
    match = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
