"""Parameters and gradients for programs that handle weights and gradients by hand, as they did on FSDP1.

Programs compute a norm as ``param.grad.norm() ** 2``, add those up, and all-reduce the result. On DTensors ``norm`` is
that of the full gradient. They put averages (EMA) in place by ``param.data = other``: on a DTensor torch does not
exchange the local tensor, so nothing changes, without an error (torch 2.11 to 2.15).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from shardkit._fsdp import own_parameters
from shardkit._fsdp.fsdp1 import READ_EACH_STEP, first_after_accumulation, gathered_parameters, rebind
from shardkit._torch import layout_of, local_tensor, plain_attributes, tree_leaves, tree_map, with_local
from shardkit.errors import TranslationError, message
from shardkit.fsdp1.dropin.errors import ShardedUse
from shardkit.shards import local_part
from shardkit.state.routes import local_of

# Functions of all elements, with the number of arguments after the tensor that they may have. One more is a dim, and
# then the result is a DTensor's.
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

# Element-wise functions besides the in-place ones.
_ELEMENTWISE = {"add", "sub", "rsub", "mul", "div", "true_divide", "lerp", "maximum", "minimum", "equal", "allclose",
                "isclose", "eq", "ne", "lt", "le", "gt", "ge", "dist", "mse_loss", "l1_loss"}  # fmt: skip
# Parts of names of in-place functions that are not.
_NOT_ELEMENTWISE = ("mm", "mv", "index", "scatter", "put", "addr", "set_", "resize")

MIXED = "got mixed torch.Tensor and DTensor"  # torch's error where a DTensor is combined with a plain tensor
_DATA: Any = Tensor.data

# From the id of a sharded parameter to the module whose unit it was in. No weak references to parameters: one of them
# and torch.utils.swap_tensors refuses, by which ``model.half()`` changes DTensors.
_owners: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


class Sharded(DTensor):
    """A DTensor that can be combined with plain tensors of the full shape, of which it takes its part, or the shard's.

    A parameter takes them where it is written to: ``param.copy_(full)`` works, which DTensors refuse. So does
    ``loss + param.pow(2).sum()``: the sum of a full parameter is all-reduced. A parameter that is replicated, as under
    NO_SHARD, acts as a plain one, and its gradient is averaged. Results are ``Sharded`` too.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute on the shard, or on DTensors."""
        kwargs = kwargs or {}
        with plain_attributes():
            if len(args) == 1 and type(args[0]) is Sharded and not kwargs:  # the fast path
                found = func(*args)
                return found if func.__name__ == "__get__" or found is args[0] else mark(found, cls)
            is_set = getattr(func, "__name__", "") == "__set__"  # FSDP2 and zero_grad set each ``grad``
            if is_set and type(args[0]) is Sharded and not _is_plain(args[1]):
                return func(*args)
            name = _name(func)
            leaves = tree_leaves((args, kwargs))
            like = next(each for each in leaves if isinstance(each, cls))
            if cls is ShardGrad and _asks(name, args, kwargs):
                args, kwargs = tree_map(functools.partial(_local, like), (args, kwargs))
                if name in _EMPTY and args and not args[0].numel():  # an empty shard, which torch refuses
                    return args[0].new_full((), _EMPTY[name])
                return func(*args, **kwargs)
            if not like.ndim and any(map(_is_plain, leaves)):
                args, kwargs = tree_map(_full, (args, kwargs))
                return func(*args, **kwargs)
            # A buffer of the full shape, such as a momentum by hand, takes this rank's part of a gradient.
            is_refused = cls is Sharded and _writes_to_full(name, args, like)
            places = _is_elementwise(name, args, leaves) and not is_refused
            placed = [_placed(each, like) for each in args] if places else list(args)
            if any(map(_is_plain, tree_leaves((placed, kwargs)))) and _is_replicated(like):
                args, kwargs = tree_map(_local_view, (args, kwargs))
                return func(*args, **kwargs)
            found = _on_dtensors(func, name, placed, kwargs, like)
            return args[0] if placed and found is placed[0] else mark(found, cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save as a DTensor, which ``torch.load`` knows: an optimizer's state may begin as a gradient."""
        return _as_dtensor(self, local_tensor(self)).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """Return a copy with memory of its own; torch's copies no subclass of DTensor."""
        copied: DTensor = _as_dtensor(self, local_tensor(self).detach().clone())
        copied.__class__ = type(self)
        memo[id(self)] = copied
        return copied


