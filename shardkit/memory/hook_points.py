"""Measure what the plain model allocates between the points at which FSDP2's hooks gather and free a unit.

A dispatch mode counts bytes; hooks on each unit, where FSDP2 has its own, report the four points.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardkit._torch.dispatch import TorchDispatchMode, tree_leaves, tree_map
from shardkit.plan import ShardUnit

START = "start"
FORWARD = "forward"
AFTER_FORWARD = "after forward"
BACKWARD = "backward"
AFTER_BACKWARD = "after backward"


@dataclass(frozen=True)
class Interval:
    """What the model allocates from one hook point to the next, without what FSDP2 does."""

    moment: str  # that begins it: before or after the forward or backward of the unit
    unit: str  # the unit's name; empty at the start
    delta: int = 0  # bytes alive at its end minus those at its beginning
    peak: int = 0  # the most bytes alive during it minus those at its beginning, >= 0


class IntervalMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts the bytes of every storage that an operator returns, until it is freed.

    Ignored tensors are not counted. Views share a storage and count once. Sizes are those of the storages, without an
    allocator's rounding.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.intervals: list[Interval] = []
        self._live = self._peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.open(START, "")

    def ignore(self, tensor: Tensor) -> None:
        """Exclude this tensor's storage."""
        self._count(tensor.untyped_storage(), nbytes=0)

    def begin(self, moment: str, unit: str) -> None:
        """End the current interval and begin another."""
        self.close()
        self.open(moment, unit)

    def open(self, moment: str, unit: str) -> None:
        self._peak = self._live
        self.opened = moment, unit, self._live

    def close(self) -> None:
        moment, unit, live = self.opened
        self.intervals.append(Interval(moment, unit, self._live - live, self._peak - live))

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, then count what it returns."""
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            self._count(storage, storage.nbytes())
        return result

    def _count(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = id(storage)
        if key in self._known:
            return

        def freed(_: object) -> None:
            del self._known[key]
            self._live -= nbytes

        self._known[key] = weakref.ref(storage, freed)
        self._live += nbytes
        self._peak = max(self._peak, self._live)


class WatchedUnit:
    """Hooks on one unit's modules that begin its intervals and, after its backward, drop its gradients."""

    def __init__(
        self, unit: ShardUnit, modules: Sequence[nn.Module], params: Sequence[nn.Parameter], meter: IntervalMeter
    ) -> None:
        self.unit, self.grad_bytes = unit, 0
        self._params, self._meter, self._in_backward = params, meter, False
        hook_unit(unit, modules, self._before_forward, self._after_forward)

    def _before_forward(self, inputs: Any) -> Any:
        if self._in_backward:  # a checkpointed forward runs again
            return inputs
        self._meter.begin(FORWARD, self.unit.name)
        tensors = [tensor for tensor in tensors_of(inputs) if tensor.requires_grad]
        if not tensors or not torch.is_grad_enabled():
            return inputs
        inside = dict(zip(map(id, tensors), _Boundary.apply(self, *tensors), strict=True))  # type: ignore[no-untyped-call]
        return tree_map(lambda leaf: inside.get(id(leaf), leaf), inputs)

    def _after_forward(self, output: Any) -> Any:
        if not self._in_backward:
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._before_backward)  # type: ignore[no-untyped-call]
            self._meter.begin(AFTER_FORWARD, self.unit.name)
        return output

    def _before_backward(self, grad: Tensor) -> Tensor:
        if not self._in_backward:
            self._in_backward = True
            self._meter.begin(BACKWARD, self.unit.name)
        return grad

    def after_backward(self) -> None:
        """End the unit's backward: the gradients of its inputs are computed, or the whole backward is over."""
        if not self._in_backward:
            return
        self._in_backward = False
        self.grad_bytes += sum(param.grad.nbytes for param in self._params if param.grad is not None)
        self._meter.close()
        for param in self._params:
            param.grad = None  # between two intervals, as FSDP2 reduces and frees them
        self._meter.open(AFTER_BACKWARD, self.unit.name)


class _Boundary(torch.autograd.Function):
    """The identity on a unit's inputs; its backward runs after the unit's own."""

    @staticmethod
    def forward(ctx: Any, watched: WatchedUnit, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.watched = watched
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.watched.after_backward()
        return (None, *grads)


def hook_unit(
    unit: ShardUnit, modules: Sequence[nn.Module], before: Callable[[Any], Any], after: Callable[[Any], Any]
) -> None:
    """Call ``before`` with the inputs of the first of a unit's modules, and ``after`` with the output of the last.

    Both return what to go on with, in the dtypes that FSDP2 casts to. Hooks that the user registered run inside of
    these, as inside of FSDP2's, which also watches the inputs of the first module only (torch 2.13).
    """
    waiting: set[nn.Module] = set()

    def pre_hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        inputs = cast_inputs(unit, (args, kwargs))
        if waiting:
            return inputs
        waiting.update(modules)
        return before(inputs)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        waiting.discard(module)
        return cast_output(unit, output) if waiting else after(cast_output(unit, output))

    for module in modules:
        module.register_forward_pre_hook(pre_hook, prepend=True, with_kwargs=True)
        module.register_forward_hook(hook)


def cast_inputs(unit: ShardUnit, inputs: Any) -> Any:
    """Return the arguments of a unit's forward in the dtype that FSDP2 casts them to."""
    return _cast(inputs, unit.mp_policy.param_dtype if unit.mp_policy.cast_forward_inputs else None)


def cast_output(unit: ShardUnit, output: Any) -> Any:
    """Return the output of a unit's forward in the dtype that FSDP2 casts it to."""
    return _cast(output, unit.mp_policy.output_dtype)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    floats = {id(each): each.to(dtype) for each in tensors_of(tree) if dtype and each.is_floating_point()}
    return tree_map(lambda leaf: floats.get(id(leaf), leaf), tree) if floats else tree


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among arguments or outputs of any structure, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
