"""Speculative decoding for any decoder-only model, through the hf-specdec package."""

import hf_specdec

DEFAULT = {"method": "ngram"}


def generate(model, speculative_config=None, **kwargs):
    """`model.generate(**kwargs)` with speculative decoding: the same output, in fewer steps.

    Args:
        model: a decoder-only transformers model.
        speculative_config: dict, JSON text or path; None: what the model's generation config carries, or prompt lookup.
        kwargs: everything `generate()` takes.
    """
    given = kwargs.get("generation_config") or model.generation_config
    config = speculative_config or getattr(given, "speculative_config", None) or DEFAULT
    return hf_specdec.generate(model, speculative_config=config, **kwargs)
