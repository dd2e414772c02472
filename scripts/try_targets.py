"""Tries every causal language model that transformers ships as a target, and prints which way it runs or why it is refused.

    python scripts/try_targets.py                           # a table on the terminal
    python scripts/try_targets.py --only llama mamba2       # these model types
    python scripts/try_targets.py --markdown docs/targets.md

Each class is built small, with random weights in float32, and decodes one row and three ragged ones, with drafts from n-grams and as a
tree (Token Recycling). The text must be plain generate()'s. Exit code 1 if one is not, or if a class fails with anything
but a clear refusal.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import logging
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_specdec
from hf_specdec.core.errors import UnsupportedModel

VOCAB, NEW_TOKENS, SECONDS, MOST_PARAMETERS = 96, 16, 90, 30_000_000
METHODS = (
    {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    {"method": "token_recycling", "num_successors": 4, "speculative_token_tree": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
)  # fmt: skip
WAYS = ("paged", "gather", "state", "refused", "not tried", "WRONG", "ERROR")
LEFT_OUT = object()  # in OTHERWISE: a name of SMALL that a type should not be given
# Sizes under every name that configurations give them; each configuration takes those it knows.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": False, "sliding_window": 12, "is_decoder": True, "use_cache": True,
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "shared_expert_intermediate_size": 32,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "embedding_size": 64,
    "ffn_dim": 64, "d_model": 64, "d_ff": 64, "word_embed_proj_dim": 64, "decoder_layers": 4, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "d_kv": 16,
    "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "n_inner": 64, "rotary_dim": 4, "dropout": 0.0,
    "num_layers": 4, "num_heads": 4, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
    "state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "expand": 2, "lru_width": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "chunk_size": 8, "attention_hidden_size": 64,
    "global_head_dim": 16, "query_pre_attn_scalar": 16, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "layerdrop": 0.0, "ffn_hidden_size": 64, "index_n_heads": 32, "index_head_dim": 16,
    "index_topk": 8, "sliding_window_size": 12,
}  # fmt: skip
_NO_HEAD_DIM: dict[str, Any] = {"head_dim": LEFT_OUT, "num_key_value_heads": 4}  # latent attention
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
_SHARED = ["sliding_attention", "full_attention"] * 2
# What a type needs besides or instead.
OTHERWISE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3",
         "mistral4", "youtu"), _NO_HEAD_DIM,
    ),
    "bailing_hybrid": {"layer_group_size": 2, "head_dim": 16, "num_key_value_heads": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 4, "rope_parameters": {"full_attention": {**_ROPE, "mrope_section": [2, 3, 3]}},
    },
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 256, "rope_parameters": _ROPE,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "dots3_note_text": {"num_key_value_heads": 4, "layer_types": ["full_attention"] * 4},
    "falcon_h1": {"mamba_d_ssm": 128},
    "fuyu": {"text_config": {"model_type": "persimmon", **_TEXT}, "hidden_size": 64, "num_hidden_layers": 4, "image_token_id": 90},
    "gemma3": {
        "text_config": {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 16,
                        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 12, "layer_types": _SHARED},
        "vision_config": _TOWER, "mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92,
    },
    "got_ocr2": {
        "text_config": {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "model_type": "qwen2",
                        "num_attention_heads": 4, "num_key_value_heads": 2},
        "vision_config": {**_TOWER, "output_channels": 16, "global_attn_indexes": [0], "window_size": 2, "mlp_dim": 16},
        "image_token_index": 90,
    },
    "gemma3n_text": {"layer_types": _SHARED, "num_kv_shared_layers": 2, "intermediate_size": 64},
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 16, "output_proj_dims": 16, "mm_posemb_size": 16}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 12},
    "moss_transcribe_diarize": {"text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 16}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "inkling2_loop_text": {
        "unpadded_vocab_size": VOCAB, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
        "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 3,
    },
    "inkling2_text": {
        "unpadded_vocab_size": VOCAB, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_head_dim": 16, "linear_num_heads": 4,
        "num_key_value_heads": 4, "mlp_layer_types": ["dense", *["sparse"] * 3],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {**_NO_HEAD_DIM, "head_dim": 8, "num_layers": 2, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "moe_topk": 2},
    "mamba2": {"num_heads": 8},
    "moshi": {"audio_vocab_size": VOCAB},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 2,
        "hc_lowrank": 8, "ngram_vocab_size_base": 64, "split_ngram_parts": 1, "ple_layer_ids": [],
    },
    "reformer": {"axial_pos_embds": False, "attention_head_size": 16, "feed_forward_size": 64},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "head_dim": LEFT_OUT, "attention_hidden_size": LEFT_OUT, "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "layer_types": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


# Why some types cannot be tried alone, in front of what transformers says.
ALONE: dict[str, str] = {
    "blt": "reads bytes in patches; plain generate() fails",
    "csm_depth_decoder_model": "goes on from another model's hidden states",
    "gemma3n": "its vision tower needs timm (its text model is below)",
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "drafts for Gemma 4 from its keys and values"),
    **dict.fromkeys(("musicgen_decoder", "musicgen_melody_decoder"), "writes several codebooks at once, no text"),
}


@dataclass
class Trial:
    """What became of one class: one of WAYS, and why."""

    model_type: str
    name: str
    way: str
    why: str = ""


# ---- models ---------------------------------------------------------------------------------------------------------


def classes() -> list[tuple[str, type[PreTrainedModel]]]:
    """(model type, class) of every causal language model, by the automatic mapping and by name."""
    found = {}
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            cls = getattr(transformers, name)
            found.setdefault(name, (model_type if cls.config_class is None else cls.config_class.model_type, cls))
    for name in dir(transformers):
        if name.endswith("ForCausalLM") and not name.startswith(("Auto", "TF", "Flax")) and name not in found:
            cls = getattr(transformers, name)
            found[name] = cls.config_class.model_type, cls
    return sorted(found.values(), key=lambda pair: (pair[0], pair[1].__name__))


def known_names(config_class: type[PreTrainedConfig]) -> set[str]:
    """The names that a configuration takes."""
    names = set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    return names | {name for base in config_class.__mro__ for name in vars(base).get("__annotations__", {})}


def small_config(config_class: type[PreTrainedConfig], model_type: str) -> PreTrainedConfig:
    """A small configuration of a class: SMALL where it knows the names, then OTHERWISE."""
    settings = {name: value for name, value in SMALL.items() if name in known_names(config_class)}
    for name, nested in getattr(config_class, "sub_configs", {}).items():
        inner = nested if isinstance(nested, type) and issubclass(nested, PreTrainedConfig) else None
        if inner is not None and inner.model_type:
            settings[name] = {key: value for key, value in SMALL.items() if key in known_names(inner)}
    settings |= OTHERWISE.get(model_type, {})
    return config_class(**{name: value for name, value in settings.items() if value is not LEFT_OUT})


@torch.no_grad()
def build(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model whose random text varies."""
    with torch.device("meta"):
        count = sum(weight.numel() for weight in cls(copy.deepcopy(config)).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"the smallest configuration known here has {count / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = cls(config).float().eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "conv" not in name:
            weight.normal_(0, 0.3)
        elif weight.dim() == 1:
            weight += 0.1 * torch.randn(weight.shape)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Left-padded prompts that repeat themselves."""
    generator = torch.Generator().manual_seed(1)
    ids, mask = (
        torch.zeros(len(lengths), max(lengths), dtype=torch.long),
        torch.zeros(len(lengths), max(lengths), dtype=torch.long),
    )
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(4, VOCAB, (length // 2 + 1,), generator=generator).repeat(2)[:length]
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


# ---- trials ---------------------------------------------------------------------------------------------------------


class TooLong(Exception):
    """A class has used its time."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TooLong inside when the time is over."""

    def stop(signum, frame):
        raise TooLong(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(model_type: str, cls: type[PreTrainedModel]) -> Trial:
    """Build a class, decode plainly and with drafts, and compare."""
    trial = Trial(model_type, cls.__name__, "not tried")
    try:
        with at_most(SECONDS):
            model = build(cls, small_config(cls.config_class, model_type))
            batches = [prompts([9]), prompts([13, 7, 10])]
            call = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
            plain = [model.generate(**copy.deepcopy(batch), **call) for batch in batches]
    except Exception as error:  # whatever a class raises about its configuration is what the table says of it
        reason = f"{ALONE[model_type]}: " if model_type in ALONE else ""
        trial.why = f"{reason}{type(error).__name__}: {one_line(error)}"
        return trial
    try:
        with at_most(SECONDS):
            trial.way, trial.why = _compare(model, batches, plain, call)
    except UnsupportedModel as error:
        trial.way, trial.why = "refused", one_line(error)
    except Exception as error:
        trial.way, trial.why = "ERROR", f"{type(error).__name__}: {one_line(error)}"
    finally:
        hf_specdec.release(model)
    return trial


def _compare(model: PreTrainedModel, batches, plain, call) -> tuple[str, str]:
    why, alone, accepted = "", "", 0
    for config in METHODS:
        for batch, expected in zip(batches, plain, strict=True):
            output = model.generate(
                **copy.deepcopy(batch), **call, speculative_config=config, return_dict_in_generate=True
            )
            ours, accepted = output.sequences, accepted + output.speculation.num_accepted_tokens
            if not torch.equal(ours, expected) and torch.equal(ours, _alone(model, batch, call)):
                expected, alone = ours, "each row as alone, because padding changes plain generate()"
            if not torch.equal(ours, expected):
                row, column = (ours != expected).nonzero()[0].tolist()
                token = column - batch["input_ids"].shape[1]
                return "WRONG", f"{config['method']}, {len(expected)} rows: row {row} from new token {token}"
    distinct = min(len(set(row[-NEW_TOKENS:].tolist())) for each in plain for row in each)
    if distinct < 3:
        why = f"weak evidence: a row has {distinct} distinct tokens"
    if not accepted:
        why = "weak evidence: no draft was accepted"
    target = hf_specdec.integration.kept_decoders(model)[0].target
    return way_of(target), why or alone


def _alone(model: PreTrainedModel, batch: dict[str, torch.Tensor], call: dict[str, Any]) -> torch.Tensor:
    """What plain generate() writes for each row of a batch alone, padded as in the batch."""
    rows = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        text = model.generate(ids[mask.bool()][None], **call)[0]
        rows.append(torch.nn.functional.pad(text, (int((mask == 0).sum()), 0)))
    return torch.stack(rows)


def way_of(target: Any) -> str:
    """How a prepared target runs."""
    if getattr(target, "recurrent", None):
        return "state"
    return "gather" if target.gather else "paged"


def one_line(error: Exception) -> str:
    """The message without line breaks, at most 300 characters."""
    text = " ".join(str(error).split()).removesuffix(" Call generate() without speculative_config.")
    return text if len(text) <= 300 else text[:297] + "..."


# ---- output ---------------------------------------------------------------------------------------------------------


def markdown(trials: list[Trial]) -> str:
    """The page docs/targets.md: the classes of each way, and those of each reason."""
    classes_of: dict[tuple[str, str], list[str]] = {}
    for trial in sorted(trials, key=lambda trial: WAYS.index(trial.way)):
        reason = re.split(": |, and |, so ", trial.why.removeprefix(trial.name).strip())[0].rstrip(".")
        classes_of.setdefault((trial.way, reason), []).append(f"`{trial.name}`")
    counts = Counter(trial.way for trial in trials)
    lines = [
        "# Every causal language model of transformers",
        "",
        f"Written by `python scripts/try_targets.py --markdown docs/targets.md` with transformers {transformers.__version__}: "
        f"{len(trials)} classes, " + ", ".join(f"{counts[way]} {way}" for way in WAYS if counts[way]) + ".",
        "",
        "A class is built small, with random weights in float32. It decodes one row and three ragged rows, with n-grams and with trees.",
        "The text must be the one that plain `generate()` writes. [Supported models](models.md) explains the ways. *Weak evidence*: the",
        "random model repeats one or two tokens, or no draft was accepted.",
        "",
        "| way | reason | classes |",
        "|---|---|---|",
    ]
    lines += [
        f"| {way} | {why.replace('|', chr(92) + '|')} | {', '.join(names)} |"
        for (way, why), names in classes_of.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="only these model types or classes")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as a page")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trials = []
    for model_type, cls in classes():
        if args.only and not {model_type, cls.__name__} & set(args.only):
            continue
        trial = attempt(model_type, cls)
        trials.append(trial)
        print(f"{trial.way:10}{trial.model_type:28}{trial.name:42}{trial.why}", flush=True)
    counts = Counter(trial.way for trial in trials)
    print(", ".join(f"{counts[way]} {way}" for way in WAYS if counts[way]))
    if args.markdown:
        args.markdown.write_text(markdown(trials), encoding="utf-8")
    return 1 if counts["WRONG"] or counts["ERROR"] else 0


if __name__ == "__main__":
    sys.exit(main())
