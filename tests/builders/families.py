"""Small, randomly initialised models of many families, whose greedy text is varied and whose windows are short."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 128
WINDOW = 12
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_GPT2 = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}
_IDS = {"initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
_DECODER = {
    "d_model": 48,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "forced_eos_token_id": None,
}
_NO_GQA = {"num_key_value_heads": 4}
_UNKNOWN = {"falcon": ("head_dim",)}  # names a config does not take

# family name → (model_type, config)
FAMILIES: dict[str, tuple[str, dict]] = {
    "Llama": ("llama", {}),
    "Mistral": ("mistral", {"sliding_window": WINDOW}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen3-MoE": ("qwen3_moe", {**_MOE, "norm_topk_prob": True}),
    "Gemma2": (
        "gemma2",
        {"sliding_window": WINDOW, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": 10.0},
    ),
    "Gemma3 text": ("gemma3_text", {"sliding_window": WINDOW, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 12}),
    "Phi3": ("phi3", {}),
    "GPT-2": ("gpt2", {**_GPT2, **_IDS}),
    "GPT-NeoX": ("gpt_neox", {}),
    "OPT": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 48, "init_std": 0.3}),
    "Falcon": ("falcon", {"alibi": False, "new_decoder_architecture": False, "multi_query": True}),
    "BLOOM": ("bloom", {"n_layer": 3, "n_head": 4}),
    "Falcon ALiBi": ("falcon", {"alibi": True, "new_decoder_architecture": False, "multi_query": True}),
    "MPT": ("mpt", {**_GPT2, **_IDS, "d_model": 48, "n_heads": 4, "n_layers": 3, "max_seq_len": 256}),
    "Granite": ("granite", {}),
    "OLMo2": ("olmo2", {}),
    "Cohere2": ("cohere2", {"sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    "StarCoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "StableLM": ("stablelm", {"partial_rotary_factor": 0.5}),
    "gpt-oss": ("gpt_oss", {**_MOE, "sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    "DeepSeek-V3": (
        "deepseek_v3",
        {**_NO_GQA, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
         "v_head_dim": 12, "head_dim": 8},
    ),
    "GLM4": ("glm4", {}),
    "Llama4": (
        "llama4_text",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "moe_layers": [0, 2],
         "layer_types": ["chunked_attention", "full_attention", "chunked_attention"], "no_rope_layers": [1, 0, 1],
         "attention_chunk_size": 8},
    ),
    "CodeGen": ("codegen", {**_GPT2, **_IDS, "rotary_dim": 8, "tie_word_embeddings": False}),
    "CTRL": ("ctrl", {**_GPT2, **_IDS, "initializer_range": 0.6, "dff": 64, "tie_word_embeddings": False}),
    "GPT-Neo": (
        "gpt_neo",
        {"num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local", "global"], 1]], "window_size": WINDOW},
    ),
    "XGLM": ("xglm", {"d_model": 48, "attention_heads": 4, "num_layers": 3, "ffn_dim": 64, "init_std": 0.3}),
    "BART's decoder": ("bart", _DECODER),
    "RoFormer": ("roformer", {"is_decoder": True, "embedding_size": 48, "initializer_range": 1.2}),
    "Doge": ("doge", {}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0, 1], "sliding_window": None}),
}  # fmt: skip


def make(family: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A model of `family` in float32."""
    model_type, options = FAMILIES[family]
    return build(model_type, seed, **{**options, **overrides})


def make_for_pages(family: str) -> PreTrainedModel:
    """`make`, with the attention that soft-caps where the config says so: transformers 5.17's default, sdpa, leaves it out, so
    that such a model reads no pages."""
    model = make(family)
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    return model


def build(model_type: str, seed: int = 0, **options) -> PreTrainedModel:
    """A causal language model of any model type, small where the type takes our usual names."""
    base = {} if "n_embd" in options else {k: v for k, v in _COMMON.items() if k not in _UNKNOWN.get(model_type, ())}
    config = AutoConfig.for_model(model_type, **{**base, **options})
    torch.manual_seed(seed)
    model = drawn_vectors(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


_SEGMENTS = {
    "num_key_value_heads": 1, "head_dim": 16, "partial_rotary_factor": 0.5, "q_lora_rank": 24, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "moe", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 32, "index_head_dim": 16, "index_topk": 4, "hc_mult": 2,
}  # fmt: skip


@torch.no_grad()
def deepseek_v4(seed: int = 0, **options) -> PreTrainedModel:
    """A DeepSeek-V4 whose layers compress segments of 4 and of 8 tokens, with drawn tables of what is born constant."""
    model = build("deepseek_v4", seed, **{**_SEGMENTS, **options})
    for name, weight in model.named_parameters():
        if name.endswith("position_bias"):
            weight.normal_(0, 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(len(buffer), model.config.n_routed_experts).argsort(1)[:, : buffer.shape[1]])
    return model


@torch.no_grad()
def drawn_vectors(model: PreTrainedModel) -> PreTrainedModel:
    """The model; its biases, norms and sinks, which are born constant, get a part too."""
    for vector in (p for p in model.parameters() if p.dim() == 1):
        vector += 0.1 * torch.randn(vector.shape)
    return model


@torch.no_grad()
def perturbed(model: PreTrainedModel, amount: float, seed: int = 1) -> PreTrainedModel:
    """A copy whose matrices are off by `amount` of their own scale: a drafter that is right some of the time."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    generator = torch.Generator().manual_seed(seed)
    for weight in copy.parameters():
        if weight.dim() > 1:
            weight += amount * weight.std() * torch.randn(weight.shape, generator=generator)
    return copy
