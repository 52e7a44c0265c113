"""Parameters and gradients of the drop-in: DTensors that raise where a program's arithmetic by hand would go wrong.

Programs cast ``param.data`` for an optimizer step and back; on a DTensor torch exchanges nothing, without an error.
Programs add up ``grad.norm() ** 2`` and all-reduce the sum; on a DTensor the square is that of the full gradient
already, on every rank (torch 2.13 to 2.15).
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shardkit._fsdp import not_compiled, own_parameters
from shardkit._fsdp.fsdp1 import optimizers_in_backward, set_local
from shardkit._torch import local_tensor, plain_attributes, with_local
from shardkit._torch.dispatch import tree_leaves
from shardkit.errors import TranslationError, message

_DATA: Any = Tensor.data
# By id: the parameters that a program has exchanged for another dtype, each with the shard that FSDP2 gathers from.
_exchanged: dict[int, tuple[Tensor, Tensor]] = {}
_stepping = False  # gradients are plain DTensors inside of optimizer steps

# What may be asked of a sum over this rank's shard alone, such as ``grad.norm()``.
_READS = {
    "__get__",
    "item",
    "tolist",
    "__float__",
    "__int__",
    "__bool__",
    "__repr__",
    "__str__",
    "__format__",
}
_READS |= {"detach", "clone", "to", "float", "double", "cpu"}


class _Shard(DTensor):
    """What both classes below need: torch copies and saves no subclass of DTensor."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save as a DTensor, which ``torch.load`` knows."""
        return _plain(self, local_tensor(self)).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """Return a DTensor, or a parameter, with memory of its own."""
        with plain_attributes():
            copied: DTensor = _plain(self, local_tensor(self).detach().clone())
            memo[id(self)] = copied
            vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


class Sharded(_Shard):
    """A sharded parameter, whose ``data`` can be exchanged for another dtype, as for an optimizer step, and back."""

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        """Return the values as a DTensor in the same memory."""
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        _exchange(self, value)


class Gradient(_Shard):
    """A gradient that is sharded: a DTensor, but for sums and norms.

    ``grad.norm().item()`` is of this rank's shard, as on FSDP1. Other arithmetic with such a number raises: torch would
    first reduce it over all ranks.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute as for DTensors."""
        name = getattr(func, "__name__", "")
        with plain_attributes():
            leaves = [leaf for leaf in tree_leaves(args) if type(leaf) is Gradient] if name not in _READS else []
            if any(not leaf.ndim and any(place.is_partial() for place in leaf.placements) for leaf in leaves):
                raise _reduced(name)
            found = func(*args, **(kwargs or {}))
            for each in found if isinstance(found, (list, tuple)) else (found,):
                if type(each) is DTensor:
                    each.__class__ = Gradient
                    is_number = each.dtype != torch.bool  # torch 2.14 reduces isfinite(grad).all() over all ranks
                    if leaves and is_number and all(place.is_replicate() for place in each.placements):
                        raise _reduced(name)  # such as of torch.cat: it gathered the gradients
            return found

    @property
    def data(self) -> Tensor:
        """Return the values as a DTensor in the same memory."""
        with plain_attributes():
            return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        rule = "torch does not exchange the values of a DTensor"
        raise TranslationError(message("grad.data", "cannot be assigned", rule, "Assign param.grad itself"))


def _reduced(name: str) -> TranslationError:
    problem = "computes with numbers of all ranks, where FSDP1 had those of one rank's part of a gradient"
    rule = "torch gathers or reduces a DTensor before it computes with it"
    fix = "Use model.clip_grad_norm_(...), or call .item() first: grad.norm().item() ** 2"
    return TranslationError(message(f"{name}()", problem, rule, fix))


def _plain(tensor: Any, local: Tensor) -> Any:
    found = with_local(tensor, local)
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def adopt(module: nn.Module) -> None:
    """Make the parameters of one module's units ``Sharded``, and their gradients ``Gradient`` from now on. Local."""
    params: list[Any] = own_parameters(module)
    for param in params:
        if type(param) is DTensor:
            param.__class__ = Sharded
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_mark)


