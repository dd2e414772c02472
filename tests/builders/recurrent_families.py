"""Small, randomly initialised models whose layers have a state, with weights drawn widely enough that the recurrence matters."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specdec import CandidateGenerator, DraftTrees

VOCAB = 128
_LINEAR, _FULL = "linear_attention", "full_attention"
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "layer_types": [_LINEAR, _FULL, _LINEAR], "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "head_dim": 12,
}  # fmt: skip
_QWEN_MOE = {**_MOE, "shared_expert_intermediate_size": 32, "norm_topk_prob": True}
_MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}

_INKLING = {
    **_MOE, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"], "sliding_window_size": 12, "head_dim": 12, "d_rel": 4,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 12, "rel_extent": 10, "n_routed_experts": 4,
}  # fmt: skip
_INKLING2 = {**_INKLING, "unpadded_vocab_size": VOCAB, "n_layers_per_attn_res_block": 1, "log_scaling_n_floor": 8}
_INKLING2.pop("num_local_experts")

# family name → (model_type, config)
FAMILIES: dict[str, tuple[str, dict]] = {
    "Qwen3-Next": ("qwen3_next", {**_DELTA, **_QWEN_MOE, "decoder_sparse_step": 2}),
    "Qwen3.5": ("qwen3_5_text", _DELTA),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", {**_DELTA, **_QWEN_MOE}),
    "OLMo-hybrid": ("olmo_hybrid", {**_DELTA, "linear_num_value_heads": 2, "linear_value_head_dim": 16}),
    "Kimi-Linear": (
        "kimi_linear",
        {**_MOE, "layer_types": [_LINEAR, _FULL, _LINEAR], "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
         "qk_nope_head_dim": 8, "v_head_dim": 8, "linear_head_dim": 12, "linear_num_heads": 4,
         "mlp_layer_types": ["dense", "sparse", "sparse"], "n_shared_experts": 1},
    ),
    "LaraMini": (
        "lara_mini",
        {**_DELTA, **_MOE, "layer_types": [_LINEAR, "sliding_attention", _LINEAR, _FULL], "num_hidden_layers": 4,
         "sliding_window": 12, "shared_expert_intermediate_size": 32},
    ),
    "Bailing-hybrid": (
        "bailing_hybrid",
        {**_MOE, "layer_types": [_LINEAR, _FULL, _LINEAR], "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16,
         "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 12, "n_group": 1, "topk_group": 1,
         "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "Nemotron-H": (
        "nemotron_h",
        {"layer_types": [_LINEAR, "mlp", _FULL, _LINEAR], "num_hidden_layers": 4, "head_dim": 12, "ssm_state_size": 8,
         "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 16, "time_step_min": 1.0},
    ),
    "Granite-hybrid": (
        "granitemoehybrid",
        {**_MAMBA2, **_MOE, "layer_types": [_LINEAR, _FULL, _LINEAR], "shared_intermediate_size": 32, "mamba_expand": 2},
    ),
    "Falcon-H1": ("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 96, "head_dim": 12}),
    "Bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1]}),
    "Mamba-2": ("mamba2", {"num_heads": 6, "head_dim": 16, "n_groups": 1, "state_size": 8, "chunk_size": 16}),
    "Mamba": ("mamba", {"state_size": 8, "time_step_rank": 8}),
    "FalconMamba": ("falcon_mamba", {"state_size": 8, "time_step_rank": 8}),
    "LFM2": ("lfm2", {"layer_types": ["conv", _FULL, "conv"], "block_multiple_of": 8, "conv_L_cache": 3}),
    "LFM2-MoE": ("lfm2_moe", {**_MOE, "layer_types": ["conv", _FULL, "conv"], "num_dense_layers": 1, "conv_L_cache": 3}),
    "LFM3": (
        "lfm3",
        {"layer_types": ["conv", "sliding_attention", "conv", _FULL], "num_hidden_layers": 4, "sliding_window": 12,
         "conv_L_cache": 3, "head_dim": 12},
    ),
    "Jamba": (
        "jamba",
        {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1, "expert_layer_period": 2,
         "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    ),
    "Zamba": (
        "zamba",
        {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_key_value_heads": 4, "mamba_d_state": 8, "mamba_dt_rank": 8,
         "n_mamba_heads": 2, "use_mamba_kernels": False},
    ),
    "Zamba2": (
        "zamba2",
        {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4, "num_key_value_heads": 4,
         "time_step_min": 1.0, "mamba_d_state": 8, "n_mamba_heads": 6, "mamba_ngroups": 1, "chunk_size": 16,
         "num_mem_blocks": 1, "use_mem_rope": True},
    ),
    "Inkling": ("inkling_text", {**_INKLING, "mlp_layer_types": ["dense", "sparse", "dense"], "logits_mup_width_multiplier": 1.0}),
    "Inkling-2": ("inkling2_text", _INKLING2),
    "Inkling-2-Loop": (
        "inkling2_loop_text",
        {**_INKLING2, "num_hidden_layers": 4, "layer_types": [*_INKLING2["layer_types"], "hybrid"], "loop_layer_index_start": 1,
         "loop_layer_index_end": 3, "loop_num_passes": 2, "loop_gate_rank": 8},
    ),
    "Zaya": (
        "zaya",
        {**_MOE, "num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 12, "head_dim": 12,
         "router_hidden_size": 16, "cca_time0": 2, "cca_time1": 3},
    ),
}  # fmt: skip


def make(family: str, seed: int = 0) -> PreTrainedModel:
    """A small model of the family in float32, whose text varies and depends on its states."""
    model_type, settings = FAMILIES[family]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**COMMON, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return drawn(model)


@torch.no_grad()
def drawn(model: PreTrainedModel) -> PreTrainedModel:
    """The model with matrices drawn widely, and states that last: their decay and their step (dt) are near one."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.uniform_(-2.5, 0)
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            weight.normal_(0, 0.5)
        elif name.endswith("qk_norm.temp"):
            weight.fill_(4.0)
        elif weight.dim() > 1:  # norms and other biases keep their initial values
            weight.normal_(0, 0.3 if "conv" in name or "embed" in name else 0.2)
    model.generation_config.eos_token_id = None
    return model


