"""Gradients and ``param.data`` as FSDP1's programs know them: this rank's shard, whatever is asked of it.

Programs on FSDP1 compute a norm by hand as ``param.grad.norm() ** 2``, add those up, and all-reduce the result. On
DTensors ``norm`` is that of the whole gradient, a DTensor, which plain tensors and all-reduces do not take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shardkit._torch import local_tensor, plain_attributes, tree_leaves, tree_map, with_local
from shardkit.errors import TranslationError, message
from shardkit.shards import local_part

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

MIXED = "got mixed torch.Tensor and DTensor"  # torch's error where a DTensor is used beside a plain tensor


class Mixed(TranslationError, RuntimeError):
    """A RuntimeError too, as torch's."""


class Sharded(DTensor):
    """A DTensor that takes plain tensors beside it: of the whole's shape, its part of which counts, or the shard's.

    So ``param.data.copy_(full)`` works, which DTensors refuse. What is computed from one is one again.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function on the shard, or on DTensors."""
        kwargs = kwargs or {}
        with plain_attributes():
            like = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
            if cls is ShardGrad and _asks(_name(func), args, kwargs):
                return _asked(func, *tree_map(functools.partial(_local, like), (args, kwargs)))
            placed = [_placed(each, like) for each in args]
            found = _on_dtensors(func, placed, kwargs, like)
            return args[0] if placed and found is placed[0] else mark(found, cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as a DTensor, which ``torch.load`` knows: state of an optimizer may begin as a gradient."""
        return with_local(self, local_tensor(self)).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """A copy with memory of its own; torch's own copies no subclass of DTensor."""
        copied: DTensor = mark(with_local(self, local_tensor(self).clone()), type(self))
        memo[id(self)] = copied
        return copied


class ShardGrad(Sharded):
    """The shard of a gradient that this rank has, which knows where it lies.

    Its size, and what is asked of all its elements, are the shard's, as plain numbers and tensors, whoever asks. All
    else, such as ``full_tensor`` or sums along a dim, is as for a DTensor. Inside ``Optimizer.step`` gradients are
    DTensors (``as_dtensors``).
    """

    __slots__ = ()


def show_shard(param: Tensor) -> None:
    """Make the gradient of a parameter, if it is a DTensor with a sharded dimension, a ``ShardGrad``; in place."""
    if param.grad is not None:
        mark(param.grad, ShardGrad)


def as_dtensors(params: Iterable[Tensor]) -> list[Tensor]:
    """Make the parameters' gradients plain DTensors, and return those that were none, for ``as_shards``. Local."""
    with plain_attributes():
        grads = [param.grad for param in params]
    found: list[Any] = [grad for grad in grads if type(grad) is ShardGrad]
    for grad in found:
        grad.__class__ = DTensor
    return found


def as_shards(grads: Iterable[Tensor]) -> None:
    """Undo ``as_dtensors``."""
    for grad in grads:
        grad.__class__ = ShardGrad


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


def mark(value: Any, kind: type[Sharded]) -> Any:
    """A DTensor with a sharded dimension as one of that kind, in place; anything else as it is. Local."""
    if type(value) is DTensor and any(isinstance(each, Shard) for each in value.placements):
        value.__class__ = kind
    return value


def _name(func: Any) -> str:
    """Of a function, or of the attribute whose getter it is."""
    name = getattr(func, "__name__", "")
    return str(getattr(func.__self__, "__name__", "")) if name == "__get__" else str(name)


def _asks(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function is about the size, or all elements, of the tensor."""
    if name in ("view", "reshape"):
        return args[1:] in ((-1,), ((-1,),), ([-1],))
    if name == "tensordot":  # of all dims, as optimizers log the cosine of two updates
        return bool(kwargs.get("dims", args[2] if len(args) > 2 else 2) == args[0].ndim)
    along = any(kwargs.get(each) is not None for each in _DIMS)
    return name in SIZES or (len(args) <= QUESTIONS.get(name, -1) + 1 and not along)


def _asked(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if _name(func) in _EMPTY and args and not args[0].numel():  # nothing is here of it, which torch refuses
        return args[0].new_full((), _EMPTY[_name(func)])
    return func(*args, **kwargs)


def _on_dtensors(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], like: DTensor) -> Any:
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if MIXED not in str(error):
            raise
        shapes = [tuple(each.shape) for each in args if isinstance(each, Tensor) and not isinstance(each, DTensor)]
        problem = f"a plain tensor of shape {shapes[0] if shapes else '?'} beside a gradient or param.data"
        rule = f"It has the shape of the whole, {tuple(like.shape)}, or of this rank's shard"
        raise Mixed(message(_name(func), problem, rule, "Make it by torch.zeros_like(param), or the like")) from error


def _local(like: DTensor, value: Any) -> Any:
    """The shard of a DTensor, or of a plain tensor of the whole's shape."""
    if isinstance(value, DTensor):
        return local_tensor(value)
    return local_part(value, like) if isinstance(value, Tensor) and value.shape == like.shape else value


def _placed(value: Any, like: DTensor) -> Any:
    """A plain tensor of the whole's shape, or of the shard's, as a DTensor; anything else as it is."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not value.ndim:
        return value
    local = _local(like, value)
    if local.shape != local_tensor(like).shape:
        return value
    similar: Any = like if local.dtype == like.dtype else torch.empty_like(like, dtype=local.dtype)
    return with_local(similar, local)
