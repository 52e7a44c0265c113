"""One training step of a model on fake tensors, cut into intervals where FSDP2 gathers and frees.

Between two moments of a unit everything that comes and goes is the model's own: activations, temporaries, gradients. A
trace measures that once, for one rank's batch, without sharding anything. What the units themselves hold follows from
the plan and is added by :mod:`shardkit.memory.timeline`, so one trace serves every strategy.
"""

from __future__ import annotations

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
from shardkit.memory.repeats import Repeats
from shardkit.plan import ShardingPlan, ShardUnit
from shardkit.reach import undone

Loss: TypeAlias = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Trace:
    """What the model itself does in one forward and backward, for one rank's batch."""

    intervals: tuple[Interval, ...]  # in order
    grad_bytes: Mapping[str, int]  # of the unsharded gradients that each unit makes in its compute dtype, by its name
    batch_bytes: int  # of the batch's tensors
    other_grad_bytes: int = 0  # of the gradients of parameters without a unit, which stay as they are made

    @property
    def flops(self) -> int:
        """Floating-point operations of the step, those of recomputation among them."""
        return sum(interval.flops for interval in self.intervals)


def trace(
    model: nn.Module,
    plan: ShardingPlan,
    batch: Any,
    *,
    loss: Loss | None = None,
    checkpointed: Collection[str] | None = None,
    dedupe: bool = True,
) -> Trace:
    """Measure one forward and backward of ``model`` on fake tensors. Local; the model stays as it is.

    Args:
        model: not sharded, on any device, meta too.
        plan: whose units have the moments, and whose dtypes the model computes in.
        batch: one rank's micro-batch: a mapping of keyword arguments, a tuple of positional ones, or the only one.
            Shapes and dtypes count, values are not read.
        loss: from what forward returns to the loss; by default its ``loss``, else the mean of its first tensor. What
            forward returned is dropped before backward, as in ``model(**batch).loss.backward()``.
        checkpointed: names of the units to recompute in backward; by default those of the plan.
        dedupe: run two blocks of each kind and count the second's intervals for the rest.

    Raises:
        PlanError: the model is sharded already, is not the plan's, or does not run on fake tensors.
    """
    _check_plain(model)
    _check_plan(model, plan)
    chosen = {unit.name for unit in plan.units if unit.checkpoint_activations} if checkpointed is None else checkpointed
    result = _traced(model, plan, batch, loss or _default_loss, chosen, Repeats() if dedupe else None)
    if result is None:  # backward left a repeated block and came back to it
        result = _traced(model, plan, batch, loss or _default_loss, chosen, None)
    assert result is not None
    return result


def _check_plain(model: nn.Module) -> None:
    sharded = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    if sharded or any(isinstance(module, FSDPModule) for module in model.modules()):
        problem = f"is sharded already: {listing(sharded)}" if sharded else "is sharded already"
        rule = "Activations are measured on the plain model, without the hooks and shards of FSDP"
        raise PlanError(message("model", problem, rule, "Build it again on the meta device: init_on_meta()"))


def _check_plan(model: nn.Module, plan: ShardingPlan) -> None:
    params, modules = dict(model.named_parameters()), dict(model.named_modules())
    missing = [fqn for unit in plan.units for fqn in unit.params if fqn not in params]
    missing += [fqn for unit in plan.units for fqn in unit.modules if fqn not in modules]
    if missing:
        problem = f"names what the model does not have: {listing(missing)}"
        raise PlanError(message("plan", problem, "A plan is of the model that is traced", "Make it from this model"))


def mixed(kept: Trace, recomputed: Trace, names: Collection[str]) -> Trace:
    """The trace in which exactly the units of these names are recomputed, from those with none and with all. Pure."""
    if [(i.moment, i.unit) for i in kept.intervals] != [(i.moment, i.unit) for i in recomputed.intervals]:
        problem = "recomputing units changes the order in which units run"
        raise PlanError(
            message("checkpoint_activations", problem, "Two traces are mixed interval by interval", "Report this")
        )
    pairs = zip(kept.intervals, recomputed.intervals, strict=True)
    return replace(kept, intervals=tuple(two if one.unit in names else one for one, two in pairs))


