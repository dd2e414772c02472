"""A small Mllama (Llama 3.2 Vision) whose images are loud, and prompts with images for it."""

import pytest
import torch
from families import VOCAB, drawn_vectors
from helpers_eagle import layer_shapes, save_checkpoint, weights
from oracle import ragged
from transformers import MllamaConfig, MllamaForConditionalGeneration
from transformers.generation import GenerationMixin

needs_image_layers = pytest.mark.skipif(
    not hasattr(GenerationMixin, "_expand_multimodal_outputs"),
    reason="older transformers cannot run Mllama on packed rows of text, and hf-specdec says so",
)

_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "cross_attention_layers": [1, 3], "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None,
    "initializer_range": 0.3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "max_position_embeddings": 256,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2,
    "image_size": 16, "patch_size": 8, "max_num_tiles": 4, "vision_output_dim": 32, "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
}  # fmt: skip
# two images, none (whose tokens see no tile), one of several tiles
RAGGED = [[1, 3], [], [2]], [9, 7, 12]
ALONE = [[2, 1]], [11]


@torch.no_grad()
def build_mllama():
    """A model of two layers that attend to images, whose gates, which would be zeros, are open. Its placeholder is id VOCAB."""
    torch.manual_seed(0)
    config = MllamaConfig(vision_config=_VISION, text_config=_TEXT, image_token_index=VOCAB)
    model = drawn_vectors(MllamaForConditionalGeneration(config).eval())
    for name, weight in model.named_parameters():
        if "gate" in name and weight.numel() == 1:
            weight.fill_(0.7)
        elif ("vision" in name or "projector" in name) and weight.dim() > 1:
            weight.normal_(0, 0.3)
    model.generation_config.eos_token_id = None
    return model


def eagle3_head(folder):
    """A head that reads the states after both layers that attend to images."""
    width = {"hidden_size": 48, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **width, "num_hidden_layers": 1, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "vocab_size": VOCAB, "draft_vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
    }  # fmt: skip
    norms = ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "norm.weight")
    shapes = {
        "fc.weight": (48, 144), **layer_shapes("midlayer.", 96, hidden=48, width=12), **dict.fromkeys(norms, (48,)),
        "lm_head.weight": (VOCAB, 48),
    }  # fmt: skip
    return save_checkpoint(folder, weights(shapes), config)


def prompts(rows, lengths, seed=0):
    """Left-padded prompts whose row i has images of `rows[i]` tiles each, as the processor hands them on: a token sees the tiles of the
    images before it, until the next image but one. Missing images and tiles are zeros, and hidden."""
    generator = torch.Generator().manual_seed(seed)
    inputs, (count, width) = ragged(lengths, 100), (max(1, *map(len, rows)), max(lengths))
    batch = len(rows)
    pixels, ratios = torch.zeros(batch, count, 4, 3, 16, 16), torch.zeros(batch, count, dtype=torch.long)
    tiles = torch.zeros(batch, count, 4, dtype=torch.long)
    mask = torch.zeros(batch, width, count, 4, dtype=torch.long)
    tiles[:, :, 0] = 1
    for row, images in enumerate(rows):
        for image, number in enumerate(images):
            pixels[row, image, :number] = torch.randn(number, 3, 16, 16, generator=generator)
            ratios[row, image], tiles[row, image, :number] = number, 1
            start = width - lengths[row] + 1 + 2 * image
            inputs["input_ids"][row, start] = VOCAB
            mask[row, start:, image, :number] = 1
    return inputs | {
        "pixel_values": pixels, "aspect_ratio_ids": ratios, "aspect_ratio_mask": tiles, "cross_attention_mask": mask,
    }  # fmt: skip