def perturbed(model: PreTrainedModel, amount: float = 0.03, seed: int = 1) -> PreTrainedModel:
    """A copy of the model that usually, not always, agrees with it."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn_like(weight) * amount * weight.std())
    return other


class WrongAt(CandidateGenerator):
    """Drafts the true text with one wrong token, at another place in each round of a row: accepts 0, 1, .., K drafts in turn.

    `texts`: the true texts, prompts included. `as_tree`: each true token has a wrong sibling before it.
    """

    texts: ClassVar[list[list[int]]] = []
    as_tree: ClassVar[bool] = False

    def __init__(self, config, target, context=None):
        super().__init__(config, target, context)
        self.rounds: dict[int, int] = {}

    @property
    def max_draft_nodes(self):
        return 2 * self.config.num_speculative_tokens

    def propose(self, sequences, limits):
        rows, parents = [], []
        for seq, limit in zip(sequences, limits, strict=True):
            turn = self.rounds[seq.id] = self.rounds.get(seq.id, seq.row) + 1
            text = next(text for text in self.texts if text[: len(seq.tokens)] == seq.tokens)
            draft = text[len(seq.tokens) : len(seq.tokens) + limit]
            wrong = turn % (self.config.num_speculative_tokens + 1)
            if wrong < len(draft):
                draft[wrong] = (draft[wrong] + 1) % VOCAB
            if not self.as_tree:
                rows.append(draft)
                continue
            tokens, above, last = [], [], -1
            for token in draft:
                tokens += [(token + 2) % VOCAB, token]
                above += [last, last]
                last = len(tokens) - 1
            rows.append(tokens)
            parents.append(above)
        return DraftTrees.from_lists(rows, parents if self.as_tree else None, self.target.device)

    def stop(self, seq):
        self.rounds.pop(seq.id, None)


class WrongAtInTrees(WrongAt):
    """The same, as trees in which accepted tokens do not lie beside each other."""

    as_tree = True
