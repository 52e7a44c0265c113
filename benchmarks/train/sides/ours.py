"""shardkit: its default, and under a memory budget."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from benchmarks.models import tokens
from benchmarks.train.case import Case, Training
from benchmarks.train.sides.fsdp2 import OPTIONS, home, offload, precision
from benchmarks.train.sides.side import Side, world
from benchmarks.train.training import (
    MAX_NORM,
    adamw,
    birthplace,
    blocks,
    build,
    compile_loss,
    ends,
    fill,
    recompute,
    train,
)
from shardkit import (
    MeshSpec,
    by_name,
    clip_grad_norm_,
    group,
    optimizer_in_backward,
    shard_model,
    step_on_local_shards,
)
from shardkit.planning.selection import Rule


def make(case: Case, device: torch.device, together: int = 1) -> Training:
    """The default; or with this many consecutive blocks in a unit, which takes fewer hooks and more
    memory.
    """
    model = build(case, birthplace(case, device))
    if case.checkpointing == "selective":  # which torch has, and shardkit leaves alone
        recompute(model, case)
    shard_model(
        model,
        units=None if together == 1 else units_of(model, together),
        mesh=None
        if case.replicas == 1
        else MeshSpec.hybrid(case.replicas, world(case) // case.replicas),
        reshard_after_forward=case.reshard,
        mp_policy=precision(case),
        offload_policy=offload(case, device),
        checkpoint_activations=case.checkpointing == "unit",
        compile=case.compile,
        **_budget(case),
    )
    fill(model, home(case, device))
    compile_loss(model, case)
    clip = functools.partial(clip_grad_norm_, model, MAX_NORM)
    return train(model, case, device, _optimizer(model, case), clip)


def units_of(model: nn.Module, together: int) -> list[Rule]:
    """The default's units, but that blocks share one."""
    names = {module: fqn for fqn, module in model.named_modules()}
    layers = [names[block] for block in blocks(model)]
    units: list[Rule] = [
        group(*layers[first : first + together]) for first in range(0, len(layers), together)
    ]
    embed, norm, head = ends(model)
    tied = embed.weight is head.weight
    last = (embed, norm, head) if tied else (norm, head)
    first: list[Rule] = [] if tied else [by_name(names[embed])]
    return [*units, *first, group(*(names[module] for module in last), reshard_after_forward=False)]


def _budget(case: Case) -> dict[str, Any]:
    if case.budget_gib is None:
        return {}
    batch = tokens(case.micro_batch, case.sequence)
    return {"memory_budget": round(case.budget_gib * 2**30), "example_batch": batch}


def _optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    if case.stepping == "in_backward":
        return optimizer_in_backward(model, functools.partial(adamw, case=case))
    optimizer = adamw(model.parameters(), case)
    return step_on_local_shards(optimizer) if case.stepping == "local" else optimizer


def _wants_budget(case: Case) -> str | None:
    return "this side needs budget_gib" if case.budget_gib is None else None


# A budget chooses what reshards, what is recomputed and what is offloaded.
_CHOSEN = {"reshard", "reshard_int", "unit", "selective", "offload"}

SHARDKIT = Side("shardkit's default", OPTIONS | {"local"}, make)
BUDGET = Side(
    "shardkit under a budget", (OPTIONS | {"local", "budget"}) - _CHOSEN, make, _wants_budget
)
