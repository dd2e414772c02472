"""What the keys of a head's config.json mean: one table per format. A key that no table names is refused."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from .files import Checkpoint, Plan

LAYERS, PROPOSALS = "transformer_layer_config", "speculators_config"  # sections of speculators' format
KIND = (".speculators_model_type", f"{PROPOSALS}.algorithm")  # places of what a head is, in that format


@dataclass(frozen=True)
class Kind:
    """A kind of value: its name in errors, and a test for it."""

    name: str
    fits: Callable[[Any], bool]


def integer(minimum: int = 1) -> Kind:
    """Integers from `minimum` on."""
    return Kind(f"an integer of at least {minimum}", lambda value: type(value) is int and value >= minimum)


def one_of(*names: str) -> Kind:
    """One of these names."""
    return Kind(" or ".join(map(repr, names)), lambda value: value in names)


def list_of(what: str, type_: type) -> Kind:
    """Lists whose items have exactly this type; `what`: their name in errors."""
    return Kind(f"a list of {what}", lambda value: isinstance(value, list) and all(type(v) is type_ for v in value))


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NUMBER = Kind("a number", lambda value: type(value) in (int, float))
NAME = Kind("a name", lambda value: isinstance(value, str))
NAMES, IDS = list_of("names", str), list_of("layers", int)
ANYTHING = Kind("anything", lambda value: True)

# Describe the layers of a head; `read_layer_config` reads them.
LAYER_KEYS = {
    "model_type": NAME, "hidden_act": NAME, "layer_types": NAMES, "rms_norm_eps": NUMBER, "rope_theta": NUMBER,
    "rope_scaling": ANYTHING, "rope_parameters": ANYTHING, "partial_rotary_factor": NUMBER, "use_sliding_window": FLAG,
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
         "vocab_size", "max_position_embeddings"),
        integer(),
    ),
    **dict.fromkeys(("sliding_window", "max_window_layers"), integer(0)),
}  # fmt: skip
# Refused unless they have this value, with which they change nothing.
_ONLY = {
    "is_neox_style": True, "rope_is_neox_style": True, "rope_interleave": False, "attention_value_scale": 1.0,
    "attention_sink_bias": False, "add_swa_attention_sink_bias": False, "logit_scale": 1.0, "logits_scaling": 1.0,
    "output_multiplier": 1.0, "input_embedding_scale": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
}  # fmt: skip
# Mean nothing to a drafting head: for transformers, for training, names of other models, and what tensors' names and shapes say.
_NOTHING = """
architectures auto_map _name_or_path name_or_path base_model_name_or_path transformers_version torch_dtype dtype use_cache
initializer_range attention_dropout hidden_dropout dropout_rate _attn_implementation attn_implementation
tie_word_embeddings bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id id2label label2id num_labels
problem_type task_specific_params tokenizer_class finetuning_task prefix output_hidden_states
output_attentions output_scores return_dict return_dict_in_generate chunk_size_feed_forward is_encoder_decoder is_decoder
add_cross_attention cross_attention_hidden_size tie_encoder_decoder torchscript use_bfloat16 tf_legacy_loss pruned_heads
do_sample temperature top_k top_p typical_p min_length max_length num_beams num_beam_groups num_return_sequences
early_stopping diversity_penalty repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id remove_invalid_values
exponential_decay_length_penalty keys_to_ignore_at_inference pretraining_tp transformers_weights
speculators_version quantization_config has_no_defaults_at_init
mlp_bias decoder_sparse_step moe_intermediate_size router_jitter_noise norm_topk_prob num_experts num_experts_per_tok num_local_experts
mlp_only_layers output_router_logits router_aux_loss_coef first_k_dense_replace n_routed_experts n_shared_experts
q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
target_model_type target_text_model_type target_model_name_or_path num_anchors ttt_length step_loss_decay loss_type
"""


@dataclass(frozen=True)
class Key:
    """A setting of a format, which the loader acts on.

    Attributes:
        kind: of its values in config.json.
        default: the setting if config.json has none; `...`: it must have one.
        places: where it may be, first to last; by default under the setting's name. "name" stands for the format's section
            and for the top level, ".name" for the top level, "section.name" for a section. "not name": the setting is the
            opposite. "name + 1": ids there are one less.
        tensor: of flags, the canonical tensor that is in the file if and only if the flag is true.
    """

    kind: Kind
    default: Any = None
    places: tuple[str, ...] = ()
    tensor: str | None = None


def keys(kind: Kind, *names: str) -> dict[str, Key]:
    """Settings of one kind by their names, without a default."""
    return {name: Key(kind) for name in names}


@dataclass(frozen=True)
class Table:
    """The keys of a format. The loader acts on `keys` and those of layers; the others are refused or mean nothing.

    Attributes:
        section: the object in config.json with the format's own keys, which may be at the top level too.
        only: keys that are refused unless they have this value.
        nothing: further keys that mean nothing.
        has_layers: whether keys describe decoder layers, at the top level or in speculators' section.
        class_keys: further keys in speculators' section, which the layers' own class reads.
    """

    keys: dict[str, Key]
    section: str | None = None
    only: dict[str, Any] = field(default_factory=dict)
    nothing: frozenset[str] = frozenset()
    has_layers: bool = True
    class_keys: frozenset[str] = frozenset()

    def __or__(self, other: Table) -> Table:
        """A table with the keys of both; where both have one, that of this table."""
        keys, only = other.keys | self.keys, other.only | self.only
        return replace(self, keys=keys, only=only, nothing=self.nothing | other.nothing)

    def places(self, name: str) -> dict[str, str]:
        """The paths at which a setting may be, with their places in `Key.places`."""
        out: dict[str, str] = {}
        for place in self.keys[name].places or (name,):
            path = place.removeprefix("not ").removesuffix(" + 1")
            if "." not in path and self.section:
                out[f"{self.section}.{path}"] = place
            out[path.removeprefix(".")] = place
        return out

    @property
    def sections(self) -> list[str]:
        """The objects in config.json whose keys are read as the format's own."""
        return [name for name in (self.section, PROPOSALS, LAYERS) if name is not None]

    def means_nothing(self, name: str) -> bool:
        """Whether a key, without its section, means nothing in this format. transformers' notes to itself begin with "_"."""
        return name.startswith("_") or name in self.nothing or name in _NOTHING.split()

    def read(self, checkpoint: Checkpoint, plan: Plan | None = None) -> SimpleNamespace:
        """The settings, as attributes. null and [] count as no value. Raises CheckpointError: a bad value, places or tensors that
        contradict a value, a missing key, or a key or a value that this format does not have."""
        if self.has_layers and checkpoint.config.get("speculators_model_type") and not checkpoint.section(LAYERS):
            raise checkpoint.error(f"is in speculators' format and has no {LAYERS}.")
        given: dict[str, Any] = {}
        for key, value in checkpoint.config.items():
            inside = {f"{key}.{k}": v for k, v in checkpoint.section(key).items()} if key in self.sections else {}
            given |= inside or ({} if key in self.sections else {key: value})
        given = {path: value for path, value in given.items() if value is not None and value != []}
        settings, seen = {}, set[str]()
        for name, key in self.keys.items():
            places = self.places(name)
            here = {path: given[path] for path in places if path in given}
            for path, value in here.items():
                _check(checkpoint, path, value, key.kind)
            made = [_setting(value, places[path]) for path, value in here.items()]
            for path, other in zip(here, made, strict=True):
                if other != made[0]:
                    both = " and ".join(f"{p} = {reprlib.repr(here[p])}" for p in (next(iter(here)), path))
                    raise checkpoint.error(f"config.json has {both}, which contradict each other.")
            if not made and key.default is ...:
                _check(checkpoint, next(iter(places)), None, key.kind)
            settings[name] = made[0] if made else key.default
            if key.tensor is not None and plan is not None and made and made[0] != (key.tensor in plan):
                has = "has" if key.tensor in plan else "has no"
                raise checkpoint.error(
                    f"config.json says {next(iter(here))} = {str(made[0]).lower()}, but the file {has} {key.tensor}."
                )
            seen |= set(places)
        for path in given:
            if path not in seen:
                self._check_other(checkpoint, path, given)
        return SimpleNamespace(**settings)

    def _check_other(self, checkpoint: Checkpoint, path: str, given: dict[str, Any]) -> None:
        """Raise CheckpointError if a key that is no setting's may change what the head computes."""
        (section, _, name), value = path.rpartition("."), given[path]
        if section == PROPOSALS and name in ("algorithm", "default_proposal_method", "proposal_methods", "verifier"):
            return
        if section == LAYERS and name in self.class_keys and name not in LAYER_KEYS:
            return
        if self.has_layers and name in LAYER_KEYS and section in ("", LAYERS):
            nested = given.get(f"{LAYERS}.{name}")
            if not section and checkpoint.section(LAYERS) and name != "model_type" and nested != value:
                raise checkpoint.error(f"config.json has {name} = {value!r}, but {LAYERS} has {nested!r}.")
            _check(checkpoint, path, value, LAYER_KEYS[name])
            rope = given.get(path.replace(name, "rope_parameters"))
            if isinstance(rope, dict) and name != "rope_parameters" and rope.get(name, value) != value:
                raise checkpoint.error(f"config.json has {path} = {value!r}, but rope_parameters has {rope[name]!r}.")
        elif name in _ONLY | self.only:
            only = (_ONLY | self.only)[name]
            if value != only:
                raise checkpoint.error(f"config.json has {path} = {value!r}; only {only!r} is supported here.")
        elif name == "architectures":
            _check(checkpoint, path, value, NAMES)
        elif not self.means_nothing(name):
            raise checkpoint.error(
                f"config.json has {path} = {reprlib.repr(value)}, which this format does not have. It may change what the "
                "head computes: remove the key if it does not."
            )


def _setting(value: Any, place: str) -> Any:
    if place.startswith("not "):
        return not value
    return [i + 1 for i in value] if place.endswith(" + 1") else value


def _check(checkpoint: Checkpoint, path: str, value: Any, kind: Kind) -> None:
    if not kind.fits(value):
        raise checkpoint.error(f"config.json has {path} = {reprlib.repr(value)}; it must be {kind.name}.")
