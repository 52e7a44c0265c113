"""Parameters that FSDP2 cannot shard: whole on every rank, with their gradients reduced once a synchronised backward.

FSDP2 cuts parameters along a dim, so it takes neither scalars nor empty ones. They are passed to ``fully_shard`` as
ignored, and what it would have done with their gradients is done here. Works on any FSDP2 model; knows no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit._fsdp import FSDPUnit, fsdp_units, not_compiled
from shardkit._torch import named_sharded_parameters, version_of
from shardkit.errors import listing, message
from shardkit.shards import device_of


def replicate(model: nn.Module, fqns: Iterable[str], mesh: DeviceMesh) -> None:
    """Keep parameters of a sharded model whole on every rank, and reduce their gradients as those of the others.

    Moves them to the mesh's device, in place. From then on each backward that reaches a unit of the model ends with
    one all-reduce of all their gradients for each axis of more than one rank, unless the unit around them does not
    reduce (``accumulate``, ``set_requires_gradient_sync``). Gradients are divided as the unit divides. A rank on which
    one got no gradient takes part with zeros; one that got none on any rank keeps None. Sums are in float32 at
    least. Local; all ranks must call it alike.

    Args:
        model: sharded by ``fully_shard`` with these parameters among its ``ignored_params``.
        fqns: of the parameters, each once.
        mesh: the whole data-parallel mesh.
    """
    wholes = [_whole(model, fqn) for fqn in fqns]
    for param in (each.param for each in wholes if not each.param.is_meta):
        param.data = param.data.to(device_of(mesh))
    # However forward was entered, torch ends a backward with this call for every unit below the root that it reached
    # first, once all gradients are computed; not while ``set_is_last_backward(False)`` holds (torch 2.11 to 2.13).
    unit = fsdp_units(model)[0]
    unit.finalize_backward = _Reduction(wholes, mesh, unit.finalize_backward)


def _whole(model: nn.Module, fqn: str) -> _Whole:
    """With the innermost unit around it; any of the model's where none of those has parameters."""
    path, _, name = fqn.rpartition(".")
    parts = fqn.split(".")
    around = [model.get_submodule(".".join(parts[:length])) for length in range(len(parts) - 1, -1, -1)]
    units = fsdp_units(model)
    found = [unit for module in around for unit in units if module in unit.modules]
    return _Whole(model.get_submodule(path), name, (found or units)[0])


