"""Parameters and gradients as FSDP1's programs know them, which handle weights and gradients by hand.

Programs compute a norm as ``param.grad.norm() ** 2``, add those up, and all-reduce the result. On DTensors ``norm`` is
that of the whole gradient. They put averages (EMA) in place by ``param.data = other``: on a DTensor torch exchanges
what is below its surface, not the local tensor, so nothing changes and nothing is said (torch 2.11 to 2.15).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from shardkit._fsdp import own_parameters
from shardkit._fsdp.fsdp1 import first_after_accumulation, rebind
from shardkit._torch import layout_of, local_tensor, plain_attributes, tree_leaves, tree_map, with_local
from shardkit.errors import TranslationError, message
from shardkit.shards import local_part
from shardkit.state.routes import local_of

# Questions about all elements, by the name of the function, with the count of arguments besides the tensor that leave
# them so: one more is a dim, along which a DTensor answers.
QUESTIONS = {
    "norm": 1, "vector_norm": 1, "linalg_vector_norm": 1, "linalg_norm": 1, "_foreach_norm": 1, "dist": 2,
    "sum": 0, "nansum": 0, "mean": 0, "nanmean": 0, "prod": 0, "std": 0, "var": 0, "median": 0, "count_nonzero": 0,
    "max": 0, "min": 0, "amax": 0, "amin": 0, "argmax": 0, "argmin": 0, "any": 0, "all": 0,
    "equal": 1, "allclose": 3, "dot": 1, "vdot": 1, "histc": 3, "quantile": 1, "flatten": 0, "ravel": 0,
    "item": 0, "tolist": 0, "numpy": 0, "__array__": 1, "__float__": 0, "__int__": 0, "__bool__": 0,
}  # fmt: skip
SIZES = {"numel", "nelement", "size", "shape", "stride", "nbytes", "__len__"}
_EMPTY = {"max": -torch.inf, "amax": -torch.inf, "min": torch.inf, "amin": torch.inf}
_DIMS = ("dim", "axis", "start_dim", "end_dim")

# Besides those in place: element by element, so that a plain tensor beside it can only be meant element by element.
_ELEMENTWISE = {"add", "sub", "rsub", "mul", "div", "true_divide", "lerp", "maximum", "minimum", "equal", "allclose",
                "isclose", "eq", "ne", "lt", "le", "gt", "ge", "dist", "mse_loss", "l1_loss"}  # fmt: skip
_NOT_ELEMENTWISE = ("mm", "mv", "index", "scatter", "put", "addr", "set_", "resize")  # in names of those in place

MIXED = "got mixed torch.Tensor and DTensor"  # torch's error where a DTensor is used beside a plain tensor
_DATA: Any = Tensor.data

# From the id of a sharded parameter to the module whose unit it was in. No weak references to parameters: one of them
# and torch.utils.swap_tensors refuses, by which ``model.half()`` changes DTensors.
_owners: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


class Mixed(TranslationError, RuntimeError):
    """A RuntimeError too, as torch's."""


