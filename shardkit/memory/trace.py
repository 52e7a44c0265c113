"""Trace one training step of a model on fake tensors, split at the moments where FSDP2 gathers and frees units.

Everything allocated between two such moments is the model's own: activations, temporaries, gradients. A trace measures
that once, for one rank's batch, without sharding anything. What the units hold follows from the plan and is added by
:mod:`shardkit.memory.timeline`, so one trace serves every strategy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardkit._torch import FakeTensorMode, real_tensors
from shardkit.errors import PlanError, listing, message
from shardkit.memory.moments import (
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
from shardkit.reach import undone
from shardkit.tiles import in_tiles

Loss: TypeAlias = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Trace:
    """What the model itself allocates and computes in one forward and backward, for one rank's batch."""

    intervals: tuple[Interval, ...]  # in order
    grad_bytes: Mapping[str, int]  # of each unit's unsharded gradients, in its compute dtype, by the unit's name
    batch_bytes: int  # of the batch's tensors
    other_grad_bytes: int = 0  # of gradients of parameters without a unit, which are not reduced into shards

    @property
    def flops(self) -> int:
        """Floating-point operations of the step, including recomputation."""
        return sum(interval.flops for interval in self.intervals)


def trace(
    model: nn.Module,
    plan: ShardingPlan,
    batch: Any,
    *,
    loss: Loss | None = None,
    checkpointed: Collection[str] | None = None,
) -> Trace:
    """Measure one forward and backward of ``model`` on fake tensors. Local; the model is unchanged afterwards.

    Args:
        model: not sharded, on any device, meta too.
        plan: its units define the moments, and the dtypes that the model computes in; its tiles are computed as such.
        batch: one rank's micro-batch: a mapping of keyword arguments, a tuple of positional ones, or the only one.
            Shapes and dtypes count, values are not read.
        loss: maps what forward returns to the loss; by default its ``loss``, else the mean of its first tensor. The
            output is dropped before backward, as in ``model(**batch).loss.backward()``.
        checkpointed: names of the units to recompute in backward; by default those of the plan.

    Raises:
        PlanError: the model is sharded already, does not match the plan, or does not run on fake tensors.
    """
    _check(model, plan)
    chosen = {unit.name for unit in plan.units if unit.checkpoint_activations} if checkpointed is None else checkpointed
    with fake_tensors(model, plan, batch) as (params, args, kwargs), IntervalMeter() as meter:
        inputs = tensors_of((args, kwargs))
        for tensor in (*model.parameters(), *model.buffers(), *inputs):
            meter.ignore(tensor)
        for fqn, tiles in plan.tiles:
            module = model.get_submodule(fqn)  # restored with everything else
            module.forward = in_tiles(module.forward, tiles, fqn)
        watched = []
        for unit in plan.units:
            modules = [model.get_submodule(fqn) for fqn in unit.modules]
            watched.append(WatchedUnit(unit, modules, [params[fqn] for fqn in unit.params], meter))
            if unit.name in chosen:
                for module in modules:
                    module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        try:
            (loss or _default_loss)(model(*args, **kwargs)).backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            problem = f"forward or backward fails on fake tensors: {type(error).__name__}: {error}"
            rule = "Activations are measured by one forward and backward on tensors that have shapes but no values"
            fix = "Pass a batch that the model accepts, loss=... for what forward returns, "
            fix += "or leave out the batch to count model states only"
            raise PlanError(message("batch", problem, rule, fix)) from error
        for each in reversed(watched):  # the root first, in the order of FSDP2's final callback
            each.after_backward()
        meter.close()
        others = sum(param.grad.nbytes for param in params.values() if param.grad is not None)
        batch_bytes = sum(tensor.nbytes for tensor in inputs)
    return Trace(tuple(meter.intervals), {each.unit.name: each.grad_bytes for each in watched}, batch_bytes, others)


