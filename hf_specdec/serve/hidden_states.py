"""vLLM's `kv_transfer_config`, and the files of hidden states that the method `extract_hidden_states` writes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load_file

CONNECTOR = "ExampleHiddenStatesConnector"
NIXL = "NixlConnector"


@dataclass
class KVTransferConfig:
    """vLLM's argument for what an engine gives to other processes: hidden states in files, or the KV of prompts (`serve.transfer`).

    Attributes:
        kv_connector: "ExampleHiddenStatesConnector" for the method `extract_hidden_states`; "NixlConnector" for disaggregated prefill.
        kv_role: "kv_producer", "kv_consumer" or "kv_both".
        kv_connector_extra_config: for "ExampleHiddenStatesConnector", `shared_storage_path` is the folder of the files (default: "/tmp",
            as in vLLM). For "NixlConnector", `hold_seconds` is how long a prompt's blocks wait for a consumer, and `pull_seconds` how
            long a consumer waits for them before it reads the prompt itself. Other keys are ignored.

    Raises:
        ValueError: the connector, the role, or a number of seconds is wrong.
    """

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        roles = {CONNECTOR: ("kv_producer", "kv_both"), NIXL: ("kv_producer", "kv_consumer", "kv_both")}
        if self.kv_role not in roles.get(self.kv_connector or "", ()):
            raise ValueError(
                f"kv_transfer_config: {self.kv_connector!r} as {self.kv_role!r} is not served. Use {CONNECTOR!r} as "
                f"'kv_producer', for the method extract_hidden_states; or {NIXL!r} as 'kv_producer', 'kv_consumer' or 'kv_both', for "
                "prefill and decode on separate servers."
            )
        if self.kv_connector == NIXL:
            for key in ("hold_seconds", "pull_seconds"):
                value = self.kv_connector_extra_config.get(key, 1)
                if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                    raise ValueError(f"kv_transfer_config: {key} must be a number above 0, not {value!r}.")

    @classmethod
    def of(cls, given: KVTransferConfig | dict[str, Any] | None) -> KVTransferConfig | None:
        """The configuration itself, or made from a dictionary; None for None. Raises ValueError: a key or a value is wrong."""
        if not isinstance(given, dict):
            return given
        try:
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"kv_transfer_config: {error}") from None


def with_storage(speculative_config: Any, transfer: KVTransferConfig | None) -> Any:
    """The speculative configuration with the folder that `transfer` names, if it names one. Raises ValueError: the method saves no hidden
    states, or both arguments name a folder.
    """
    if transfer is None or transfer.kv_connector == NIXL:
        return speculative_config
    if not isinstance(speculative_config, dict) or speculative_config.get("method") != "extract_hidden_states":
        raise ValueError("kv_transfer_config needs speculative_config={'method': 'extract_hidden_states', ...}.")
    if "output_dir" in speculative_config:
        raise ValueError("kv_transfer_config and speculative_config['output_dir'] both name a folder: give one.")
    return {**speculative_config, "output_dir": transfer.kv_connector_extra_config.get("shared_storage_path", "/tmp")}


def load_hidden_states(path: str | os.PathLike) -> dict[str, torch.Tensor]:
    """Read the complete file of one request: `hidden_states` [tokens, layers, hidden] and `token_ids` [tokens]."""
    return load_file(path)


def cleanup_hidden_states(path: str | os.PathLike) -> None:
    """Delete one request's file."""
    os.remove(path)
