"""Hidden states of requests, as vLLM's example connector names them: where files go, and how they are read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load_file

CONNECTOR = "ExampleHiddenStatesConnector"


@dataclass
class KVTransferConfig:
    """vLLM's argument for where the method `extract_hidden_states` writes. Nothing else is transferred here.

    Attributes:
        kv_connector: "ExampleHiddenStatesConnector".
        kv_role: "kv_producer".
        kv_connector_extra_config: `shared_storage_path` is the folder; "/tmp" without it, as in vLLM. The other keys are about how
            vLLM writes, and change nothing.
    """

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kv_connector != CONNECTOR or self.kv_role not in ("kv_producer", "kv_both"):
            raise ValueError(
                f"kv_transfer_config: {self.kv_connector!r} as {self.kv_role!r} is not served. There is {CONNECTOR!r} as "
                "'kv_producer', for the method extract_hidden_states."
            )


def with_storage(speculative_config: Any, transfer: KVTransferConfig | dict[str, Any] | None) -> Any:
    """The speculative configuration with the folder that `transfer` names.

    Raises:
        ValueError: the method saves no hidden states, or its folder is named twice.
    """
    if transfer is None:
        return speculative_config
    if isinstance(transfer, dict):
        try:
            transfer = KVTransferConfig(**transfer)
        except TypeError as error:
            raise ValueError(f"kv_transfer_config: {error}") from None
    if not isinstance(speculative_config, dict) or speculative_config.get("method") != "extract_hidden_states":
        raise ValueError("kv_transfer_config needs speculative_config={'method': 'extract_hidden_states', ...}.")
    if "output_dir" in speculative_config:
        raise ValueError("kv_transfer_config and speculative_config['output_dir'] both name a folder: give one.")
    return {**speculative_config, "output_dir": transfer.kv_connector_extra_config.get("shared_storage_path", "/tmp")}


def load_hidden_states(path: str | os.PathLike) -> dict[str, torch.Tensor]:
    """`hidden_states` [tokens, layers, hidden] and `token_ids` [tokens] of one request. Files are whole once they have their name."""
    return load_file(path)


def cleanup_hidden_states(path: str | os.PathLike) -> None:
    """Delete one request's file."""
    os.remove(path)
