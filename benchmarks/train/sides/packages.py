"""FSDP2 as other packages wrap it, where they are installed: accelerate, and Lightning's Fabric."""

from __future__ import annotations

import torch

from benchmarks.train.case import Case, Training
from benchmarks.train.sides.side import Side


def _accelerate(case: Case, device: torch.device) -> Training:
    raise NotImplementedError


def _lightning(case: Case, device: torch.device) -> Training:
    raise NotImplementedError


ACCELERATE = Side(
    "accelerate's FSDP2", frozenset({"reshard", "unit", "compile", "offload"}), _accelerate, package="accelerate"
)
LIGHTNING = Side("Lightning's FSDP2", frozenset({"compile"}), _lightning, package="lightning_fabric")
