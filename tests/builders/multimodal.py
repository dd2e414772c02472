"""Small, randomly initialised models with a vision tower, and prompts with images for them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from families import VOCAB, WINDOW, drawn_vectors
from helpers_eagle import layer_shapes, save_checkpoint, weights
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3Processor,
    LlavaProcessor,
    MllamaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLProcessor,
)
from transformers.models.clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE = 120  # the placeholder's id
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
_CLIP = {**_TOWER, "model_type": "clip_vision_model"}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model"}
_QWEN_TOWER = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "patch_size": 8, "mlp_ratio": 1}
_QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2]}}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_QWEN3_TOWER = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 8, "out_hidden_size": 48,
                "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1], "spatial_merge_size": 2}  # fmt: skip
_GEMMA4 = {
    "text_config": {**_TEXT, "sliding_window": WINDOW, "layer_types": [*_SLIDING[:2], "full_attention"], "global_head_dim": 12,
                    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                      "num_key_value_heads": 2, "head_dim": 8, "patch_size": 8, "pooling_kernel_size": 2, "position_embedding_size": 16},
    "audio_config": None, "image_token_id": IMAGE, "video_token_id": 121, "audio_token_id": 122,
    "boi_token_id": 123, "eoi_token_id": 124, "boa_token_id": 125,
}  # fmt: skip

# family → its model type and configuration: a small tower, and a text model like those of `families`
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {
        "text_config": {**_TEXT, "sliding_window": WINDOW, "query_pre_attn_scalar": 12, "layer_types": _SLIDING},
        "vision_config": _TOWER, "mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": 121, "eoi_token_index": 122,
    }),
    "llava": ("llava", {
        "text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _CLIP, "image_token_index": IMAGE,
        "vision_feature_layer": -1,
    }),
    "mistral3": ("mistral3", {
        "text_config": {**_TEXT, "model_type": "mistral"}, "vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": IMAGE, "spatial_merge_size": 1,
    }),
    "qwen2_vl": ("qwen2_vl", {"text_config": {**_TEXT, **_MROPE}, "vision_config": _QWEN_TOWER, **_QWEN_IDS}),
    "qwen2_5_vl": ("qwen2_5_vl", {
        "text_config": {**_TEXT, **_MROPE},
        "vision_config": {**_QWEN_TOWER, "hidden_size": 16, "out_hidden_size": 48, "intermediate_size": 16,
                          "fullatt_block_indexes": [0]},
        **_QWEN_IDS,
    }),
    "llava_next": ("llava_next", {
        "text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _CLIP, "image_token_index": IMAGE,
        "vision_feature_layer": -1, "image_grid_pinpoints": [[16, 32], [32, 16]],
    }),
    "llava_onevision": ("llava_onevision", {
        "text_config": {**_TEXT, "model_type": "qwen2"}, "vision_config": _SIGLIP, "image_token_index": IMAGE,
        "video_token_index": 121, "image_grid_pinpoints": [[16, 32], [32, 16]],
    }),
    "internvl": ("internvl", {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]}, "image_token_id": IMAGE, "image_seq_length": 4,
    }),
    "idefics3": ("idefics3", {
        "text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _TOWER, "image_token_id": IMAGE, "scale_factor": 1,
    }),
    "smolvlm": ("smolvlm", {
        "text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _TOWER, "image_token_id": IMAGE, "scale_factor": 1,
    }),
    "aya_vision": ("aya_vision", {
        "text_config": {**_TEXT, "model_type": "cohere2", "sliding_window": WINDOW, "layer_types": _SLIDING},
        "vision_config": {**_SIGLIP, "patch_size": 4}, "image_token_index": IMAGE,
    }),
    "ovis2": ("ovis2", {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_TOWER, "vocab_size": 32}, "hidden_size": 48, "vocab_size": VOCAB, "image_token_id": IMAGE,
        "visual_indicator_token_ids": [121, 122, 123, 124, 125],
    }),
    "qwen3_vl": ("qwen3_vl", {"text_config": {**_TEXT, **_MROPE}, "vision_config": _QWEN3_TOWER, **_QWEN_IDS}),
    "qwen3_vl_moe": ("qwen3_vl_moe", {"text_config": {**_TEXT, **_MROPE, **_MOE}, "vision_config": _QWEN3_TOWER, **_QWEN_IDS}),
    "qwen3_5": ("qwen3_5", {
        "text_config": {**_TEXT, **_MROPE, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                        "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
        "vision_config": {**_QWEN3_TOWER, "depth": 1}, **_QWEN_IDS,
    }),
    "glm4v": ("glm4v", {
        "text_config": {**_TEXT, **_MROPE},
        "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 8, "image_size": 32,
                          "out_hidden_size": 48},
        "image_token_id": IMAGE, "video_token_id": 121, "image_start_token_id": 122, "image_end_token_id": 123,
        "video_start_token_id": 124, "video_end_token_id": 125,
    }),
    "gemma4": ("gemma4", _GEMMA4),
    "gemma4 shared": ("gemma4", {
        **_GEMMA4,
        "text_config": {**_GEMMA4["text_config"], "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
                        "num_kv_shared_layers": 2},
    }),
    "gemma4 vision": ("gemma4", {**_GEMMA4, "text_config": {**_GEMMA4["text_config"], "use_bidirectional_attention": "vision"}}),
    "paligemma": ("paligemma", {
        "text_config": {**_TEXT, "model_type": "gemma"}, "vision_config": {**_SIGLIP, "projection_dim": 48}, "projection_dim": 48,
        "hidden_size": 48, "image_token_index": IMAGE, "vocab_size": VOCAB,
    }),
    "paligemma2": ("paligemma", {
        "text_config": {**_TEXT, "model_type": "gemma2", "sliding_window": WINDOW, "layer_types": _SLIDING,
                        "query_pre_attn_scalar": 12},
        "vision_config": {**_SIGLIP, "projection_dim": 48}, "projection_dim": 48, "hidden_size": 48, "image_token_index": IMAGE,
        "vocab_size": VOCAB,
    }),
}  # fmt: skip
HYBRID = "qwen3_5"  # its text model has recurrent layers: tests/model/test_recurrent_prompts.py
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
TREE = {"method": "draft_model", "early_exit": 2, "branching_factors": [2, 2, 1]}
METHODS = {
    "none": {"method": "none"}, "ngram": NGRAM, "tree": TREE, "token_recycling": {"method": "token_recycling"},
    "lookahead": {"method": "lookahead"}, "suffix": {"method": "suffix"},
    "self_window": {"method": "self_window", "draft_window": 6, "draft_sinks": 2},
}  # fmt: skip
GREEDY = {"max_new_tokens": 16, "do_sample": False}
MULTIMODAL = tuple(family for family in _FAMILIES if family != HYBRID)
_TYPES = {"gemma3": "token_type_ids", "paligemma": "token_type_ids", **dict.fromkeys(
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "gemma4"), "mm_token_type_ids"
)}  # fmt: skip


def token_types(model: PreTrainedModel) -> str | None:
    """The name of the input that says which tokens are images; None: there is none."""
    return _TYPES.get(model.config.model_type)


@torch.no_grad()
def build_multimodal(family: str, seed: int = 0, vocab_size: int = VOCAB, **changes: Any) -> PreTrainedModel:
    """A model with a vision tower, in float32. Its images are as loud as its text."""
    model_type, settings = copy.deepcopy(_FAMILIES[family])  # configurations write to what they are given
    settings = {**settings, "text_config": {**settings["text_config"], "vocab_size": vocab_size}}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, tie_word_embeddings=False, **{**settings, **changes})
    model = drawn_vectors(AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval())
    decoder = {id(weight) for weight in model.get_decoder().parameters()}
    for name, weight in model.named_parameters():
        if id(weight) not in decoder and weight.dim() > 1 and "lm_head" not in name:
            weight.normal_(0, 0.3)
    # transformers 5.17's default, sdpa, leaves its soft-capping out
    if model.config.get_text_config().model_type == "gemma2":
        model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def eagle_head(folder):
    """An EAGLE head of the test models' size."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "vocab_size": VOCAB, "tie_word_embeddings": False,
    }  # fmt: skip
    shapes = {"fc.weight": (48, 96), **layer_shapes("layers.0.", input_width=48, hidden=48, width=12)}
    return save_checkpoint(folder, weights(shapes), config)


