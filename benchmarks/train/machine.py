"""Where something was measured: versions, the GPU, the commit, and settings that change what is
measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("triton", "transformers", "accelerate", "lightning", "pytorch-lightning")
# Settings of the environment that change memory or speed. The first is the second's name since
# torch 2.9.
SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_ALGO",
)
ROOT = Path(__file__).parents[2]


def facts(device: torch.device) -> dict[str, Any]:
    """All of it, as strings and numbers. Local."""
    cuda = device.type == "cuda"
    return {
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "gpu_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "driver": _said(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"
        )
        if cuda
        else None,
        "power_limit": _said(
            "nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader", "-i", "0"
        )
        if cuda
        else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,  # type: ignore[no-untyped-call]
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "float32_products": torch.get_float32_matmul_precision(),
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit of this checkout, with ``+`` if files differ from it; None without git."""
    head = os.environ.get("SHARDKIT_COMMIT") or _said("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = _said(
        "git",
        "-C",
        str(ROOT),
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        "shardkit",
        "benchmarks",
    )
    return f"{head}+" if head and changed else head


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().split("\n")[0] or None if done.returncode == 0 else None