def without_activations(plan: ShardingPlan) -> Trace:
    """The trace of a model that keeps nothing but gradients: what can be said without a batch. Pure."""
    root = next(unit for unit in plan.units if unit.modules == ("",))
    inner = [unit for unit in plan.execution_order() if unit is not root]
    grads = {unit.name: _unsharded_grad_bytes(plan, unit) for unit in plan.units}
    forward = [Interval(moment, unit.name) for unit in inner for moment in (FORWARD, AFTER_FORWARD)]
    forward = [Interval(FORWARD, root.name), *forward, Interval(AFTER_FORWARD, root.name)]
    backward = [Interval(BACKWARD, root.name, grads[root.name], grads[root.name])]
    for unit in reversed(inner):
        backward.append(Interval(BACKWARD, unit.name, grads[unit.name], grads[unit.name]))
        backward.append(Interval(AFTER_BACKWARD, unit.name))
    others = sum(plan.specs[fqn].nbytes for fqn in plan.unsharded if fqn in plan.specs and plan.specs[fqn].trainable)
    last = Interval(AFTER_BACKWARD, root.name, others, others)
    return Trace((*forward, *backward, last), grads, 0, others)


def _unsharded_grad_bytes(plan: ShardingPlan, unit: ShardUnit) -> int:
    """Bytes of the whole gradients of a unit, in the dtype it computes in."""
    compute = unit.mp_policy.param_dtype
    return sum(spec.numel * (compute or spec.dtype).itemsize for spec in plan.specs_of(unit) if spec.trainable)


def _traced(
    model: nn.Module, plan: ShardingPlan, batch: Any, loss: Loss, checkpointed: Collection[str], repeats: Repeats | None
) -> Trace | None:
    with fake_tensors(model, plan, batch) as (params, args, kwargs), IntervalMeter() as meter:
        inputs = tensors_of((args, kwargs))
        for tensor in (*model.parameters(), *model.buffers(), *inputs):
            meter.ignore(tensor)
        watched = []
        for unit in plan.units:
            modules = [model.get_submodule(fqn) for fqn in unit.modules]
            watched.append(WatchedUnit(unit, modules, [params[fqn] for fqn in unit.params], meter))
            for module in modules:
                forward = module.forward
                if unit.name in checkpointed:
                    forward = partial(checkpoint, forward, use_reentrant=False)
                if repeats is not None and len(modules) == 1 and unit.modules != ("",):
                    forward = repeats.wrap(unit.name, module, forward, unit.name in checkpointed)
                module.forward = forward  # undone with all else
        with _explained():
            loss(model(*args, **kwargs)).backward()  # type: ignore[no-untyped-call]
        for each in reversed(watched):  # the root first, as FSDP2's last callback goes through them
            each.after_backward()
        meter.close()
        intervals = meter.intervals if repeats is None else repeats.filled_in(meter.intervals)
        others = sum(param.grad.nbytes for param in params.values() if param.grad is not None)
        batch_bytes = sum(tensor.nbytes for tensor in inputs)
    grad_bytes = {each.unit.name: each.grad_bytes for each in watched}
    return None if intervals is None else Trace(tuple(intervals), grad_bytes, batch_bytes, others)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        problem = f"the model does not train on it with fake tensors: {type(error).__name__}: {error}"
        rule = "Activations are measured by one forward and backward on tensors that have shapes but no values"
        fix = "Pass a batch that the model accepts, loss=... for what forward returns, "
        fix += "or leave out the batch to count model states only"
        raise PlanError(message("batch", problem, rule, fix)) from error


def _default_loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    return tensors_of(output)[0].float().mean()


# Fake tensors in place of the model's own.


@contextmanager
def fake_tensors(
    model: nn.Module, plan: ShardingPlan, batch: Any
) -> Iterator[tuple[dict[str, nn.Parameter], tuple[Any, ...], Mapping[str, Any]]]:
    """Run the body on fake tensors; yields the fake parameters by FQN, and the arguments of a forward of ``batch``.

    Parameters have the dtype that their unit computes in, as FSDP2 unshards them. When the body ends, however it
    ends, the model has its own tensors back, and whatever else it did to the modules is undone.

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
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        for registry, name, tensor in list(_registered(model)):
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


def _registered(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Where tensors hang in a model: parameters, buffers, and plain attributes."""
    for module in model.modules():
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for registry in registries:
            yield from ((registry, name, value) for name, value in registry.items() if isinstance(value, Tensor))


def _faked(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="cpu").requires_grad_(value.requires_grad)
