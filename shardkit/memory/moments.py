"""The four moments of each unit, found on the plain model the way FSDP2's own hooks find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardkit._torch import tree_leaves, tree_map
from shardkit.memory.meter import Meter
from shardkit.plan import ShardUnit

START = "start"
FORWARD = "forward"
AFTER_FORWARD = "after forward"
BACKWARD = "backward"
AFTER_BACKWARD = "after backward"


@dataclass(frozen=True)
class Interval:
    """What the model does from one moment to the next, apart from what FSDP2 does.

    Attributes:
        moment: which moment begins it: before or after the forward or backward of ``unit``.
        unit: the unit's name; empty at the start.
        delta: bytes alive at its end less those at its beginning.
        peak: the most bytes alive during it less those at its beginning, >= 0.
        flops: floating-point operations.
    """

    moment: str
    unit: str
    delta: int = 0
    peak: int = 0
    flops: int = 0


class Recorder:
    """Cuts what a meter shows into intervals."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.intervals: list[Interval] = []
        self.open(START, "")

    def moment(self, moment: str, unit: str) -> None:
        """One interval ends here and another begins."""
        self.close()
        self.open(moment, unit)

    def close(self) -> None:
        """The interval ends."""
        (moment, unit), (live, flops), meter = self._opened, self._before, self.meter
        self.intervals.append(Interval(moment, unit, meter.live - live, meter.peak - live, meter.flops - flops))

    def open(self, moment: str, unit: str) -> None:
        """An interval begins."""
        self.meter.start_interval()
        self._opened = moment, unit
        self._before = self.meter.live, self.meter.flops


class Watched:
    """Hooks on one unit's modules, which report its moments and, after its backward, drop its gradients."""

    def __init__(self, unit: ShardUnit, params: Sequence[nn.Parameter], recorder: Recorder) -> None:
        self.unit = unit
        self.grad_bytes = 0
        self._params = params
        self._recorder = recorder
        self._modules_done = 0
        self._in_forward = False
        self._in_backward = False

    def attach(self, module: nn.Module) -> None:
        """Watch one of the unit's modules. Hooks that the user registered run inside, as with FSDP2's."""
        module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        enters = not self._in_forward and not self._in_backward  # a recomputed forward is part of backward
        if enters:
            self._in_forward = True
            self._recorder.moment(FORWARD, self.unit.name)
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
            self._recorder.moment(AFTER_FORWARD, self.unit.name)
        return output

    def _before_backward(self, grad: Tensor) -> Tensor:
        if not self._in_backward:
            self._in_backward = True
            self._recorder.moment(BACKWARD, self.unit.name)
        return grad

    def after_backward(self) -> None:
        """The gradients of the unit's inputs are known, or the whole backward is over."""
        if not self._in_backward:
            return
        self._in_backward = False
        grads = [param.grad for param in self._params if param.grad is not None]
        self.grad_bytes += sum(grad.nbytes for grad in grads)
        del grads
        self._recorder.close()
        for param in self._params:
            param.grad = None  # between two intervals: reducing them is FSDP2's doing
        self._recorder.open(AFTER_BACKWARD, self.unit.name)


class _Boundary(torch.autograd.Function):
    """The identity around a unit's inputs, whose backward runs when the unit's own is done."""

    @staticmethod
    def forward(ctx: Any, watched: Watched, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.watched = watched
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.watched.after_backward()
        return (None, *grads)


def cast_inputs(unit: ShardUnit, tree: Any) -> Any:
    """The arguments of a unit's forward, in the dtype that FSDP2 would cast them to."""
    policy = unit.mp_policy
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        return tree
    return tree_map(lambda leaf: _to(leaf, policy.param_dtype), tree)


def cast_output(unit: ShardUnit, output: Any) -> Any:
    """What a unit's forward returned, in the dtype that FSDP2 would cast it to."""
    dtype = unit.mp_policy.output_dtype
    return output if dtype is None else tree_map(lambda leaf: _to(leaf, dtype), output)


def _to(leaf: Any, dtype: torch.dtype | None) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors among arguments or outputs of any structure, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
