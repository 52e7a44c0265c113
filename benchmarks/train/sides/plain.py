"""Whole models on every rank: a bare one in bfloat16, and DDP."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from benchmarks.train.case import Case, Training
from benchmarks.train.sides.side import Side
from benchmarks.train.training import (
    build,
    compile_loss,
    optimizer_by_hand,
    prepare,
    torch_clip,
    train,
)

_COMMON = {"unit", "selective", "compile"}


def _bare(case: Case, device: torch.device) -> Training:
    """Parameters, gradients and state in bfloat16: no float32 masters, so less memory than any side
    that has them.
    """
    model = build(case, device)
    if case.bf16:
        model.to(torch.bfloat16)
    prepare(model, case)
    compile_loss(model, case)
    return train(model, case, device, optimizer_by_hand(model, case), torch_clip(model))


def _ddp(case: Case, device: torch.device) -> Training:
    """Float32 parameters and gradients, autocast to bfloat16, as DDP's users do it."""
    model = build(case, device)
    prepare(model, case)
    compile_loss(model, case)
    ids = None if device.type == "cpu" else [device.index or 0]
    replica = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    if case.fake_ranks:
        replica.register_comm_hook(None, lambda _, bucket: _pretend(bucket.buffer()))
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=case.bf16)
    optimizer = optimizer_by_hand(model, case)
    return train(replica, case, device, optimizer, torch_clip(model), precision=autocast)


def _pretend(buffer: Tensor) -> Future[Tensor]:
    """In place of DDP's own all-reduce, which expects a result that a pretended group does not give
    (torch 2.13).
    """
    done: Future[Tensor] = Future()
    done.set_result(buffer.div_(dist.get_world_size()))
    return done


BARE = Side("bare bf16 model", frozenset(_COMMON | {"in_backward"}), _bare)
DDP = Side("DDP, autocast", frozenset(_COMMON | {"fake"}), _ddp)
