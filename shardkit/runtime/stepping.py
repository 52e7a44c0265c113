"""Checks and gradients for optimizers that know nothing of sharding: replaced parameters, gradients not reduced yet.

An optimizer built before sharding holds parameters that no model has any more, and one that steps before gradients are
reduced finds none. Both would silently train nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardkit._fsdp import FSDPUnit, fsdp_units
from shardkit._fsdp.params import (
    NO_TORCH_FUNCTION,
    around_backward,
    before_reductions,
    drop_unreduced_gradients,
    gathered_parameters,
    is_reduce_scattered,
    unreduced,
    unsharded_parameter,
    without_memory,
)
from shardkit._torch import local_tensor, tree_leaves, with_local
from shardkit.errors import ShardkitError, listing, message
from shardkit.runtime.replicated import waiting_parameters

_LOW_PRECISION = (torch.bfloat16, torch.float16)
logger = logging.getLogger("shardkit")

_replaced: Any = WeakIdKeyDictionary()  # the FQN of each parameter that sharding replaced, while someone holds it
_units: WeakSet[Any] = WeakSet()  # of the models that are watched
_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # how many param groups each optimizer had then
_low_precision_allowed: WeakSet[Optimizer] = WeakSet()
_waiting: WeakKeyDictionary[Any, list[_Mark]] = WeakKeyDictionary()  # by FSDPParam


@contextmanager
def replacing(model: nn.Module) -> Iterator[None]:
    """In this context the model is sharded; optimizers with a parameter that it loses raise at their first step. Local.

    Nothing is kept alive: replaced parameters that no one else holds are freed and forgotten.
    """
    before: Any = WeakIdKeyDictionary()
    before.update({param: fqn for fqn, param in model.named_parameters()})
    yield
    now = set(model.parameters())
    _replaced.update({param: fqn for param, fqn in before.items() if param not in now})
    _checked.clear()
    watch_gradients(model)


def watch_gradients(model: nn.Module) -> None:
    """Let ``zero_grad()``, the model's or an optimizer's, drop gradients that are not reduced yet. Local, idempotent.

    For any model sharded by ``fully_shard``. After a backward that does not reduce (``no_sync``,
    ``set_requires_gradient_sync(False)``) the ``.grad`` of a sharded parameter is a :class:`WaitingGradient`, without
    memory, until the next backward begins. If it is cleared by then, the gradient that waits is dropped. A step of an
    optimizer that holds such a parameter raises.
    """
    new = [unit for unit in fsdp_units(model) if unit not in _units]
    if new:
        _units.update(new)
        around_backward(model, _unmark, _mark)
        before_reductions(new, _unmark)
        _hook()


@functools.cache
def _hook() -> None:
    """Enter torch's registry of hooks before any optimizer's step, once in a process."""
    register_optimizer_step_pre_hook(_before_step)


def allow_low_precision(optimizers: Iterable[Optimizer]) -> None:
    """Log no warning at their first step that they update parameters in low precision."""
    _low_precision_allowed.update(optimizers)


def low_precision_problem(named: Iterable[tuple[str, Tensor]], subject: str | None = None) -> str | None:
    """Say which parameters train in low precision without float32 masters; None if none does. Local, pure.

    Args:
        named: parameters by name.
        subject: what the message is about, instead of the parameters.
    """
    low = {name: param.dtype for name, param in named if param.requires_grad and param.dtype in _LOW_PRECISION}
    dtypes = listing(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in low.values()))
    problem = f"{len(low)} parameters that train in {dtypes}, without float32 masters"
    rule = "Updates smaller than half a unit in the last place of a parameter are lost"
    fix = "Load or cast the model in float32 before sharding and compute in low precision with mp_policy="
    fix += "MixedPrecisionPolicy(param_dtype=torch.bfloat16), or call check_optimizer(..., low_precision=True)"
    return message(subject or listing(low), problem, rule, fix) if low else None


# Gradients that wait to be reduced.


class WaitingGradient(Tensor):
    """Stands in for a gradient that is not reduced yet. It has no memory and can be zeroed; any other use raises.

    For a sharded parameter it is the local tensor of the DTensor in ``.grad``.
    """

    __torch_function__ = NO_TORCH_FUNCTION
    param: ref[Tensor]  # its ``.grad`` is this tensor
    reduced: Tensor | None  # the ``.grad`` that it replaced
    is_zeroed: bool

    @staticmethod
    def __new__(cls, param: Tensor) -> WaitingGradient:
        """Make one; a sparse one for a plain parameter, since autograd replaces those if it adds to them."""
        sharded = isinstance(param, DTensor)
        like = local_tensor(param) if isinstance(param, DTensor) else param
        self = without_memory(cls, like, torch.strided if sharded else torch.sparse_coo)
        self.param, self.reduced, self.is_zeroed = ref(param), param.grad, False
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Zero it, or add to it; anything else raises."""
        name, given = func.overloadpacket.__name__, tree_leaves((args, kwargs))
        if name in ("zero_", "_foreach_zero_"):
            for each in given:
                each.become_zeros() if isinstance(each, WaitingGradient) else each.zero_()
            return args[0] if name == "zero_" else None
        if name == "add" and not isinstance(args[0], WaitingGradient):
            return args[0].clone()  # autograd accumulates in a backward that FSDP2 has no part in
        shape = next(tuple(each.shape) for each in given if isinstance(each, WaitingGradient))
        raise _waiting_error(f"a gradient, of which this rank has {shape}", name)

    def become_zeros(self) -> None:
        """Give the parameter an ordinary gradient of zeros."""
        self.is_zeroed, param = True, self.param()
        if param is not None:
            zeros = torch.zeros_like(param, dtype=self.dtype, requires_grad=False)
            param.grad = zeros if self.reduced is None else self.reduced.zero_()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WaitingGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def _waiting_error(what: str, use: str) -> ShardkitError:
    problem = f"uses {what}, which this rank has accumulated and no rank has reduced yet"
    rule = "Only a backward with gradient sync reduces gradients: the last micro-batch of a step, not those under "
    rule += "accumulate(last=False), no_sync() or set_requires_gradient_sync(False)"
    fix = "Run the last micro-batch with accumulate(model, last=True), or drop the gradients with zero_grad()"
    return ShardkitError(message(use, problem, rule, fix))


