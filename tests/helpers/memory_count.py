"""The bytes that are alive while torch's own FSDP2 runs a step, counted storage by storage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit import ShardingPlan, apply_plan
from shardkit._torch.dispatch import TorchDispatchMode, tree_leaves
from shardkit.testing import fake_world


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of every storage that an operator has touched, until it is freed; FSDP2's resizing shows."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.live = 0
        self.peak = 0
        self._references: list[weakref.ref[torch.UntypedStorage]] = []

    def see(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self.sizes:
            self._references.append(weakref.ref(storage, lambda _: self._change(key, 0, gone=True)))
        self._change(key, size)

    def _change(self, key: int, size: int, gone: bool = False) -> None:
        self.live += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        if gone:
            del self.sizes[key]
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.device.type != "meta":
                self.see(leaf.untyped_storage())
        return result

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """See storages that are resized, which is no operator."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self.see(storage)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resize_):
            yield


def counted_peak(model: nn.Module, plan: ShardingPlan, step: Callable[[nn.Module], object]) -> int:
    """The most bytes alive on rank 0 of the plan's ranks in the second step: shards, buffers and all that comes on top.

    Args:
        model: real, not sharded; sharded here, in a fake world: its values become wrong, its sizes do not.
        plan: to shard it by.
        step: one forward and backward.
    """
    storages = LiveStorages()
    with fake_world(plan.mesh.size), storages.resizes(), storages:
        apply_plan(model, plan)
        step(model)  # makes what later ones reuse
        model.zero_grad()
        gc.collect()
        before = storages.peak = storages.live
        step(model)
        held = {local.untyped_storage() for local in map(_local, model.parameters())}
        held |= {buffer.untyped_storage() for buffer in model.buffers()}
        return storages.peak - before + sum(storage.nbytes() for storage in held)


def _local(param: nn.Parameter) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param