def replicated_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of the model that :func:`replicate` keeps. Local, pure."""
    found = set()
    for unit in fsdp_units(model):
        call = unit.finalize_backward
        while isinstance(call, _Reduction):
            found |= {each.param for each in call.wholes}
            call = call.before
    return found


def waiting_parameters() -> list[nn.Parameter]:
    """Replicated parameters of any model whose gradient no rank has reduced yet, and nobody has zeroed. Local, pure."""
    params = [each.watched for each in _unreduced if each.watched is not None]
    return [param for param in params if param.grad is not None and param.grad.any()]


def unreduced_problem(model: nn.Module) -> str | None:
    """Name what trains outside of all units while nobody reduces its gradient over the ranks. Local, pure."""
    if all(unit.mesh_info.mesh.size() == 1 for unit in fsdp_units(model)):
        return None
    reduced, named = replicated_parameters(model), named_sharded_parameters(model)
    plain = [(fqn, param) for fqn, param in named if param.requires_grad and not isinstance(param, DTensor)]
    found = [fqn for fqn, param in plain if param not in reduced]
    problem = "train outside of all units, and nobody reduces their gradients over the ranks"
    rule = "Each rank updates its own copy from its own batch, as ignored_params ask for, so the copies drift apart"
    fix = "All-reduce their gradients before optimizer.step(), or leave them out of ignored_params"
    return message(listing(found, 6), problem, rule, fix) if found else None


@dataclass(eq=False)
class _Whole:
    """One parameter, found by its place, as loading and materializing may replace the object.

    ``.grad`` is reduced after a synchronised backward, and this rank's own after one without synchronisation. If a
    backward adds to a reduced one, that is set aside, since reducing it again would be wrong for sums.
    """

    module: nn.Module  # which registers it
    name: str  # in that module
    unit: FSDPUnit  # whose settings hold for it
    own: bool = True  # whether ``.grad``, if there is one, is this rank's own
    reduced: Tensor | None = None  # what was set aside
    watched: nn.Parameter | None = None
    before: tuple[Tensor, Tensor] | None = None
    version: int = 0  # of ``.grad``, when a backward last added to it

    @property
    def param(self) -> nn.Parameter:
        return self.module.get_parameter(self.name)

    def watch(self) -> None:
        """See to it that later backwards keep reduced gradients apart; what a new parameter has is its own."""
        if self.watched is not self.param:
            self.watched, self.own, self.reduced = self.param, True, None
            self.watched.register_hook(self._before_accumulation)  # type: ignore[no-untyped-call]
            self.watched.register_post_accumulate_grad_hook(self._after_accumulation)  # type: ignore[no-untyped-call]

    def _before_accumulation(self, incoming: Tensor) -> None:
        grad = self.param.grad  # autograd.grad() comes here too, so nothing may change yet
        self.before = None if self.own or grad is None else (grad.clone(), incoming)
        if self.own and (grad is None or self._is_zeroed(grad)):  # dropped between micro-batches
            self.reduced = None

    def _is_zeroed(self, grad: Tensor) -> bool:
        """Whether ``zero_grad(set_to_none=False)`` came after the backward that set a reduced gradient aside."""
        return self.reduced is not None and version_of(grad) != self.version and not grad.any()

    def _after_accumulation(self, param: Tensor) -> None:
        if self.before is not None:
            self.reduced, incoming = self.before
            param.grad = incoming.detach().clone()
        assert param.grad is not None
        self.own, self.before, self.version = True, None, version_of(param.grad)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """What is reduced already, and what is to be reduced."""
        grad = self.param.grad
        return (None if grad is None else self.reduced, grad) if self.own else (grad, None)

    def settle(self, total: Tensor, ranks: int, used: Tensor) -> None:
        """Set ``.grad``, given the sum over the ranks; ``used`` counts those that had one, and is rarely read."""
        reduced, own = self.gradients()
        self.own, self.reduced = False, None
        _unreduced.discard(self)
        if reduced is None and own is None and not used.item():
            return
        new = _shaped(total / (self.unit.gradient_divide_factor or ranks), self.param)
        self.param.grad = new if reduced is None else reduced + new


_unreduced: WeakSet[_Whole] = WeakSet()  # a backward of their model ended without reducing their gradients


@dataclass(eq=False)
class _Reduction:
    """What a backward ends with: torch's own work, or another reduction, then this one."""

    wholes: list[_Whole]
    mesh: DeviceMesh
    before: Callable[[], None]

    @not_compiled
    def __call__(self) -> None:
        self.before()
        self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        trained = [each for each in self.wholes if each.param.requires_grad]
        for each in trained:
            each.watch()
        due = [each for each in trained if each.unit.reduce_grads and each.unit.all_reduce_grads]
        _unreduced.update(each for each in trained if each.own and each not in due)
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


def _parts(wholes: list[_Whole], device: torch.device) -> list[Tensor]:
    """Which have a gradient of this rank, as ones and zeros, then their gradients or zeros: flat, of one dtype."""
    grads = [each.gradients()[1] for each in wholes]
    doubles = any(each.param.dtype in (torch.float64, torch.complex128) for each in wholes)
    dtype = torch.float64 if doubles else torch.float32
    used = torch.ones(len(grads), dtype=dtype, device=device)
    for index, grad in enumerate(grads):
        if grad is None:  # filled, not copied from a list, for which the host would wait
            used[index].zero_()
    given = [torch.zeros_like(w.param) if grad is None else grad for w, grad in zip(wholes, grads, strict=True)]
    return [used, *(_real(grad).flatten().to(device, dtype) for grad in given)]


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    shaped = flat.view(_real(like).shape).to(like.device)
    return (torch.view_as_complex(shaped) if like.is_complex() else shaped).to(like.dtype)
