"""SpeculativeConfig: the keys common to all methods, and how a configuration is checked, read and written."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
VERIFICATION_RULES = ("greedy", "coupled", "rejection", "block", "typical", "synthetic")
_RULE_ALIASES = {"standard": "rejection", "probabilistic": "rejection", "strict": "coupled"}  # vLLM's names
_RULE_OF_KEY = {
    "posterior_threshold": "typical",
    "posterior_alpha": "typical",
    "synthetic_acceptance_rates": "synthetic",
    "synthetic_acceptance_length": "synthetic",
}
# Keys that may differ between calls that share a decoder and its drafter.
PER_CALL_KEYS = ("seed", "rejection_sample_method", "async_scheduling", "trace", "prediction", *_RULE_OF_KEY)
_APART = {  # keys that exclude each other
    "compile": ["prepack_weights"], "native": ["compile", "prepack_weights"],
    "deterministic": ["prepack_weights", "target_quantization", "compile", "native"],
}  # fmt: skip
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
QUANTIZATIONS = ("wint8", "wint4")
RECURRENT_STATES = ("auto", "kept", "replayed")
KV_CACHE_DTYPES = ("auto", "int8")
DRAFT_LENGTHS = ("fixed", "auto")
MOST_DRAFT_TOKENS, MOST_DRAFT_NODES = 1024, 4096  # per row and round: longer paths are cut, larger trees are refused
_TABLE = "num_speculative_tokens_per_batch_size"
_LARGEST_BLOCK = 4096  # tokens; a pool has several blocks, however short the texts are


def config_key(
    default: Any, about: str, minimum: float | None = None, maximum: float | None = None, choices: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:  # fmt: skip
    """A key of a configuration, or an option of a training run, as a dataclass field. `key_error` checks its value by its type.

    Args:
        about: what `hf-specdec models` says of it.
        minimum, maximum, choices: of numbers and of names; without them these are not checked.
        secret: it is never saved or shown.
    """
    metadata = {"help": about, "bounds": (minimum, maximum), "choices": choices, **({"secret": True} if secret else {})}
    return field(default=default, repr=not secret, metadata=metadata)


class SpeculativeConfigError(ValueError):
    """A speculative configuration cannot work; the message names the key and says what to do."""


@dataclass
class SpeculativeConfig:
    """Fields common to all methods. Each method subclasses this next to its generator, as PEFT does with its tuners.

    Keys have vLLM's names where vLLM has the concept. Instances are plain data: they serialise to JSON and back.
    """

    name: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()
    default_num_speculative_tokens: ClassVar[int] = 5
    has_weights: ClassVar[bool] = False  # whether the drafter is a model or a head
    has_parts: ClassVar[bool] = False  # whether it is made of other drafters
    can_be_combined: ClassVar[bool] = True  # whether it may be a part of another
    uses_assistant_model: ClassVar[bool] = False  # whether it drafts with generate(assistant_model=)
    default_longest_draft: ClassVar[int] = 8  # default of num_speculative_tokens under draft_length "auto"

    method: str = config_key("", "the drafting method; `hf-specdec models` lists all of them")
    num_speculative_tokens: int | None = config_key(
        None,
        "K: draft tokens per step (length of a chain, depth of a tree), at most 1024; 'auto': as draft_length 'auto', with a "
        "default maximum",
    )
    num_speculative_tokens_per_batch_size: list[list[int]] | None = config_key(
        None,
        "K by the number of decoding rows, as [first, last, K]: [[1, 4, 5], [5, 16, 2]], or as {first: K}; every K is at most "
        "num_speculative_tokens; the last K also applies to larger batches",
    )
    disable_by_batch_size: int | None = config_key(
        None, "draft nothing in a step with more decoding rows than this", minimum=1
    )
    max_model_len: int | None = config_key(
        None, "do not draft beyond this many tokens per text, drafts included", minimum=1
    )
    draft_length: str = config_key(
        "fixed",
        "'fixed': num_speculative_tokens for every row; 'auto': for each row and step the fastest length up to it, "
        "by measured costs and acceptance",
        choices=DRAFT_LENGTHS,
    )
    rejection_sample_method: str | None = config_key(
        None,
        "how drafts are verified when sampling: 'coupled' (default), 'rejection' (alias 'standard') or 'block', all "
        "exact; 'typical' (lossy); 'greedy' (refuses to sample); 'synthetic' (ignores the model, for benchmarks only)",
        choices=VERIFICATION_RULES,
    )
    posterior_threshold: float = config_key(
        0.09,
        "'typical' accepts tokens whose probability exceeds min(posterior_threshold, posterior_alpha * exp(-entropy))",
        minimum=0,
        maximum=1,
    )
    posterior_alpha: float = config_key(0.3, "see posterior_threshold", minimum=0)
    synthetic_acceptance_rates: list[float] | None = config_key(
        None,
        "for 'synthetic': num_speculative_tokens numbers; number i is the share of steps in which at least i draft tokens are accepted",
    )
    synthetic_acceptance_length: float | None = config_key(
        None, "for 'synthetic', instead of the rates: mean tokens per step, bonus token included"
    )
    prediction: Any = config_key(
        None,
        "the expected output: a text (with `generate(tokenizer=)`), token ids, or a list of them by row; every method drafts from it",
    )
    draft_sample_method: str | None = config_key(
        None, "how a model drafts when sampling: 'probabilistic' (default) or 'greedy'", choices=DRAFT_SAMPLE_METHODS
    )
    seed: int | None = config_key(
        None, "seed for sampling; by default from torch's generator", minimum=0, maximum=2**63 - 1
    )
    block_size: int = config_key(16, "tokens per KV block", minimum=1, maximum=_LARGEST_BLOCK)
    kv_cache_dtype: str = config_key(
        "auto",
        "'int8' (lossy): keep the target's keys and values in 8 bits; the output is that of method 'none' with this key",
        choices=KV_CACHE_DTYPES,
    )
    num_blocks: int | None = config_key(None, "most KV blocks in the pool; by default what the batch needs", minimum=1)
    prefill_chunk_size: int = config_key(2048, "most prompt tokens per forward (bounds activation memory)", minimum=1)
    prepack_weights: bool | None = config_key(
        None, "on a CPU, keep a second copy of the weights in a faster layout; by default if memory is plentiful"
    )
    async_scheduling: bool | None = config_key(
        None,
        "launch the next step before stopping criteria and streamers have seen the last one; by default on GPUs",
    )
    quantization: str | None = config_key(
        None, "8-bit or 4-bit weights for the drafter's linear layers: 'wint8' or 'wint4'", choices=QUANTIZATIONS
    )
    target_quantization: str | None = config_key(
        None,
        "as `quantization`, for the target; its own weights stay in memory, and the output is the quantized target's",
        choices=QUANTIZATIONS,
    )
    compile: bool | None = config_key(
        None,
        "compile target and draft model by torch.compile; by default layers are only traced and rewritten for CUDA graphs",
    )
    cuda_graphs: bool | None = config_key(
        None,
        "run decoding steps and drafting rounds as CUDA graphs; by default on GPUs, except for models that cannot use the paged cache, "
        "and mixtures of experts whose routing the host must read",
    )
    native: bool | None = config_key(
        None,
        "on a CPU, run decoding steps and products with quantized weights as calls of the compiled library; by default where it "
        "can. False: never; True: an error if it cannot",
    )
    draft_tensor_parallel_size: int | None = config_key(
        None,
        "for sharded targets: 1 (default) keeps a whole drafter on every rank; the number of ranks shards a draft model, too",
        minimum=1,
    )
    recurrent_states: str = config_key(
        "auto",
        "for targets with recurrent layers. 'kept': the state after every draft token; 'replayed': one state and the drafts' inputs, "
        "with less memory and more time; 'auto': 'kept' up to a quarter of the memory",
        choices=RECURRENT_STATES,
    )
    deterministic: bool = config_key(
        False,
        "give the target's logits the same bits in any batch, so that greedy output equals plain decoding with this key, also in "
        "bfloat16; slower",
    )

    trace: bool = config_key(
        False,
        "record tokens and milliseconds of every step in `output.speculation.trace`; steps do not overlap then",
    )

    def __post_init__(self) -> None:
        self.method = self.method or self.name
        if self.method != self.name:
            raise SpeculativeConfigError(
                f"{type(self).__name__} is the configuration of {self.name!r}, not {self.method!r}."
            )
        self._settle_draft_length()
        self.check_keys()
        if self.quantization is not None and not self.has_weights:
            raise self.fail("quantization", "is for drafters with weights, and this method has none: leave it out.")
        for owner, keys in _APART.items():
            for key in keys:
                if getattr(self, owner) and getattr(self, key):
                    raise self.fail(key, f"cannot be combined with {owner!r}: leave one of them out.")
        self._check_rule_keys()

    def check_keys(self) -> None:
        """Check the keys that were declared with `config_key`, each by itself. A method calls it before it uses their values."""
        self.method = self.method or self.name  # errors name it
        if isinstance(self.rejection_sample_method, str):
            self.rejection_sample_method = _RULE_ALIASES.get(self.rejection_sample_method, self.rejection_sample_method)
        for f in dataclasses.fields(self):
            if isinstance(value := getattr(self, f.name), os.PathLike):
                setattr(self, f.name, value := os.fspath(value))
            self._refuse(f.name, key_error(f, value))

    def read_auto(self) -> None:
        """Replace `num_speculative_tokens: "auto"` by the two keys it stands for."""
        if self.num_speculative_tokens == "auto":
            self.num_speculative_tokens, self.draft_length = None, "auto"

    def _settle_draft_length(self) -> None:
        """Set `num_speculative_tokens` to a number and bring the batch-size table into the form [[first, last, K], ..]."""
        self.read_auto()
        automatic = self.draft_length == "auto"
        table = self.num_speculative_tokens_per_batch_size
        if table is not None:
            if automatic:
                raise self.fail(_TABLE, "cannot be combined with draft_length 'auto': choose one.")
            table = self.num_speculative_tokens_per_batch_size = self._batch_size_ranges(table)
        if self.num_speculative_tokens is None:
            usual = max(self.default_num_speculative_tokens, self.default_longest_draft if automatic else 0)
            self.num_speculative_tokens = max(1, *(k for _, _, k in table)) if table else usual
        self.check_number("num_speculative_tokens", minimum=1, whole=True)
        for first, last, k in table or []:
            if k > self.num_speculative_tokens:
                raise self.fail(
                    _TABLE,
                    f"wants {k} draft tokens for {first} to {last} rows, more than num_speculative_tokens = "
                    f"{self.num_speculative_tokens}: raise num_speculative_tokens or lower this K.",
                )

    def _batch_size_ranges(self, table: Any) -> list[list[int]]:
        """The table as [[first, last, K], ..], from this form (vLLM's) or {first: K}; numbers may be strings, as in JSON keys."""
        try:
            if isinstance(table, dict):
                starts = sorted((_integer(first), _integer(k)) for first, k in table.items())
                lasts = [following - 1 for following, _ in starts[1:]] + [first for first, _ in starts[-1:]]
                table = [(first, last, k) for (first, k), last in zip(starts, lasts, strict=True)]
            ranges = sorted([_integer(first), _integer(last), _integer(k)] for first, last, k in table)
        except (TypeError, ValueError):
            forms = "a list of [first, last, K] like [[1, 4, 5], [5, 16, 2]] or a mapping {first: K}"
            raise self.fail(_TABLE, f"must be {forms}, all integers, not {table!r}.") from None
        expected = 1
        for first, last, k in ranges:
            if first != expected or last < first or k < 0:
                raise self.fail(
                    _TABLE,
                    f"has the entry {[first, last, k]} where one that begins at {expected} is expected: ranges [first, last, K] "
                    f"must start at 1, have no gaps or overlaps, and have K >= 0; not {table!r}.",
                )
            expected = last + 1
        if not ranges:
            raise self.fail(_TABLE, f"must name at least one batch size, not {table!r}; leave it out for one K.")
        return ranges

    @property
    def implied_length(self) -> int | None:
        """The `num_speculative_tokens` that follows from the other keys, so that it need not be written; None: it always is."""
        return self.default_num_speculative_tokens

    @property
    def longest_draft(self) -> int:
        """Maximum number of tokens on a draft's path: `num_speculative_tokens`, at most MOST_DRAFT_TOKENS."""
        return min(self.num_speculative_tokens or 0, MOST_DRAFT_TOKENS)

    @property
    def verification_rule(self) -> str:
        """`rejection_sample_method`, or its default."""
        return self.rejection_sample_method or "coupled"

    @property
    def verifies_by_draft_probs(self) -> bool:
        """True if drafts are sampled with independent noise and then tested against the probabilities they were drawn with."""
        return self.verification_rule in ("rejection", "block")

    @property
    def acceptance_rates(self) -> list[float]:
        """Synthetic rule: P(at least i drafts are accepted) for i = 1, 2, .., never increasing; 0 beyond the list.

        A mean length is turned into the rates of least variance, as in vLLM: 3.4 tokens (two drafts, a third with probability
        0.4, and the bonus token) become [1, 1, 0.4].
        """
        if self.synthetic_acceptance_rates is not None:
            return self.synthetic_acceptance_rates
        whole, part = divmod((self.synthetic_acceptance_length or 1.0) - 1.0, 1.0)
        return [1.0] * min(int(whole), MOST_DRAFT_TOKENS) + [part]

    def _check_rule_keys(self) -> None:
        """Check the keys that belong to one verification rule: their values, and that this rule is used."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        given = [key for key in _RULE_OF_KEY if getattr(self, key) != defaults[key]]
        for key in given:
            if self.verification_rule != _RULE_OF_KEY[key]:
                raise self.fail(key, f"can be used only with rejection_sample_method {_RULE_OF_KEY[key]!r}.")
        if self.verification_rule == "synthetic":
            self._check_synthetic(given)

    def _check_synthetic(self, given: list[str]) -> None:
        deepest = self.num_speculative_tokens or 0
        if len(given) != 1:
            raise self.fail(
                "rejection_sample_method",
                "is 'synthetic', which ignores the model and needs exactly one of synthetic_acceptance_rates and "
                f"synthetic_acceptance_length, not {' and '.join(given) or 'none'}.",
            )
        if self.synthetic_acceptance_length is not None:
            self.check_number("synthetic_acceptance_length", minimum=1, maximum=deepest + 1)
            return
        rates: Any = self.synthetic_acceptance_rates
        fits = isinstance(rates, list) and len(rates) == deepest and all(type(r) in (int, float) for r in rates)
        # With 1 and 0 around the rates, one comparison finds increasing rates, rates outside [0, 1], and NaN.
        if not fits or not all(a >= b for a, b in itertools.pairwise([1.0, *rates, 0.0])):
            raise self.fail(
                "synthetic_acceptance_rates",
                f"must be {deepest} numbers in [0, 1] (as many as num_speculative_tokens) that never increase: the share of "
                f"steps in which at least 1, 2, .. drafts are accepted; not {rates!r}.",
            )

    def fail(self, key: str, what: str) -> SpeculativeConfigError:
        """Make an error about `key`; the caller raises it."""
        return SpeculativeConfigError(f"speculative_config[{key!r}] of method {self.method!r} {what}")

    def _refuse(self, key: str, wrong: str) -> None:
        if wrong:
            raise self.fail(key, wrong)

    def check_number(self, key: str, minimum: float, maximum: float | None = None, whole: bool = False) -> None:
        """Raise SpeculativeConfigError unless the value of `key` is a number, or a `whole` one, in [minimum, maximum]."""
        self._refuse(key, number_error(getattr(self, key), whole, minimum, maximum))

    def check_int(self, key: str, minimum: float, maximum: float | None = None) -> None:
        """Raise SpeculativeConfigError unless the value of `key` is an integer in [minimum, maximum]. For methods of other packages."""
        self.check_number(key, minimum, maximum, whole=True)

    def check_choice(self, key: str, choices: tuple[str, ...]) -> None:
        """Raise SpeculativeConfigError, which suggests the nearest choice, unless the value of `key` is one of `choices`. For the same."""
        self._refuse(key, choice_error(getattr(self, key), choices))

    def check_text(self, key: str) -> None:
        """Raise SpeculativeConfigError unless the value of `key` is None or non-empty text."""
        value = getattr(self, key)
        self._refuse(key, "" if value is None else text_error(value))

    @classmethod
    def from_dict(cls, values: dict[str, Any], others: Iterable[str] = ()) -> SpeculativeConfig:
        """Build from a dict. An unknown key is an error that suggests the nearest valid key or the nearest of `others`."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                hint = nearest_hint(key, [*known, *others])
                raise SpeculativeConfigError(
                    f"speculative_config has no key {key!r} for method {cls.name!r}{hint}. Valid keys: {', '.join(sorted(known))}."
                )
        if values.get("num_speculative_tokens") == "auto" and values.get("draft_length", "auto") != "auto":
            raise SpeculativeConfigError(
                f"speculative_config['num_speculative_tokens'] of method {cls.name!r} is 'auto', but draft_length is "
                f"{values['draft_length']!r}: leave draft_length out, or give a number."
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """`method` and all values that differ from the defaults, except secrets. JSON-serialisable; `parse_config` reads it."""
        out: dict[str, Any] = {"method": self.method}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            default = self.implied_length if f.name == "num_speculative_tokens" else f.default
            if f.name != "method" and value != default and not f.metadata.get("secret"):
                out[f.name] = value
        return out

    def to_json(self) -> str:
        """`to_dict()` as JSON text with sorted keys."""
        return json.dumps(self.to_dict(), sort_keys=True)


def _integer(value: Any) -> int:
    """Convert an integer or a string with one. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(value)
    return int(value)


def key_error(f: dataclasses.Field, value: Any) -> str:
    """What is wrong with the value of a field made by `config_key`, after its name; "" if nothing is, or nothing is known of it."""
    kind, _, none = (f.type.__name__ if isinstance(f.type, type) else str(f.type)).partition(" | ")
    optional = none == "None"
    if "bounds" not in f.metadata or (value is None and optional):
        return ""
    (minimum, maximum), choices = f.metadata["bounds"], f.metadata["choices"]
    if kind == "bool" and (optional or not none):
        return "" if isinstance(value, bool) else f"must be true or false, not {value!r}."
    if choices:
        return choice_error(value, choices)
    if kind == "str" and optional:
        return text_error(value)
    return (
        number_error(value, kind == "int", minimum, maximum) if kind in ("int", "float") and minimum is not None else ""
    )


def choice_error(value: Any, choices: tuple[str, ...]) -> str:
    """What is wrong with a value that must be one of `choices`, with the nearest of them, after its name; "" if nothing is."""
    known = ", ".join(map(repr, choices))
    return "" if value in choices else f"must be one of {known}, not {value!r}{nearest_hint(value, choices)}."


def text_error(value: Any) -> str:
    """What is wrong with a value that must be text, after its name; "" if nothing is."""
    return "" if isinstance(value, str) and value else f"must be text, not {value!r}."


def number_error(value: Any, whole: bool, minimum: float | None, maximum: float | None) -> str:
    """What is wrong with a value that must be a number, or a `whole` one, in [minimum, maximum], after its name; "" if nothing is."""
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    # Every comparison with NaN is False.
    if is_number and (minimum is None or value >= minimum) and (maximum is None or value <= maximum):
        return ""
    bounds = [f"at least {minimum}"] * (minimum is not None) + [f"at most {maximum}"] * (maximum is not None)
    return f"must be {'an integer' if whole else 'a number'} of {' and '.join(bounds)}, not {value!r}."


def with_hints(dataclass_type: type[T]) -> type[T]:
    """Class decorator: an argument that the dataclass does not have is a TypeError that suggests the nearest one."""
    initialize = dataclass_type.__init__
    known = [f.name for f in dataclasses.fields(dataclass_type)]  # type: ignore[arg-type]

    @functools.wraps(initialize)
    def checked(self, *args, **values) -> None:
        for name in values:
            if name not in known:
                hint = nearest_hint(name, known)
                raise TypeError(f"{dataclass_type.__name__}() has no argument {name!r}{hint}.")
        initialize(self, *args, **values)

    setattr(dataclass_type, "__init__", checked)  # noqa: B010 (a method, to a type checker)
    return dataclass_type


def nearest_hint(word: Any, choices: Iterable[str]) -> str:
    """' (did you mean ...?)' with the choice nearest to `word`; an empty string if none is near."""
    match = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
