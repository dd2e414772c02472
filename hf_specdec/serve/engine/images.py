"""Prompts with images and audio: what a model's processor makes of them."""

from __future__ import annotations

import base64
import copy
import io
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from .encoder import EncoderInput
from .sounds import hears

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

_INSTALL = "pip install 'hf-specdec[images]'"
NO_IMAGES = f"reads no images, or its processor of them could not be loaded, as the log then says ({_INSTALL})"
MOST_IMAGES, MOST_PIXELS = 32, 64_000_000  # of a conversation that holds or names files of images
_MOST_RATIO = 200  # of an image's sides: some processors scale the shorter one up
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # Pillow's other readers are many, and some run other programs


# Of the model types for which transformers has a class for text alone, those with images here. Llama 4 is served as text.
_LOADED_WITH_TOWER = {"mllama", "qwen3_5", "qwen3_5_moe"}


def reads_images(config: PreTrainedConfig) -> bool:
    """True if models of this configuration are loaded with a vision tower, by AutoModelForImageTextToText."""
    kind, with_tower, of_text = type(config), MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    if kind not in with_tower:
        return False
    has_one_class = kind not in of_text or of_text[kind] is with_tower[kind]
    return has_one_class or config.model_type in _LOADED_WITH_TOWER


def reads_sounds(config: PreTrainedConfig) -> bool:
    """True if models of this configuration write text after what they hear, without an encoder-decoder's attention to it."""
    return type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and not getattr(config, "is_encoder_decoder", False)


def load_processor(name: str, config: PreTrainedConfig, tokenizer: Any, **origin: Any) -> Any:
    """A model's processor of images or audio and text; None: it reads neither, or, with a warning, its processor cannot be loaded.

    Args:
        name: the model's name or folder.
        tokenizer: the processor gets a copy of it, and it gets the processor's chat template if it has none; None: no tokenizer is wanted.
        origin: as for transformers' `from_pretrained`.
    """
    is_pair = bool(getattr(config, "is_encoder_decoder", False))
    if not (reads_images(config) or reads_sounds(config)):
        return None
    from transformers import AutoImageProcessor, AutoProcessor

    try:
        if is_pair:  # whose prompts have no text with images in it
            return AutoImageProcessor.from_pretrained(name, **origin)
        if tokenizer is None:
            return None
        processor = AutoProcessor.from_pretrained(name, **origin)
        if not (hasattr(processor, "image_processor") or hears(processor)):
            raise ValueError(f"transformers finds a {type(processor).__name__} only")
    except Exception as error:  # a processor is a program of many authors, and needs packages of its own
        logger.warning(
            "The processor of %s cannot be loaded, so images and audio are refused (%s): %s", name, _INSTALL, error
        )
        return None
    if tokenizer.chat_template is None:
        tokenizer.chat_template = processor.chat_template
    processor.tokenizer = copy.deepcopy(tokenizer)  # another thread may use the other
    return processor


def bytes_of(url: str) -> bytes:
    """The contents of a data URL. Raises ValueError: it is none, or not base64."""
    kind, comma, data = url.partition(",")
    if not comma or not kind.startswith("data:") or not kind.endswith(";base64"):
        raise ValueError("an image is given as a URL that begins with data:image/...;base64,")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise ValueError(f"its data are not base64: {error}") from None


def read_images(files: Iterable[bytes]) -> list[Any]:
    """Pillow's images in RGB, upright, from files of the usual formats.

    Raises:
        ValueError: there are more than MOST_IMAGES; a file holds no image; or they have more than MOST_PIXELS pixels together.
        ImportError: Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(f"Images need Pillow: {_INSTALL}") from error
    from transformers.image_utils import load_image

    images, left = [], MOST_PIXELS
    for raw in files:
        if len(images) == MOST_IMAGES:
            raise ValueError(f"There are more than {MOST_IMAGES} images.")
        where = f"Image {len(images) + 1}"
        try:
            image = Image.open(io.BytesIO(raw), formats=_FORMATS)  # reads the header only
            width, height = image.size
            left -= width * height
            is_strip = max(image.size) > _MOST_RATIO * min(image.size)
            if left >= 0 and not is_strip:
                images.append(load_image(image))
        except UnidentifiedImageError:
            raise ValueError(f"{where} cannot be read as {', '.join(_FORMATS)}.") from None
        except Exception as error:  # Pillow's readers raise what they happen to raise for a broken file
            raise ValueError(f"{where} cannot be read: {error}.") from None
        if left < 0 or is_strip:
            most = f"one side may be {_MOST_RATIO} times the other, and all together may have {MOST_PIXELS}"
            raise ValueError(f"{where} has {width} × {height} pixels; {most}.")
    return images


def adds_special_tokens(tokenizer: Any, processor: Any, text: str) -> bool:
    """Whether the tokenizer adds its special tokens to what a chat template made: only processors let it, unless the text begins with the
    token with which texts begin (transformers' rule)."""
    return processor is not None and (tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token))


def processed(processor: Any, text: str, images: list[Any], sounds: list[Any]) -> tuple[list[int], EncoderInput]:
    """The token ids of a text with images and audio, and what the model reads in addition.

    Args:
        processor: transformers' processor of the model.
        text: with one placeholder for an image or a recording, as the processor expects it.
        images: as the processor takes them (Pillow's, arrays, tensors), in the order of the placeholders.
        sounds: see `heard`.

    Raises:
        ValueError: the processor refuses the text, the images or the audio.
    """
    adds = adds_special_tokens(processor.tokenizer, processor, text)
    what = "recordings" if sounds else "images"
    try:
        media: dict[str, Any] = {"images": [images]} if images else {}
        if sounds:
            media |= {"audio": sounds, "sampling_rate": processor.feature_extractor.sampling_rate}
        made = processor(text=[text], **media, return_tensors="pt", add_special_tokens=adds)
    except Exception as error:  # see `load_processor`
        raise ValueError(f"The model's processor refuses the {what}, or their places in the text: {error!r}") from error
    inputs = {key: value.numpy() if torch.is_tensor(value) else value for key, value in made.items()}
    inputs.pop("attention_mask", None)  # one row, without padding
    return inputs.pop("input_ids")[0].tolist(), EncoderInput(images=inputs)
