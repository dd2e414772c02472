"""WeightSender: the trainer's side of `hf-specdec serve --enable-weight-updates`, and TRL's client with it."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .engine.weights import broadcast, join_group


class WeightSender:
    """Sends weights to a server over a process group of torch.

        sender = WeightSender("http://localhost:8000")
        sender.connect()
        sender.send(model.named_parameters())

    Args:
        url: of the server.
        port: at which the server finds this process.
        api_key: the server's; None: it needs none.
        backend: "gloo", or "nccl" if the weights and the server's model are on two GPUs.
    """

    def __init__(self, url: str, port: int = 51216, api_key: str | None = None, backend: str = "gloo"):
        self.url, self.port, self.backend = url.rstrip("/"), port, backend
        self._headers = {"Content-Type": "application/json", **({} if api_key is None else {"x-api-key": api_key})}
        self._group: Any = None

    def connect(self) -> None:
        """Make the group. Raises ValueError: the server refuses; RuntimeError: it does not come."""
        place = urllib.parse.urlparse(self.url)
        with socket.create_connection((place.hostname or "localhost", place.port or 80)) as probe:
            address = probe.getsockname()[0]  # by which the server reaches this machine
        where = {"master_address": address, "master_port": self.port, "backend": self.backend}
        with ThreadPoolExecutor(1) as pool:  # the server answers once both have joined
            asked = pool.submit(self._post, "/init_weight_transfer_engine", {"init_info": where})
            self._group = join_group(address, self.port, 0, 2, self.backend)
            asked.result()

    def send(
        self, tensors: Iterable[tuple[str, torch.Tensor]], metadata: list[tuple[str, str, list[int]]] | None = None
    ) -> None:
        """Replace the server's weights of these names. Raises ValueError: it refuses them, and keeps those it has.

        Args:
            metadata: name, dtype and shape of all tensors, if these are made one by one.
        """
        if metadata is None:
            tensors = list(tensors)
            metadata = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors]
        names, dtypes, shapes = (list(part) for part in zip(*metadata, strict=True))
        with ThreadPoolExecutor(1) as pool:
            update = {"names": names, "dtype_names": dtypes, "shapes": shapes}
            asked = pool.submit(self._post, "/update_weights", {"update_info": update})
            for _, tensor in tensors:
                tensor = tensor.detach().contiguous()
                broadcast(self._group, tensor if self.backend == "nccl" else tensor.cpu())
            asked.result()

    def close(self) -> None:
        """Leave the group."""
        self._group = None

    def _post(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), self._headers)
        try:
            urllib.request.urlopen(request).close()
        except urllib.error.HTTPError as error:
            raise ValueError(json.loads(error.read())["error"]["message"]) from None


def use_with_trl(backend: str = "gloo") -> None:
    """Let TRL's trainers with `vllm_mode="server"` send weights by a `WeightSender`, without vLLM, which would need NCCL. Call it before
    a trainer is made. `backend`: see `WeightSender`."""
    from trl.generation import vllm_client, vllm_generation  # pyright: ignore[reportMissingImports]

    def init_communicator(client: Any, device: Any = None) -> None:
        client.communicator = WeightSender(client.base_url, client.group_port, backend=backend)
        client.communicator.connect()

    kind = vllm_client.VLLMClient
    kind.init_communicator = init_communicator
    kind.update_named_params = lambda client, metadata, tensors: client.communicator.send(tensors, metadata)
    kind.close_communicator = lambda client: client.communicator.close()
    for module in (vllm_client, vllm_generation):
        module.is_vllm_available = lambda *_, **__: True
