"""Small, randomly initialised models with a vision tower, as text prompts meet them."""

from __future__ import annotations

from typing import Any

import torch
from families import VOCAB, WINDOW, drawn_vectors
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256, "initializer_range": 0.3,
    "tie_word_embeddings": False,
}  # fmt: skip
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_TOWER = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "patch_size": 8, "mlp_ratio": 1, "out_hidden_size": 48,
               "intermediate_size": 16, "fullatt_block_indexes": [0]}  # fmt: skip
_QWEN_IDS = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}}

# model type → its configuration: a tower nobody looks through, and a text model like those of `families`
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**_TEXT, "sliding_window": WINDOW, "query_pre_attn_scalar": 12,
                        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "vision_config": _TOWER, "mm_tokens_per_image": 4, "image_token_index": 120, "boi_token_index": 121, "eoi_token_index": 122,
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"}, "vision_config": {**_TOWER, "model_type": "clip_vision_model"},
        "image_token_index": 120,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"}, "vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 120, "spatial_merge_size": 1,
    },
    "qwen2_vl": {"text_config": {**_TEXT, **_MROPE}, "vision_config": _QWEN_TOWER, **_QWEN_IDS},
    "qwen2_5_vl": {"text_config": {**_TEXT, **_MROPE}, "vision_config": _QWEN_TOWER, **_QWEN_IDS},
}  # fmt: skip


def build_multimodal(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A model with a vision tower, in float32."""
    settings = dict(MULTIMODAL[model_type])
    if model_type == "qwen2_vl":
        known = ("depth", "embed_dim", "hidden_size", "num_heads", "patch_size", "mlp_ratio")
        settings["vision_config"] = {key: settings["vision_config"][key] for key in known}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, tie_word_embeddings=False, **settings)
    model = drawn_vectors(AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval())
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