# ---- prompts ----------------------------------------------------------------------------------------------------


def _pixels(model: PreTrainedModel, rows: list[int], seed: int) -> dict[str, Any]:
    """Random images, `rows[i]` of them in row i, as the family's processor would hand them on."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    count, kind = sum(rows), model.config.model_type
    if kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", HYBRID):
        grids = torch.tensor([[1, 4, 4], [1, 4, 6], [1, 6, 4]] * count)[:count]
        return {"pixel_values": draw(int(grids.prod(1).sum()), 3 * 2 * 64), "image_grid_thw": grids}
    if kind in ("llava_next", "llava_onevision"):
        return {
            "pixel_values": draw(count, 3, 3, 16, 16),
            "image_sizes": torch.tensor([[16, 32], [32, 16], [16, 24]] * count)[:count],
        }
    if kind == "mistral3":
        return {
            "pixel_values": draw(count, 3, 16, 16),
            "image_sizes": torch.tensor([[16, 16], [8, 16]] * count)[:count],
        }
    if kind in ("idefics3", "smolvlm"):  # rows with fewer images are filled with zeros
        images = torch.zeros(len(rows), max(rows), 3, 16, 16)
        for row, own in enumerate(rows):
            images[row, :own] = draw(own, 3, 16, 16)
        return {"pixel_values": images}
    if kind == "gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)
        return {"pixel_values": draw(count, 16, 3 * 64), "image_position_ids": places.expand(count, -1, -1)}
    return {"pixel_values": draw(count, 3, 16, 16)}


@torch.no_grad()
def image_prompts(
    model: PreTrainedModel, images: list[int], lengths: list[int], seed: int = 0, text_seed: int = 0, end: bool = False
) -> dict[str, Any]:
    """Left-padded prompts with images, as keyword arguments of `generate()`.

    Args:
        images: number of images of each row.
        lengths: tokens of text of each row, which repeat themselves.
        seed, text_seed: of the images and of the text.
        end: the images stand at the end; otherwise between two tokens and the rest.
    """
    pixels = _pixels(model, images, seed)
    features = model.base_model.get_image_features(**pixels, return_dict=True).pooler_output
    sizes = [each.shape[0] for each in features]
    if 0 in sizes or len(sizes) != sum(images):  # Idefics: one entry for all images of a row
        sizes = [size // own for size, own in zip(sizes, images, strict=True) for _ in range(own)]
    generator, rows = torch.Generator().manual_seed(text_seed), []
    for own, length in zip(images, lengths, strict=True):
        pattern = torch.randint(4, 100, (max(2, length // 2),), generator=generator)
        text = pattern.repeat(3)[:length]
        placeholders = [torch.full((sizes.pop(0),), IMAGE) for _ in range(own)]
        placeholders = [piece for each in placeholders for piece in (each, torch.tensor([5]))][:-1]
        split = length if end else 2
        rows.append(torch.cat([text[:split], *placeholders, text[split:]]))
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = row
        mask[i, width - len(row) :] = 1
    inputs = {"input_ids": ids, "attention_mask": mask, **pixels}
    name = token_types(model)
    if name is not None:
        inputs[name] = (ids == IMAGE).long() if model.config.model_type != "paligemma" else torch.zeros_like(ids)
    return inputs


# ---- processors -------------------------------------------------------------------------------------------------

_SPECIAL = {"qwen2_5_vl": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"), "llava": ("<image>",),
            "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"), "mllama": ("<|image|>", "<|python_tag|>")}  # fmt: skip
_PLACEHOLDERS = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "llava": "<image>",
    "gemma3": "<start_of_image>",
    "mllama": "<|image|>",
}
# As the templates of these models do: a text is shown only as a part (LLaVA, which leaves the first token to the tokenizer), or also
# by itself.
_TEMPLATE = (
    "{bos}{{% for m in messages %}}<{{{{ m['role'] }}}}>{string}{{% for c in m['content'] %}}"
    "{{% if c['type'] == 'image' %}}{image}{{% else %}}{{{{ c['text'] }}}}{{% endif %}}{{% endfor %}}{end}{{% endfor %}}"
    "{{% if add_generation_prompt %}}<assistant>{{% endif %}}"
)


class ImagesOnly(Qwen2VLProcessor):
    """Without a processor of videos, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token, self.image_token_id = "<|image_pad|>", IMAGE
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    @property
    def model_input_names(self):
        return ["input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids"]


