"""Names that this library registers with transformers."""

ATTENTION_NAME = "hf_specdec"
