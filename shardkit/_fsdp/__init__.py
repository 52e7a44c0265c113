"""FSDP2's private state that ``shard_model`` and its hooks need: flags that its API can set but not
read, parameters in their sharded and unsharded form, and the forward or backward under way.

What reads or sets the state of FSDP2's objects, or derives from its classes, is in this package;
torch's other private names are in ``_torch``. When something breaks with a new torch, look in these
two first. The classes are ``FSDPState``, ``FSDPParamGroup`` (here a unit) and ``FSDPParam`` in torch
(2.11 to 2.15). The other files are imported by what uses them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._torch import require_names, units_of

# torch.compiler.disable imports the whole compiler where it decorates, which takes seconds and an
# optional package (hypothesis); this one, made for torch's own modules, does so at the first call
# (torch 2.11 to 2.13).
not_compiled = torch._compile._disable_dynamo


_TRAINED = "_shardkit_trained"  # the attribute of an ``FSDPParam`` with its last requires_grad


class FSDPUnit(Protocol):
    """torch's ``FSDPParamGroup``: the parameters of one all-gather and one reduce-scatter, and how
    both run.

    ``FSDPModule`` has setters for these and no getters, so they are read and restored here. The
    names are those of torch 2.11 to 2.15; if one is missing, :func:`fsdp_units` raises.
    """

    modules: tuple[nn.Module, ...]
    fsdp_params: list[Any]
    device: torch.device
    is_sharded: bool  # neither unsharded nor sharded over fewer ranks after forward
    is_unsharded: bool
    mesh_info: Any  # has shard_process_group, replicate_process_group, or both
    post_forward_mesh_info: Any  # None: the parameters stay unsharded from forward to backward
    reshard_after_backward: bool
    reduce_grads: bool
    all_reduce_grads: bool
    gradient_divide_factor: float | None  # None: the number of ranks
    unshard: Callable[..., Any]
    reshard: Callable[[], None]
    post_backward: Callable[..., None]
    # called for each unit below the root when a backward ends
    finalize_backward: Callable[[], None]
    wait_for_unshard: Callable[[], None]
    _to_sharded: Callable[[], None]
    _all_gather_result: Any  # of an all-gather that nothing has waited for
    _partial_reduce_output: Any  # reduce-scattered gradients that wait for an all-reduce


def fsdp_units(model: nn.Module) -> list[FSDPUnit]:
    """The units of every FSDP module of the model, each once, parents first. Local, pure."""
    units: list[FSDPUnit] = []
    for state in states_of(model.modules()):
        units += units_of(state)
    if units:
        require_names(units[0], "FSDPParamGroup", FSDPUnit.__annotations__)
    return units


@contextmanager
def without_init_subclass() -> Iterator[None]:
    """In this context the classes that ``fully_shard`` makes, of FSDPModule and a module's class,
    do not call ``__init_subclass__`` of the latter, which may want arguments.
    """
    FSDPModule.__init_subclass__ = classmethod(lambda cls: None)  # type: ignore[assignment]
    try:
        yield
    finally:
        del FSDPModule.__init_subclass__


def states_of(modules: Iterable[object]) -> list[Any]:
    """Return the state of each FSDP module; ``fully_shard([a, b])`` makes one for both."""
    states = [module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)]
    return list(dict.fromkeys(states))


def fsdp_params(modules: Iterable[object]) -> list[Any]:
    """Return the ``FSDPParam`` objects of FSDP modules, without those of modules inside them."""
    params: list[Any] = []
    for state in states_of(modules):
        for unit in units_of(state):
            params += unit.fsdp_params
    return params


def initialize(root: FSDPModule) -> None:
    """Make ``root`` the root of the FSDP modules below it, as its first forward would. Local.

    torch has no public way before a forward (2.11 to 2.15).
    """
    from shardkit._fsdp.before_2_15 import dtypes_of_frozen

    with dtypes_of_frozen(fsdp_units(root)):  # type: ignore[arg-type]
        root._get_fsdp_state()._lazy_init()


def is_in_use(module: FSDPModule) -> bool:
    """Whether FSDP2's hooks have unsharded this module for a forward that has not ended, or in
    backward. Local, pure.
    """
    return module._get_fsdp_state()._training_state.name != "IDLE"


def unsharded_param(fsdp_param: Any) -> Tensor | None:
    """Return the unsharded form of an ``FSDPParam``, which torch keeps from the first all-gather
    on, also while its memory is freed. Local, pure.
    """
    return getattr(fsdp_param, "_unsharded_param", None)


def holds_param_of(held: Collection[int], unit: FSDPUnit) -> bool:
    """Whether an optimizer holds one of the unit's parameters, in either form. Local, pure.

    ``held`` are the ids of its parameters, since hashing a DTensor costs ten times as much.
    """
    for param in unit.fsdp_params:
        if id(param.sharded_param) in held or id(unsharded_param(param)) in held:
            return True
    return False


@dataclass
class StepState:
    """The parameters, as FQNs, and units that a step should know of."""

    waiting: list[str] = field(default_factory=list)  # with a gradient that is not reduced
    # held in the unsharded form, which the next all-gather overwrites
    copies: list[str] = field(default_factory=list)
    hooked: list[str] = field(default_factory=list)  # with hooks of ``register_hook``
    written: list[str] = field(default_factory=list)  # whose change is lost
    # without a gradient, by unit that has others
    unused: dict[FSDPUnit, list[str]] = field(default_factory=dict)
    unsharded: list[FSDPUnit] = field(default_factory=list)  # they would keep the values of before


def state_at_step(units: Iterable[FSDPUnit], held: Collection[int]) -> StepState:
    """Look at the parameters of an optimizer's units. Local, pure.

    A gradient that waits is on the unsharded parameter, or in ``reduce_dtype`` beside it (before
    torch 2.15); on an HSDP mesh the reduce-scattered gradients of a unit wait for the all-reduce.
    """
    # One loop without calls, because it runs in every step.
    step = StepState()
    for unit in units:
        unused, written, has_gradient = [], [], False
        if not unit.is_sharded or unit._all_gather_result is not None:
            step.unsharded.append(unit)
        for param in unit.fsdp_params:
            sharded, state = param.sharded_param, vars(param)
            is_held = id(sharded) in held
            if is_held and sharded.requires_grad:
                if sharded.grad is None:
                    unused.append(param._param_fqn)
                else:
                    has_gradient = True
                if sharded._backward_hooks:
                    step.hooked.append(param._param_fqn)
            unsharded = state.get("_unsharded_param")
            if unsharded is None:  # before the first all-gather
                continue
            # ``param.data = value`` replaces the storage of a DTensor, which nothing reads.
            storage = sharded.untyped_storage()
            known = vars(param._sharded_param_data).setdefault("storage", storage)
            if unsharded._version or known is not storage:  # all-gathers preserve both
                written.append(param._param_fqn)
            if id(unsharded) in held:
                step.copies.append(param._param_fqn)
            waits = unsharded.grad is not None or unit._partial_reduce_output is not None
            if is_held and (waits or state.get("unsharded_accumulated_grad") is not None):
                step.waiting.append(param._param_fqn)
        if has_gradient:
            step.unused[unit] = unused
            step.written += written
    return step


# Whether the sharded and the unsharded form of an ``FSDPParam`` require grad.
both_require_grad: Callable[[Any], tuple[bool, bool]] = operator.attrgetter(
    "sharded_param.requires_grad", "_unsharded_param.requires_grad"
)


def keep_requires_grad(units: Iterable[FSDPUnit]) -> None:
    """Give sharded parameters what ``requires_grad_()`` set on unsharded ones, which resharding
    would undo. Local.

    While a unit is unsharded either form may be set: modules register the unsharded one, but
    optimizers and lists of parameters hold the sharded one. Where they differ, the one that changed
    wins: the sharded one if it is not as at the last call, else the registered one.
    """
    for unit in units:
        if unit.is_sharded:
            continue
        for param in unit.fsdp_params:
            sharded, info = param.sharded_param, param._module_info
            registered = info.module._parameters[info.param_name]
            trains, before = sharded.requires_grad, vars(param).get(_TRAINED)
            if registered.requires_grad != trains:
                if trains == before or before is None:
                    trains = not trains
                    sharded.requires_grad_(trains)
                else:
                    registered.requires_grad_(trains)
            vars(param)[_TRAINED] = trains


def reshard_units(units: Iterable[FSDPUnit]) -> None:
    """Reshard units, also those that an error in forward left in the middle of it. Local."""
    for unit in units:
        unit.wait_for_unshard()  # for one that was prefetched
        unit._to_sharded()


# The hooks of ``register_hook`` and ``register_post_accumulate_grad_hook``, which torch has no
# public way to list; None where there never was one.
tensor_hooks: Callable[[Tensor], dict[int, Any] | None] = operator.attrgetter("_backward_hooks")
post_accumulate_hooks: Callable[[Tensor], dict[int, Any] | None] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)


def set_post_accumulate_hooks(tensor: Tensor, hooks: dict[int, Any]) -> None:
    """Give a tensor the hooks of another one, in the same dict, so that their handles still remove
    them.
    """
    tensor._post_accumulate_grad_hooks = hooks


def share_attributes(fsdp_param: Any) -> None:
    """Give the unsharded form of an ``FSDPParam``, which torch makes in the first all-gather, the
    attributes of the sharded one. Local.
    """
    make = fsdp_param.init_unsharded_param

    def make_first() -> None:
        make()
        del fsdp_param.init_unsharded_param  # the class's own from now on
        unsharded, attributes = fsdp_param._unsharded_param, vars(fsdp_param.sharded_param)
        if type(unsharded) in (nn.Parameter, DTensor):
            unsharded.__dict__ = attributes  # one dict: a change of either is seen in both
        else:
            vars(unsharded).update(attributes)  # a tensor subclass has its own parts there

    fsdp_param.init_unsharded_param = make_first


def slot_of(fsdp_param: Any) -> tuple[int, str]:
    """Return where an ``FSDPParam`` is registered: the ``id`` of its module, and its name there.
    Local, pure.
    """
    return id(fsdp_param._module_info.module), fsdp_param._module_info.param_name
