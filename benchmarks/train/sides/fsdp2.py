"""``fully_shard`` by hand: the naive way, and the expert's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from benchmarks.train.case import Case, Training
from benchmarks.train.sides.side import Side, world
from benchmarks.train.training import (
    birthplace,
    blocks,
    build,
    compile_loss,
    ends,
    fill,
    optimizer_by_hand,
    prepare,
    torch_clip,
    train,
)

OPTIONS = frozenset(
    {
        "fake",
        "reshard",
        "reshard_int",
        "replicas",
        "unit",
        "selective",
        "compile",
        "offload",
        "in_backward",
    }
    | {"masterless"}
)
Sharder = Callable[[nn.Module, Case, dict[str, Any]], object]


def mesh_of(case: Case, device: torch.device) -> DeviceMesh:
    """One axis, or replicas and shards."""
    ranks = world(case)
    if case.replicas == 1:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp_shard",))
    shape, names = (case.replicas, ranks // case.replicas), ("dp_replicate", "dp_shard")
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def precision(case: Case) -> MixedPrecisionPolicy:
    """Compute in bfloat16 and reduce in float32; or float32 throughout."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return half if case.bf16 else MixedPrecisionPolicy()


def offload(case: Case, device: torch.device) -> OffloadPolicy:
    """Where shards live; pinned beside a GPU."""
    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if case.offload else OffloadPolicy()


def home(case: Case, device: torch.device) -> torch.device:
    """The device of the shards."""
    return torch.device("cpu") if case.offload else device


def shard_naively(model: nn.Module, case: Case, options: dict[str, Any]) -> None:
    """Blocks, then the root, as most code does it."""
    reshard = True if case.reshard is None else case.reshard
    for block in blocks(model):
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(model, **options)


def shard_expertly(model: nn.Module, case: Case, options: dict[str, Any]) -> None:
    """As torchtitan groups: the embedding alone; blocks; norm and head together, kept after
    forward; the root.

    A tied embedding joins norm and head. The last block reshards like the others: its gather is
    prefetched for backward, and to keep it instead is a choice that torchtitan's present version
    does not make.
    """
    reshard = True if case.reshard is None else case.reshard
    embed, norm, head = ends(model)
    tied = embed.weight is head.weight
    if not tied:
        fully_shard(embed, reshard_after_forward=reshard, **options)
    for block in blocks(model):
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(
        [embed, norm, head] if tied else [norm, head], reshard_after_forward=False, **options
    )
    fully_shard(model, **options)


def _by_hand(shard: Sharder) -> Callable[[Case, torch.device], Training]:
    def make(case: Case, device: torch.device) -> Training:
        model = build(case, birthplace(case, device))
        prepare(model, case)
        options = {
            "mesh": mesh_of(case, device),
            "mp_policy": precision(case),
            "offload_policy": offload(case, device),
        }
        shard(model, case, options)
        fill(model, home(case, device))
        compile_loss(model, case)
        return train(model, case, device, optimizer_by_hand(model, case), torch_clip(model))

    return make


NAIVE = Side("fully_shard: blocks, root", OPTIONS, _by_hand(shard_naively))
EXPERT = Side("fully_shard: torchtitan's groups", OPTIONS, _by_hand(shard_expertly))
