"""Counting bytes that are alive and arithmetic that is done, by watching operators."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardkit._torch import TorchDispatchMode, tree_leaves
from shardkit._torch.flops import flops_of


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts the bytes of all storages that operators make, until they are freed, and the FLOPs.

    Tensors that existed before are not counted. Views share a storage and count once. Sizes are those of the
    storages, without an allocator's rounding.

    Attributes:
        live: bytes alive.
        peak: the most bytes that were alive since :meth:`start_interval`.
        flops: of matrix products, convolutions and attention, as ``torch.utils.flop_counter`` counts them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.flops = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def ignore(self, tensor: Tensor) -> None:
        """Never count this tensor's storage."""
        self._watch(tensor.untyped_storage(), nbytes=0)

    def start_interval(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then count what it made and did."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._watch(storage, storage.nbytes())
        self.flops += flops_of(func, args, kwargs or {}, result)
        return result

    def _watch(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = id(storage)
        if key in self._known:
            return

        def freed(_: object) -> None:
            del self._known[key]
            self.live -= nbytes

        self._known[key] = weakref.ref(storage, freed)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
