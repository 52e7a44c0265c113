"""Parameters whole on every rank, whose gradients are all-reduced at the end of backward.

FSDP2 splits parameters along a dim, so it takes neither scalars nor empty ones; others are small,
or a rule says so. They are passed to ``fully_shard`` as ignored, and their gradients are reduced
here. Works on any FSDP2 model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from shardkit._fsdp import FSDPUnit, fsdp_units, not_compiled
from shardkit._torch import named_sharded_parameters
from shardkit._torch.dispatch import version_of
from shardkit.errors import listing
from shardkit.runtime.stepping import reductions
from shardkit.shards import device_of


def replicate(model: nn.Module, fqns: Iterable[str], mesh: DeviceMesh) -> None:
    """Keep parameters of a sharded model whole on every rank, and reduce their gradients.

    Moves them to the mesh's device, in place. From then on each backward that reaches a unit of the
    model ends with one all-reduce of all their gradients for each mesh axis of more than one rank,
    unless the unit around them does not reduce (``accumulate``, ``set_requires_gradient_sync``).
    Gradients are divided as the unit divides. A rank without a gradient contributes zeros; a
    parameter without a gradient on any rank keeps None. Sums are in float32 or wider. Local; all
    ranks must call it with the same parameters.

    ``fully_shard`` had these among its ``ignored_params``; ``mesh`` is the whole data-parallel one.
    """
    units = fsdp_units(model)
    unit_of: dict[nn.Module, FSDPUnit] = {}
    for unit in units:
        unit_of.update(dict.fromkeys(unit.modules, unit))
    replicated = []
    for fqn in fqns:
        # The innermost unit around it; any of the model's where none of those has parameters.
        module, unit = model, unit_of.get(model, units[0])
        *path, name = fqn.split(".")
        for child in path:
            module = module.get_submodule(child)
            unit = unit_of.get(module, unit)
        one = _Replicated(module, name, unit)
        if not one.param.is_meta:
            one.param.data = one.param.data.to(device_of(mesh))
        replicated.append(one)
    # However forward was entered, torch ends a backward with this call for every unit below the
    # root that it reached first, once all gradients are computed; not while
    # ``set_is_last_backward(False)`` holds (torch 2.11 to 2.13).
    units[0].finalize_backward = _Reduction(replicated, mesh, units[0].finalize_backward)


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Let a module compute with its replicated parameters cast to ``dtype``, as those of units are.
    In place.
    """
    forward = module.forward

    @functools.wraps(forward)
    def with_cast_params(*args: Any, **kwargs: Any) -> Any:
        before: list[tuple[Any, dict[str, Any]]] = []
        try:
            for inner in module.modules():
                before.append((inner._parameters, dict(inner._parameters)))
                for name, param in inner._parameters.items():
                    if param is not None and param.is_floating_point():
                        inner._parameters[name] = param.to(dtype)  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            for registry, params in before:
                registry.update(params)

    module.forward = with_cast_params