def _read_plainly(name: str) -> Any:
    """Return an attribute for ``Sharded`` that is read without ``__torch_function__``, in a fifth of the time."""
    plain = getattr(DTensor, name)

    def read(self: Any) -> Any:
        with plain_attributes():
            return plain.__get__(self)

    def write(self: Any, value: Any) -> None:
        with plain_attributes() if not _is_plain(value) else nullcontext():
            plain.__set__(self, value)

    return property(read, write)


for _each in READ_EACH_STEP:
    setattr(Sharded, _each, _read_plainly(_each))


class ShardGrad(Sharded):
    """A gradient whose size, and functions of all its elements, are those of this rank's shard, as on FSDP1.

    All else, such as ``full_tensor`` or sums along a dim, is as for a DTensor. Inside ``Optimizer.step`` parameters and
    gradients are DTensors (``as_dtensors``).
    """

    __slots__ = ()


def adopt(module: FSDPModule | None) -> None:
    """Make the parameters of one module's unit ``Sharded``, and their gradients ``ShardGrad`` from now on. Local."""
    if not isinstance(module, nn.Module):
        return
    for param in own_parameters(module):
        _owners[id(param)] = module
        if type(mark(param, Sharded)) is Sharded and param.requires_grad:
            param.register_hook(functools.partial(_like_param, param.placements))
        if param.requires_grad:
            first_after_accumulation(param, show_shard)


def _like_param(placements: Any, grad: Any) -> Any:
    """Return a gradient placed like its parameter: torch 2.13 replicates that of a dim of size 1."""
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
    mark(param.grad, ShardGrad)


def mark(value: Any, kind: type[Sharded]) -> Any:
    """Make a DTensor with a sharded dim, or a sum of one, that kind, in place; return other values unchanged."""
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


# ``param.data``: ``DATA`` replaces ``DTensor.data`` while there are drop-in models; other DTensors are as before.


def _get_data(tensor: Any) -> Tensor:
    found: Tensor = _DATA.__get__(tensor)
    return mark(found, Sharded) if is_ours(tensor) else found


def _set_data(tensor: Any, value: Tensor) -> None:
    owner = _owner(tensor)
    if owner is None and not isinstance(tensor, ShardGrad):
        _DATA.__set__(tensor, value)
        return
    shape = layout_of(tensor).shape
    if not isinstance(value, DTensor) or (layout_of(value).shape, value.dtype) != (shape, tensor.dtype):
        problem = f"{type(value).__name__} of {value.dtype}, {tuple(value.shape)}, assigned to one of {tuple(shape)}"
        rule = "A sharded parameter or gradient takes a DTensor of its own shape, dtype and placements"
        fix = "Use param.data.copy_(...), or write to the parameters in FSDP.summon_full_params(model)"
        raise TranslationError(message("param.data = ...", problem, rule, fix))
    placed = value if value.placements == tensor.placements else value.redistribute(placements=tensor.placements)
    rebind(owner, tensor, local_of(placed))


DATA = property(_get_data, _set_data)


class Gathered(nn.Parameter):
    """A full parameter between forward and backward, when the module has it in the place of the sharded one."""

    @property
    def data(self) -> Tensor:
        """Return its values; raise a TranslationError where others are assigned, which resharding would drop."""
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        problem = "assigned while its unit is gathered, between forward and backward"
        rule = "Resharding drops the full parameter, and its values with it"
        fix = "Assign before forward or after backward, or to the parameters of model.named_parameters()"
        raise TranslationError(message("param.data", problem, rule, fix))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter, which no resharding drops."""
        copied: nn.Parameter = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        copied.__class__ = nn.Parameter
        return copied


def show_gathered(module: FSDPModule | None) -> list[Any]:
    """Make what one module's unit has gathered at present ``Gathered``, until ``show_plain``; return it. Local."""
    found: list[Any] = [] if module is None else gathered_parameters(module)
    plain = [param for param in found if type(param) in (nn.Parameter, Gathered)]  # no DTensor of 2D parallelism
    for param in plain:
        param.__class__ = Gathered
    return plain


def show_plain(params: list[Any]) -> None:
    """Make parameters ``nn.Parameter`` again, for a forward: the class that torch.compile knows. Local."""
    for param in params:
        param.__class__ = nn.Parameter


