"""RequestReader: what the HTTP side must know of a model to read requests for it, and how it makes token ids of them."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import time
from functools import cached_property
from typing import Any, Literal

from ..engine.encoder import EncoderInput
from ..engine.images import NO_IMAGES, adds_special_tokens, bytes_of, processed, read_images
from ..engine.sounds import NO_SOUNDS, heard, hears
from ..engine.speech import Speech
from ..ipc.messages import Facts
from .errors import ApiError, bad_request
from .protocol import Conversation

logger = logging.getLogger(__name__)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MOST_PER_TOKEN = 8  # characters: the tokens of long texts have fewer
_TOKENS_OF_CUT_WORD = 1024  # that a word may have more if the text ends inside it
_MOST_CHARACTERS = 1 << 20  # take one to three seconds


class RequestReader:
    """Reads requests for a model. Lanes call it, also in a process of their own.

    Args:
        names: of the model; the first one is shown in messages.
        response_template, processor: see `Server`.
    """

    def __init__(self, tokenizer: Any, names: list[str], response_template: dict | None, processor: Any):
        self.tokenizer, self.names, self.processor = tokenizer, names, processor
        self.response_template, self.facts = response_template, Facts()
        self.created = int(time.time())
        self.encode("")  # sets the tokenizer's options, which must not change while another thread uses it

    def know(self, facts: Facts) -> None:
        """Take over what must be known about the model. Raises: see `connect`; ImportError: it reads audio, and a package is missing."""
        if facts.encoder is not None and facts.encoder.speech is not None:
            packages = ("python_multipart", "soundfile", "soxr")
            missing = ", ".join(name for name in packages if importlib.util.find_spec(name) is None)
            if missing:
                raise ImportError(f"Serving {self.names[0]} needs {missing}: pip install 'hf-specdec[audio]'")
        if facts.encoder is None and self.tokenizer.chat_template is None:
            logger.warning("The tokenizer has no chat template: /v1/chat/completions uses ChatML.")
        if twice := set(facts.adapters) & set(self.names):
            raise ValueError(f"lora_modules: {min(twice)!r} is the name of the model. Give the adapter another name.")
        self.facts = facts
        if self.response_template is None:
            self.response_template = facts.response_template
        if self.response_template is not None:
            self.tokenizer.get_response_parser(self.response_template, prefix="")  # raises if it is malformed

    @property
    def served(self) -> list[str]:
        """The names that requests may give as their model: those of the model, and of its LoRA adapters."""
        return [*self.names, *self.facts.adapters]

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 if a request names a model that is not served; None is always accepted."""
        if name is not None and name not in self.served:
            message = f"The model {name!r} does not exist here. Served: {', '.join(self.served)}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def model(self, name: str) -> dict[str, Any]:
        """What OpenAI's API tells about a model. Its length is not known until it is loaded."""
        parent = {"parent": self.names[0]} if name in self.facts.adapters else {}
        return {
            "id": name, "object": "model", "created": self.created, "owned_by": "hf-specdec", **parent, **self.facts.length
        }  # fmt: skip

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text of any length."""
        options = {"return_attention_mask": False, "return_token_type_ids": False}
        return self.tokenizer(text, add_special_tokens=add_special_tokens, **options)["input_ids"]

    def prompt_ids(self, prompt: str | list[int], param: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt (text, or ids) that comes from the field `param`. Raises ApiError: 400, it is empty or too long."""
        if isinstance(prompt, str):
            self._refuse_long_text(prompt, param)
            prompt = self.encode(prompt, add_special_tokens)
        if not prompt:
            raise bad_request("The prompt is empty: it needs at least one token.", param)
        if len(prompt) > self.most_prompt_tokens:
            raise self._too_long(str(len(prompt)), param)
        return prompt

    @property
    def most_prompt_tokens(self) -> int:
        """Maximum number of tokens of a prompt: with an encoder, of what it reads."""
        encoder = self.facts.encoder
        return self.facts.max_model_len - 1 if encoder is None else encoder.max_length

    def check_reads(self, what: Literal["prompt", "conversation", "audio"]) -> Speech:
        """Raise ApiError 400 unless the model reads this kind of input. Returns what is known about its speech, if it reads audio."""
        encoder, name = self.facts.encoder, self.names[0]
        speech: Any = None if encoder is None else encoder.speech
        if encoder is not None and encoder.pixels is not None:
            raise bad_request(
                f"{name} is an encoder-decoder model of images, which LLM.generate answers, and no server."
            )
        if what == "audio" and speech is None:
            raise bad_request(f"{name} reads text, not audio.")
        if what != "audio" and speech is not None:
            raise bad_request(f"{name} reads audio: use /v1/audio/transcriptions or /v1/audio/translations.")
        if what == "conversation" and encoder is not None:
            raise bad_request(f"{name} is an encoder-decoder model, which has no conversations: use /v1/completions.")
        return speech  # type: ignore[return-value]

    def _refuse_long_text(self, text: str, param: str) -> None:
        """Refuse a text much of which is too long already: tokens of beginnings are counted, the next one twice as long."""
        most = self.most_prompt_tokens + 1
        size = _MOST_PER_TOKEN * most
        while size < len(text):
            if len(self.encode(text[:size])) > most + _TOKENS_OF_CUT_WORD:
                raise self._too_long(f"more than {most}", param)
            size *= 2

    def _too_long(self, size: str, param: str) -> ApiError:
        most = self.most_prompt_tokens
        limit = f"with max_model_len {self.facts.max_model_len} it may have {most}"
        if self.facts.encoder is not None:
            limit = f"the encoder reads at most {most}"
        return ApiError(400, f"The prompt has {size} tokens; {limit}.", param=param, code="context_length_exceeded")

    def text_ids(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text that need not be a prompt, but must not keep others waiting. `param` and errors: see `prompt_ids`."""
        self.check_length(len(text), param)
        return self.encode(text, add_special_tokens)

    def check_length(self, num_characters: int, param: str) -> None:
        """Raise ApiError 400 for so many characters that to tokenize them would keep others waiting. `param`: the field they come from."""
        most = max(_MOST_CHARACTERS, _MOST_PER_TOKEN * self.facts.max_model_len)
        if num_characters > most:
            message = f"{param}: the text has {num_characters} characters; at most {most} are tokenized at once."
            raise bad_request(message, param)

    @property
    def template_reads_effort(self) -> bool:
        """Whether the chat template reads `reasoning_effort`."""
        return "reasoning_effort" in str(self.tokenizer.chat_template)

    def chat_text(self, body: Conversation) -> str:
        """A conversation as text with its special tokens, by the tokenizer's chat template (ChatML if it has none). Raises ApiError: 400,
        the template raises for these messages, or `chat_template_kwargs` sets an argument that the server sets.
        """
        messages = [message.for_template(self._template_wants_parts) for message in body.messages]
        more = body.chat_template_kwargs or {}
        reserved = sorted(more.keys() & inspect.signature(self.tokenizer.apply_chat_template).parameters.keys())
        if reserved and reserved != ["documents"]:
            raise bad_request(f"chat_template_kwargs may not set {', '.join(reserved)}.", "chat_template_kwargs")
        if body.reasoning_effort is not None and self.template_reads_effort:
            more = {"reasoning_effort": body.reasoning_effort, **more}
        template = None
        if self.tokenizer.chat_template is None:
            # ChatML begins with the token with which the tokenizer begins every text, if it has one.
            begins = self.tokenizer.bos_token is not None and self.encode("x")[0] == self.tokenizer.bos_token_id
            template = "{{ bos_token }}" + CHATML if begins else CHATML
        final = body.continue_final_message
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=body.offered_tools, chat_template=template, tokenize=False,
                add_generation_prompt=body.add_generation_prompt and not final, continue_final_message=final, **more,
            )  # fmt: skip
        except Exception as error:  # a template is a program from the checkpoint and may raise anything
            message = f"The chat template refused the messages: {error}"
            functions = [call.get("function") for given in messages for call in given.get("tool_calls", ())]
            if any(isinstance(function, dict) and isinstance(function["arguments"], str) for function in functions):
                message += ". The arguments of a tool call are no JSON object, which this template may need."
            raise bad_request(message, "messages") from None

    @cached_property
    def _template_wants_parts(self) -> bool:
        """True if the chat template, that of a model with a processor, shows no text that is not in a list of parts."""
        if self.processor is None or self.tokenizer.chat_template is None:
            return False
        try:
            text = self.tokenizer.apply_chat_template([{"role": "user", "content": "word"}], tokenize=False)
        except Exception:  # see `chat_text`
            return True
        return "word" not in text

    def media_urls(self, body: Any) -> list[str]:
        """Where the images and recordings of a request are. Raises ApiError: 400, the model reads none."""
        images = [image["url"] for image in body.images] if isinstance(body, Conversation) else []
        sounds = body.sounds if isinstance(body, Conversation) else []
        if images and not hasattr(self.processor, "image_processor"):
            raise bad_request(f"{self.names[0]} {NO_IMAGES}.", "messages")
        if sounds and not hears(self.processor):
            raise bad_request(f"{self.names[0]} {NO_SOUNDS}.", "messages")
        return images + sounds

    def chat_ids(self, body: Conversation, fetched: dict[str, bytes]) -> tuple[list[int], EncoderInput | None]:
        """The token ids of a conversation, and its images and recordings as the model reads them. `fetched`: files by address. Raises
        ApiError: 400."""
        text, urls = self.chat_text(body), self.media_urls(body)
        if not urls:
            return self.prompt_ids(text, "messages", adds_special_tokens(self.tokenizer, self.processor, text)), None
        self._refuse_long_text(text, "messages")
        try:
            files = (fetched[url] if url in fetched else bytes_of(url) for url in urls[: len(body.images)])
            sounds = heard(self.processor, map(bytes_of, body.sounds)) if body.sounds else []
            ids, images = processed(self.processor, text, read_images(files) if body.images else [], sounds)
        except (ValueError, ImportError) as error:
            raise bad_request(str(error), "messages") from None
        return self.prompt_ids(ids, "messages"), images
