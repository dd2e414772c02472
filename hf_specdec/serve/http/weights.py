"""Endpoints for training loops, in the shapes of vLLM's development endpoints and of SGLang's: pause, sleep, update the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator, Field, model_validator

from ..engine.params import GROUP_NAME
from .bodies import Body, Part, checked, parsed
from .endpoints import ignored_header
from .errors import bad_request
from .routes import Route, holding
from .server import Server

_Sizes = list[Annotated[int, Field(ge=0, lt=1 << 63)]]


class Group(Part):
    """Where the trainer, rank 0, waits for the engine."""

    master_address: str = Field(description="host of the trainer")
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(1, description="rank of this engine")
    world_size: int = Field(2, description="ranks in the group")
    group_name: str = Field(GROUP_NAME, description="name of the group")
    backend: Literal["gloo", "nccl"] | None = Field(None, description="default: nccl on a GPU, else gloo")
    packed: Literal[False] = Field(False, exclude=True)


class Tensors(Part):
    """A folder, or what the trainer broadcasts one by one."""

    path: str | None = Field(None, description="a folder on the server's machine, with the whole model")
    names: list[str] | None = Field(
        None, description="the model's names of the tensors, in the order in which they come"
    )
    dtype_names: list[str] = Field([], description="their dtypes, such as bfloat16")
    shapes: list[_Sizes] = Field([], description="their shapes")
    packed: Literal[False] = Field(False, exclude=True)

    @model_validator(mode="after")
    def _check_form(self) -> Tensors:
        if (self.path is None) == (self.names is None):
            raise ValueError("give either path or names, dtype_names and shapes")
        return self

    def call(self) -> tuple[str, dict[str, Any]]:
        """The method of `Control`, and its arguments."""
        if self.path is not None:
            return "update", {"weights": self.path}
        return "receive", self.model_dump(include={"names", "dtype_names", "shapes"})


class InitRequest(Body):
    """POST /init_weight_transfer_engine."""

    init_info: Group


class UpdateRequest(Body):
    """POST /update_weights."""

    update_info: Tensors


class GroupRequest(Group, Body):
    """POST /init_weights_update_group, SGLang's."""


class BroadcastRequest(Body):
    """POST /update_weights_from_distributed, SGLang's."""

    names: list[str]
    dtype_names: list[str] = Field(alias="dtypes")
    shapes: list[_Sizes]


class DiskRequest(Body):
    """POST /update_weights_from_disk, SGLang's."""

    weights: str = Field(alias="model_path")


class PauseRequest(Body):
    """POST /pause. Running requests are aborted, run to their end, or wait and go on later."""

    mode: Literal["abort", "wait", "keep"] = Field("abort", description="what becomes of running requests")


class SleepRequest(Body):
    """POST /sleep. Level 1 moves a GPU's weights to host memory, level 2 frees them; both free the KV cache."""

    level: Annotated[Literal[1, 2, "1", "2"], AfterValidator(int)] = 1  # in a query it is a text


class WakeRequest(Body):
    """POST /wake_up."""

    tags: list[Literal["weights", "kv_cache"]] | None = Field(None, description="what wakes up; default: both")


class EmptyRequest(Body):
    """A request without fields."""


# In vLLM's shape: log-probabilities are those before temperature and penalties.
_SERVER = {
    "weight_transfer_config": {"backend": "torch.distributed"},
    "model_config": {"logprobs_mode": "raw_logprobs"},
}
_SUCCESS = {"success": True, "message": "Succeeded."}
_Call = Callable[[Any], tuple[str, dict[str, Any]]]


def _with_fields(method: str, part: Part) -> tuple[str, dict[str, Any]]:
    """A method of `Control`, and a part's fields as its arguments."""
    return method, part.model_dump(include=set(type(part).model_fields))


def _post(path: str, form: type[Body], summary: str, call: str | _Call, answer: dict[str, Any]) -> Route:
    """A path that calls a method of `Control`. `call`: the method, whose arguments are the body's fields; or makes both of a body."""
    call = partial(_with_fields, call) if isinstance(call, str) else call
    schema = holding(**{name: {} for name in answer})
    return Route("POST", path, partial(_called, form, call, answer), summary, schema, form, errors=(403, 404, 503))


def _get(path: str, summary: str, told: Callable[[Server], dict[str, Any]]) -> Route:
    async def work(server: Server, request: Request, raw: bytes) -> Response:
        server.check_control()
        return JSONResponse(told(server))

    return Route("GET", path, work, summary, {"type": "object"}, errors=(403, 503))


async def _called(
    form: type[Body], call: _Call, answer: dict[str, Any], server: Server, request: Request, raw: bytes
) -> Response:
    """Answer a request whose fields are in its body, in its query, or in both."""
    server.check_control()
    query = {name: request.query_params.getlist(name) for name in request.query_params}
    given = parsed(raw, request.headers) if raw else {}
    if not isinstance(given, dict):
        raise bad_request("The body must be a JSON object.")
    one = {name: values if len(values) > 1 or name == "tags" else values[0] for name, values in query.items()}
    body = checked(form, {**given, **one})
    await server.control(*call(body))
    return JSONResponse(answer, headers=ignored_header(body.unknown_fields))


# Paths that answer 403 unless the server allows them.
ROUTES = (
    _post("/pause", PauseRequest, "Let no request run", "pause", {"status": "paused"}),
    _post("/resume", EmptyRequest, "Let requests run again", "resume", {"status": "resumed"}),
    _post("/sleep", SleepRequest, "Abort requests; free memory", "sleep", {}),
    _post("/wake_up", WakeRequest, "Undo /sleep", "wake_up", {}),
    _post("/reset_prefix_cache", EmptyRequest, "Drop cached prefixes", "reset_prefix_cache", {"success": True}),
    _post(
        "/init_weight_transfer_engine", InitRequest, "Join the trainer's process group", lambda body: _with_fields("join", body.init_info),
        {"message": "Weight transfer initialized"},
    ),
    _post("/start_weight_update", EmptyRequest, "Begin an update", "start_update", {"message": "Weight update started"}),
    _post("/update_weights", UpdateRequest, "Replace weights", lambda body: body.update_info.call(), {"message": "Weights updated"}),
    _post("/finish_weight_update", EmptyRequest, "End an update", "finish_update", {"message": "Weight update finished"}),
    _post("/init_weights_update_group", GroupRequest, "Join the trainer's process group", "join", _SUCCESS),
    _post(
        "/update_weights_from_distributed", BroadcastRequest, "Replace weights by those that the trainer broadcasts", "receive", _SUCCESS,
    ),
    _post("/update_weights_from_disk", DiskRequest, "Replace all weights by a folder's", "update", _SUCCESS),
    _get("/is_paused", "Whether no request may run", lambda server: {"is_paused": server.running_worker.load.is_paused}),
    _get("/is_sleeping", "Whether the engine sleeps", lambda server: {"is_sleeping": server.running_worker.load.is_asleep}),
    _get("/get_world_size", "Number of ranks of the engine", lambda _: {"world_size": 1}),
    _get("/server_info", "How weights can be transferred", lambda _: {"vllm_config": _SERVER}),
)  # fmt: skip
