"""The object `speculators_config`, which is common to all heads in speculators' format."""

from __future__ import annotations

from typing import Any

from .target import TargetModel


def speculators_config(algorithm: str, num_tokens: int, target: TargetModel) -> dict[str, Any]:
    """The object `speculators_config` of config.json: the method, the length of a draft, the target."""
    architectures = getattr(target.model.config, "architectures", None) or [type(target.model).__name__]
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": num_tokens,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": target.name, "architectures": architectures},
    }
