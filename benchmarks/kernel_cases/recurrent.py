"""Compile cases of layers with a state: heads of published hybrids."""

from __future__ import annotations

from hf_specdec.kernels.recurrent.triton import convolution_kernel, gated_delta_kernel, mamba2_kernel, tile_of

from .compiling import CompileCase

_WALK = {**dict.fromkeys(("parents", "into", "saved"), "*i32"), "tokens": "i32"}
_STATES = dict.fromkeys(("before", "pool", "saved_states"), "*fp32")


def compile_cases() -> list[CompileCase]:
    """Gated delta rule, Mamba-2 and the convolution."""
    cases = []
    for name, kind, key_heads, heads, width, value_width, per_channel in (
        ("delta rule qwen3-next (128/128)", "bf16", 16, 32, 128, 128, False),
        ("delta rule olmo-hybrid (96/192)", "bf16", 30, 30, 96, 192, False),
        ("delta rule kimi-linear (128/128)", "bf16", 32, 32, 128, 128, True),
        ("delta rule qwen3-next float32", "fp32", 16, 32, 128, 128, False),
    ):
        signature = {**dict.fromkeys(("out", "query", "key", "value", "rate"), f"*{kind}"), "decay": "*fp32"}
        signature |= {**_STATES, **_WALK, "scale": "fp32"}
        block_k, block_v = tile_of(width, value_width)
        constants = {
            "KEY_HEADS": key_heads, "HEADS": heads, "WIDTH": width, "VALUE_WIDTH": value_width, "PER_CHANNEL": per_channel,
            "SAVES": True, "BLOCK_K": block_k, "BLOCK_V": block_v,
        }  # fmt: skip
        cases.append(CompileCase(name, gated_delta_kernel, signature, constants, unaligned=("tokens",)))
    for name, kind, heads, groups, width, size in (
        ("mamba-2 nemotron-h (64, 128)", "bf16", 128, 8, 64, 128),
        ("mamba-2 falcon-h1 (64, 256)", "bf16", 24, 1, 64, 256),
        ("mamba-2 granite float32 (64, 128)", "fp32", 128, 1, 64, 128),
    ):
        signature: dict[str, str] = dict.fromkeys(
            ("out", "x", "steps", "into_state", "out_of_state", "skip", "bias"), f"*{kind}"
        )
        signature |= {"rate": "*fp32", **_STATES, **_WALK}
        block_n, block_p = tile_of(size, width)
        constants = {
            "HEADS": heads, "GROUPS": groups, "WIDTH": width, "SIZE": size, "ROUNDS_SKIP": True, "SAVES": True,
            "BLOCK_P": block_p, "BLOCK_N": block_n,
        }  # fmt: skip
        cases.append(CompileCase(name, mamba2_kernel, signature, constants, unaligned=("tokens",)))
    for name, biased, silu in (("convolution qwen3-next", False, True), ("convolution nemotron-h", True, True)):
        signature: dict[str, str] = dict.fromkeys(
            ("out", "x", "weight", "pool", *(["bias"] if biased else [])), "*bf16"
        )
        signature |= {
            **dict.fromkeys(("windows", "into"), "*i32"),
            **dict.fromkeys(("tokens", "channels", "length"), "i32"),
        }
        constants = {"SIZE": 4, "HAS_BIAS": biased, "SILU": silu, "BLOCK": 256, **({} if biased else {"bias": None})}
        cases.append(CompileCase(name, convolution_kernel, signature, constants, unaligned=("tokens", "length")))
    return cases