def build_processor(family: str) -> ProcessorMixin:
    """The processor of a model of `build_multimodal`, or of `build_mllama`, whose placeholder has no logits. Their tokens are letters: a
    prompt of a few words repeats them."""
    special = dict(enumerate(_SPECIAL[family], VOCAB if family == "mllama" else IMAGE))
    words = {special.get(i, chr(32 + i) if i < 95 else f"<{i}>"): i for i in {*range(VOCAB), *special}}
    words = {{94: "<user>", 93: "<assistant>", 92: "<system>", 91: "<s>"}.get(i, word): i for word, i in words.items()}
    made = Tokenizer(models.WordLevel(words, unk_token=chr(35)))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 91)])
    roles = ["<user>", "<assistant>", "<system>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", pad_token=" ")
    tokenizer.add_special_tokens({"additional_special_tokens": [*roles, *special.values()]})
    takes_text = "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    string, end = ("", "") if family == "llava" else (takes_text, "{% endif %}")
    bos = "" if family == "llava" else "{{ bos_token }}"
    template = _TEMPLATE.format(bos=bos, image=_PLACEHOLDERS[family], string=string, end=end)
    tokenizer.chat_template = template
    if family == "qwen2_5_vl":
        images = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=256, max_pixels=1024)
        return ImagesOnly(images, tokenizer, chat_template=template)
    size = {"height": 16, "width": 16}
    if family == "mllama":
        images = MllamaImageProcessorPil(size=size, max_image_tiles=4)
        return MllamaProcessor(images, tokenizer, template)
    if family == "llava":
        images = CLIPImageProcessorPil(size=size, crop_size=size)
        return LlavaProcessor(images, tokenizer, 8, "default", template, num_additional_image_tokens=1)
    for name, token in zip(("image_token", "boi_token", "eoi_token"), _SPECIAL[family], strict=True):
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return Gemma3Processor(Gemma3ImageProcessorPil(size=size), tokenizer, template, image_seq_length=4)
