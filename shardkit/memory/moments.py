"""Measure what the plain model allocates and computes between the moments at which FSDP2 gathers and frees a unit.

A dispatch mode counts; hooks on each unit, in the places of FSDP2's own, report the four moments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardkit._torch import FakeTensor, TorchDispatchMode, tree_leaves, tree_map
from shardkit._torch.flops import flops_of
from shardkit.plan import ShardUnit

START = "start"
FORWARD = "forward"
AFTER_FORWARD = "after forward"
BACKWARD = "backward"
AFTER_BACKWARD = "after backward"

# Autograd asks a fake tensor for its device several times for each node: two of three calls that a meter sees. Passing
# these on to FakeTensorMode took a fifth of the trace's time (torch 2.13).
DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True)
class Interval:
    """What the model allocates and computes from one moment to the next, without what FSDP2 does."""

    moment: str  # that begins it: before or after the forward or backward of the unit
    unit: str  # the unit's name; empty at the start
    delta: int = 0  # bytes alive at its end minus those at its beginning
    peak: int = 0  # the most bytes alive during it minus those at its beginning, >= 0
    flops: int = 0


class IntervalMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts FLOPs, and the bytes of every storage that an operator returns until it is freed.

    Ignored tensors are not counted. Views share a storage and count once. Sizes are those of the storages, without an
    allocator's rounding; FLOPs are those of matrix products, convolutions and attention.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.intervals: list[Interval] = []
        self._live = self._peak = self._flops = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.open(START, "")

    def ignore(self, tensor: Tensor) -> None:
        """Exclude this tensor's storage."""
        self._count(tensor.untyped_storage(), nbytes=0)

    def moment(self, moment: str, unit: str) -> None:
        """End the current interval and begin another."""
        self.close()
        self.open(moment, unit)

    def open(self, moment: str, unit: str) -> None:
        self._peak = self._live
        self._opened = moment, unit, self._live, self._flops

    def close(self) -> None:
        moment, unit, live, flops = self._opened
        self.intervals.append(Interval(moment, unit, self._live - live, self._peak - live, self._flops - flops))

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, then count what it made and did."""
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            self._count(storage, storage.nbytes())
        self._flops += flops_of(func, args, kwargs or {}, result)
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
    """Hooks on one unit's modules that report its moments and, after its backward, drop its gradients.

    Hooks that the user registered run inside of them, as inside of FSDP2's.
    """

    def __init__(
        self, unit: ShardUnit, modules: Sequence[nn.Module], params: Sequence[nn.Parameter], meter: IntervalMeter
    ) -> None:
        self.unit = unit
        self.grad_bytes = 0
        self._params = params
        self._meter = meter
        self._modules_done = 0
        self._in_forward = self._in_backward = False
        for module in modules:
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        enters = not self._in_forward and not self._in_backward  # a recomputed forward is part of backward
        if enters:
            self._in_forward = True
            self._meter.moment(FORWARD, self.unit.name)
        args, kwargs = cast_inputs(self.unit, args), cast_inputs(self.unit, kwargs)
        tensors = [tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad]
        if not enters or not tensors or not torch.is_grad_enabled():
            return args, kwargs  # torch 2.13 watches the inputs of a unit's first module only
        inside = dict(zip(map(id, tensors), _Boundary.apply(self, *tensors), strict=True))  # type: ignore[no-untyped-call]
        return tree_map(lambda leaf: inside.get(id(leaf), leaf), (args, kwargs))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._in_backward:
            return output
        output = cast_output(self.unit, output)
        self._modules_done += 1
        if self._modules_done == len(self.unit.modules):
            self._modules_done, self._in_forward = 0, False
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._before_backward)  # type: ignore[no-untyped-call]
            self._meter.moment(AFTER_FORWARD, self.unit.name)
        return output

    def _before_backward(self, grad: Tensor) -> Tensor:
        if not self._in_backward:
            self._in_backward = True
            self._meter.moment(BACKWARD, self.unit.name)
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


def cast_inputs(unit: ShardUnit, tree: Any) -> Any:
    """Return the arguments of a unit's forward in the dtype that FSDP2 casts them to."""
    policy = unit.mp_policy
    return _cast(tree, policy.param_dtype if policy.cast_forward_inputs else None)


def cast_output(unit: ShardUnit, output: Any) -> Any:
    """Return the output of a unit's forward in the dtype that FSDP2 casts it to."""
    return _cast(output, unit.mp_policy.output_dtype)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    def to(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree if dtype is None else tree_map(to, tree)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among arguments or outputs of any structure, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