def _check(model: nn.Module, plan: ShardingPlan) -> None:
    params, modules = dict(model.named_parameters()), dict(model.named_modules())
    sharded = [name for name, param in params.items() if isinstance(param, DTensor)]
    if sharded or any(isinstance(module, FSDPModule) for module in modules.values()):
        problem = f"is sharded already: {listing(sharded)}" if sharded else "is sharded already"
        rule = "Activations are measured on the plain model, without FSDP2's hooks and shards"
        raise PlanError(message("model", problem, rule, "Build it again on the meta device: init_on_meta()"))
    missing = [fqn for unit in plan.units for fqn in unit.params if fqn not in params]
    missing += [fqn for unit in plan.units for fqn in unit.modules if fqn not in modules]
    missing += [fqn for fqn, _ in plan.tiles if fqn not in modules]
    if missing:
        problem = f"names modules or parameters that the model does not have: {listing(missing)}"
        raise PlanError(
            message("plan", problem, "The plan must be made for the model that is traced", "Make it with plan_model")
        )


def _default_loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else tensors_of(output)[0].float().mean()


def mixed(kept: Trace, recomputed: Trace, names: Collection[str]) -> Trace | None:
    """Return the trace in which exactly the units of these names are recomputed, from those with none and with all.

    None if recomputing changes the order in which units run, as of a unit inside that blocks share.
    """
    if [(i.moment, i.unit) for i in kept.intervals] != [(i.moment, i.unit) for i in recomputed.intervals]:
        return None
    pairs = zip(kept.intervals, recomputed.intervals, strict=True)
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
    last = Interval(AFTER_BACKWARD, root.name, others, others)
    return Trace((*forward, *backward, last), grads, 0, others)


# Fake tensors in place of the model's own.


@contextmanager
def fake_tensors(
    model: nn.Module, plan: ShardingPlan, batch: Any
) -> Iterator[tuple[dict[str, nn.Parameter], tuple[Any, ...], Mapping[str, Any]]]:
    """Run the body with fake tensors in the model; yield the fake parameters by FQN, and forward's arguments.

    Parameters have the dtype that their unit computes in, as FSDP2 unshards them. When the body ends, also by an error,
    the model has its own tensors back, and whatever else the body did to the modules is undone.

    Args:
        model: not sharded.
        plan: of the model.
        batch: a mapping of keyword arguments, a tuple or list of positional ones, or the only argument.
    """
    dtypes = {fqn: unit.mp_policy.param_dtype for unit in plan.units for fqn in unit.params}
    names = {id(param): name for name, param in model.named_parameters()}
    fakes: dict[int, Tensor] = {}
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        real_tensors(),
        undone(model),
        _unpacked(batch),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        # Parameters, buffers, and plain attributes.
        registries: list[dict[str, Any]] = [
            each for module in model.modules() for each in (module._parameters, module._buffers, vars(module))
        ]
        for registry in registries:
            for name, tensor in [(name, each) for name, each in registry.items() if isinstance(each, Tensor)]:
                fqn = names.get(id(tensor), "")
                if id(tensor) not in fakes:
                    value = torch.empty(tensor.shape, dtype=dtypes.get(fqn) or tensor.dtype, device="cpu")
                    fakes[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if fqn else value
                registry[name] = fakes[id(tensor)]
        params: dict[str, Any] = {name: fakes[key] for key, name in names.items()}
        if isinstance(batch, Mapping):
            yield params, (), {name: _faked(value) for name, value in batch.items()}
        else:
            yield params, tuple(map(_faked, batch if isinstance(batch, (tuple, list)) else (batch,))), {}


@contextmanager
def _unpacked(batch: Any) -> Iterator[None]:
    """Keep transformers from a mask of tokens by tokens for packed documents, which it takes all fake positions for."""
    module, name = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    original = getattr(module, name, None)
    # A batch with positions may be packed; only shapes are read.
    if original is None or (isinstance(batch, Mapping) and "position_ids" in batch):
        yield
        return
    setattr(module, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(module, name, original)


def _faked(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="cpu").requires_grad_(value.requires_grad)
