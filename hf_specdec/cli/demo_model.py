"""The model of the demo: the bundled one, inflated until it costs as much as a real one. Its text and acceptance do not change."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import hf_specdec

from .options import load_model_and_tokenizer

if TYPE_CHECKING:
    import torch

SIZES = ("tiny", "100m", "300m", "1b")
_HUNDRED = (768, 14, 2048, 12, 4, 64)  # the size "100m"; inflation.PRESETS has the larger ones


@dataclass
class DemoModel:
    """The models of the demo.

    Attributes:
        model: the target, which generates the same text as `tiny`.
        eagle3: folder of the bundled EAGLE-3 head, inflated in the same way; None if it is not installed. The bundled draft model
            is used as it is.
        cheap_rows: True if a step spends its time on reading weights, so that verifying a few more tokens costs little.
    """

    model: Any
    tokenizer: Any
    eagle3: str | None
    cheap_rows: bool


def has_bfloat16(device: torch.device) -> bool:
    """True if the device multiplies in bfloat16 in hardware."""
    import torch

    if device.type != "cpu":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _affordable(device: torch.device, cheap_rows: bool) -> str:
    """A size whose steps are long enough to gain from drafts, and short enough for the demo's time limit."""
    if device.type == "cuda":
        return "1b"
    return "300m" if cheap_rows else "100m"


@contextmanager
def demo_model(args: argparse.Namespace) -> Iterator[DemoModel]:
    """The model of `args.size` ("auto": a size for the device) in `args.dtype` ("auto": bfloat16 if the device has it)."""
    import torch

    from hf_specdec.inflation import DIMENSIONS, PRESETS, inflate, inflate_eagle3

    args.model, wanted, args.dtype = "tiny", args.dtype, "float32"
    source, tokenizer = load_model_and_tokenizer(args)
    cheap_rows = has_bfloat16(source.device) if wanted == "auto" else wanted == "bfloat16"
    dtype = torch.bfloat16 if cheap_rows else torch.float32
    name = args.size if args.size != "auto" else _affordable(source.device, cheap_rows)
    size = {"tiny": None, "100m": _HUNDRED, **PRESETS}[name]
    sizes = {} if size is None else dict(zip(DIMENSIONS, size, strict=True))
    model = inflate(source, **sizes, dtype=dtype)
    with tempfile.TemporaryDirectory(prefix="hf-specdec-demo-") as folder:
        has_head = "tiny-eagle3" in hf_specdec.bundled_names()
        if has_head:
            head = hf_specdec.bundled("tiny-eagle3")
            inflate_eagle3(head, source.config, model.config, folder, dtype, device=source.device)
        try:
            yield DemoModel(model, tokenizer, folder if has_head else None, cheap_rows)
        finally:
            hf_specdec.release(model)
