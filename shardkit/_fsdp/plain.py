"""FSDP2's parameters, shown to a program as the plain tensors that FSDP1's were.

While a parameter is sharded, FSDP2 registers a DTensor on its module. FSDP1 showed plain tensors,
and its programs compute with them: norms by hand and an all-reduce, penalties, averages,
``p.data``. Here the module shows a plain ``nn.Parameter`` that shares storage with the DTensor's
local tensor. FSDP2 keeps working with its DTensor and never sees the plain one. A parameter has
three forms:

===================  ==================================  =================================
form                 modules register it                 who uses it
===================  ==================================  =================================
``plain``            while it is sharded                 the program and its optimizer
``sharded_param``    while it is sharded, in             FSDP2; our state functions, and
                     ``as_dtensors``                     those of torch
``_unsharded_param`` in forward and backward             the modules' forwards
===================  ==================================  =================================

and what happens to one form reaches the others here:

=====================================  =========================================================
when                                   what
=====================================  =========================================================
``fully_shard`` was called             ``attach``: the original parameter becomes ``plain``
a gradient is reduced                  ``take_gradient``: from the DTensor to ``plain``
``as_dtensors`` begins                 ``update_dtensor``, then ``hide``: modules have DTensors
``as_dtensors`` ends, or the whole     ``show``: modules have ``plain``, with the values and
model is sharded                       gradients of the DTensors
before a forward of the root           ``update_dtensor``: what the program did to ``plain``
after ``.to()``, ``load_state_dict``   ``reset_sharded_param``: ``update_dtensor``, or
                                       ``convert`` for another dtype
=====================================  =========================================================

Private names of ``FSDPParam`` and ``FSDPParamGroup`` are those of torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.utils.weak import WeakIdKeyDictionary

from shardkit._fsdp import (
    fsdp_units,
    not_compiled,
    post_accumulate_hooks,
    set_post_accumulate_hooks,
    share_attributes,
    slot_of,
    tensor_hooks,
)
from shardkit._fsdp.collectives import has_gradient
from shardkit._fsdp.waiting import WaitingUnit
from shardkit._torch import has_own_dispatch, plain_shards, units_of
from shardkit._torch.dispatch import adds_gradient_of_its_own

# The FQN of the parameter for each p.grad that stands for a gradient which is not reduced yet.
waiting_gradients: Any = WeakIdKeyDictionary()


class PlainShard(FSDPParam):
    """A parameter whose modules show a plain tensor while it is sharded."""

    sharded_param: Any  # FSDP2's DTensor
    plain: nn.Parameter
    is_shown: bool  # False: the modules have the DTensor, as fully_shard leaves them
    has_changed: bool  # in dtype or requires_grad, which the unit has to know before a forward
    version: int  # of the plain parameter at the last forward
    own_hooks: dict[int, Any]  # of the DTensor; the program's are the plain parameter's
    # Gradients that are not reduced accumulate in ``param_dtype``, as in FSDP1. FSDP2 would convert
    # them to ``reduce_dtype``: since torch 2.15 by this property, before in the method.
    unsharded_grad_dtype = None

    def to_accumulated_grad_if_needed(self) -> None:
        """Called by FSDP2 after a backward that does not reduce."""

    def attach(self, original: nn.Parameter) -> None:
        """Let the parameter that was sharded become the plain one; an optimizer may hold it."""
        local = self.sharded_param._local_tensor
        if original.is_meta or local.is_meta or has_own_dispatch(type(original)):
            original = self.new_plain(original)
        original.data = self.flat(local)
        original.grad = None
        self.plain = original
        self.is_shown = False  # until the whole model is sharded
        self.has_changed = False
        self.version = 0
        # Weak, because torch does not let Python's collector see a hook: the model would stay.
        self.own_hooks = {0: partial(_take_gradient, ref(self))}

    def new_plain(self, old: nn.Parameter) -> nn.Parameter:
        """Return a plain parameter with the hooks of ``old``, whose own type or device is wrong."""
        local = self.sharded_param._local_tensor
        plain = nn.Parameter(local, local.is_floating_point() and old.requires_grad)
        hooks = post_accumulate_hooks(old)
        if hooks:
            set_post_accumulate_hooks(plain, hooks)
        return plain

    def show(self) -> None:
        """Register the plain parameter, with what the DTensor has."""
        sharded = self.sharded_param
        if self.plain.is_meta and not sharded.is_meta:  # the model was materialized after sharding
            self.plain = self.new_plain(self.plain)
        # One dict of attributes for all forms of a parameter.
        vars(self.plain).update(vars(sharded))
        sharded.__dict__ = self.plain.__dict__
        # Set, not registered, which torch refuses for frozen parameters.
        hooks = post_accumulate_hooks(sharded)
        if hooks is not self.own_hooks:
            if hooks:  # the program's, of a parameter that was on meta
                set_post_accumulate_hooks(self.plain, hooks)
            set_post_accumulate_hooks(sharded, self.own_hooks)
        self.plain.data = self.flat(sharded._local_tensor)
        if sharded.grad is None:
            self.plain.grad = None
        else:
            grad = self.flat(sharded.grad._local_tensor)
            # the same object where it stands for a gradient that waits for its reduction
            if self.plain.grad is None or self.plain.grad.data_ptr() != grad.data_ptr():
                self.plain.grad = grad
        sharded.grad = None
        self.is_shown = True
        self._setattr_on_modules(sharded)

    def hide(self) -> None:
        """Register the DTensor, with what the plain parameter has."""
        if self.plain.grad is not None:
            self.sharded_param.grad = self.to_sharded_dtensor(
                self.plain.grad.view(self.sharded_size)
            )
        self.is_shown = False
        self._setattr_on_modules(self.sharded_param)

    def flat(self, local: Tensor) -> Tensor:
        """Return a rank's part as FSDP1 showed it: with one dim, unless every rank has all of it.

        A layer that is called outside of the model's forward then fails. With the dims of a shard
        it would compute with a part of its weights.
        """
        return local if self.shard_mesh.size() == 1 else local.reshape(-1)

    @property
    def fqn(self) -> str:
        """Return the name that FSDP2's errors use, known from the first forward on."""
        return self._param_fqn or self._module_info.param_name

    # ---- what FSDP2 calls

    def _setattr_on_modules(self, param: nn.Parameter) -> None:
        if param is self.sharded_param and self.is_shown:
            param = self.plain
            plain_shards[param] = True
        super()._setattr_on_modules(param)

    def take_gradient(self, sharded: Any) -> None:
        """Called by FSDP2 when the DTensor's gradient is reduced, in the reduction's stream."""
        if not self.is_shown:
            return
        grad = self.flat(sharded.grad._local_tensor)
        sharded.grad = None
        if self.grad_offload_event is not None:  # before torch 2.13 the copy may still run
            self.grad_offload_event.synchronize()
        for hook in (tensor_hooks(self.plain) or {}).values():
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
        if self.plain.grad is None:
            self.plain.grad = grad
        else:
            self.plain.grad += grad
        for hook in (post_accumulate_hooks(self.plain) or {}).values():
            hook(self.plain)

    def reset_sharded_param(self) -> None:
        """Called by FSDP2 after ``.to()`` and ``load_state_dict()``, and before a first forward."""
        if not self.is_shown:
            super().reset_sharded_param()  # type: ignore[no-untyped-call]
            return
        self.find_plain()
        if self.plain.dtype == self.sharded_param.dtype:
            self.update_dtensor()
        else:
            self.convert()

    # ---- what the program did to the plain parameter

    def find_plain(self) -> None:
        """Where the program has registered another parameter, take that one as the plain one."""
        if self.sharded_state is not ShardedState.SHARDED:
            return
        info = self._module_info
        registered = info.module._parameters[info.param_name]
        if registered is not self.plain and type(registered) is nn.Parameter:
            self.plain = registered
            self._setattr_on_modules(self.sharded_param)

    def update_dtensor(self) -> None:
        """Give the DTensor the values of another storage, and ``requires_grad``."""
        self.find_plain()
        plain, local = self.plain, self.sharded_param._local_tensor
        if plain.data_ptr() != local.data_ptr() or plain.dtype != local.dtype:
            if plain.shape != self.flat(local).shape:
                raise RuntimeError(
                    f"{self.fqn} has the shape {tuple(plain.shape)}, but this rank's shard has "
                    f"{tuple(self.flat(local).shape)}. Write full values in "
                    "FSDP.summon_full_params(model)."
                )
            self.copy_values()
        if plain.requires_grad != self.sharded_param.requires_grad:
            self.sharded_param.requires_grad_(plain.requires_grad)
            self.has_changed = True

    @torch.no_grad()
    def copy_values(self) -> None:
        """Copy the plain parameter's values into new memory of the DTensor, and share that. The
        program may still use the old one.
        """
        sharded, registry = self.sharded_param, self._module_info.module._parameters
        values = self.plain.detach().to(sharded.dtype, copy=True)
        sharded._local_tensor = values.view(self.sharded_size)
        # torch pads and pins the local tensor of the parameter that is registered.
        name = self._module_info.param_name
        registered, registry[name] = registry[name], sharded
        super().reset_sharded_param()  # type: ignore[no-untyped-call]
        registry[name] = registered
        self.plain.data = self.flat(sharded._local_tensor)

    def convert(self) -> None:
        """Make the DTensor one of the plain parameter's dtype."""
        if has_gradient(self):
            raise RuntimeError(f"{self.fqn} cannot be converted while its gradient waits.")
        old = self.sharded_param
        self.sharded_param = nn.Parameter(old.detach().to(self.plain.dtype), old.requires_grad)
        set_post_accumulate_hooks(self.sharded_param, self.own_hooks)
        self.sharded_param.__dict__ = self.plain.__dict__
        self.has_changed = True
        if hasattr(self, "_unsharded_param"):  # FSDP2 makes it once, at the first forward
            del self._unsharded_param
            share_attributes(self)
            self.all_gather_outputs = []
        self.copy_values()


