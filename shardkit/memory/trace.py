"""Trace one training step of a model on fake tensors, split at the points where FSDP2's hooks gather and free units.

Everything allocated between two such points is the model's own: activations, temporaries, gradients. A trace measures
that once, for one rank's batch, without sharding anything. What the units hold follows from the plan and is added by
:mod:`shardkit.memory.timeline`, so one trace serves every strategy.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import CellType, FunctionType
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from shardkit._torch import real_tensors
from shardkit._torch.dispatch import FakeTensorMode
from shardkit.errors import PlanError, message
from shardkit.memory.hook_points import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    BACKWARD,
    FORWARD,
    Interval,
    IntervalMeter,
    WatchedUnit,
    tensors_of,
)
from shardkit.plan import ShardingPlan
from shardkit.tiles import in_tiles

Loss: TypeAlias = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Trace:
    """What the model itself allocates in one forward and backward, for one rank's batch."""

    intervals: tuple[Interval, ...]  # in order
    grad_bytes: Mapping[str, int]  # of each unit's unsharded gradients, in its compute dtype, by the unit's name
    batch_bytes: int  # of the batch's tensors
    other_grad_bytes: int = 0  # of gradients of parameters without a unit, which are not reduced into shards


def trace(
    model: nn.Module,
    plan: ShardingPlan,
    batch: Any,
    *,
    loss: Loss | None = None,
    checkpointed: Collection[str] | None = None,
    meter: IntervalMeter | None = None,
) -> Trace:
    """Measure one forward and backward of a copy of ``model`` on fake tensors. Local; the model is unchanged.

    Args:
        model: not sharded, on any device, meta too.
        plan: its units define the intervals, and the dtypes that the model computes in; its tiles are computed as such.
        batch: one rank's micro-batch: a mapping of keyword arguments, a tuple of positional ones, or the only one.
            Shapes and dtypes count, values are not read.
        loss: maps what forward returns to the loss; by default its ``loss``, else the mean of its first tensor. The
            output is dropped before backward, as in ``model(**batch).loss.backward()``.
        checkpointed: names of the units whose activations are checkpointed; by default those of the plan.
        meter: to measure with; a subclass may count more than bytes.

    Raises:
        PlanError: the model is sharded already, or does not run on fake tensors.
    """
    if any(isinstance(each, (DTensor, FSDPModule)) for each in (*model.parameters(), *model.modules())):
        rule = "Activations are measured on the plain model, without FSDP2's hooks and shards"
        raise PlanError(
            message("model", "is sharded already", rule, "Build it again on the meta device: init_on_meta()")
        )
    chosen = {unit.name for unit in plan.units if unit.checkpoint_activations} if checkpointed is None else checkpointed
    with fake_copy(model, plan, batch) as (copied, args, kwargs), meter or IntervalMeter() as meter:
        params, inputs = dict(copied.named_parameters()), tensors_of((args, kwargs))
        for tensor in (*params.values(), *copied.buffers(), *inputs):
            meter.ignore(tensor)
        for fqn, tiles in plan.tiles:
            module = copied.get_submodule(fqn)
            module.forward = in_tiles(module.forward, tiles, fqn)
        watched = []
        for unit in plan.units:
            modules = [copied.get_submodule(fqn) for fqn in unit.modules]
            watched.append(WatchedUnit(unit, modules, [params[fqn] for fqn in unit.params], meter))
            for module in modules if unit.name in chosen else ():
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        try:
            (loss or _default_loss)(copied(*args, **kwargs)).backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            problem = f"fails in forward or backward on fake tensors: {type(error).__name__}: {error}"
            rule = "Activations are measured by one forward and backward on tensors that have shapes but no values"
            fix = "Pass a batch that the model accepts, loss=... for what forward returns, "
            fix += "or leave out the batch to count model states only"
            raise PlanError(message("batch", problem, rule, fix)) from error
        for each in reversed(watched):  # the root first, in the order of FSDP2's final callback
            each.after_backward()
        meter.close()
        others = sum(param.grad.nbytes for param in params.values() if param.grad is not None)
        grads = {each.unit.name: each.grad_bytes for each in watched}
        return Trace(tuple(meter.intervals), grads, sum(tensor.nbytes for tensor in inputs), others)


def _default_loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else tensors_of(output)[0].float().mean()


def mixed(kept: Trace, checkpointed: Trace, names: Collection[str]) -> Trace | None:
    """Return the trace in which exactly the units of these names are checkpointed, from those with none and with all.

    None if checkpointing changes the order in which units run, as of a unit inside that blocks share.
    """
    if [(i.moment, i.unit) for i in kept.intervals] != [(i.moment, i.unit) for i in checkpointed.intervals]:
        return None
    pairs = zip(kept.intervals, checkpointed.intervals, strict=True)
    return replace(kept, intervals=tuple(two if one.unit in names else one for one, two in pairs))


