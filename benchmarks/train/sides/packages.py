"""FSDP2 as other packages wrap it, where they are installed: accelerate, and Lightning's Fabric."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.train.case import Case, Training
from benchmarks.train.sides.fsdp2 import offload, precision, shard_naively
from benchmarks.train.sides.side import Side, world
from benchmarks.train.training import MAX_NORM, adamw, build, compile_loss, prepare, train

# accelerate by its documented calls: an Accelerator with a plugin, prepare, backward,
# clip_grad_norm_.


def _accelerate(case: Case, device: torch.device) -> Training:
    """Units are what its plugin makes of the blocks' class name, with an embedding and
    ``[norm, head]`` of its own.
    """
    accelerator = _accelerator(case, device)
    model = build(case, device)
    prepare(model, case)
    compile_loss(model, case)
    model, optimizer = accelerator.prepare(model, adamw(model.parameters(), case))

    def clip() -> None:
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)

    return train(model, case, device, optimizer, clip, backward=accelerator.backward)


def _accelerator(case: Case, device: torch.device) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin  # type: ignore[import-not-found, unused-ignore]
    from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-not-found, unused-ignore]

    # It keeps one state for a process, and one launched process of a world is what LOCAL_RANK says.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.setdefault("LOCAL_RANK", "0")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=case.reshard is not False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[
            "LlamaDecoderLayer" if case.model.startswith("hf-") else "Block"
        ],
        mixed_precision_policy=precision(case) if case.bf16 else None,
        cpu_offload=offload(case, device) if case.offload else False,
    )
    return Accelerator(mixed_precision="bf16" if case.bf16 else "no", fsdp_plugin=plugin)


def _refuse(case: Case) -> str | None:
    return (
        None
        if torch.accelerator.is_available()
        else "accelerate shards on accelerators only, not on a CPU"
    )


# Lightning's Fabric: ModelParallelStrategy, whose parallelize_fn calls fully_shard, as its
# documentation shows.


def _lightning(case: Case, device: torch.device) -> Training:
    """Units are the blocks and the root, as in Lightning's guide to FSDP2."""
    from lightning_fabric import Fabric  # type: ignore[import-not-found, unused-ignore]
    from lightning_fabric.strategies import ModelParallelStrategy  # type: ignore[import-not-found, unused-ignore]

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        prepare(model, case)
        shard_naively(model, case, {"mesh": mesh["data_parallel"], "mp_policy": precision(case)})
        return model

    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    strategy = ModelParallelStrategy(
        parallelize, data_parallel_size=world(case), tensor_parallel_size=1
    )
    fabric = Fabric(
        accelerator=device.type,
        devices=local,
        num_nodes=world(case) // local,
        strategy=strategy,
        precision="32-true",
    )
    fabric.launch()
    model = build(case, device)
    compile_loss(model, case)
    sharded = fabric.setup(model)
    optimizer = fabric.setup_optimizers(adamw(sharded.parameters(), case))

    # by default it looks whether the norm is finite, which waits for the device
    def clip() -> None:
        fabric.clip_gradients(sharded, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)

    return train(sharded, case, device, optimizer, clip, backward=fabric.backward)


ACCELERATE = Side(
    "accelerate's FSDP2",
    frozenset({"fake", "reshard", "unit", "selective", "compile", "offload"}),
    _accelerate,
    _refuse,
    package="accelerate",
)
LIGHTNING = Side(
    "Lightning's FSDP2",
    frozenset({"reshard", "reshard_int", "unit", "selective", "compile"}),
    _lightning,
    package="lightning_fabric",
)