def _mark(param: Any) -> None:
    if optimizers_in_backward(param):
        rule = "FSDP2 does not step such optimizers, so nothing would train"
        fix = "Call shardkit.optimizer_in_backward(model, factory) after wrapping instead"
        raise TranslationError(message("_apply_optimizer_in_backward", "was called on the parameters", rule, fix))
    grad = param.grad
    if type(grad) is DTensor and not _stepping:
        mesh = grad.device_mesh
        if any(isinstance(place, Shard) and mesh.size(axis) > 1 for axis, place in enumerate(grad.placements)):
            grad.__class__ = Gradient


def as_dtensors(params: Iterable[Any], stepping: bool | None = None) -> None:
    """Make gradients plain DTensors; a step says that those which its closure makes are too. Local."""
    global _stepping
    _stepping = _stepping if stepping is None else stepping
    for param in params:
        if type(param.grad) is Gradient:
            param.grad.__class__ = DTensor  # type: ignore[assignment]


def as_gradients(params: Iterable[Any]) -> None:
    """Undo ``as_dtensors``."""
    global _stepping
    _stepping = False
    for param in params:
        if type(param) is Sharded:
            _mark(param)


@torch.no_grad()
def _exchange(param: Any, value: Any) -> None:
    """Let a parameter have the values of a DTensor of another dtype; the way back copies them into its own shard."""
    own = _exchanged.get(id(param), (param, local_tensor(param)))[1]
    is_alike = isinstance(value, DTensor) and (value.shape, value.placements) == (
        param.shape,
        param.placements,
    )
    if is_alike and value.dtype == param.dtype and _memory(local_tensor(value)) == _memory(local_tensor(param)):
        return
    if not is_alike or value.dtype == param.dtype:
        problem = f"cannot be assigned a {type(value).__name__} of {value.dtype} and shape {tuple(value.shape)}"
        rule = "It can take another dtype and its own again, as for an optimizer step, but no other values"
        fix = "Use param.data.copy_(...), or write to the parameters in FSDP.summon_full_params(model)"
        raise TranslationError(message("param.data", problem, rule, fix))
    if value.dtype != own.dtype:
        _exchanged[id(param)] = param, own
        set_local(param, value, local_tensor(value))
        return
    if _memory(local_tensor(value)) != _memory(own):
        own.copy_(local_tensor(value))
    set_local(param, value, own)
    del _exchanged[id(param)]


@not_compiled
def check_own_dtype(model: nn.Module, args: object) -> None:
    """Before a forward, which would not use them: raise for parameters exchanged for another dtype."""
    for name, param in model.named_parameters() if _exchanged else ():
        if id(param) in _exchanged:
            rule = "The forward gathers the values in the parameter's own dtype"
            fix = "Assign param.data in the old dtype again after the step, or cast the model before FSDP(...)"
            raise TranslationError(message(f"data of {name}", "is in another dtype", rule, fix))


def _memory(local: Tensor) -> int:
    return local.untyped_storage().data_ptr()  # a padded shard without elements has a storage


def whole_norms(get_total_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return torch's ``get_total_norm``, which for our gradients returns the full norm, plain. Collective."""

    @functools.wraps(get_total_norm)
    def total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not any(type(grad) is Gradient for grad in grads):
            return get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
        alike: defaultdict[Any, list[Tensor]] = defaultdict(list)
        with plain_attributes():
            for grad in grads:
                where = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
                alike[where].append(with_local(grad, local_tensor(grad)) if isinstance(grad, DTensor) else grad)
        norms: list[Any] = [get_total_norm(each, norm_type, False, foreach) for each in alike.values()]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        return get_total_norm(whole, norm_type, error_if_nonfinite)  # the norm of norms is the norm

    return total_norm