def without_activations(plan: ShardingPlan) -> Trace:
    """Return the trace of a model that keeps only gradients: what is known without a batch."""
    root = next(unit for unit in plan.units if unit.modules == ("",))
    inner = [unit for unit in plan.execution_order() if unit is not root]
    grads = {}
    for unit in plan.units:  # unsharded, in the dtype that the unit computes in
        trained = [spec for spec in plan.specs_of(unit) if spec.trainable]
        grads[unit.name] = sum(spec.numel * (unit.mp_policy.param_dtype or spec.dtype).itemsize for spec in trained)
    forward = [Interval(moment, unit.name) for unit in inner for moment in (FORWARD, AFTER_FORWARD)]
    forward = [Interval(FORWARD, root.name), *forward, Interval(AFTER_FORWARD, root.name)]
    backward = [Interval(BACKWARD, root.name, grads[root.name], grads[root.name])]
    for unit in reversed(inner):
        backward.append(Interval(BACKWARD, unit.name, grads[unit.name], grads[unit.name]))
        backward.append(Interval(AFTER_BACKWARD, unit.name))
    others = sum(plan.specs[fqn].nbytes for fqn in plan.unsharded if fqn in plan.specs and plan.specs[fqn].trainable)
    return Trace((*forward, *backward, Interval(AFTER_BACKWARD, root.name, others, others)), grads, 0, others)


# A copy of the model on fake tensors.


@contextmanager
def fake_copy(
    model: nn.Module, plan: ShardingPlan, batch: Any
) -> Iterator[tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]]:
    """Run the body on a copy of the model with fake tensors; yield the copy, and the arguments of its forward.

    Parameters have the dtype that their unit computes in, as FSDP2 unshards them. The model itself does not run, so it
    keeps its caches, counters and gradients. What its functions keep elsewhere, as in globals, is not copied.

    Args:
        model: not sharded, on any device.
        plan: of the model.
        batch: a mapping of keyword arguments, a tuple or list of positional ones, or the only argument.
    """
    # transformers takes all fake positions for those of packed documents, and makes a mask of tokens by tokens. A batch
    # with positions may be packed; only shapes are read.
    masks, packs = sys.modules.get("transformers.masking_utils"), isinstance(batch, Mapping) and "position_ids" in batch
    unpacked = (
        patch.object(masks, "find_packed_sequence_indices", lambda _: None) if masks and not packs else nullcontext()
    )
    dtypes = {fqn: unit.mp_policy.param_dtype for unit in plan.units for fqn in unit.params}
    with torch.inference_mode(False), torch.enable_grad(), real_tensors():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            params = list(model.named_parameters())
            memo = {id(p): nn.Parameter(_faked(p, dtypes.get(fqn)), p.requires_grad) for fqn, p in params}
        with _FakeCopies(mode):
            copied = _copy_modules(model, memo)
        with mode, unpacked:
            if isinstance(batch, Mapping):
                yield copied, (), {name: _faked(value) for name, value in batch.items()}
            else:
                yield copied, tuple(map(_faked, batch if isinstance(batch, (tuple, list)) else (batch,))), {}


def _faked(value: Any, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=dtype or value.dtype, device="cpu").requires_grad_(value.requires_grad)


class _FakeCopies(TorchFunctionMode):
    """While active, ``copy.deepcopy`` of a tensor makes a fake one, also of a result of operators."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        with self._mode:
            return _faked(args[0])


def _copy_modules(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy with the copies that ``memo`` has by id; an attribute that cannot be copied is shared."""
    copies = {module: object.__new__(type(module)) for module in model.modules()}
    memo.update((id(module), copied) for module, copied in copies.items())
    for module, copied in copies.items():
        for name, value in vars(module).items():
            known = len(memo)
            try:
                vars(copied)[name] = _copied(value, memo)
            except Exception:  # locks, process groups, and whatever else refuses
                vars(copied)[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
                for key in list(memo)[known:]:  # parts of it, half copied
                    del memo[key]
        config: Any = vars(copied).get("config")
        if hasattr(config, "use_cache") and config is not vars(module)["config"]:
            config.use_cache = False  # transformers fills no cache in training, and checkpointed blocks must not
    return copies[model]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy, and of a function one with copies of its closure: it may wrap a module's own forward."""
    if not (isinstance(value, FunctionType) and value.__closure__):
        return copy.deepcopy(value, memo)
    cells = tuple(CellType(_copied(cell.cell_contents, memo)) for cell in value.__closure__)
    made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__ = value.__kwdefaults__
    return made