def _take_gradient(weak: ref[PlainShard], sharded: nn.Parameter) -> None:
    param = weak()
    if param is not None:
        param.take_gradient(sharded)


class PlainUnit(WaitingUnit):
    """A unit of plain parameters, in which a gradient that is not reduced yet can be cleared.

    FSDP1 kept such a gradient in ``p.grad``, where ``optimizer.zero_grad()`` drops it. Here
    ``p.grad`` is negative zeros meanwhile, to which the reduced gradient will be added. Where this
    rank has no part of a parameter there is no sign to see: ``p.grad`` requires a gradient
    meanwhile, which ``zero_grad()`` ends.
    """

    fsdp_params: list[PlainShard]  # type: ignore[assignment]
    is_kept = False  # unsharded from a backward on, as SHARD_GRAD_OP is under no_sync

    @property
    def shows_plain(self) -> bool:
        """Functions of shardkit that need DTensors refuse the model then."""
        return self.fsdp_params[0].is_shown

    @not_compiled
    def post_backward(self, *unused: Any) -> None:
        super().post_backward()
        # The reduction's stream writes p.grad, and FSDP2 waits for it when backward ends. The
        # gradient of a penalty that the program computed with p is added before, in this stream.
        unit: Any = self
        if unit._post_reduce_event is not None and any(
            adds_gradient_of_its_own(param.plain) for param in self.fsdp_params
        ):
            unit._wait_for_post_backward()

    def finalize_backward(self) -> None:
        super().finalize_backward()  # type: ignore[no-untyped-call]
        self.is_kept = not self.reshard_after_backward
        for param in self.fsdp_params:
            if has_gradient(param):
                if param.plain.grad is None:
                    param.plain.grad = torch.full_like(param.plain, -0.0, requires_grad=False)
                grad = param.plain.grad
                if not grad.numel():
                    grad.requires_grad_()
                self.waiting.append((param, grad, grad._version))
                waiting_gradients[grad] = param.fqn

    def was_cleared(self, param: PlainShard, grad: Tensor, version: int) -> bool:
        """Whether ``p.grad`` is gone or was zeroed; raises where the program wrote other values."""
        waiting_gradients.pop(grad)
        if param.plain.grad is None:
            return True
        is_written = param.plain.grad is not grad
        is_zeroed = False
        if not grad.numel():
            is_zeroed = not grad.requires_grad
            grad.requires_grad_(False)
        elif grad._version != version:
            is_zeroed = not bool(grad.any() or grad.signbit().any())
            is_written |= not is_zeroed
        if is_written:
            raise RuntimeError(
                f"{param.fqn}.grad was written while its gradient waits to be reduced: after a "
                "backward under no_sync() it is zeros, so the write would be lost. Write it after "
                "a backward outside of no_sync(), or clear it by optimizer.zero_grad()."
            )
        return is_zeroed


