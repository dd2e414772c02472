"""Request bodies of the HTTP API: OpenAI's fields, and sampling parameters that vLLM adds to them."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..engine.params import OF_MODELS, SamplingParams
from ..engine.sounds import AUDIO_PART, sound_url
from ..engine.structured import WHITE_SPACE, StructuredOutputsParams
from .bodies import Body, Items, Part
from .chat_parser import tool_grammar
from .errors import bad_request

_MOST_STOPS, _MOST_PROMPTS, _MOST_BIASES, MOST_MESSAGES = 64, 1024, 65536, 32768
_UNSUPPORTED_FIELDS = (
    "functions", "function_call", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "suffix",
    "best_of", "use_beam_search", "audio", "modalities", "prompt_embeds",
)  # fmt: skip

# Values of unsupported fields that ask for what is done anyway; so does `best_of` with the value of `n`.
_HARMLESS = {"suffix": [""], "modalities": [["text"]]}


class StreamOptions(Part):
    """Which token counts a stream contains: in a last frame, and then also in every frame."""

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @property
    def without_effect(self) -> list[str]:
        """As in vLLM, also `continuous_usage_stats` without `include_usage`."""
        alone = self.continuous_usage_stats and not self.include_usage
        return [*super().without_effect, *(["continuous_usage_stats"] if alone else [])]


class SpeculationField(BaseModel):
    """The field `speculative_config` of a request: drafter, draft length, or no drafts at all; and whether others learn from it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    method: str | None = Field(
        default=None, description="which drafter drafts, of method per_request or auto; default: the server's choice"
    )
    num_speculative_tokens: int | None = Field(
        default=None, ge=0, description="tokens of a draft; 0: none; default: the method's"
    )
    enabled: bool = Field(default=True, description="false: plain decoding")
    private: bool = Field(default=False, description="this request and others do not draft from each other's texts")


class JsonSchema(Part):
    """A JSON schema that the answer must follow."""

    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def without_effect(self) -> list[str]:
        """Also `strict: false`: schemas are always followed."""
        return [*super().without_effect, *(["strict"] if self.strict is False else [])]


