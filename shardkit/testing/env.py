"""``python -m shardkit env``: what a bug report needs."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from typing import Any

import torch
import torch.distributed as dist

from shardkit._torch import MINIMUM_TORCH, NEWEST_TESTED, torch_version

PACKAGES = ("transformers", "accelerate", "peft", "torchao", "bitsandbytes", "lightning", "triton", "numpy")
# What torchrun, NCCL, gloo, torch and shardkit read. Of SLURM's only the sizes: others name people and accounts.
VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_", "SLURM_NNODES", "SLURM_NTASKS"),
    *("CUDA_", "HIP_", "ROCR_", "NCCL_", "RCCL_", "GLOO_", "TORCH", "PYTORCH_", "OMP_", "SHARDKIT_"),
)


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Return the parser of the command, added to the result of ``ArgumentParser.add_subparsers``."""
    text = "print what a bug report needs: versions, devices, backends, environment"
    parser: argparse.ArgumentParser = commands.add_parser("env", help=text, description=f"{text.capitalize()}.")
    return parser


def run(options: argparse.Namespace) -> int:
    """Print one fact a line and return 0. Local."""
    for name, value in _facts():
        print(f"{name:<14} {value}")
    return 0


def _facts() -> Iterator[tuple[str, object]]:
    shardkit, tested = sys.modules["shardkit"], MINIMUM_TORCH <= torch_version() <= NEWEST_TESTED
    yield "shardkit", f"{shardkit.__version__}, from {shardkit.__path__[0]}"
    low, high = (".".join(map(str, each)) for each in (MINIMUM_TORCH, NEWEST_TESTED))
    yield "torch", f"{torch.__version__}, {'' if tested else 'not '}tested (shardkit is tested with {low} to {high})"
    yield "built for", f"CUDA {torch.version.cuda}, HIP {torch.version.hip}, git {torch.version.git_version}"
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    yield "devices", _devices()
    yield "CPU cores", f"{os.cpu_count()}, of which torch uses {torch.get_num_threads()}"
    backends = [name for name in ("gloo", "nccl", "xccl", "ucc", "mpi") if dist.is_backend_available(name)]
    nccl = f", NCCL {torch.cuda.nccl.version()}" if "nccl" in backends else ""  # type: ignore[no-untyped-call]
    yield "backends", ", ".join(backends) + nccl
    installed = {each.name: each.version for each in distributions() if each.name in PACKAGES}
    yield "packages", ", ".join(f"{name} {installed[name]}" for name in PACKAGES if name in installed)
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
    yield "variables", " ".join(variables) or "none"


def _devices() -> str:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "no accelerator"
    name_of = getattr(torch.get_device_module(device), "get_device_name", lambda index: "")  # torch.mps has none
    names = [name_of(index) for index in range(torch.accelerator.device_count())]
    return ", ".join(f"{names.count(name)} x {device.type} {name}" for name in dict.fromkeys(names))
