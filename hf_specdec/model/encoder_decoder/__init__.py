"""Encoder-decoder models: their decoders run over packed rows, and attend to the keys of what the encoder has read."""

from .families import FAMILIES, decoder_config, family_of, is_encoder_decoder, position_offsets

__all__ = ["FAMILIES", "decoder_config", "family_of", "is_encoder_decoder", "position_offsets"]
