"""Names under which this library is registered with transformers."""

ATTENTION_NAME = "hf_specdec"
