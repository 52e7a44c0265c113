"""Peak memory of one forward and backward: by the allocator on a GPU, by counting live tensors on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._torch import TorchDispatchMode


class LivePeak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In this context ``peak`` is the most bytes that tensors held at once on the CPU, looked at after each operation.

    Counted are the storages of ``held`` and of all that operations return while it lives; not Python's own memory, nor
    what a kernel uses for itself.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._kept = [self._add(tensor) for tensor in held]
        self.peak = 0
        self._look()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, then look."""
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                self._add(each)
        self._look()
        return out

    def _add(self, tensor: Tensor) -> torch.UntypedStorage:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = id(storage)
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))
        return storage

    def _look(self) -> None:
        # Sizes are asked for anew, because FSDP2 frees what it gathered by resizing its storage to 0.
        alive = [storage() for storage in list(self._storages.values())]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive if storage is not None))
