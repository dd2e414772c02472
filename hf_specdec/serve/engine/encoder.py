"""Encoder-decoder models in the engine: what an encoder reads for a request, and the rules that the model itself has for its text."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.errors import UnsupportedModel
from .speech import Speech

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.logits_process import LogitsProcessor

    from ...model.encoder_decoder.source import Source


def check_ids(ids: Items[int], size: int, what: str, who: str = "the model") -> None:
    """Raise ValueError for an id that is not one of `size`. `what` and `who` begin the parts of its sentence."""
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise ValueError(f"{what} {wrong}; {who} has ids 0 to {size - 1}.")


def pixels_of(processor: Any, image: Any) -> np.ndarray:
    """What an encoder reads of one image, float32 [channels, height, width]. Raises ValueError: the processor refuses it."""
    try:
        made = getattr(processor, "image_processor", processor)(image, return_tensors="pt")["pixel_values"]
    except Exception as error:  # a processor is a program of many authors
        raise ValueError(f"The model's processor refuses the image: {error!r}") from error
    if made.dim() != 4 or len(made) != 1 or not made.isfinite().all():
        raise ValueError("A prompt has one image, of finite numbers.")
    return made[0].float().numpy()


@dataclass
class EncoderInput:
    """What an encoder reads for a request, and how the answer begins. It crosses between processes."""

    ids: list[int] = field(default_factory=list)  # a text's; none for audio and images
    features: np.ndarray | None = None  # float32 [bins, frames] of audio, or [channels, height, width] of an image
    beginning: list[list[int]] = field(default_factory=list)  # per place of the answer, the ids that may stand there
    has_timestamps: bool = False  # the answer's timestamps follow Whisper's rules
    num_frames: int = 0  # of the features, those of the recording; 0: nobody wants the times of the answer's tokens
    images: dict[str, Any] | None = None  # what the processor makes of a prompt with images, by name, less the ids

    @property
    def num_bytes_of_images(self) -> int:
        """Memory that they take until the answer ends."""
        return sum(getattr(value, "nbytes", 0) for value in (self.images or {}).values())


@dataclass
class EncoderFacts:
    """What those who send requests must know about an encoder-decoder model."""

    decoder_prompt: list[int]  # ids with which the decoder begins, unless a request has others
    max_length: int  # maximum number of ids, or of states of audio, that the encoder reads
    speech: Speech | None = None  # of models that read audio
    pixels: tuple[int, ...] | None = None  # of models that read images, the shape of one's features
    text_follows: bool = True  # a text with which the decoder is to begin follows `decoder_prompt`, or replaces it

    @classmethod
    def of(cls, model: PreTrainedModel, extractor: Any, max_model_len: int) -> EncoderFacts | None:
        """The facts about a model; None: it has no encoder.

        Args:
            extractor: transformers' feature extractor of a model that reads audio, or processor of one that reads images.
            max_model_len: see `LLM`; it bounds a text that the encoder reads, too.

        Raises:
            UnsupportedModel: the encoder reads neither ids, nor Whisper's features, nor images by a known processor.
        """
        from ...model.architectures import position_limit
        from ...model.encoder_decoder import is_encoder_decoder

        if not is_encoder_decoder(model):
            return None
        given: Any = model.generation_config
        config, name = model.config, type(model).__name__
        if config.model_type == "whisper":
            extractor = getattr(extractor, "feature_extractor", extractor)
            return cls([], config.max_source_positions, Speech.of(model, extractor))
        images = model.main_input_name == "pixel_values"
        if images and extractor is None:
            raise UnsupportedModel(
                f"{name} reads images, and has no image processor: LLM also takes a processor as its tokenizer."
            )
        if not images and model.main_input_name != "input_ids":
            raise UnsupportedModel(
                f"{name} reads {model.main_input_name}; LLM and the server read audio for Whisper only: call model.generate()."
            )
        start = given.decoder_start_token_id if given.decoder_start_token_id is not None else given.bos_token_id
        prompt = [token for token in (start, given.forced_bos_token_id) if token is not None]
        if not prompt or not all(isinstance(token, int) for token in prompt):
            raise UnsupportedModel(
                f"{name} does not say how its texts begin: set generation_config.decoder_start_token_id."
            )
        if images:
            pixels = pixels_of(extractor, np.zeros((64, 64, 3), dtype=np.uint8))
            with torch.no_grad():
                states = model.get_encoder()(torch.from_numpy(pixels)[None].to(model.device, model.dtype))[0]
            follows = "donut" not in config.encoder.model_type  # transformers' rule
            return cls(prompt, states.shape[1], None, pixels.shape, follows)
        positions = position_limit(config.get_text_config(encoder=True))
        return cls(prompt, min(positions or max_model_len, max_model_len))


class EncoderSide:
    """Makes what a request's rows need of an encoder-decoder model.

    Args:
        max_length: see `EncoderFacts`.
        num_blocks: number of blocks for the keys of the rows' sources.
    """

    def __init__(self, model: PreTrainedModel, max_length: int, num_blocks: int):
        self.model, self.max_length, self.num_blocks = model, max_length, num_blocks
        generator: Any = model
        self._config = config = generator._prepare_generation_config(None)[0]
        # Requests choose these themselves; the first token is in the decoder's prompt, and an answer that was cut off has no end.
        config.do_sample, config.num_beams, config.repetition_penalty = False, 1, 1.0
        config.forced_bos_token_id = config.forced_eos_token_id = None
        generator._prepare_special_tokens(config, device=model.device)

    def source(self, given: EncoderInput | None) -> Source:
        """The source of a request's rows, which the encoder has not read yet. Raises ValueError: it cannot be read."""
        from ...model.encoder_decoder.families import shares_vocabulary
        from ...model.encoder_decoder.source import Source

        if given is None:
            raise ValueError(
                f"{type(self.model).__name__} has an encoder, and this request has nothing for it to read."
            )
        device = self.model.device
        if given.features is not None:
            features = torch.from_numpy(given.features)[None].to(device, self.model.dtype)
            return Source(self.model, self.max_length, self.num_blocks, {self.model.main_input_name: features})
        embeddings: Any = self.model.get_encoder().get_input_embeddings()
        if not given.ids:
            raise ValueError("The prompt is empty: it needs at least one token.")
        check_ids(given.ids, embeddings.num_embeddings, "The prompt holds the id", "the encoder")
        if len(given.ids) > self.max_length:
            raise ValueError(f"The prompt has {len(given.ids)} tokens; the encoder reads at most {self.max_length}.")
        ids = torch.tensor([given.ids], device=device)
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        in_common = given.ids if shares_vocabulary(self.model.config) else []
        return Source(self.model, len(given.ids), self.num_blocks, arguments, in_common)

    def times(self, given: EncoderInput, source: Source, prompt: list[int], answer: list[int]) -> list[float]:
        """See `token_times`: of the answer's ids, in seconds after the features begin."""
        from ...model.encoder_decoder.alignment import token_times

        known = len(prompt) + len(given.beginning)
        return token_times(self.model, source, prompt + answer, known, given.num_frames)[len(prompt) :]

    def rules(self, given: EncoderInput, prompt: Items[int]) -> list[LogitsProcessor]:
        """The logits processors that `generate()` makes of the model's generation config, and of how the answer begins. `prompt`: ids."""
        from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

        from ...sampling.warpers import BeginningLogitsProcessor

        begin = len(prompt) + len(given.beginning)
        ids = torch.tensor([given.ids]) if given.ids else None
        generator: Any = self.model
        rules: list[Any] = generator._get_logits_processor(self._config, begin, ids, device=self.model.device)
        if given.has_timestamps:
            rules.append(WhisperTimeStampLogitsProcessor(self._config, begin_index=begin))
        return [BeginningLogitsProcessor(len(prompt), given.beginning, rules)] if given.beginning else rules
