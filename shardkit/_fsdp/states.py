"""FSDP2's private state for accumulation, recovery from errors, dtypes, and full parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit._fsdp import FSDPUnit, fsdp_params, states_of
from shardkit._torch import require_names, units_of

# The attribute of a ``.grad`` that stands for a gradient which waits for its reduction.
PLACEHOLDER = "_shardkit_placeholder"

_without_hooks: WeakSet[Any] = WeakSet()  # the states in a context of ``without_hooks``


@contextmanager
def unsharded_until_backward(model: nn.Module, *, only_frozen: bool = False) -> Iterator[None]:
    """In this context no unit, or none without trained parameters, reshards after forward.

    ``set_reshard_after_forward`` could not restore an int.
    """
    before = []
    for state in states_of(model.modules()):
        for unit in units_of(state):
            trains = any(param.sharded_param.requires_grad for param in unit.fsdp_params)
            if not (only_frozen and trains):
                before.append((state, unit, unit.post_forward_mesh_info))
                unit.post_forward_mesh_info = None
    try:
        yield
    finally:
        for state, unit, mesh_info in before:
            # The first forward, which may have run meanwhile, decides for a root with torch's
            # default.
            decided = state._is_root and state._auto_reshard_after_forward
            unit.post_forward_mesh_info = None if decided else mesh_info


def roots_of(model: nn.Module) -> list[Any]:
    """Return the roots of the model's FSDP modules, which may be around it. Local, pure.

    A first forward makes roots; before it there are none.
    """
    roots: list[Any] = []
    for state in states_of(model.modules()):
        for other in state._state_ctx.all_states:
            if other._is_root and other._modules[0] not in roots:
                roots.append(other._modules[0])
    return roots


def reset_iteration(root: Any) -> None:
    """Abandon the forward or backward under way below a root: wait for its collectives, and
    reshard. Local.
    """
    if hasattr(root, "reset_iter_state"):  # since torch 2.13
        root.reset_iter_state()
    else:
        from shardkit._fsdp.before_2_13 import reset_iter_state

        reset_iter_state(root)


def end_backward(model: nn.Module) -> None:
    """Reduce and wait for what a backward left that reached the output of no unit. Collective.

    Torch ends a backward only if it passes the output of a unit: a penalty alone may have no
    gradient of any. So this is a backward that does nothing else.
    """
    states = states_of(roots_of(model))

    def end(_: torch.Tensor) -> None:
        for state in states:
            state._register_root_post_backward_final_callback()

    nothing = torch.zeros((), requires_grad=True)
    nothing.register_hook(end)  # type: ignore[no-untyped-call]
    nothing.backward()  # type: ignore[no-untyped-call]


def drop_unreduced_gradients(unit: FSDPUnit) -> None:
    """Drop the gradients of a unit that backward kept to be reduced later. Local."""
    # On an HSDP mesh what was reduce-scattered for the whole unit waits for the all-reduce, with
    # its layout (since torch 2.15).
    unit._partial_reduce_output = None
    getattr(unit, "_partial_reduce_output_layout", {}).clear()
    for param in unit.fsdp_params:
        drop_unsharded_gradient(param)


def drop_unsharded_gradient(param: Any) -> None:
    """Drop the gradient of one of a unit's ``fsdp_params`` that is not reduce-scattered. Local.

    It is on the unsharded parameter, or in ``reduce_dtype`` beside it (before torch 2.15).
    """
    if "unsharded_accumulated_grad" in vars(param):
        param.unsharded_accumulated_grad = None
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None


def compute_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes that floating-point parameters of the model's units are unsharded in.
    Local, pure.
    """
    dtypes = set()
    for state in states_of(model.modules()):
        for unit in units_of(state):
            for param in unit.fsdp_params:
                if param.sharded_param.is_floating_point():
                    dtypes.add(state._mp_policy.param_dtype or param.sharded_param.dtype)
    return dtypes


def show_plain_name(module: nn.Module) -> None:
    """Let ``_get_name`` return the name of the class that ``fully_shard`` has derived from. Local."""
    name = type(module).__name__.removeprefix("FSDP")
    vars(module)["_get_name"] = lambda: name


def is_under_way(model: nn.Module) -> bool:
    """Whether a forward or backward of a unit of the model has begun and not ended. Local, pure."""
    for state in states_of(model.modules()):
        for part in (state, *units_of(state)):
            if part._training_state.name != "IDLE" and state not in _without_hooks:
                return True
    return False


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In this context FSDP2's hooks do nothing: forwards of these modules neither unshard nor
    reshard nor cast. Local.
    """
    params = fsdp_params(modules)
    states = [state for state in states_of(modules) if state not in _without_hooks]
    # What is only set below. The other names are also read, which raises where torch lacks them.
    for state in states:
        require_names(state, "FSDPState", ["_mp_policy"])
    for param in params:
        require_names(param, "FSDPParam", ["reset_sharded_param"])
    before = [(state, dict(vars(state))) for state in states]
    for state in states:
        # The hooks return early in a backward, which recomputes a forward. They still unshard the
        # units, which are in the first attribute since torch 2.12, and cast by the policy.
        vars(state).update(
            _fsdp_param_groups=[],
            _fsdp_param_group=None,
            _mp_policy=MixedPrecisionPolicy(),
            _training_state=type(state._training_state).PRE_BACKWARD,
        )
    for param in params:
        # After ``load_state_dict`` torch takes what a module holds for its shard.
        vars(param)["reset_sharded_param"] = lambda: None
    _without_hooks.update(states)
    try:
        yield
    finally:
        _without_hooks.difference_update(states)
        for param in params:
            del vars(param)["reset_sharded_param"]
        for state, attributes in before:
            vars(state).clear()
            vars(state).update(attributes)
            state._modules_to_run_forward.clear()  # if one of fully_shard([a, b]) ran alone
