"""Small random encoder-decoder models, and ragged batches for their encoders."""

import functools
import importlib.util

import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    EncoderDecoderModel,
    SpeechEncoderDecoderModel,
    VisionEncoderDecoderModel,
)

VOCAB, NEW = 96, 20
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
TREE = {"method": "token_recycling", "num_successors": 4, "speculative_token_tree": PATHS}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 3}
SUFFIX = [{"method": "suffix"}] if importlib.util.find_spec("arctic_inference") else []
IDS = {
    "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "forced_eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
BART_SIZES = {
    "d_model": 48, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip
_SPEECH = {**BART_SIZES, "max_target_positions": 64}
_T5 = {
    "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip
_PART = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 12, "query_pre_attn_scalar": 12, "attn_logit_softcapping": None,
    "max_position_embeddings": 64,
}  # fmt: skip
_HEADS = {f"{part}_num_{kind}_heads": 4 for part in ("encoder", "decoder") for kind in ("attention", "key_value")}
SIZES = {
    **dict.fromkeys(("bart", "mbart", "plbart", "marian", "pegasus", "blenderbot", "blenderbot-small", "m2m_100"), BART_SIZES),
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
    "longt5": {**_T5, "local_radius": 5},
    "whisper": {**_SPEECH, "max_source_positions": 20, "num_mel_bins": 8},
    "speech_to_text": {**_SPEECH, "max_source_positions": 60, "input_feat_per_channel": 8, "conv_channels": 16},
    "moonshine": {
        **_HEADS, "hidden_size": 36, "intermediate_size": 64, "encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 2,
        "max_position_embeddings": 64, "pad_head_dim_to_multiple_of": 8,
    },
    "t5gemma": {
        "encoder": _PART,
        "decoder": {**_PART, "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    },
}  # fmt: skip
SPEECH = ("whisper", "speech_to_text", "moonshine")
_WIDE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
_SOUND = {
    "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "add_adapter": True, "output_hidden_size": 48,
    "num_adapter_layers": 1,
}  # fmt: skip
_ENCODERS = {
    "vision": (VisionEncoderDecoderModel, "vit", {**_WIDE, "image_size": 32, "patch_size": 8}),
    "donut": (
        VisionEncoderDecoderModel,
        "donut-swin",
        {
            "image_size": [32, 32],
            "patch_size": 4,
            "embed_dim": 12,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
    ),
    "speech": (SpeechEncoderDecoderModel, "wav2vec2", {**_WIDE, **_SOUND}),
    "text": (EncoderDecoderModel, "bert", {**_WIDE, "vocab_size": VOCAB, "max_position_embeddings": 64}),
}
_READS = {"is_encoder_decoder": False, "is_decoder": True, "add_cross_attention": True}
_TROCR = {**BART_SIZES, **_READS, "cross_attention_hidden_size": 32}
_MBART = {**BART_SIZES, **_READS, "encoder_layers": 2}  # transformers counts these for the decoder's cache
# pairs of models: the kind of encoder, the type of the decoder, and its sizes
PAIRS = {
    "vision mbart": ("vision", "mbart", _MBART),
    "vision donut": ("donut", "mbart", _MBART),
    "vision trocr": ("vision", "trocr", _TROCR),
    "vision trocr small": ("vision", "trocr", {**_TROCR, "use_learned_position_embeddings": False}),
    "text gpt2": ("text", "gpt2", {**_READS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "speech mbart": ("speech", "mbart", _MBART),
    "text bert": ("text", "bert", {**_READS, **_WIDE, "num_hidden_layers": 2, "max_position_embeddings": 64}),
}


def build(family: str, seed: int = 0, **options):
    """A small random model whose text is varied."""
    torch.manual_seed(seed)
    if family in PAIRS:
        encoder, kind, sizes = PAIRS[family]
        pair, reads, of_encoder = _ENCODERS[encoder]
        parts = AutoConfig.for_model(reads, **of_encoder), AutoConfig.for_model(kind, **{**IDS, **sizes, **options})
        model = pair(pair.config_class.from_encoder_decoder_configs(*parts, **IDS)).eval()
    else:
        config = AutoConfig.for_model(family, **{**IDS, **SIZES[family], **options})
        model = (AutoModelForSpeechSeq2Seq if family in SPEECH else AutoModelForSeq2SeqLM).from_config(config).eval()
    gain = 2.0 if "t5" in family else 6.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                table = any(part in name for part in ("embed", "shared", "lm_head", "proj_out", "wte", "wpe"))
                weight.copy_(torch.randn_like(weight) * (0.35 if table else gain * weight[0].numel() ** -0.5))
            else:
                weight += 0.1 * torch.randn_like(weight)
    model.generation_config._from_model_config = False  # else it is not loaded again
    for name, value in (("eos_token_id", None), ("suppress_tokens", None), ("begin_suppress_tokens", None)):
        setattr(model.generation_config, name, value)
    return model


@functools.cache
def of(family: str):
    return build(family, 2 if family == "text gpt2" else 0)


def inputs_for(family: str, rows: int = 5, seed: int = 1) -> dict[str, torch.Tensor]:
    """A ragged batch for the encoder."""
    generator = torch.Generator().manual_seed(seed)
    if family.startswith("vision"):
        return {"pixel_values": torch.randn(rows, 3, 32, 32, generator=generator)}
    if family == "whisper":
        return {"input_features": torch.randn(rows, 8, 40, generator=generator)}
    lengths = torch.tensor([30, 17, 24, 9, 30])[:rows, None]
    if family in ("moonshine", "speech mbart"):
        mask = (torch.arange(12000) < 400 * lengths).long()
        return {"input_values": torch.randn(mask.shape, generator=generator), "attention_mask": mask}
    mask = (torch.arange(30) < lengths).long()
    if family == "speech_to_text":
        return {"input_features": torch.randn(rows, 30, 8, generator=generator), "attention_mask": mask}
    return {"input_ids": mask * torch.randint(3, VOCAB, (rows, 30), generator=generator), "attention_mask": mask}


# 96 ids: 60 of text, marks, and times from 74 on
END, START, ENGLISH, PREVIOUS, NO_TIMES = 60, 61, 62, 67, 73
MARKS = {
    END: "<|endoftext|>", START: "<|startoftranscript|>", ENGLISH: "<|en|>", 63: "<|de|>", 64: "<|transcribe|>", 65: "<|translate|>",
    66: "<|startoflm|>", PREVIOUS: "<|startofprev|>", 68: "<|nospeech|>", NO_TIMES: "<|notimestamps|>",
}  # fmt: skip


@functools.cache
def whisper(seed: int = 1):
    ids = {"eos_token_id": END, "pad_token_id": END, "bos_token_id": END, "decoder_start_token_id": START}
    model = build("whisper", seed, **ids)
    for name, value in {
        **ids, "is_multilingual": True, "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": 63}, "prev_sot_token_id": PREVIOUS,
        "task_to_id": {"transcribe": 64, "translate": 65}, "no_timestamps_token_id": NO_TIMES, "max_length": 64,
        "max_initial_timestamp_index": 5, "begin_suppress_tokens": [5, END], "suppress_tokens": [*range(61, 73)],
        "alignment_heads": [[0, 0], [1, 1]],
    }.items():  # fmt: skip
        setattr(model.generation_config, name, value)
    return model