class ResponseFormat(Part):
    """The field `response_format`: what the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structured_outputs(self) -> dict[str, Any] | None:
        """The same as arguments of `StructuredOutputsParams`; None: any text."""
        if self.type != "json_schema":
            return {"json_object": True} if self.type == "json_object" else None
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise bad_request("response_format of type json_schema needs json_schema.schema.", "response_format")
        return {"json": self.json_schema.schema_}


class PredictionField(Part):
    """The field `prediction`: what will be written, mostly."""

    type: Literal["content"]
    content: str | Items[dict[str, Any]]

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else joined_text(self.content, "prediction")


class SamplingFields(Body):
    """The fields that chat, completion and response requests share."""

    model: str | None = Field(None, description="a name that /v1/models lists; default: the first")
    kv_transfer_params: dict[str, Any] | None = Field(
        None, description="of disaggregated prefill: as the other server answered"
    )
    n: int = Field(1, ge=1, le=128, description="number of answers")
    stream: bool = Field(False, description="send the answer in events, as it is written")
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, description="0: the likeliest token; default: the model's, else 1")
    top_p: float | None = Field(None, description="0 to 1; default: the model's, else 1")
    top_k: int | None = Field(None, description="likeliest tokens to draw from; 0 or -1: all; default: the model's")
    min_p: float | None = Field(
        None, description="least probability, as a share of the largest; default: the model's, else 0"
    )
    presence_penalty: float = Field(0.0, description="-2 to 2, for tokens that the answer has")
    frequency_penalty: float = Field(0.0, description="-2 to 2, for each time that it has them")
    repetition_penalty: float | None = Field(
        None, description="factor for tokens of prompt and answer; default: the model's, else 1"
    )
    seed: int | None = Field(None, description="the same seed draws the same tokens; default: a random one")
    stop: str | Items[str] | None = Field(None, description="texts that end the answer")
    stop_token_ids: Items[int] | None = Field(None, description="token ids that end it")
    include_stop_str_in_output: bool = Field(False, description="keep the stop text")
    ignore_eos: bool = Field(False, description="go on after the end-of-sequence token")
    min_tokens: int = Field(0, description="tokens before which the answer does not end")
    logit_bias: dict[str, float] | None = Field(
        None, max_length=_MOST_BIASES, description="token id → number that is added to its logit"
    )
    allowed_token_ids: Items[int] | None = Field(None, description="the only ids to draw from; default: all")
    bad_words: Items[str] | None = Field(None, description="texts that are not written")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="likeliest tokens shown per prompt token; default: none"
    )
    priority: int = Field(0, description="smaller numbers run first")
    max_time: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="seconds after which the answer ends with what is written; default: no limit",
    )
    speculative_config: SpeculationField | None = None
    prediction: PredictionField | None = None
    return_token_ids: bool = Field(False, description="show ids of prompt and answer")
    return_tokens_as_token_ids: bool = Field(False, description="name tokens of logprobs token_id:5")
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="what the text must match: json, json_object, regex, choice or grammar, and white space"
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported_fields(cls, values: Any) -> Any:
        """Refuse known fields that cannot be served: ignoring them would silently change the answer."""
        known = {**_HARMLESS, "best_of": [values.get("n") or 1]} if isinstance(values, dict) else {}
        for field in _UNSUPPORTED_FIELDS if isinstance(values, dict) else ():
            if values.get(field) not in [None, False, [], "none", *known.get(field, [])]:
                instead = ": use structured_outputs" if field.startswith("guided") else ""
                raise ValueError(f"{field} is not served here{instead}")
        return values

    @model_validator(mode="after")
    def _refuse_options_without_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true.", "stream_options")
        return self

    def wanted_format(self) -> dict[str, Any] | None:
        """What other fields than `structured_outputs` say that the text must match, as arguments of `StructuredOutputsParams`."""
        return None if self.response_format is None else self.response_format.structured_outputs()

    def grammar(self) -> StructuredOutputsParams | None:
        """What the text must match; None: any text."""
        wanted, given = self.wanted_format(), self.structured_outputs
        if wanted is None and given is None:
            return None
        try:
            if wanted is not None and given is not None and not given.keys() <= WHITE_SPACE:
                raise ValueError(
                    "structured_outputs cannot be combined with response_format or a forced tool call, except for "
                    f"{' and '.join(sorted(WHITE_SPACE))}."
                )
            return StructuredOutputsParams.of({**(given or {}), **(wanted or {})})
        except ValueError as error:
            raise bad_request(str(error), "structured_outputs") from None

    def sampling_params(self, defaults: SamplingParams, max_tokens: int | None, **more: Any) -> SamplingParams:
        """The request's parameters for the engine.

        Args:
            defaults: values for temperature, top-p, top-k, min-p and repetition penalty where the request has none.
            max_tokens: maximum number of new tokens; None: only the model's length limits them.
            more: further fields of `SamplingParams`."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > _MOST_STOPS:
            raise bad_request(f"stop may hold {_MOST_STOPS} texts, not {len(stops)}.", "stop")
        if wrong := [token for token in self.logit_bias or () if not token.strip().isdecimal()]:
            message = f"logit_bias must map token ids to numbers: {', '.join(wrong[:5])} are no ids."
            raise bad_request(message, "logit_bias")
        speculation = self.speculative_config or SpeculationField()
        given = {name: getattr(defaults, name) for name in OF_MODELS}
        given |= {name: value for name in _SHARED if (value := getattr(self, name)) is not None}
        given |= {"stop": stops, "max_tokens": max_tokens, "drafter": speculation.method, **more}
        given["num_speculative_tokens"] = speculation.num_speculative_tokens if speculation.enabled else 0
        try:
            return SamplingParams(**given, private=speculation.private)
        except ValueError as error:
            raise bad_request(str(error), str(error).partition(" ")[0]) from None


_SHARED = {field.name for field in fields(SamplingParams)} & SamplingFields.model_fields.keys()


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: int | None = Field(16, ge=0, description="new tokens, at most")
    logprobs: int | None = Field(None, ge=0, le=20, description="likeliest tokens shown per token; default: none")
    echo: bool = Field(False, description="put the prompt before the answer")
    decoder_prompt: str | Items[int] | None = Field(
        None, description="how the answer of an encoder-decoder model begins; default: the model's"
    )

    @field_validator("prompt", mode="before")
    @classmethod
    def _refuse_many_prompts(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and len(prompt) > _MOST_PROMPTS and type(prompt[0]) is not int:
            raise ValueError(f"prompt may hold {_MOST_PROMPTS} prompts, not {len(prompt)}")
        return prompt

    def prompts(self) -> list[Any]:
        """The prompts as a list, each a text or a list of token ids."""
        if not self.prompt and self.prompt != "":
            raise bad_request("prompt is empty.", "prompt")
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)


