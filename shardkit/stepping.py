"""What an optimizer that knows nothing of sharding is told: which parameters were replaced, which gradients wait.

An optimizer built before sharding holds parameters that are in no model any more, and one that steps while gradients
wait to be reduced has none to apply. Both would train nothing, without a word.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardkit._fsdp import FSDPUnit, fsdp_units
from shardkit._fsdp_gradients import around_backward, drop_unreduced_gradient, set_local, stand_in, unreduced
from shardkit._torch import local_tensor, version, with_local
from shardkit.errors import ShardkitError, listing, message

LOW_PRECISION = (torch.bfloat16, torch.float16)
logger = logging.getLogger("shardkit")

_replaced: Any = WeakIdKeyDictionary()  # the FQN of each parameter that sharding replaced and somebody still holds
_units: WeakSet[Any] = WeakSet()  # of the models that are watched
_known: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # how many of an optimizer's groups were looked at
_vouched: WeakSet[Optimizer] = WeakSet()  # those that may update in low precision
_waiting: WeakKeyDictionary[Any, list[_Shown]] = WeakKeyDictionary()  # by FSDP2's own FSDPParam


@contextmanager
def replacing(model: nn.Module) -> Iterator[None]:
    """In this context the model is sharded; optimizers that hold what it loses raise at their first step. Local.

    Nothing is kept alive: what nobody else holds is forgotten as FSDP2 frees it.
    """
    before: Any = WeakIdKeyDictionary()
    before.update({param: fqn for fqn, param in model.named_parameters()})
    yield
    now = set(model.parameters())
    _replaced.update({param: fqn for param, fqn in before.items() if param not in now})
    _known.clear()
    watch_gradients(model)


def watch_gradients(model: nn.Module) -> None:
    """Let ``zero_grad()``, the model's or an optimizer's, drop gradients that wait to be reduced. Local, idempotent.

    For any model sharded by ``fully_shard``. After a backward that does not reduce (``no_sync``,
    ``set_requires_gradient_sync(False)``) the ``.grad`` of a sharded parameter is a :class:`WaitingGradient`, without
    memory, until the next backward begins. If it was cleared by then, the gradient that waits is dropped. A step of
    an optimizer that holds such a parameter raises.
    """
    units = fsdp_units(model)
    if all(unit in _units for unit in units):
        return
    _units.update(units)
    around_backward(model, _unmark, _mark)
    _hook()


@functools.cache
def _hook() -> None:
    """Torch's own registry of what runs before any optimizer's step: entered once in a process."""
    register_optimizer_step_pre_hook(_before_step)


def allow_low_precision(optimizers: Iterable[Optimizer]) -> None:
    """No warning at their first step that parameters are updated in low precision."""
    _vouched.update(optimizers)


# Gradients that wait.


class WaitingGradient(DTensor):
    """Stands in ``.grad`` for a gradient that is not reduced yet. It can be cleared; any other use raises."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function where it clears, or asks for what is no value; else an error."""
        name = getattr(func, "__name__", "")
        if name in ("zero_", "_foreach_zero_"):
            for each in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                if isinstance(each, WaitingGradient):
                    each.become_zeros()
        elif name not in _VALUELESS:
            shapes = [tuple(each.shape) for each in args if isinstance(each, WaitingGradient)]
            raise _waiting_error(f"a gradient of shape {shapes[0]}" if shapes else "gradients", name)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def become_zeros(self) -> None:
        """What ``zero_grad(set_to_none=False)`` asks for: an ordinary gradient of zeros."""
        set_local(self, torch.zeros_like(local_tensor(self), memory_format=torch.contiguous_format))
        self.__class__ = DTensor  # type: ignore[assignment]


_VALUELESS = {
    "__get__", "__set__", "__hash__", "__repr__", "detach_", "requires_grad_", "dim", "size",
    "numel", "element_size", "stride", "is_floating_point", "is_complex", "__len__", "data_ptr", "__reduce_ex__",
}  # fmt: skip


def _waiting_error(what: str, use: str) -> ShardkitError:
    return ShardkitError(
        message(
            use,
            f"uses {what}, which this rank has accumulated and no rank has reduced yet",
            "Only a backward with gradient sync reduces gradients: the last micro-batch of a step, not those under "
            "accumulate(last=False), no_sync() or set_requires_gradient_sync(False)",
            "Run the last micro-batch with accumulate(model, last=True), or drop the gradients with zero_grad()",
        )
    )


