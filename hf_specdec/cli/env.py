"""`hf-specdec env`: print versions, devices and settings for a bug report."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import hf_specdec

from .measure import cpuinfo, device_name, versions_of

EPILOG = """\
examples:
  hf-specdec env                      readable lines, to be pasted into a bug report
  hf-specdec env --json               the same as JSON

It prints no access tokens, keys or prompts. Of variables that may hold a secret, it says only whether they are set.
"""

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "accelerate", "numpy")
# The modules that each extra installs.
EXTRAS = {
    "suffix": ("arctic_inference",),
    "gpu": ("triton", "torchao"),
    "serve": ("fastapi", "llguidance", "openai", "prometheus_client", "uvicorn"),
    "train": ("accelerate", "matplotlib"),
    "ray": ("ray",),
    "pd": ("nixl",),
}
OTHERS = (
    "hf-specdec-models", "arctic-inference", "triton", "torchao", "llguidance", "fastapi", "peft", "bitsandbytes", "vllm",
)  # fmt: skip
CPU_FEATURES = (
    "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "sve",
)  # fmt: skip
VARIABLES = (
    "HF_SPECDEC_CACHE", "HF_SPECDEC_KERNELS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TRITON_INTERPRET", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_SPECDEC_API_KEY")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    values = environment()
    print(json.dumps(values, indent=2) if args.json else text(values))
    return 0


def environment() -> dict[str, Any]:
    """Versions, devices, extras and settings, without secrets, as values for JSON."""
    import torch
    from huggingface_hub import constants

    return {
        "hf-specdec": hf_specdec.__version__,
        "installed in": str(Path(hf_specdec.__file__).parent),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        # torch's own word names its build, as in 2.13.0+cu130; PyPI's metadata does not.
        "packages": dict.fromkeys(PACKAGES, "missing")
        | versions_of(PACKAGES)
        | {"torch": torch.__version__}
        | versions_of(OTHERS),
        "extras": {extra: missing_of(modules) for extra, modules in EXTRAS.items()},
        "cpu": cpu(),
        "gpus": gpus(),
        "kernels": kernels(),
        "bundled models": hf_specdec.bundled_names(),
        "methods": list(hf_specdec.available_methods()),
        "hub cache": constants.HF_HUB_CACHE,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ}
        | {name: "set" for name in SECRETS if name in os.environ},
    }


def kernels() -> str:
    """What the tensor operations run in, on the first GPU, or on the CPU if there is none: "triton", "native" or "reference"."""
    import torch

    from ..kernels.dispatch import uses_native, uses_triton

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return "triton" if uses_triton(device) else "native" if uses_native(device) else "reference"


def missing_of(modules: tuple[str, ...]) -> str:
    """ "complete" if all modules of an extra are installed, else which ones are not."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"without {', '.join(missing)}" if missing else "complete"


def cpu() -> dict[str, Any]:
    """The processor, its instruction sets, the number of cores for this process, and the number of threads that torch uses."""
    import torch

    flags = cpuinfo("flags", "Features").split()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = {"name": device_name(torch.device("cpu")), "features": [name for name in CPU_FEATURES if name in flags]}
    uses = torch.backends.cpu.get_cpu_capability()
    return processor | {"torch uses": uses, "cores": cores, "threads": torch.get_num_threads()}


def gpus() -> list[dict[str, Any]]:
    """Name, capability, memory and toolkit of every GPU that torch sees."""
    import torch

    described = []
    for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
        size = {"capability": f"{gpu.major}.{gpu.minor}", "memory": f"{gpu.total_memory / 2**30:.0f} GiB"}
        described.append({"name": gpu.name, **size, "cuda": torch.version.cuda or torch.version.hip})
    return described


def text(values: dict[str, Any]) -> str:
    """The values of `environment` as a line each."""
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            items = ((key, " ".join(item) if isinstance(item, list) else item) for key, item in value.items())
            value = ", ".join(f"{key} {item}" for key, item in items)
        elif isinstance(value, list):
            value = "; ".join(" ".join(map(str, item.values())) if isinstance(item, dict) else item for item in value)
        lines.append(f"{name + ':':<16}{value or 'none'}")
    return "\n".join(lines)
