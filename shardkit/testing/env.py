"""``python -m shardkit env``: what a bug report needs."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import distributions
from typing import Any

import torch
from torch.utils.collect_env import get_pretty_env_info

from shardkit._torch import MINIMUM_TORCH, NEWEST_TESTED, torch_version

PACKAGES = (
    "transformers", "accelerate", "peft", "torchao", "bitsandbytes", "lightning", "triton", "numpy",
)  # fmt: skip
# What torchrun, NCCL, gloo, torch and shardkit read. Of SLURM's only the sizes: others name people
# and accounts.
VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_", "SLURM_NNODES",
    "SLURM_NTASKS", "CUDA_", "HIP_", "ROCR_", "NCCL_", "RCCL_", "GLOO_", "TORCH", "PYTORCH_",
    "OMP_", "SHARDKIT_",
)  # fmt: skip


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Return the parser of the command, added to the result of
    ``ArgumentParser.add_subparsers``.
    """
    text = "print what a bug report needs: versions, devices, environment"
    parser: argparse.ArgumentParser = commands.add_parser(
        "env", help=text, description=f"{text.capitalize()}."
    )
    return parser


def run(options: argparse.Namespace) -> int:
    """Print shardkit's facts and torch's own report, and return 0. Local."""
    shardkit = sys.modules["shardkit"]
    print(f"shardkit {shardkit.__version__}, from {shardkit.__path__[0]}")
    is_tested = MINIMUM_TORCH <= torch_version() <= NEWEST_TESTED
    tested = "tested" if is_tested else "not tested"
    oldest = ".".join(map(str, MINIMUM_TORCH))
    newest = ".".join(map(str, NEWEST_TESTED))
    print(f"torch {torch.__version__}, {tested} (shardkit is tested with {oldest} to {newest})")
    packages = [f"{p.name} {p.version}" for p in distributions() if p.name in PACKAGES]
    print(", ".join(sorted(packages)))
    names = [name for name in sorted(os.environ) if name.startswith(VARIABLES)]
    print(*(f"{name}={os.environ[name]}" for name in names))
    print(get_pretty_env_info())  # type: ignore[no-untyped-call]
    return 0
