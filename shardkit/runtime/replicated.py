"""Parameters whole on every rank, whose gradients are all-reduced at the end of backward.

FSDP2 splits parameters along a dim, so it takes neither scalars nor empty ones; others are small, or a rule says so.
They are passed to ``fully_shard`` as ignored, and their gradients are reduced here. Works on any FSDP2 model.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit._fsdp import FSDPUnit, fsdp_units, not_compiled
from shardkit._torch import named_sharded_parameters
from shardkit._torch.dispatch import version_of
from shardkit.errors import listing, message
from shardkit.runtime.stepping import replicated_waiting
from shardkit.shards import device_of


def replicate(model: nn.Module, fqns: Iterable[str], mesh: DeviceMesh) -> None:
    """Keep parameters of a sharded model whole on every rank, and reduce their gradients as those of the others.

    Moves them to the mesh's device, in place. From then on each backward that reaches a unit of the model ends with
    one all-reduce of all their gradients for each mesh axis of more than one rank, unless the unit around them does
    not reduce (``accumulate``, ``set_requires_gradient_sync``). Gradients are divided as the unit divides. A rank
    without a gradient contributes zeros; a parameter without a gradient on any rank keeps None. Sums are in float32
    or wider. Local; all ranks must call it with the same parameters.

    ``fully_shard`` had these among its ``ignored_params``; ``mesh`` is the whole data-parallel one.
    """
    units = fsdp_units(model)
    params = []
    for fqn in fqns:
        names = fqn.split(".")
        around = [model.get_submodule(".".join(names[:length])) for length in range(len(names) - 1, -1, -1)]
        # The innermost unit around it; any of the model's where none of those has parameters.
        unit = next((unit for module in around for unit in units if module in unit.modules), units[0])
        params.append(_Replicated(around[0], names[-1], unit))
        if not params[-1].param.is_meta:
            params[-1].param.data = params[-1].param.data.to(device_of(mesh))
    # However forward was entered, torch ends a backward with this call for every unit below the root that it reached
    # first, once all gradients are computed; not while ``set_is_last_backward(False)`` holds (torch 2.11 to 2.13).
    units[0].finalize_backward = _Reduction(params, mesh, units[0].finalize_backward)


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Let a module compute with its replicated parameters cast to ``dtype``, as those of units are. In place."""
    forward = module.forward

    @functools.wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        owners: Any = [(each._parameters, dict(each._parameters)) for each in module.modules()]
        try:
            for params, own in owners:
                params.update({n: p.to(dtype) for n, p in own.items() if p is not None and p.is_floating_point()})
            return forward(*args, **kwargs)
        finally:
            for params, own in owners:
                params.update(own)

    module.forward = cast