class Sharded(DTensor):
    """A DTensor that takes plain tensors beside it: of the whole's shape, its part of which counts, or the shard's.

    A parameter takes them where it is written to: ``param.copy_(full)`` works, which DTensors refuse. So does
    ``loss + param.pow(2).sum()``: the sum of a whole parameter beside a plain tensor is all-reduced. A parameter that
    every rank has whole, as under NO_SHARD, is plain beside plain tensors, and its gradient is averaged. What is
    computed from one is one again.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the function on the shard, or on DTensors."""
        kwargs = kwargs or {}
        with plain_attributes():
            if len(args) == 1 and type(args[0]) is Sharded and not kwargs:  # nothing is beside it: the fast path
                found = func(*args)
                return found if func.__name__ == "__get__" or found is args[0] else mark(found, cls)
            name = _name(func)
            leaves = tree_leaves((args, kwargs))
            like = next(each for each in leaves if isinstance(each, cls))
            if cls is ShardGrad and _asks(name, args, kwargs):
                return _asked(func, name, *tree_map(functools.partial(_local, like), (args, kwargs)))
            if not like.ndim and any(map(_is_plain, leaves)):
                return func(*tree_map(_whole, args), **tree_map(_whole, kwargs))
            # A buffer of the whole's shape, such as a momentum by hand, takes this rank's part of a gradient.
            is_split = cls is Sharded and _is_whole_target(name, args, like)
            places = _is_elementwise(name, args, leaves) and not is_split
            placed = [_placed(each, like) for each in args] if places else list(args)
            if any(map(_is_plain, tree_leaves((placed, kwargs)))) and _is_everywhere(like):
                args, kwargs = tree_map(_local_view, (args, kwargs))
                return func(*args, **kwargs)
            found = _on_dtensors(func, name, placed, kwargs, like)
            return args[0] if placed and found is placed[0] else mark(found, cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as a DTensor, which ``torch.load`` knows: state of an optimizer may begin as a gradient."""
        return _as_dtensor(self, local_tensor(self)).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """Return a copy with memory of its own; torch's own copies no subclass of DTensor."""
        copied: DTensor = _as_dtensor(self, local_tensor(self).detach().clone())
        copied.__class__ = type(self)
        memo[id(self)] = copied
        return copied


class ShardGrad(Sharded):
    """The shard of a gradient that this rank has, which knows where it lies.

    Its size, and what is asked of all its elements, are the shard's, as plain numbers and tensors, whoever asks. All
    else, such as ``full_tensor`` or sums along a dim, is as for a DTensor. Inside ``Optimizer.step`` parameters and
    gradients are DTensors (``as_dtensors``).
    """

    __slots__ = ()


def adopt(module: FSDPModule | None) -> None:
    """Makes the parameters of one module's unit ``Sharded``, and their gradients ``ShardGrad``s from now on. Local."""
    if not isinstance(module, nn.Module):
        return
    for param in own_parameters(module):
        _owners[id(param)] = module
        if type(mark(param, Sharded)) is Sharded and param.requires_grad:
            param.register_hook(functools.partial(_like_param, param.placements))
        if param.requires_grad:
            first_after_accumulation(param, show_shard)


def _like_param(placements: Any, grad: Any) -> Any:
    """Return what autograd adds to a sharded parameter's gradient: of a dim of size 1, torch 2.13 makes it whole."""
    is_placed = not isinstance(grad, DTensor) or grad.placements == placements
    return grad if is_placed else grad.redistribute(placements=placements)


def is_ours(tensor: object) -> bool:
    """Return whether it is a parameter of a drop-in model. Local, pure."""
    return _owner(tensor) is not None


def _owner(tensor: Any) -> nn.Module | None:
    owner = _owners.get(id(tensor))
    return owner if owner is not None and any(each is tensor for each in own_parameters(owner)) else None


def show_shard(param: Tensor) -> None:
    """Make the gradient of a parameter, if it is a DTensor with a sharded dimension, a ``ShardGrad``; in place."""
    if param.grad is not None:
        mark(param.grad, ShardGrad)


def mark(value: Any, kind: type[Sharded]) -> Any:
    """A DTensor with a sharded dimension, or a sum of one, as one of that kind, in place; other things as they are."""
    if type(value) is not DTensor:
        return value
    is_sum = kind is Sharded and (not value.ndim or any(each.is_partial() for each in value.placements))
    if is_sum or any(isinstance(each, Shard) for each in value.placements):
        value.__class__ = kind
    return value


def as_dtensors(params: Iterable[Tensor]) -> list[tuple[Tensor, type]]:
    """Make parameters and their gradients plain DTensors, and return what they were, for ``as_before``. Local."""
    with plain_attributes():
        tensors = [each for param in params for each in (param, param.grad)]
    found: list[Any] = [(each, type(each)) for each in tensors if type(each) in (Sharded, ShardGrad)]
    for each, _ in found:
        each.__class__ = DTensor
    return found


def as_before(tensors: Iterable[tuple[Any, type]]) -> None:
    """Undo ``as_dtensors``."""
    for each, kind in tensors:
        each.__class__ = kind


# ``param.data``, and what stands for ``DTensor.data`` while there are drop-in models; other DTensors are as before.


def _get_data(tensor: Any) -> Tensor:
    found: Tensor = _DATA.__get__(tensor)
    return mark(found, Sharded) if is_ours(tensor) else found


def _set_data(tensor: Any, value: Tensor) -> None:
    owner = _owner(tensor)
    if owner is None and not isinstance(tensor, ShardGrad):
        _DATA.__set__(tensor, value)
        return
    whole = layout_of(tensor).shape
    if not isinstance(value, DTensor) or (layout_of(value).shape, value.dtype) != (whole, tensor.dtype):
        problem = f"{type(value).__name__} of {value.dtype}, {tuple(value.shape)}, for {tuple(whole)}"
        rule = "A sharded parameter or gradient takes a DTensor of its own shape, dtype and placements"
        fix = "Use param.data.copy_(...), or write to the parameters in FSDP.summon_full_params(model)"
        raise TranslationError(message("param.data = ...", problem, rule, fix))
    placed = value if value.placements == tensor.placements else value.redistribute(placements=tensor.placements)
    rebind(owner, tensor, local_of(placed))


DATA = property(_get_data, _set_data)


def whole_norms(get_total_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.nn.utils.get_total_norm`` that takes ShardGrads for the whole gradients, also beside plain ones.

    Its result is plain, and the same on every rank. Collective where there are any.
    """

    @functools.wraps(get_total_norm)
    def total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        each = [tensors] if isinstance(tensors, Tensor) else tensors
        return get_total_norm([_whole_norm(grad, norm_type) for grad in each], norm_type, *args, **kwargs)

    return total_norm


@torch.no_grad()
def _whole_norm(grad: Tensor, norm_type: float) -> Tensor:
    """Of a ShardGrad its norm, which stands for it in a norm of norms; any other tensor itself."""
    if not isinstance(grad, ShardGrad):
        return grad
    norm: Any = torch.linalg.vector_norm(with_local(grad, local_tensor(grad)), norm_type)
    return norm.full_tensor()  # type: ignore[no-any-return]


# What a function is asked.


def _name(func: Any) -> str:
    """Of a function, or of the attribute whose getter or setter it is."""
    name = getattr(func, "__name__", "")
    return str(getattr(func.__self__, "__name__", "")) if name in ("__get__", "__set__") else str(name)


def _is_elementwise(name: str, args: tuple[Any, ...], leaves: list[Any]) -> bool:
    """Return whether plain tensors are meant element by element. Beside a parameter they are if it is written to only.

    A batch may have a parameter's shape by chance, in a method that is called besides forward.
    """
    in_place = name.endswith("_") and not name.endswith("__") and not any(each in name for each in _NOT_ELEMENTWISE)
    if any(isinstance(each, DTensor) and isinstance(each, nn.Parameter) for each in leaves):
        return in_place and isinstance(args[0], DTensor)
    return in_place or name.strip("_") in _ELEMENTWISE or name.strip("_")[1:] in _ELEMENTWISE  # __radd__, __iadd__


def _is_whole_target(name: str, args: tuple[Any, ...], like: DTensor) -> bool:
    """Return whether a plain tensor of the whole's shape is written to, of which each rank would write its part."""
    is_written = name.endswith("_") or name.startswith("__i")  # __iadd__
    target: Any = args[0] if args else None
    return is_written and _is_plain(target) and target.shape == like.shape and not _is_everywhere(like)


def _asks(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function is about the size, or all elements, of the tensor."""
    if name in ("view", "reshape"):
        return args[1:] in ((-1,), ((-1,),), ([-1],))
    if name == "tensordot":  # of all dims, as optimizers log the cosine of two updates
        return bool(kwargs.get("dims", args[2] if len(args) > 2 else 2) == args[0].ndim)
    along = any(kwargs.get(each) is not None for each in _DIMS)
    return name in SIZES or (len(args) <= QUESTIONS.get(name, -1) + 1 and not along)


def _asked(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    if name in _EMPTY and args and not args[0].numel():  # nothing is here of it, which torch refuses
        return args[0].new_full((), _EMPTY[name])
    return func(*args, **kwargs)


def _on_dtensors(func: Callable[..., Any], name: str, args: list[Any], kwargs: dict[str, Any], like: DTensor) -> Any:
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if MIXED not in str(error):
            raise
        plain = list(filter(_is_plain, tree_leaves(args)))
        problem = f"a plain tensor of shape {tuple(plain[0].shape) if plain else '?'} beside a sharded one"
        rule = f"Element by element it has the shape of the whole, {tuple(like.shape)}, or of this rank's shard"
        fix = "Make it by torch.zeros_like(param), or the like, or compute with param.full_tensor()"
        raise Mixed(message(name, problem, rule, fix)) from error


def _local(like: DTensor, value: Any) -> Any:
    """Return the shard of a DTensor, or of a plain tensor of the whole's shape."""
    if isinstance(value, DTensor):
        return local_tensor(value)
    return local_part(value, like) if isinstance(value, Tensor) and value.shape == like.shape else value


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _is_everywhere(tensor: DTensor) -> bool:
    """Return whether every rank has all of it."""
    mesh = tensor.device_mesh
    return all(each.is_replicate() or mesh.size(dim) == 1 for dim, each in enumerate(tensor.placements))


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _placed(value: Any, like: DTensor) -> Any:
    """Return a plain tensor of the whole's shape, or of the shard's, as a DTensor; anything else as it is."""
    is_trained = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
    if not _is_plain(value) or is_trained or not value.ndim:  # a gradient would not reach it
        return value
    local = _local(like, value)
    if local.shape != local_tensor(like).shape:
        return value
    similar: Any = like if local.dtype == like.dtype else torch.empty_like(like, dtype=local.dtype)
    return with_local(similar, local)


def _as_dtensor(tensor: Any, local: Tensor) -> Any:
    """Return a plain DTensor of another local tensor, a parameter where ``tensor`` is one."""
    found = with_local(tensor, local)
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def _local_view(value: Any) -> Any:
    return _LocalView.apply(value) if isinstance(value, DTensor) else value  # type: ignore[no-untyped-call]


class _LocalView(Function):
    """A tensor that every rank has whole as a plain one; its gradient is averaged over the ranks. Collective there."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        """Return a view of it."""
        ctx.tensor = tensor
        local: Tensor = tensor.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        """Return the mean, placed like the tensor."""
        grad = grad.contiguous()
        for group in ctx.tensor.device_mesh.get_all_groups():
            dist.all_reduce(grad, group=group)
        return with_local(ctx.tensor, grad / ctx.tensor.device_mesh.size())
