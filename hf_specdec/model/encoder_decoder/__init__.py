"""Encoder-decoder models: their decoders run over packed rows, and attend to the keys of what the encoder has read."""

from .families import FAMILIES, check_decoder_only, family_of, is_encoder_decoder, position_offsets, text_config

__all__ = ["FAMILIES", "check_decoder_only", "family_of", "is_encoder_decoder", "position_offsets", "text_config"]
