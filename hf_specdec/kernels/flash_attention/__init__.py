"""Optional: the flash-attn package instead of our Triton kernel, for batches without trees (decoding, chains, prompts).

Trees, sinks, float32, and keys that differ in width from values stay with our kernel. FlashAttention-3 (`flash_attn_interface`) reads
blocks of any size; FlashAttention-2 (`flash_attn`) needs a 'block_size' that is a multiple of 256 tokens.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..attention.inputs import AttentionInputs

VARIABLE = "HF_SPECDEC_FLASH_ATTENTION"
CHOICES = ("never", "chains", "prompts", "always")
LONGEST_CHAIN = 64  # tokens per row; batches with longer rows count as prompts
HUB_KERNELS = {3: "kernels-community/flash-attn3", 2: "kernels-community/flash-attn2"}


@dataclass(frozen=True)
class FlashAttention:
    """Paged attention by flash-attn. It is called like `attention.triton.paged_attention`.

    Attributes:
        version: 3 (`flash_attn_with_kvcache`) or 2 (`flash_attn_varlen_func`).
        function: the function of that version.
    """

    version: int
    function: Callable[..., torch.Tensor]

    @property
    def page_multiple(self) -> int:
        """The block size must be a multiple of this."""
        return 256 if self.version == 2 else 1

    def __call__(
        self,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        inputs: AttentionInputs,
        scaling: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: None = None,
    ) -> torch.Tensor:
        """[T, H, Dv]; see `attention.triton.paged_attention`. Outputs of tokens after the last row are undefined."""
        assert inputs.visibility is None and sinks is None
        keys, values = (pool.unflatten(0, (-1, inputs.block_size)) for pool in (key_pool, value_pool))
        options = {
            "softmax_scale": scaling,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),  # both ends count
            "softcap": softcap or 0.0,
            "cu_seqlens_q": inputs.query_starts,
            "max_seqlen_q": inputs.max_query_length,
        }
        if self.version == 3:
            return self.function(
                query, keys, values, cache_seqlens=inputs.key_lengths, page_table=inputs.block_tables, **options
            )
        ends = torch.nn.functional.pad(inputs.key_lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return self.function(
            query, keys, values, cu_seqlens_k=ends, max_seqlen_k=inputs.max_key_length,
            block_table=inputs.block_tables, **options,
        )  # fmt: skip


def flash_attention_for(
    query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, inputs: AttentionInputs, sinks=None
) -> FlashAttention | None:
    """The attention to use instead of the Triton kernel, or None.

    HF_SPECDEC_FLASH_ATTENTION says for which batches: "chains" (rows of up to LONGEST_CHAIN new tokens), "prompts", "always", or "never"
    (the default).

    Raises:
        ValueError: the variable has another value, or the installed version cannot read blocks of this size.
        ImportError: the variable asks for flash-attn, which is not available.
    """
    choice = os.environ.get(VARIABLE, "never")
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(CHOICES)}, not {choice!r}.")
    kind = "chains" if inputs.max_query_length <= LONGEST_CHAIN else "prompts"
    if choice not in (kind, "always") or not _on_gpu(query.device):
        return None
    if inputs.visibility is not None or sinks is not None or not _fits(query, key_pool, value_pool):
        return None
    flash = find_flash_attention(_capability(query.device) >= (9, 0))
    if flash is None:
        raise ImportError(
            f"{VARIABLE}={choice} needs flash-attn: pip install flash-attn --no-build-isolation, or pip install kernels for the "
            "builds on the Hub."
        )
    if inputs.block_size % flash.page_multiple:
        raise ValueError(f"flash-attn 2 reads blocks of 256 tokens: set 'block_size': 256, not {inputs.block_size}.")
    return flash


@functools.cache
def find_flash_attention(hopper: bool, from_hub: bool = True) -> FlashAttention | None:
    """The newest available version, or None.

    Args:
        hopper: the device can run version 3.
        from_hub: if flash-attn is not installed, fetch a build through the `kernels` package if that is installed.
    """
    if hopper and importlib.util.find_spec("flash_attn_interface") is not None:
        from flash_attn_interface import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

        return FlashAttention(3, flash_attn_with_kvcache)
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        return FlashAttention(2, flash_attn_varlen_func)
    if from_hub and importlib.util.find_spec("kernels") is not None:
        version = 3 if hopper else 2
        build = importlib.import_module("kernels").get_kernel(HUB_KERNELS[version])
        return FlashAttention(version, build.flash_attn_with_kvcache if version == 3 else build.flash_attn_varlen_func)
    return None


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _fits(query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor) -> bool:
    """True if flash-attn has a kernel for these dtypes and widths."""
    width = query.shape[-1]
    same = key_pool.shape[-1] == value_pool.shape[-1] == width
    return query.dtype in (torch.float16, torch.bfloat16) and same and width % 8 == 0 and width <= 256