# ---- for the drop-in


def to_plain(module: FSDPModule, originals: Mapping[tuple[int, str], nn.Parameter]) -> None:
    """Let the parameters of a module that was just sharded be plain.

    ``show_plain`` shows them. Local.
    """
    for unit in units_of(module._get_fsdp_state()):
        unit.__class__, unit.waiting = PlainUnit, []
        for param in unit.fsdp_params:
            param.__class__ = PlainShard
            param.attach(originals[slot_of(param)])


def show_plain(model: nn.Module) -> None:
    """Show the plain parameters of a model that is sharded and initialized. Local."""
    for unit in plain_units(model):
        if unit.shows_plain:
            continue
        for param in unit.fsdp_params:
            param.show()


def plain_units(model: nn.Module) -> list[PlainUnit]:
    return [unit for unit in fsdp_units(model) if isinstance(unit, PlainUnit)]


def plain_of_unsharded(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Return the plain parameter for each unsharded one that modules register at present. Local."""
    plain = {}
    for unit in plain_units(model):
        if not unit.is_sharded:
            for param in unit.fsdp_params:
                plain[param._unsharded_param] = param.plain
    return plain


@not_compiled
def update_dtensors(units: Iterable[PlainUnit]) -> None:
    """Let FSDP2 use what the program did to the plain parameters since the last forward. Local."""
    for unit in units:
        if not unit.shows_plain:
            continue
        has_changed = is_written = False
        for param in unit.fsdp_params:
            param.update_dtensor()
            has_changed |= param.has_changed
            param.has_changed = False
            is_written |= param.version != param.plain._version
            param.version = param.plain._version
        if has_changed:
            unit._init_mp_dtypes()  # of the parameters that train
        # After a forward without backward unshard again: a write to p.data shows nowhere.
        if unit.is_unsharded and (is_written or not unit.is_kept):
            unit.reshard()
        unit.is_kept = False


@contextmanager
def as_dtensors(model: nn.Module) -> Iterator[dict[Tensor, PlainShard]]:
    """In this context modules have FSDP2's DTensors, with gradients.

    Yields them by plain parameter.
    """
    units = [unit for unit in plain_units(model) if unit.shows_plain]
    update_dtensors(units)
    shards: dict[Tensor, PlainShard] = {}
    for unit in units:
        unit.reshard()
        for param in unit.fsdp_params:
            param.hide()
            shards[param.plain] = param
    try:
        yield shards
    finally:
        for param in shards.values():
            param.show()
