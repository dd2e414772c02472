"""Prompts as `LLM` takes them, read into what a request of the engine holds."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ...sampling.grammar import Reasoning
from .encoder import EncoderFacts, EncoderInput, pixels_of
from .images import NO_IMAGES, adds_special_tokens, bytes_of, processed, read_images
from .params import SamplingParams
from .sounds import AUDIO_PART, NO_SOUNDS, heard, hears, sound_url
from .structured import reasoning_before, reasoning_marks, response_template_of

_TEXT = ("prompt", "prompt_token_ids")  # keys of a prompt
_WITH_MEDIA, _PAIR = (*_TEXT, "multi_modal_data"), ("encoder_prompt", "decoder_prompt")
# a text, if one was given; ids; the reasoning before the answer; what else the model reads
Read = tuple[str | None, list[int], Reasoning | None, EncoderInput | None]


class PromptReader:
    """Reads the prompts of a model.

    Args:
        tokenizer: None: prompts are token ids.
        processor: transformers' processor of images and text, or a feature extractor of audio; None: prompts have neither.
        encoder: None: the model is decoder-only.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, processor: Any, encoder: EncoderFacts | None):
        self.model, self.tokenizer, self.processor, self.encoder = model, tokenizer, processor, encoder
        self.name = type(model).__name__

    def read(self, prompt: Any, params: SamplingParams) -> Read:
        """A prompt as `LLM.generate` takes it. Raises ValueError: it is none, or not one that this model reads."""
        facts = self.encoder
        has_both = isinstance(prompt, dict) and "encoder_prompt" in prompt
        source, begins = (prompt["encoder_prompt"], prompt.get("decoder_prompt")) if has_both else (prompt, None)
        for part, known in ((prompt, _PAIR if has_both else _WITH_MEDIA), (source, _WITH_MEDIA), (begins, _TEXT)):
            for key in part.keys() - known if isinstance(part, dict) else ():
                raise ValueError(f"A prompt with a key {key!r} is not read; its keys are {', '.join(known)}.")
        if facts is None:
            if has_both:
                raise ValueError(f"{self.name} has no encoder: encoder_prompt is not for it.")
            has_media = isinstance(prompt, dict) and "multi_modal_data" in prompt
            text, ids, images = self._with_media(prompt) if has_media else (*self._text(prompt), None)
            return text, ids, self._reasoning(text, ids, params), images
        if params.thinking_token_budget is not None:
            raise ValueError("thinking_token_budget is for decoder-only models.")
        data = source.get("multi_modal_data") if isinstance(source, dict) else None
        if facts.speech is not None or facts.pixels is not None:
            if isinstance(source, dict) and not source.keys().isdisjoint(_TEXT):
                if begins is not None:
                    raise ValueError(
                        "The decoder begins twice: leave out the prompt of encoder_prompt, or decoder_prompt."
                    )
                begins = source
            return self._speech(facts, data, begins) if facts.speech is not None else self._image(facts, data, begins)
        if data is not None:
            raise ValueError(f"{self.name} reads text: multi_modal_data is not for it.")
        text, ids = self._text(source)
        return text, self._decoder_prompt(facts, begins), None, EncoderInput(ids)

    def of_conversations(self, conversations: list[list[dict]], **options: Any) -> list[Any]:
        """The prompts of conversations. `options`: those of the tokenizer's `apply_chat_template`. Raises ValueError: a part that should
        hold an image holds none."""
        stripped, prompts = [_without_media(conversation) for conversation in conversations], []
        messages = [messages for messages, _ in stripped]
        # apply_chat_template refuses an empty list
        texts: Any = messages and self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        for text, (_, media) in zip(texts, stripped, strict=True):
            adds = adds_special_tokens(self.tokenizer, self.processor, text)
            ids = self.tokenizer(text, add_special_tokens=adds)["input_ids"]
            prompts.append({"prompt": text, "multi_modal_data": media} if media else ids)
        return prompts

    def _speech(self, facts: EncoderFacts, data: Any, begins: Any) -> Read:
        """A recording of one window. `begins`: how the transcript begins, if that is said."""
        speech: Any = facts.speech
        audio = data["audio"] if isinstance(data, dict) and data.keys() == {"audio"} else None
        if not isinstance(audio, (tuple, list)) or len(audio) != 2:
            raise ValueError('A prompt of this model is {"multi_modal_data": {"audio": (samples, sampling rate)}}.')
        features = speech.features(np.asarray(audio[0], np.float32), audio[1])
        if features.shape[1] > speech.num_frames:
            raise ValueError(
                "The audio is longer than a window of the model: use the server's /v1/audio/transcriptions, or model.generate()."
            )
        if begins is not None:
            return None, self._decoder_prompt(facts, begins), None, EncoderInput(features=features)
        ids, beginning = speech.prompt([], speech.beginning("transcribe", None, has_timestamps=False))
        return None, ids, None, EncoderInput(features=features, beginning=beginning)

    def _image(self, facts: EncoderFacts, data: Any, begins: Any) -> Read:
        """An image, which an encoder reads. `begins`: how the decoder begins, if that is said."""
        if not isinstance(data, dict) or data.keys() != {"image"}:
            raise ValueError('A prompt of this model is {"multi_modal_data": {"image": image}}.')
        pixels = pixels_of(self.processor, data["image"])
        if pixels.shape != facts.pixels:
            raise ValueError(
                f"The image becomes {list(pixels.shape)}; images of this model become {list(facts.pixels or ())}."
            )
        return None, self._decoder_prompt(facts, begins), None, EncoderInput(features=pixels)

    def _with_media(self, prompt: dict[str, Any]) -> tuple[str, list[int], EncoderInput]:
        """A prompt's text and token ids, and its images and recordings as the model reads them."""
        data, text = prompt["multi_modal_data"], None if "prompt_token_ids" in prompt else prompt.get("prompt")
        if not isinstance(text, str) or not isinstance(data, dict) or not data or data.keys() - {"image", "audio"}:
            raise ValueError(
                'A prompt with images is {"prompt": text with their placeholders, "multi_modal_data": {"image": image or list}}; one '
                'with audio has {"audio": (samples, sampling rate) or list}.'
            )
        reads = {
            "image": (hasattr(self.processor, "image_processor"), NO_IMAGES),
            "audio": (hears(self.processor), NO_SOUNDS),
        }
        if why := next((why for kind, (can, why) in reads.items() if kind in data and not can), None):
            raise ValueError(f"{self.name} {why}. LLM also takes a processor as its tokenizer.")
        images, sounds = data.get("image", []), data.get("audio", [])
        images = list(images) if isinstance(images, (list, tuple)) else [images]
        sounds = sounds if isinstance(sounds, list) else [sounds]
        return text, *processed(self.processor, text, images, heard(self.processor, sounds) if sounds else [])

    def _reasoning(self, text: str | None, ids: list[int], params: SamplingParams) -> Reasoning | None:
        """The reasoning before the answer to a prompt, if it has a budget. Raises ValueError: no response template describes it."""
        if params.thinking_token_budget is None:
            return None
        template = response_template_of(self.tokenizer, self.model)
        if reasoning_marks(template) is None:
            raise ValueError(
                "thinking_token_budget: no response template says how this model begins and ends its reasoning."
            )
        prefix = self.tokenizer.decode(ids) if text is None else text
        return reasoning_before(self.tokenizer, template, prefix, params.structured_outputs is not None)

    def _decoder_prompt(self, facts: EncoderFacts, given: Any) -> list[int]:
        """Ids with which a decoder begins: the model's, then a text without special tokens; or the ids that are given."""
        if given is None:
            return facts.decoder_prompt
        text, ids = self._text(given, adds=False)
        return facts.decoder_prompt + ids if text is not None and facts.text_follows else ids

    def _text(self, prompt: Any, adds: bool = True) -> tuple[str | None, list[int]]:
        """A prompt's text, if it was given as text, and its token ids. `adds`: with the tokenizer's special tokens. Raises ValueError: no
        prompt, or a text without a tokenizer.
        """
        if isinstance(prompt, dict):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(map(operator.index, prompt["prompt_token_ids"]))
            prompt = prompt.get("prompt")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("Text prompts need a tokenizer: pass one to LLM(tokenizer=...), or token ids.")
            return prompt, self.tokenizer(prompt, add_special_tokens=adds)["input_ids"]
        if isinstance(prompt, (list, tuple)) and all(isinstance(token, int) for token in prompt):
            return None, list(prompt)
        kinds = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
        raise ValueError(f"A prompt is {kinds}, not {type(prompt).__name__}.")


def _without_media(messages: list[dict]) -> tuple[list[dict], dict[str, list[Any]]]:
    """A conversation whose parts say only where images and recordings are, and these by kind. Raises ValueError: a part holds none."""
    media: dict[str, list[Any]] = {}
    changed = []

    def place_of(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image_url":
            given = part.get("image_url")
            media.setdefault("image", []).extend(
                read_images([bytes_of(str(given.get("url") if isinstance(given, dict) else given))])
            )
        elif kind == "input_audio":
            media.setdefault("audio", []).append(bytes_of(sound_url(part)))
            return AUDIO_PART
        elif kind in ("image", "audio") and kind in part:
            media.setdefault(kind, []).append(part[kind])
            return {"type": "image"} if kind == "image" else AUDIO_PART
        elif isinstance(kind, str) and kind.partition("_")[0] in ("image", "audio", "video", "file"):
            raise ValueError(f"{str(part)[:100]}: LLM.chat does not read such a part of a message.")
        else:
            return part
        return {"type": "image"}

    for message in messages:
        content = message.get("content")
        changed.append({**message, "content": list(map(place_of, content))} if isinstance(content, list) else message)
    return changed, media
