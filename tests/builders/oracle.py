"""Tiny random models and a way to ask `generate()` twice: plainly, as the oracle, and with speculation."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import torch
from cache_checks import check_blocks
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LogitsProcessor, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import integration

VOCAB = 61
PAD, EOS = 0, 3


def tiny_llama(seed: int = 0, vocab_size: int = VOCAB, **changes: Any) -> LlamaForCausalLM:
    """A random Llama whose greedy text neither repeats one token nor never repeats: float32, no eos token of its own."""
    settings: dict[str, Any] = {
        "vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.4,
        "bos_token_id": 1, "eos_token_id": None, "pad_token_id": PAD, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()
    model.generation_config.eos_token_id = None
    return model


def drafter_of(model: PreTrainedModel, noise: float = 0.02) -> PreTrainedModel:
    """A copy that is a little wrong: some of its drafts are accepted, some are not."""
    drafter = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return drafter


def ragged(lengths: list[int], vocab_size: int = VOCAB, seed: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded prompts of these lengths: `input_ids` and `attention_mask` [B, max(lengths)]."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        pattern = torch.randint(4, vocab_size, (max(2, length // 2),), generator=generator)
        ids[row, width - length :] = pattern.repeat(3)[:length]
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@contextlib.contextmanager
def interposed(module, call):
    """Inside the context, `call` follows each call of a module. It is no hook: models with hooks are tested with them before any work."""
    original = module._call_impl

    def followed(*args, **kwargs):
        output = original(*args, **kwargs)
        call(module, args, output)
        return output

    module._call_impl = followed
    try:
        yield
    finally:
        del module._call_impl


def method_configs(drafter_path: str) -> dict[str, dict[str, Any]]:
    """The methods every semantic test runs through."""
    return {
        "none": {"method": "none"},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "chain": {"method": "draft_model", "model": drafter_path, "num_speculative_tokens": 4},
        "tree": {"method": "draft_model", "model": drafter_path, "branching_factors": [3, 2, 1]},
    }


class Recorder(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert not self.ends
        self.puts.append(value.clone())

    def end(self):
        self.ends += 1


class RecentTokensPenalty(LogitsProcessor):
    """A user's processor: depends on the row's prefix."""

    def __call__(self, input_ids, scores):
        recent = input_ids[:, -5:]
        return scores.scatter_add(1, recent, torch.full(recent.shape, -3.0))


def assert_clean(model: PreTrainedModel) -> None:
    """Nothing of a failed call is left: no block, no sequence, and the model's own attention is back."""
    assert model.config._attn_implementation != "hf_specdec"
    for decoder in integration.kept_decoders(model):
        assert decoder.statistics == {} and decoder.cache.tables == {}
        check_blocks(decoder.cache.pool)
        assert decoder.cache.pool.num_used == 0
        generator = decoder.generator
        for part in (generator, getattr(generator, "ngrams", None)):
            for state in ("indices", "kept_nodes", "unread", "texts"):
                assert not getattr(part, state, None), state
        if hasattr(getattr(generator, "cache", None), "pool"):  # not a suffix cache
            check_blocks(generator.cache.pool)
            assert generator.cache.pool.num_used == 0 and generator.cache.tables == {}
        if hasattr(generator, "drafter"):
            assert not getattr(getattr(generator, "bridge", None), "read", None)
            assert generator.drafter.config._attn_implementation != "hf_specdec"
    hf_specdec.release(model)


def bundled_prompts(tokenizer, count: int) -> list[str]:
    rows = [
        json.loads(line)
        for line in Path(hf_specdec.bundled("tiny")).parent.joinpath("prompts.jsonl").read_text().splitlines()
    ]
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows[:count]]
    return [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]


def load_bundled(name: str):
    """A bundled model in float32, where greedy outputs are comparable token for token."""
    return AutoModelForCausalLM.from_pretrained(hf_specdec.bundled(name), dtype=torch.float32).eval()
