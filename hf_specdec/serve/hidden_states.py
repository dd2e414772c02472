"""Hidden states of requests, as vLLM's example connector names them: where files go, and how they are read."""

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
    """vLLM's argument for what leaves an engine: hidden states, in files, or the keys and values of prompts (`serve.transfer`).

    Attributes:
        kv_connector: "ExampleHiddenStatesConnector" for the method `extract_hidden_states`; "NixlConnector" for prefill and decode apart.
        kv_role: "kv_producer", "kv_consumer" or "kv_both".
        kv_connector_extra_config: of the first, `shared_storage_path` is the folder; "/tmp" without it, as in vLLM. Of the second,
            `hold_seconds`, for which a prompt's blocks wait for a consumer, and `pull_seconds`, after which a consumer reads the
            prompt itself. The other keys are about how vLLM writes, and change nothing.
    """

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        roles = {CONNECTOR: ("kv_producer", "kv_both"), NIXL: ("kv_producer", "kv_consumer", "kv_both")}
        if self.kv_role not in roles.get(self.kv_connector or "", ()):
            raise ValueError(
                f"kv_transfer_config: {self.kv_connector!r} as {self.kv_role!r} is not served. There is {CONNECTOR!r} as "
                f"'kv_producer', for the method extract_hidden_states; and {NIXL!r} as 'kv_producer', 'kv_consumer' or 'kv_both', for "
                "prefill and decode apart."
            )
        if self.kv_connector == NIXL:
            for key in ("hold_seconds", "pull_seconds"):
                value = self.kv_connector_extra_config.get(key, 1)
                if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                    raise ValueError(f"kv_transfer_config: {key} must be a number above 0, not {value!r}.")

    @classmethod
    def of(cls, given: KVTransferConfig | dict[str, Any] | None) -> KVTransferConfig | None:
        """The configuration, also from a dictionary.

        Raises:
            ValueError: a key or a value is wrong.
        """
        if not isinstance(given, dict):
            return given
        try:
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"kv_transfer_config: {error}") from None


def with_storage(speculative_config: Any, transfer: KVTransferConfig | dict[str, Any] | None) -> Any:
    """The speculative configuration with the folder that `transfer` names.

    Raises:
        ValueError: the method saves no hidden states, or its folder is named twice.
    """
    transfer = KVTransferConfig.of(transfer)
    if transfer is None or transfer.kv_connector == NIXL:
        return speculative_config
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