def replicated_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of the model that :func:`replicate` keeps. Local, pure."""
    found = set()
    for unit in fsdp_units(model):
        call = unit.finalize_backward
        while isinstance(call, _Reduction):
            found |= {each.param for each in call.params}
            call = call.before
    return found


def unreduced_problem(model: nn.Module) -> str | None:
    """Name the parameters that train outside of all units, so that no one reduces their gradients. Local, pure."""
    meshes = {unit.mesh_info.mesh for unit in fsdp_units(model)}
    if all(mesh.size() == 1 for mesh in meshes):
        return None
    groups = functools.cache(_groups)  # most parameters have one mesh
    reduced = {ranks for mesh in meshes for ranks in groups(mesh)}
    replicated = replicated_parameters(model)
    found = [
        fqn
        for fqn, param in named_sharded_parameters(model)
        if param.requires_grad
        and param not in replicated
        and not (isinstance(param, DTensor) and reduced.intersection(groups(param.device_mesh)))
    ]
    problem = "trains outside of all units, so its gradient is not reduced across ranks"
    rule = "ignored_params are left to the program: each rank updates its own copy, and the copies drift apart"
    fix = "All-reduce their gradients before optimizer.step(), or leave them out of ignored_params"
    return message(listing(found, 6), problem, rule, fix) if found else None


def _groups(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    """The ranks of each group: torch may give a DTensor an equal mesh made earlier, which has groups of its own."""
    return [tuple(dist.get_process_group_ranks(group)) for group in mesh.get_all_groups()]


@dataclass(eq=False)
class _Replicated:
    """One parameter, found by its place, because loading and materializing may replace the object.

    ``.grad`` is reduced after a backward that synchronizes, and this rank's own after one that does not. When a
    backward adds to a reduced gradient, that one is set aside: it must not be reduced again.
    """

    module: nn.Module  # registers it
    name: str  # in that module
    unit: FSDPUnit  # its settings apply
    own: bool = True  # whether ``.grad``, if there is one, is this rank's own
    waits: bool = False  # the last backward left an own gradient without reducing it
    reduced: Tensor | None = None  # set aside
    watched: nn.Parameter | None = None  # has the hooks below
    before: tuple[Tensor, Tensor] | None = None  # a reduced gradient, and what a backward is about to add to it
    version: int = 0  # of ``.grad``, when a backward last added to it

    @property
    def param(self) -> nn.Parameter:
        return self.module._parameters[self.name]  # type: ignore[return-value]

    def watch(self) -> None:
        """Keep reduced gradients apart in later backwards. The gradient of a new parameter is this rank's own."""
        param = self.param
        if self.watched is not param:
            self.watched, self.own, self.reduced = param, True, None
            self.version = 0 if param.grad is None else version_of(param.grad)
            param.register_hook(self._before_accumulation)  # type: ignore[no-untyped-call]
            after = WeakMethod(self._after_accumulation)  # the collector does not see through these hooks
            param.register_post_accumulate_grad_hook(lambda p: (f := after()) and f(p))  # type: ignore[no-untyped-call]

    def is_zeroed(self) -> bool:
        """Whether ``zero_grad(set_to_none=False)`` was called since a backward added to the gradient."""
        grad = self.param.grad
        return grad is not None and version_of(grad) != self.version and not grad.any()

    def _before_accumulation(self, incoming: Tensor) -> None:
        grad = self.param.grad  # autograd.grad() calls this hook too, so nothing may change yet
        self.before = None if self.own or grad is None else (grad.clone(), incoming)
        if self.own and (grad is None or (self.reduced is not None and self.is_zeroed())):
            self.reduced = None  # cleared between micro-batches

    def _after_accumulation(self, param: Tensor) -> None:
        if self.before is not None:
            self.reduced, incoming = self.before
            param.grad = incoming.detach().clone()
        assert param.grad is not None
        self.own, self.before, self.version = True, None, version_of(param.grad)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradient that is reduced already, and the one to be reduced."""
        grad = self.param.grad
        return (None if grad is None else self.reduced, grad) if self.own else (grad, None)

    def settle(self, total: Tensor, ranks: int, used: Tensor) -> None:
        """Set ``.grad`` from the sum over the ranks; ``used`` counts those with a gradient, and is rarely read."""
        reduced, own = self.gradients()
        self.own, self.reduced = False, None
        if reduced is None and own is None and not used.item():
            return
        mean, like = total / (self.unit.gradient_divide_factor or ranks), self.param
        mean = mean.view(_real(like).shape).to(like.device)
        new = (torch.view_as_complex(mean) if like.is_complex() else mean).to(like.dtype)
        like.grad = new if reduced is None else reduced + new


@dataclass(eq=False)
class _Reduction:
    """The end of a backward: torch's own work, or another reduction, then this one."""

    params: list[_Replicated]
    mesh: DeviceMesh
    before: Callable[[], None]

    def __post_init__(self) -> None:
        replicated_waiting.add(self)

    def waiting(self) -> list[nn.Parameter]:
        """Return the parameters with a gradient that is not reduced yet, and not cleared. Local, pure.

        Ranks must agree, so a gradient of zeros waits as any other; it is cleared where something wrote zeros later.
        """
        params = [each for each in self.params if each.waits]
        return [each.param for each in params if each.param.grad is not None and not each.is_zeroed()]

    @not_compiled
    @torch.no_grad()
    def __call__(self) -> None:
        self.before()
        trained = [each for each in self.params if each.param.requires_grad]
        for each in trained:
            each.watch()
            each.waits = each.own and not (each.unit.reduce_grads and each.unit.all_reduce_grads)
        due = [each for each in trained if each.unit.reduce_grads and each.unit.all_reduce_grads]
        if not due:
            return
        parts = _parts(due, device_of(self.mesh))
        flat = torch.cat(parts)
        for group in self.mesh.get_all_groups():
            if group.size() > 1:
                dist.all_reduce(flat, group=group)
        used, *sums = torch.split(flat, [part.numel() for part in parts])
        for index, (each, total) in enumerate(zip(due, sums, strict=True)):
            each.settle(total, self.mesh.size(), used[index])


def _parts(params: list[_Replicated], device: torch.device) -> list[Tensor]:
    """Ones and zeros for which have a gradient on this rank, then the gradients or zeros: flat, of one dtype."""
    grads = [each.gradients()[1] for each in params]
    doubles = any(each.param.dtype in (torch.float64, torch.complex128) for each in params)
    dtype = torch.float64 if doubles else torch.float32
    used = torch.ones(len(grads), dtype=dtype, device=device)
    for index, grad in enumerate(grads):
        if grad is None:  # filled, because a copy from a list would make the host wait
            used[index].zero_()
    given = [torch.zeros_like(p.param) if grad is None else grad for p, grad in zip(params, grads, strict=True)]
    return [used, *(_real(grad).flatten().to(device, dtype) for grad in given)]


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value