class _Mark:
    """A waiting gradient in the ``.grad`` of a parameter that the user sees: sharded or, if kept gathered, unsharded.

    The gradient that waits may be in the ``.grad`` of an unsharded parameter itself; then nothing is put there.
    """

    def __init__(self, param: Tensor) -> None:
        self._param = ref(param)
        self._mark = WaitingGradient(param) if isinstance(param, DTensor) or param.grad is None else None
        if self._mark is not None:
            param.grad = with_local(param, self._mark) if isinstance(param, DTensor) else self._mark
        self._grad = None if self._mark is None else param.grad

    @property
    def param(self) -> Tensor:
        param = self._param()
        assert param is not None  # FSDP2 holds it
        return param

    @property
    def is_cleared(self) -> bool:
        """Whether the gradient was removed or zeroed."""
        return self.param.grad is None or (self._mark is not None and self._mark.is_zeroed)

    def remove(self, cleared: bool) -> None:
        """Restore ``.grad``; ``cleared`` if this or another mark of the parameter was, where zeros stay."""
        if cleared and not (self._mark is not None and self._mark.is_zeroed):
            self.param.grad = None
        elif self._mark is not None and self.param.grad is self._grad:
            self.param.grad = self._mark.reduced


def _mark(units: list[FSDPUnit]) -> None:
    """Mark the parameters whose gradients wait, after a backward."""
    for unit in units:
        for param in [] if unit.reduce_grads and unit.all_reduce_grads else unreduced(unit):
            unsharded = None if unit.is_sharded else unsharded_parameter(param)
            _waiting[param] = [_Mark(each) for each in (param.sharded_param, unsharded) if each is not None]


def _unmark(units: Iterable[FSDPUnit], *, only_cleared: bool = False) -> None:
    """Remove marks before a backward or a reduction, and drop the gradients whose marks were cleared."""
    for unit in units if _waiting else ():
        waiting = {param: _waiting[param] for param in unit.fsdp_params if param in _waiting}
        cleared = [param for param, marks in waiting.items() if any(mark.is_cleared for mark in marks)]
        if cleared and len(cleared) < len(waiting) and is_reduce_scattered(unit):
            problem = f"cleared the gradients of {len(cleared)} of the {len(waiting)} parameters of one unit"
            rule = "Gradients that a unit on an HSDP mesh has reduce-scattered wait for the all-reduce as one tensor"
            fix = "Clear the gradients of all parameters, as model.zero_grad() does, or accumulate without "
            raise ShardkitError(message("zero_grad()", problem, rule, fix + "shard_gradients"))
        for param in cleared if only_cleared else waiting:
            for mark in _waiting.pop(param):
                mark.remove(param in cleared)
        drop_unreduced_gradients(unit, cleared)


# Before an optimizer's step.


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Check an optimizer at its first step, when groups were added, and while any gradient waits."""
    if torch.compiler.is_compiling():
        return
    groups = optimizer.param_groups
    if _checked.get(optimizer) != len(groups):
        _check_held([param for group in groups for param in group["params"]], optimizer)
        _checked[optimizer] = len(groups)
    _unmark(_units, only_cleared=True)
    waiting = [mark.param for marks in _waiting.values() for mark in marks] + waiting_parameters()
    held = {param for group in groups for param in group["params"]} if waiting else set()
    shapes = [str(tuple(param.shape)) for param in waiting if param in held]
    if shapes:
        what = f"gradients of {len(shapes)} parameters, of shapes {listing(dict.fromkeys(shapes), 5)}"
        raise _waiting_error(what, f"{type(optimizer).__name__}.step()")


def _check_held(params: list[Tensor], optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    replaced = [_replaced[param] for param in params if param in _replaced]
    if replaced:
        problem = f"holds {len(replaced)} parameters that sharding has replaced: {listing(replaced)}"
        rule = "They no longer belong to the model, so a step has no effect"
        raise ShardkitError(message(name, problem, rule, "Build the optimizer after shard_model"))
    gathered = gathered_parameters(_units)
    copies = [str(tuple(param.shape)) for param in params if param in gathered]
    if copies:
        problem = f"holds {len(copies)} gathered copies of parameters, of shapes {listing(copies, 5)}"
        rule = "The next all-gather overwrites them, so a step has no effect"
        fix = "Build the optimizer right after shard_model, or call model.reshard() before"
        raise ShardkitError(message(name, problem, rule, fix))
    sharded = ((str(index), param) for index, param in enumerate(params) if isinstance(param, DTensor))
    low = None if optimizer in _low_precision_allowed else low_precision_problem(sharded, name)
    if low:
        logger.warning(low)
