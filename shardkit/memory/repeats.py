"""Repeated blocks: two of each kind run, the others only pretend to, and the second's intervals count for them.

A 70B model has 80 blocks that do the same; running them all on fake tensors would take most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardkit._torch import saves_through_hooks, tree_leaves, tree_map
from shardkit.memory.moments import BACKWARD, FORWARD, Interval, tensors_of

# Attributes that number the blocks of a model and so differ between equal ones.
_NUMBERING = {"layer_idx", "layer_id", "layer_number", "layer_index", "idx", "index", "block_idx"}


@dataclass(frozen=True)
class _Spec:
    """A tensor that an output had: a new one of that shape, or the input at that place among the tensors."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    same_as_input: int | None


@dataclass
class _Kind:
    """Units that do the same. Two of them really run: the input of the first may be held by who made it."""

    units: list[str] = field(default_factory=list)
    output: Any = None  # of the second, with _Spec in place of tensors
    keeps: tuple[bool, ...] = ()  # which of its input tensors the second keeps for backward


class Repeats:
    """Knows the kinds of blocks that have run, and which units are copies of which."""

    def __init__(self) -> None:
        self._kinds: dict[Any, _Kind] = {}
        self._copies: dict[str, str] = {}

    def wrap(self, unit: str, module: nn.Module, forward: Callable[..., Any], recomputed: bool) -> Callable[..., Any]:
        """``forward`` of the module of a unit, or what pretends to be it where two units of the same kind have run.

        Where it is ``recomputed``, which ``forward`` does already, backward runs it again, so all its inputs are kept.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            inputs = tensors_of((args, kwargs))
            kind = self._kinds.setdefault((_kind_of(module), _arguments((args, kwargs)), recomputed), _Kind())
            if unit not in kind.units:
                kind.units.append(unit)
            if unit in kind.units[:2]:
                if saves_through_hooks():  # in the model's own checkpoint, which holds what it needs
                    output, saved = forward(*args, **kwargs), set()
                else:
                    with _saved_storages() as saved:
                        output = forward(*args, **kwargs)
                kind.output = _template(output, inputs)
                kind.keeps = tuple(recomputed or id(each.untyped_storage()) in saved for each in inputs)
                return output
            self._copies[unit] = kind.units[1]
            return _pretend(kind, inputs, list(module.parameters()))

        return run

    def filled_in(self, intervals: Sequence[Interval]) -> list[Interval] | None:
        """The intervals with those of copies replaced; None where a block's own was cut by another unit's moment."""
        originals = {(each.moment, each.unit): each for each in reversed(intervals)}
        involved = {*self._copies, *self._copies.values()}
        result = []
        for interval, following in zip(intervals, [*intervals[1:], None], strict=True):
            if interval.unit in involved and interval.moment in (FORWARD, BACKWARD):
                if following is None or following.unit != interval.unit:
                    return None
                original = originals.get((interval.moment, self._copies.get(interval.unit, interval.unit)))
                if original is None:
                    return None
                interval = replace(original, unit=interval.unit)
            result.append(interval)
        return result


def _kind_of(module: nn.Module) -> Any:
    """Equal for modules that do the same: classes, settings and parameters throughout."""

    def describe(each: nn.Module) -> Any:
        simple = (bool, int, float, str, torch.dtype, type(None))
        settings = [(k, v) for k, v in vars(each).items() if isinstance(v, simple) and k not in _NUMBERING]
        params = each.named_parameters(recurse=False)
        return type(each), *settings, *((n, p.shape, p.dtype, p.requires_grad) for n, p in params)

    return tuple(map(describe, module.modules()))


def _arguments(tree: Any) -> Any:
    def describe(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.shape, leaf.dtype, leaf.requires_grad
        return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)

    return tuple(map(describe, tree_leaves(tree)))


def _template(output: Any, inputs: list[Tensor]) -> Any:
    places = {id(tensor): place for place, tensor in enumerate(inputs)}

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return _Spec(leaf.shape, leaf.dtype, leaf.requires_grad, places.get(id(leaf)))

    return tree_map(spec, output)


@contextmanager
def _saved_storages() -> Iterator[set[int]]:
    """Ids of the storages that autograd keeps for backward of what runs in the body."""
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(id(tensor.untyped_storage()))
        return tensor.detach()  # an operator's own output, kept as it is, would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _pretend(kind: _Kind, inputs: list[Tensor], params: list[nn.Parameter]) -> Any:
    """An output like that of the kind, through which a backward reaches the inputs and parameters."""
    specs = [leaf for leaf in tree_leaves(kind.output) if isinstance(leaf, _Spec) and leaf.same_as_input is None]
    kept = [each for each, keeps in zip(inputs, kind.keeps, strict=True) if keeps]
    made = iter(_Pretence.apply(specs, kept, *inputs, *params))  # type: ignore[no-untyped-call]

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, _Spec):
            return leaf
        return next(made) if leaf.same_as_input is None else inputs[leaf.same_as_input]

    return tree_map(tensor, kind.output)


class _Pretence(torch.autograd.Function):
    """Outputs of given shapes; backward gives every input a gradient of its own shape."""

    @staticmethod
    def forward(ctx: Any, specs: list[_Spec], kept: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*kept)
        ctx.shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        made = [torch.empty(spec.shape, dtype=spec.dtype, device=tensors[0].device) for spec in specs]
        ctx.mark_non_differentiable(*(t for t, spec in zip(made, specs, strict=True) if not spec.requires_grad))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        wanted = zip(ctx.shapes, ctx.needs_input_grad[2:], strict=True)
        made = (torch.empty(shape, dtype=dtype, device=to) if want else None for (shape, dtype, to), want in wanted)
        return (None, None, *made)
