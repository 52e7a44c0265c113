"""The default plan against an expert's units, on models of many kinds in their real sizes, without
a GPU.

Run: ``python -m benchmarks.default_rule [NAME ...] [--write FILE]``; needs transformers, and timm,
diffusers, torchvision and monai for their models. Each is planned on the meta device for 64 ranks,
in float32 with AdamW. Peaks of one rank are shardkit's own estimate, for both sides: bytes counted
on fake tensors, not measured on a GPU.

Columns: the largest unit as a share of the parameters; the units and all-gathers; the peak, and the
peak with checkpointed blocks; each for the default and for the expert's units, and the ratio of the
two.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.models_of_others import Case, cases
from shardkit import MeshSpec, PlanError, ShardingPlan, by_name, group, plan_model
from shardkit.memory.allocations import OPTIMIZERS, Prediction, timeline
from shardkit.memory.tracing import trace

MESH = MeshSpec.sharded(64)
HEADER = [
    "model",
    "parameters",
    "largest unit",
    "units",
    "all-gathers",
    "peak",
    "checkpointed",
    "seconds to plan",
]


def peak_bytes(model: nn.Module, plan: ShardingPlan, batch: Any) -> int:
    """The most bytes alive on the fullest rank during a training step."""
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    measured = timeline(plan, trace(model, plan, batch), OPTIMIZERS["adamw"], buffers)
    return Prediction("", plan, measured, host=0).peak.total


def plans_of(case: Case, model: nn.Module, checkpoint: bool) -> tuple[ShardingPlan, ShardingPlan]:
    """The default plan, and the expert's."""
    units = [by_name(*case.units)] + [group(*case.tail, reshard_after_forward=False)] * bool(
        case.tail
    )
    ours = plan_model(model, mesh=MESH, checkpoint_activations=checkpoint)
    hand = plan_model(model, mesh=MESH, units=units)
    blocks = any(unit.blocks for unit in hand.units)  # of vgg16's single layers there are none
    return ours, plan_model(
        model, mesh=MESH, units=units, checkpoint_activations=True
    ) if checkpoint and blocks else hand


def build(case: Case) -> nn.Module:
    """The model, on the meta device unless it reads values while it is built."""
    try:
        with torch.device("meta"):
            return case.make().train()
    except RuntimeError:
        return case.make().train()


def peaks(case: Case, model: nn.Module, checkpoint: bool) -> str:
    """The peaks of both plans, or why there are none, as where a model has
    nothing to checkpoint.
    """
    try:
        ours, hand = (
            peak_bytes(model, plan, case.batch) / 2**30
            for plan in plans_of(case, model, checkpoint)
        )
    except PlanError as error:
        return str(error).partition(". ")[0]
    return f"{ours:.2f}, {hand:.2f} GiB: {ours / hand:.2f}"


def row_of(case: Case) -> list[str]:
    """One line of the table."""
    model = build(case)
    started = time.perf_counter()
    plans = plans_of(case, model, checkpoint=False)
    seconds = time.perf_counter() - started
    shares = [
        max(sum(spec.numel for spec in plan.specs_of(unit)) for unit in plan.units)
        for plan in plans
    ]
    total = sum(spec.numel for spec in plans[0].params)
    gathers = [plan.collectives().all_gathers for plan in plans]
    return [
        case.name,
        f"{total / 1e6:,.0f} M",
        "{:.1f} %, {:.1f} %".format(*(100 * share / total for share in shares)),
        "{}, {}".format(*(len(plan.units) for plan in plans)),
        f"{gathers[0]}, {gathers[1]}: {gathers[0] / gathers[1]:.2f}",
        *(peaks(case, model, checkpoint) for checkpoint in (False, True)),
        f"{seconds / 2:.2f}",
    ]


def main() -> None:
    """Print the table; each cell has the default's figure, the expert's, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="models whose names contain one of these; all by default"
    )
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    lines = ["| " + " | ".join(HEADER) + " |", "| --- " * len(HEADER) + "|"]
    print(
        f"torch {torch.__version__}, {MESH.size} ranks, float32, AdamW, estimated",
        *lines,
        sep="\n",
        flush=True,
    )
    for case in cases():
        if options.names and not any(name.lower() in case.name.lower() for name in options.names):
            continue
        try:
            row = row_of(case)
        except Exception as error:  # a model that changed in its package must not end the table
            row = [case.name, f"{type(error).__name__}: {error}".splitlines()[0][:300]]
        lines.append("| " + " | ".join(row) + " |")
        print(lines[-1], flush=True)
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
