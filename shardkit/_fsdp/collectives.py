"""The collectives of an FSDP unit: noted right before each, or without its forward, for a rank that
skips it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.utils import _apply_to_tensors

from shardkit._fsdp import FSDPUnit, not_compiled, states_of, unsharded_param
from shardkit._torch import units_of


def observe_collectives(unit: FSDPUnit, note: Callable[[str], None]) -> Callable[[], None]:
    """Call ``note`` right before each all-gather and reduce-scatter of a unit; return what ends it.
    Local.

    The objects that run collectives, torch's or those of ``set_custom_all_gather``, become copies
    of a derived class, which passes torch's isinstance checks. All-reduces do not go through such
    an object, so they are not noted.
    """
    own: Any = unit
    before = own._all_gather_comm, own._reduce_scatter_comm
    own._all_gather_comm = _noting(before[0], partial(note, "all-gather"))
    own._reduce_scatter_comm = _noting(before[1], partial(note, "reduce-scatter"))

    def end() -> None:
        own._all_gather_comm, own._reduce_scatter_comm = before

    return end


def _noting(comm: Any, note: Callable[[], None]) -> Any:
    class Noting(type(comm)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            note()
            return super().__call__(*args, **kwargs)

    noting = copy.copy(comm)
    noting.__class__ = Noting
    return noting


class _GradEdge(torch.autograd.Function):
    """Return the first tensor; the others get gradients of zeros, so that backward reaches what
    made them.

    It saves a tensor, so that a recomputed forward that ends in it is recomputed before anything
    else in its backward.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        """Return an alias that autograd takes for no view: FSDP2 warns of outputs that are
        views.
        """
        ctx.others = []
        for other in others:
            # of an activation only the shape is kept
            is_plain = type(other) is Tensor
            ctx.others.append(other.new_empty(()).expand(other.shape) if is_plain else other)
        ctx.save_for_backward(value.new_empty(()))
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        _ = ctx.saved_tensors
        return gradient, *map(torch.zeros_like, ctx.others)


def add_grad_edge(value: Tensor, *others: Tensor) -> Tensor:
    """Return ``value``, from which backward also reaches ``others``, with zeros. Local."""
    tracked = [other for other in others if other.requires_grad]
    if not (tracked and torch.is_grad_enabled()):
        return value
    return _GradEdge.apply(value, *tracked)  # type: ignore[no-any-return, no-untyped-call]


def modules_of(module: FSDPModule) -> tuple[nn.Module, ...]:
    """Return the modules of ``fully_shard([a, b])`` that ``module`` is one of. Local, pure."""
    return module._get_fsdp_state()._modules


def pass_through(module: FSDPModule, zero: Tensor, body: Callable[[Tensor], Tensor]) -> Tensor:
    """Run ``body`` as the forward of a unit: unshard, reshard, and join its backward. Collective.

    torch's methods are called rather than the module, so that none of its other hooks sees the
    zero. The zero is cloned because what FSDP2 returns for it is a view, and it warns of a forward
    that returns one.
    """
    state: Any = module._get_fsdp_state()
    (zero,), _ = state._pre_forward(module, (zero,), {})
    return state._post_forward(module, (zero,), body(zero.clone()))  # type: ignore[no-any-return]


def is_root(module: FSDPModule) -> bool:
    """Whether a unit is its model's FSDP root; known from the first forward on. Local, pure."""
    return bool(module._get_fsdp_state()._is_root)


def device_of(module: FSDPModule) -> torch.device:
    """Return the device that a unit computes on. Local, pure."""
    return module._get_fsdp_state()._device


apply_to_tensors = _apply_to_tensors  # replaces tensors in the containers in which FSDP2 finds them


def reduce_unused(modules: Iterable[object], beside_used: bool = False) -> None:
    """Reduce zeros for trainable parameters without a gradient in the units of FSDP modules. Local,
    in place.

    Ranks that use different parameters of a unit would otherwise reduce different ones.
    ``beside_used`` leaves out units without any gradient, as FSDP1 did, because optimizers apply
    weight decay and momentum to zeros. torch's own
    ``set_reduce_scatter_unused_params`` does not, and is not in torch 2.11 and 2.12.
    """
    for state in states_of(modules):
        # torch 2.11 and 2.12 list fully_shard([a, b]) twice, and end its backward twice
        listed = state._state_ctx.all_states
        listed[:] = dict.fromkeys(listed)
        for unit in units_of(state):
            is_set = getattr(unit.post_backward, "func", None) is _post_backward  # an inner model's
            if not is_set:
                unit.post_backward = partial(_post_backward, unit, beside_used)


@not_compiled
def _post_backward(unit: Any, beside_used: bool, *_: object) -> None:
    is_used = any(map(has_gradient, unit.fsdp_params)) or unit._partial_reduce_output is not None
    if unit.reduce_grads and (is_used or not beside_used):
        for param in unit.fsdp_params:
            unsharded = unsharded_param(param)
            if unsharded is not None and unsharded.requires_grad and not has_gradient(param):
                unsharded.grad = torch.zeros_like(unsharded)
    type(unit).post_backward(unit)  # that of the class now, which accumulate() changes


def has_gradient(param: Any) -> bool:
    """Return whether one of a unit's ``fsdp_params`` has a gradient that is not reduced. Local,
    pure.
    """
    if not hasattr(param, "_unsharded_param"):
        return False
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None
