"""Encoder-decoder models: their decoders run over packed rows, and attend to the keys of what the encoder has read."""

from .families import decoder_config, family_of, is_encoder_decoder, position_offsets

__all__ = ["decoder_config", "family_of", "is_encoder_decoder", "position_offsets"]