def _mark(units: list[FSDPUnit]) -> None:
    """After a backward: put marks where a gradient waits."""
    for unit in units:
        for param in [] if unit.reduce_grads and unit.all_reduce_grads else unreduced(unit):
            whole = stand_in(param)
            shown = [param.sharded_param] if whole is None or unit.is_sharded else [param.sharded_param, whole]
            _waiting[param] = [_Shown(each, _put_mark(each) if each.grad is None else None) for each in shown]


class _Shown:
    """A parameter that the user sees while its gradient waits: sharded or, where it is kept, whole."""

    def __init__(self, param: Tensor, mark: Tensor | None) -> None:
        self.param = param
        self.mark = mark  # None: it had a gradient already
        self.version = None if mark is None else version(mark)

    def is_cleared(self) -> bool:
        """Whether somebody took the gradient away, or zeroed it."""
        return self.param.grad is None or (self.mark is not None and version(self.mark) != self.version)

    def unmark(self, cleared: bool) -> None:
        """Take the mark away, if it is there; a gradient too if it was cleared elsewhere. Zeros stay."""
        zeros = self.mark is not None and self.param.grad is self.mark and type(self.mark) is DTensor
        if not zeros and (cleared or self.param.grad is self.mark):
            self.param.grad = None


def _put_mark(param: Tensor) -> Tensor:
    if isinstance(param, DTensor):
        local = local_tensor(param)
        mark: Tensor = with_local(param, torch.zeros((), dtype=local.dtype, device=local.device).expand(local.shape))
        mark.__class__ = WaitingGradient
    else:  # adding to a sparse one makes a new one, should autograd get here before FSDP2 does
        empty: dict[str, Any] = {"size": param.shape, "dtype": param.dtype, "device": param.device}
        mark = torch.sparse_coo_tensor(**empty, check_invariants=False)
    param.grad = mark
    return mark


def _unmark(units: Iterable[FSDPUnit], *, cleared_alone: bool = False) -> None:
    """Before a backward: take the marks away, and drop what waits where somebody cleared them."""
    for unit, param in [(each, param) for each in units for param in each.fsdp_params] if _waiting else ():
        shown = _waiting.get(param, [])
        cleared = any(each.is_cleared() for each in shown)
        if cleared or not cleared_alone:
            _waiting.pop(param, None)
            for each in shown:
                each.unmark(cleared)
        if cleared:
            drop_unreduced_gradient(unit, param)


# Before an optimizer's step.


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Look at an optimizer before its first step, and whenever a gradient waits."""
    groups = optimizer.param_groups
    if _known.get(optimizer) != len(groups):
        _check_held([param for group in groups for param in group["params"]], optimizer)
        _known[optimizer] = len(groups)
    _unmark(_units, cleared_alone=True)
    held = {param for group in groups for param in group["params"]} if _waiting else set()
    shapes = [str(tuple(s.param.shape)) for shown in _waiting.values() for s in shown if s.param in held]
    if shapes:
        what = f"gradients of {len(shapes)} parameters, of shapes {listing(dict.fromkeys(shapes), 5)}"
        raise _waiting_error(what, f"{type(optimizer).__name__}.step()")


def _check_held(params: list[Tensor], optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    replaced = [_replaced[param] for param in params if param in _replaced]
    if replaced:
        problem = f"holds {len(replaced)} parameters that sharding has replaced: {listing(replaced)}"
        rule = "They are in no model any more, so a step has no effect"
        raise ShardkitError(message(name, problem, rule, "Build the optimizer after shard_model"))
    whole = {id(stand_in(param)) for unit in _units for param in unit.fsdp_params}
    copies = [str(tuple(param.shape)) for param in params if id(param) in whole]
    if copies:
        problem = f"holds {len(copies)} gathered copies of parameters, of shapes {listing(copies, 5)}"
        rule = "The next all-gather overwrites them, so a step has no effect"
        fix = "Build the optimizer right after shard_model, or call model.reshard() before"
        raise ShardkitError(message(name, problem, rule, fix))
    low = [param for param in params if param.dtype in LOW_PRECISION and param.requires_grad]
    if low and optimizer not in _vouched and any(isinstance(param, DTensor) for param in low):
        dtypes = listing(dict.fromkeys(str(param.dtype) for param in low))
        logger.warning(
            "%s updates %d parameters in %s without float32 masters: updates smaller than half a unit in the last "
            "place are lost. Load the model in float32 and compute in low precision with MixedPrecisionPolicy("
            "param_dtype=...), or call check_optimizer(optimizer, model, low_precision=True).",
            name, len(low), dtypes,
        )  # fmt: skip
