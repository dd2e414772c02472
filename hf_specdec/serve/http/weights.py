"""Endpoints for training loops, in the shapes of vLLM's development endpoints and of SGLang's: pause, sleep, update the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, StrictInt, model_validator

from ..engine.weights import GROUP_NAME
from .bodies import Body, Part, checked, parsed
from .endpoints import ignored_header, served
from .errors import bad_request
from .server import Server

_Sizes = list[Annotated[StrictInt, Field(ge=0, lt=1 << 63)]]


class Group(Part):
    """Where the trainer, rank 0, waits for the engine."""

    master_address: str
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = 1
    world_size: int = 2
    group_name: str = GROUP_NAME
    backend: Literal["gloo", "nccl"] | None = None
    packed: Literal[False] = False


class Tensors(Part):
    """A folder, or what the trainer broadcasts one by one."""

    path: str | None = None
    names: list[str] | None = None
    dtype_names: list[str] = []
    shapes: list[_Sizes] = []
    packed: Literal[False] = False

    @model_validator(mode="after")
    def _check_form(self) -> Tensors:
        if (self.path is None) == (self.names is None):
            raise ValueError("give either path or names, dtype_names and shapes")
        return self

    def call(self) -> tuple[str, dict[str, Any]]:
        """The method of `Control`, and its arguments."""
        if self.path is not None:
            return "update", {"weights": self.path}
        return "receive", {"names": self.names, "dtype_names": self.dtype_names, "shapes": self.shapes}


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
    dtypes: list[str]
    shapes: list[_Sizes]


class DiskRequest(Body):
    """POST /update_weights_from_disk, SGLang's."""

    model_path: str


class PauseRequest(Body):
    """POST /pause. Running requests are aborted, run to their end, or wait and go on later."""

    mode: Literal["abort", "wait", "keep"] = "abort"


class SleepRequest(Body):
    """POST /sleep."""

    level: Literal[1, 2, "1", "2"] = 1


class WakeRequest(Body):
    """POST /wake_up."""

    tags: list[Literal["weights", "kv_cache"]] | None = None


class EmptyRequest(Body):
    """A request without fields."""


def _join(info: Group) -> tuple[str, dict[str, Any]]:
    names = "master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"
    return "join", {name: getattr(info, name) for name in names}


# In vLLM's shape: log-probabilities are those before temperature and penalties.
_SERVER = {
    "weight_transfer_config": {"backend": "torch.distributed"},
    "model_config": {"logprobs_mode": "raw_logprobs"},
}
_SUCCESS = {"success": True, "message": "Succeeded."}
# body, what it does, the method of `Control` with its arguments, the answer
_Call = Callable[[Any], tuple[str, dict[str, Any]]]
_CALLS: dict[str, tuple[type[Body], str, _Call, dict[str, Any]]] = {
    "/pause": (PauseRequest, "Let no request run", lambda body: ("pause", {"mode": body.mode}), {"status": "paused"}),
    "/resume": (EmptyRequest, "Let requests run again", lambda _: ("resume", {}), {"status": "resumed"}),
    "/sleep": (SleepRequest, "Abort requests; free memory", lambda body: ("sleep", {"level": int(body.level)}), {}),
    "/wake_up": (WakeRequest, "Undo /sleep", lambda body: ("wake_up", {"tags": body.tags}), {}),
    "/reset_prefix_cache": (EmptyRequest, "Drop cached prefixes", lambda _: ("reset_prefix_cache", {}), {"success": True}),
    "/init_weight_transfer_engine": (
        InitRequest, "Join the trainer's process group", lambda body: _join(body.init_info), {"message": "Weight transfer initialized"},
    ),
    "/start_weight_update": (EmptyRequest, "Begin an update", lambda _: ("start_update", {}), {"message": "Weight update started"}),
    "/update_weights": (UpdateRequest, "Replace weights", lambda body: body.update_info.call(), {"message": "Weights updated"}),
    "/finish_weight_update": (EmptyRequest, "End an update", lambda _: ("finish_update", {}), {"message": "Weight update finished"}),
    "/init_weights_update_group": (GroupRequest, "Join the trainer's process group", _join, _SUCCESS),
    "/update_weights_from_distributed": (
        BroadcastRequest, "Replace weights by those that the trainer broadcasts",
        lambda body: ("receive", {"names": body.names, "dtype_names": body.dtypes, "shapes": body.shapes}), _SUCCESS,
    ),
    "/update_weights_from_disk": (
        DiskRequest, "Replace all weights by a folder's", lambda body: ("update", {"weights": body.model_path}), _SUCCESS,
    ),
}  # fmt: skip
POSTS = {path: (form, summary, {name: {} for name in answer}) for path, (form, summary, _, answer) in _CALLS.items()}
GETS = {
    "/is_paused": "Whether no request may run", "/is_sleeping": "Whether the engine sleeps",
    "/get_world_size": "Number of ranks of the engine", "/server_info": "How weights can be transferred",
}  # fmt: skip


def add_weight_routes(app: FastAPI, server: Server) -> None:
    """Serve these paths, which answer 403 unless the server allows them."""
    for path in _CALLS:
        app.add_route(path, partial(served, partial(_called, path), server), methods=["POST"])
    answers: dict[str, Callable[[], dict[str, Any]]] = {
        "/is_paused": lambda: {"is_paused": server.running_worker.load.is_paused},
        "/is_sleeping": lambda: {"is_sleeping": server.running_worker.load.is_asleep},
        "/get_world_size": lambda: {"world_size": 1},
        "/server_info": lambda: {"vllm_config": _SERVER},
    }

    async def told(request: Request) -> Response:
        server.check_control()
        return JSONResponse(answers[request.url.path]())

    for path in GETS:
        app.add_route(path, told, methods=["GET"])


async def _called(path: str, server: Server, request: Request, raw: bytes) -> Response:
    """Answer a request whose fields are in its body, in its query, or in both."""
    server.check_control()
    form, _, call, answer = _CALLS[path]
    query = {name: values if len(values) > 1 or name == "tags" else values[0] for name, values in _query(request)}
    given = parsed(raw, request.headers) if raw else {}
    if not isinstance(given, dict):
        raise bad_request("The body must be a JSON object.")
    body = checked(form, {**given, **query})
    await server.control(*call(body))
    return JSONResponse(answer, headers=ignored_header(body.unknown_fields))


def _query(request: Request) -> list[tuple[str, list[str]]]:
    return [(name, request.query_params.getlist(name)) for name in request.query_params]