def whole_norms(get_total_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a ``torch.nn.utils.get_total_norm`` of the full gradients, sharded ones and plain ones. Collective.

    Its result is plain, and the same on every rank.
    """

    @functools.wraps(get_total_norm)
    def total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        each = [tensors] if isinstance(tensors, Tensor) else tensors
        with torch.no_grad():  # the norm of norms is the norm
            norms = [_norm(grad, norm_type) if isinstance(grad, ShardGrad) else grad for grad in each]
        return get_total_norm(norms, norm_type, *args, **kwargs)

    return total_norm


def _norm(grad: DTensor, norm_type: float) -> Tensor:
    norm: Any = torch.linalg.vector_norm(with_local(grad, local_tensor(grad)), norm_type)
    return norm.full_tensor()  # type: ignore[no-any-return]


# What a function does with its arguments.


def _name(func: Any) -> str:
    """Return the name of a function, or of the attribute whose getter or setter it is."""
    name = getattr(func, "__name__", "")
    return str(getattr(func.__self__, "__name__", "")) if name in ("__get__", "__set__") else str(name)


def _is_elementwise(name: str, args: tuple[Any, ...], leaves: list[Any]) -> bool:
    """Return whether plain tensors are combined element by element; with a parameter only if that is written to.

    In a method other than forward, a batch may have a parameter's shape by chance.
    """
    in_place = name.endswith("_") and not name.endswith("__") and not any(each in name for each in _NOT_ELEMENTWISE)
    if any(isinstance(each, DTensor) and isinstance(each, nn.Parameter) for each in leaves):
        return in_place and isinstance(args[0], DTensor)
    return in_place or name.strip("_") in _ELEMENTWISE or name.strip("_")[1:] in _ELEMENTWISE  # __radd__, __iadd__


def _writes_to_full(name: str, args: tuple[Any, ...], like: DTensor) -> bool:
    """Return whether a plain tensor of the full shape is written to, of which each rank would write its part only."""
    is_written = name.endswith("_") or name.startswith("__i")  # __iadd__
    target: Any = args[0] if args else None
    return is_written and _is_plain(target) and target.shape == like.shape and not _is_replicated(like)


def _asks(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function is of the tensor's size or of all its elements."""
    if name in ("view", "reshape"):
        return args[1:] in ((-1,), ((-1,),), ([-1],))
    if name == "tensordot":  # of all dims, as optimizers log the cosine of two updates
        return bool(kwargs.get("dims", args[2] if len(args) > 2 else 2) == args[0].ndim)
    along = any(kwargs.get(each) is not None for each in _DIMS)
    return name in SIZES or (len(args) <= QUESTIONS.get(name, -1) + 1 and not along)


def _on_dtensors(func: Callable[..., Any], name: str, args: list[Any], kwargs: dict[str, Any], like: DTensor) -> Any:
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if MIXED not in str(error):
            raise
        plain = list(filter(_is_plain, tree_leaves(args)))
        problem = f"a plain tensor of shape {tuple(plain[0].shape) if plain else '?'} is combined with a sharded one"
        rule = f"An element-wise operand has the full shape, {tuple(like.shape)}, or the shape of this rank's shard"
        fix = "Create it by torch.zeros_like(param), or compute with param.full_tensor()"
        raise ShardedUse(message(name, problem, rule, fix)) from error


def _local(like: DTensor, value: Any) -> Any:
    """Return the shard of a DTensor, or of a plain tensor of the full shape."""
    if isinstance(value, DTensor):
        return local_tensor(value)
    return local_part(value, like) if isinstance(value, Tensor) and value.shape == like.shape else value


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _is_replicated(tensor: DTensor) -> bool:
    """Return whether every rank has the full tensor."""
    mesh = tensor.device_mesh
    return all(each.is_replicate() or mesh.size(dim) == 1 for dim, each in enumerate(tensor.placements))


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _placed(value: Any, like: DTensor) -> Any:
    """Return a plain tensor of the full shape, or of the shard's, as a DTensor; anything else as it is."""
    is_trained = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
    if not _is_plain(value) or is_trained or not value.ndim:  # a gradient would not reach it
        return value
    local = _local(like, value)
    if local.shape != local_tensor(like).shape:
        return value
    similar: Any = like if local.dtype == like.dtype else torch.empty_like(like, dtype=local.dtype)
    return with_local(similar, local)


def _as_dtensor(tensor: Any, local: Tensor) -> Any:
    """Return a DTensor of another local tensor; a parameter where ``tensor`` is one."""
    found = with_local(tensor, local)
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def _local_view(value: Any) -> Any:
    return _LocalView.apply(value) if isinstance(value, DTensor) else value  # type: ignore[no-untyped-call]


class _LocalView(Function):
    """Return a replicated tensor as a plain one, whose gradient is averaged over the ranks. Collective in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        """Return a view of the local tensor."""
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