def replicated_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of the model that :func:`replicate` keeps. Local, pure."""
    params: set[nn.Parameter] = set()
    for unit in fsdp_units(model):
        call = unit.finalize_backward
        while isinstance(call, _Reduction):
            params.update(call.params())
            call = call.first
    return params


def unreduced_problem(model: nn.Module) -> str | None:
    """Name the parameters that train outside of all units, so that no one reduces their gradients.
    Local, pure.
    """
    units = fsdp_units(model)
    if all(unit.mesh_info.mesh.size() == 1 for unit in units):
        return None
    reduced = replicated_parameters(model)
    for unit in units:
        reduced.update(param.sharded_param for param in unit.fsdp_params)
    unreduced = []
    for fqn, param in named_sharded_parameters(model):
        if param.requires_grad and param not in reduced:
            unreduced.append(fqn)
    if not unreduced:
        return None
    return (
        f"{listing(unreduced, 6)} trains outside of all units, so its gradient is not reduced "
        "across ranks. ignored_params are left to the program: each rank updates its own copy, and "
        "the copies drift apart. All-reduce their gradients before optimizer.step(), or leave them "
        "out of ignored_params."
    )


@dataclass(eq=False)
class _Replicated:
    """One parameter, found by its place, because loading and materializing may replace the object.

    A backward adds to ``.grad``, and must not reduce again what an earlier one has reduced. So a
    gradient is local (this rank's own, not reduced yet) or reduced:

    - From :meth:`settle` on, ``.grad`` is reduced.
    - Before the next backward adds to it, a hook moves it to ``set_aside``.
    - After that ``.grad`` is local, over several backwards where they do not reduce.
    - ``settle`` makes it the mean over the ranks, and adds ``set_aside``.
    """

    module: nn.Module  # registers it
    name: str  # in that module
    unit: FSDPUnit  # its settings apply
    is_local: bool = True  # what .grad is, if there is one
    set_aside: Tensor | None = None  # a reduced gradient, while .grad is local
    # autograd's node that adds to .grad, with our hooks; it dies if not held
    accumulator: Any = None
    version: int = 0  # of .grad, when a backward last added to it

    @property
    def param(self) -> nn.Parameter:
        return self.module._parameters[self.name]  # type: ignore[return-value]

    def hook(self) -> None:
        """Set reduced gradients aside in later backwards. The gradient of a new parameter is local."""
        param = self.param
        accumulator = get_gradient_edge(param).node
        if self.accumulator is accumulator:
            return
        self.accumulator, self.is_local, self.set_aside = accumulator, True, None
        self.version = 0 if param.grad is None else version_of(param.grad)
        # Hooks of the node run after those of the tensor, and not in autograd.grad(). Weak, because
        # the collector does not see them.
        before, after = WeakMethod(self._before_accumulation), WeakMethod(self._after_accumulation)
        accumulator.register_prehook(lambda gradients: before()())  # type: ignore[misc]
        accumulator.register_hook(lambda inputs, gradients: after()())  # type: ignore[misc]

    def is_zeroed(self) -> bool:
        """Whether ``zero_grad(set_to_none=False)`` was called since a backward
        added to ``.grad``.
        """
        grad = self.param.grad
        return grad is not None and version_of(grad) != self.version and not grad.any()

    def _forget_cleared(self) -> None:
        if self.param.grad is None or (self.set_aside is not None and self.is_zeroed()):
            self.set_aside = None

    def _before_accumulation(self) -> None:
        self._forget_cleared()
        param = self.param
        if not self.is_local and param.grad is not None:
            self.set_aside, param.grad = param.grad, None

    def _after_accumulation(self) -> None:
        assert self.param.grad is not None
        self.is_local, self.version = True, version_of(self.param.grad)

    def local_gradient(self) -> Tensor | None:
        """The gradient of this rank that is not reduced yet."""
        return self.param.grad if self.is_local else None

    def settle(self, total: Tensor, ranks: int, used: Tensor) -> None:
        """Set ``.grad`` from the sum over the ranks; ``used`` counts those with a gradient."""
        param = self.param
        local = self.local_gradient()
        self._forget_cleared()
        earlier = self.set_aside if self.is_local else param.grad  # what was reduced before
        self.is_local, self.set_aside = False, None
        if earlier is None and local is None and not used.item():
            return
        mean = total / (self.unit.gradient_divide_factor or ranks)
        mean = mean.view(_real(param).shape).to(param.device)
        if param.is_complex():
            mean = torch.view_as_complex(mean)
        gradient = mean.to(param.dtype)
        param.grad = gradient if earlier is None else earlier + gradient


@dataclass(eq=False)
class _Reduction:
    """The end of a backward: ``first``, which is torch's own or another reduction, then this one."""

    replicated: list[_Replicated]
    mesh: DeviceMesh
    first: Callable[[], None]

    def __post_init__(self) -> None:
        reductions.add(self)

    def params(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients it reduces. Local, pure."""
        return [one.param for one in self.replicated]

    def waiting(self) -> list[nn.Parameter]:
        """Return the parameters with a gradient that is not reduced yet, and not cleared. Local,
        pure.

        Ranks must agree, so a gradient of zeros waits too, unless something wrote zeros later.
        """
        waiting = []
        for one in self.replicated:
            # Before a backward it is the program's own, as of torch's get_optimizer_state_dict().
            is_from_backward = one.accumulator is not None
            if is_from_backward and one.local_gradient() is not None and not one.is_zeroed():
                waiting.append(one.param)
        return waiting

    @not_compiled
    @torch.no_grad()
    def __call__(self) -> None:
        self.first()
        due = []
        for one in self.replicated:
            if one.param.requires_grad:
                one.hook()
                if one.unit.reduce_grads and one.unit.all_reduce_grads:
                    due.append(one)
        if not due:
            return
        device = device_of(self.mesh)
        # What is summed is flat, of one dtype: for each whether this rank has a gradient, and then
        # the gradients, or zeros.
        doubles = any(one.param.dtype in (torch.float64, torch.complex128) for one in due)
        dtype = torch.float64 if doubles else torch.float32
        used = torch.ones(len(due), dtype=dtype, device=device)
        parts = [used]
        for index, one in enumerate(due):
            gradient = one.local_gradient()
            if gradient is None:
                used[index].zero_()  # not copied from a list, which would make the host wait
                gradient = torch.zeros_like(one.param)
            parts.append(_real(gradient).flatten().to(device, dtype))
        flat = torch.cat(parts)
        for group in self.mesh.get_all_groups():
            if group.size() > 1:
                dist.all_reduce(flat, group=group)
        used, *totals = torch.split(flat, [part.numel() for part in parts])
        for index, (one, total) in enumerate(zip(due, totals, strict=True)):
            one.settle(total, self.mesh.size(), used[index])


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value
