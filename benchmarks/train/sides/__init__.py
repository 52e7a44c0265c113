"""Who shards: every side builds the same model from the same seed, and trains it by
the same step.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.train.sides import fsdp1, fsdp2, ours, packages, plain
from benchmarks.train.sides.side import Side as Side

SIDES: Mapping[str, Side] = {
    "bare": plain.BARE,
    "ddp": plain.DDP,
    "fsdp1": fsdp1.FSDP1,
    "naive": fsdp2.NAIVE,
    "expert": fsdp2.EXPERT,
    "shardkit": ours.SHARDKIT,
    "shardkit-budget": ours.BUDGET,
    "accelerate": packages.ACCELERATE,
    "lightning": packages.LIGHTNING,
}
