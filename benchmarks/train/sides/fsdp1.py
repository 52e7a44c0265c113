"""FSDP1, with blocks as its units, in all of its strategies."""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks.train.case import Case, Training
from benchmarks.train.sides.fsdp2 import mesh_of
from benchmarks.train.sides.side import Side
from benchmarks.train.training import (
    MAX_NORM,
    adamw,
    birthplace,
    blocks,
    build,
    compile_loss,
    draw,
    prepare,
    refresh_buffers,
    train,
)

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def strategy(case: Case) -> str:
    """By name; FULL_SHARD, or with replicas HYBRID_SHARD, where nothing is said."""
    return case.strategy or ("FULL_SHARD" if case.replicas == 1 else "HYBRID_SHARD")


class _Values:
    """FSDP1's ``param_init_fn``: memory and values for a module that is on meta, tied parameters
    once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made: dict[nn.Parameter, nn.Parameter] = {}

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        for name, param in module.named_parameters(recurse=False):
            if param.is_meta and param not in self.made:
                self.made[param] = nn.Parameter(torch.empty_like(param, device=self.device))
                draw(self.made[param], param.dim())
            module.register_parameter(name, self.made.get(param, param))
        refresh_buffers(module, self.device)


def _make(case: Case, device: torch.device) -> Training:
    model = build(case, birthplace(case, device))
    prepare(model, case)
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    hybrid: dict[str, Any] = (
        {"device_mesh": mesh_of(case, device)} if strategy(case) in HYBRID else {}
    )
    with warnings.catch_warnings():
        # A world of one rank is NO_SHARD for FSDP1, which is deprecated; both are said by the
        # table's own words.
        warnings.filterwarnings("ignore", message=".*(NO_SHARD|FSDP will not all-gather).*")
        sharded = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[strategy(case)],
            auto_wrap_policy=ModuleWrapPolicy({type(blocks(model)[0])}),
            mixed_precision=half if case.bf16 else None,
            cpu_offload=CPUOffload(offload_params=True) if case.offload else None,
            param_init_fn=_Values(device) if case.fake_ranks else None,
            device_id=device,
            use_orig_params=True,
            **hybrid,
        )
    compile_loss(model, case)
    optimizer = adamw(sharded.parameters(), case)
    return train(
        sharded, case, device, optimizer, lambda: cast(Any, sharded).clip_grad_norm_(MAX_NORM)
    )


def _refuse(case: Case) -> str | None:
    if case.offload and not torch.accelerator.is_available():
        return "FSDP1's CPU offload pins memory, which takes a GPU"
    names = [each.name for each in ShardingStrategy]
    if strategy(case) not in names:
        return f"no strategy is called {case.strategy}; they are {', '.join(names)}"
    if (strategy(case) in HYBRID) != (case.replicas > 1):
        return f"{strategy(case)} and {case.replicas} replicas do not go together"
    return None


OPTIONS = frozenset({"fake", "strategy", "replicas", "unit", "selective", "compile", "offload"})
FSDP1 = Side("FSDP1, blocks", OPTIONS, _make, _refuse)