class ChatMessage(BaseModel):
    """One message of a conversation. The template sees fields that are unknown here, so they are not ignored."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | Items[dict[str, Any]] | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @property
    def images(self) -> list[dict[str, Any]]:
        """What its parts say of images: {"url": .., "detail": ..}."""
        parts = self.content if isinstance(self.content, list) else []
        images: list[Any] = [part.get("image_url") for part in parts if part.get("type") == "image_url"]
        if not all(isinstance(image, dict) and isinstance(image.get("url"), str) for image in images):
            raise bad_request('messages: a part with an image has {"image_url": {"url": text}}.', "messages")
        return images

    @property
    def sounds(self) -> list[str]:
        """Data URLs of its parts with recordings."""
        parts = self.content if isinstance(self.content, list) else []
        try:
            return [sound_url(part) for part in parts if part.get("type") == "input_audio"]
        except ValueError as error:
            raise bad_request(f"messages: {error}", "messages") from None

    def for_template(self, as_parts: bool) -> dict[str, Any]:
        """The message as chat templates expect it: text parts joined unless images or audio are among them or the template wants parts,
        arguments of tool calls parsed."""
        message = self.model_dump(exclude_none=True)
        for call in message.get("tool_calls") or []:
            if isinstance(call.get("function"), dict):
                call["function"]["arguments"] = _arguments(call["function"].get("arguments"))
        if self.content is not None and (as_parts or self.images or self.sounds):
            parts = [{"type": "text", "text": self.content}] if isinstance(self.content, str) else self.content
            places = {"image_url": {"type": "image"}, "input_audio": AUDIO_PART}
            message["content"] = [
                places.get(str(part.get("type"))) or {"type": "text", "text": joined_text([part])} for part in parts
            ]
        elif isinstance(self.content, list):
            message["content"] = joined_text(self.content)
        return message


def _arguments(given: Any) -> dict[str, Any] | str:
    """The arguments of an earlier tool call as an object, as templates want them. A text that is not of one, if cut off, stays a text."""
    if given is None or given == "":
        return {}
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        arguments = json.loads(text)
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()  # no NaN, and no half of a character
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def joined_text(parts: list[dict[str, Any]], param: str = "messages", kinds: tuple[str, ...] = ("text",)) -> str:
    """The joined texts of a content's parts. Besides `kinds` there may be refusals, the text of which is in another field."""
    texts = []
    for part in parts:
        kind = part.get("type")
        if kind not in (*kinds, "refusal"):
            raise bad_request(
                f"{param}: parts of type {kind!r} are not served here: this server gives models no files or video.", param
            )  # fmt: skip
        texts.append(part.get("refusal" if kind == "refusal" else "text"))
        if not isinstance(texts[-1], str):
            raise bad_request(f"{param}: the text of a part must be a text.", param)
    return "".join(texts)


class Function(BaseModel):
    """A function that the model may call. The template sees fields that are unknown here, so they are not ignored."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Part):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Part):
    """A function by its name."""

    name: str


class NamedTool(Part):
    """The form of `tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedFunction


class Conversation(Body):
    """The fields that make the prompt of a conversation."""

    messages: Items[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None

    @model_validator(mode="after")
    def _refuse_two_continuations(self) -> Conversation:
        begins_another = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and begins_another:
            message = "add_generation_prompt begins another message: leave out either it or continue_final_message."
            raise bad_request(message, "add_generation_prompt")
        return self

    @property
    def images(self) -> list[dict[str, Any]]:
        """See `ChatMessage`."""
        return [image for message in self.messages for image in message.images]

    @property
    def sounds(self) -> list[str]:
        """See `ChatMessage`."""
        return [sound for message in self.messages for sound in message.sounds]

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the chat template shows to the model; None if the model may not call any."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(include={"type", "function"}, exclude_none=True) for tool in tools] or None


class ChatRequest(Conversation, SamplingFields):
    """POST /v1/chat/completions."""

    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    parallel_tool_calls: bool = True
    thinking_token_budget: int | None = Field(None, ge=-1)

    @property
    def forced_tool(self) -> str | None:
        """ "required", or the name of the function that must be called; None: the model decides."""
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return None
        if not self.tools:
            raise bad_request("tool_choice needs tools.", "tool_choice")
        if not isinstance(choice, NamedTool):
            return "required"
        name = choice.function.name
        if name not in {tool.function.name for tool in self.tools}:
            raise bad_request(f"tool_choice names {name!r}, which is not among the tools.", "tool_choice")
        return name

    def wanted_format(self) -> dict[str, Any] | None:
        """As in other requests; or the JSON of a forced tool call."""
        wanted, forced = super().wanted_format(), self.forced_tool
        if forced is None:
            return wanted
        if wanted is not None:
            raise bad_request("tool_choice cannot be combined with response_format.", "tool_choice")
        functions = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in self.tools or []}
        return {"json": tool_grammar(functions, forced, self.parallel_tool_calls)}


class TokenizeRequest(Conversation):
    """POST /tokenize: a text, or a conversation as /v1/chat/completions takes it."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [
        {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
        {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
    ]})  # fmt: skip
    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = Field(None, min_length=1, max_length=MOST_MESSAGES)  # type: ignore[assignment]
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_form(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    @property
    def unknown_fields(self) -> list[str]:
        """Sorted names of fields that are ignored: also those that belong to the other form."""
        other = {"add_special_tokens"} if self.prompt is None else Conversation.model_fields.keys()
        return sorted({*super().unknown_fields, *(other & self.model_fields_set)})


class LoadAdapterRequest(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Items[int]
