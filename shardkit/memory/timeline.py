"""What is alive on one rank through a training step: a trace of the model, and FSDP2's own buffers around it.

Replays what FSDP2 allocates and frees at each moment of each unit, in the order of ``FSDPParamGroup``,
``foreach_all_gather`` and ``foreach_reduce`` of torch 2.13. That is the CPU's order and so the caching allocator's;
streams do not matter to what is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardkit.memory.moments import AFTER_BACKWARD, AFTER_FORWARD, BACKWARD, FORWARD, START
from shardkit.memory.sizes import Optimizer, UnitBytes, unit_bytes
from shardkit.memory.trace import Trace
from shardkit.plan import ShardingPlan, ShardUnit

STEP = "optimizer step"


@dataclass(frozen=True)
class Point:
    """The most that is alive on one rank in one stretch of a step, in bytes.

    Attributes:
        moment: what begins the stretch: before or after a unit's forward or backward, or the optimizer's step.
        unit: the unit's name; empty for the start and the step.
        parameters: shards of the parameters, parameters that are not sharded, and buffers.
        gradients: of the shards; during the optimizer's step also of parameters that are not sharded.
        optimizer: state, and during the step temporaries.
        unsharded: parameters that are gathered.
        communication: buffers of all-gathers and reduce-scatters.
        activations: all that the model itself keeps and makes, unsharded gradients and the batch among it.
    """

    moment: str
    unit: str
    parameters: int
    gradients: int
    optimizer: int
    unsharded: int
    communication: int
    activations: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(getattr(self, category) for category in CATEGORIES)

    @property
    def where(self) -> str:
        """In words."""
        return f"{self.moment} of {self.unit}" if self.unit else self.moment


class Predicted(Protocol):
    """A prediction of one step: a row of an estimate, or the choice for a budget."""

    @property
    def timeline(self) -> Sequence[Point]:
        """Every stretch of the step, in order."""

    @property
    def peak(self) -> Point | None:
        """The stretch in which most is alive."""


CATEGORIES = ("parameters", "gradients", "optimizer", "unsharded", "communication", "activations")


@dataclass
class _Rank:
    """What FSDP2 holds on one rank right now."""

    plan: ShardingPlan
    sizes: dict[str, UnitBytes]
    optimizer: Optimizer
    parameters: int = 0
    gradients: int = 0
    states: int = 0
    activations: int = 0
    unsharded: dict[str, int] = field(default_factory=dict)
    gathers: dict[str, int] = field(default_factory=dict)  # flat buffers in flight or kept
    last_forward_gather: str | None = None
    reduce_input: int = 0
    held_reduced: int = 0  # buffers of all-reduces, which stay until backward ends
    ran: list[ShardUnit] = field(default_factory=list)  # in forward's order, for backward's prefetch

    def point(self, moment: str, unit: str, communication: int = 0, activations: int = 0, temporary: int = 0) -> Point:
        """What is alive, with that much more for a moment."""
        return Point(
            moment,
            unit,
            self.parameters,
            self.gradients,
            self.states + temporary,
            sum(self.unsharded.values()),
            sum(self.gathers.values()) + self.reduce_input + self.held_reduced + communication,
            self.activations + activations,
        )


def timeline(plan: ShardingPlan, trace: Trace, optimizer: Optimizer, buffers: int = 0) -> list[Point]:
    """Every stretch of one steady step of ``plan``, in order: the second step or a later one. Pure.

    Args:
        plan: whose units the trace has.
        trace: of the model with the plan's checkpointing.
        optimizer: what it keeps.
        buffers: bytes of the model's buffers.
    """
    rank = _rank(plan, trace, optimizer, buffers)
    units = {unit.name: unit for unit in plan.units}
    points: list[Point] = []
    for interval in trace.intervals:
        if interval.moment in _AT:
            points += _AT[interval.moment](rank, units[interval.unit], trace)
        points.append(rank.point(interval.moment, interval.unit, activations=interval.peak))
        rank.activations += interval.delta
    rank.reduce_input = rank.held_reduced = 0
    rank.gathers.clear()
    rank.gradients += trace.other_grad_bytes  # which the model itself made, so that they were activations until here
    rank.activations -= trace.other_grad_bytes
    temporary = 0 if optimizer.in_backward else round(optimizer.temporary * rank.gradients)
    points.append(rank.point(STEP, "", temporary=temporary))
    return points


def _rank(plan: ShardingPlan, trace: Trace, optimizer: Optimizer, buffers: int) -> _Rank:
    sizes = {unit.name: unit_bytes(plan, unit, optimizer) for unit in plan.units}
    here = [size for size in sizes.values() if not size.offloaded]
    whole = [plan.specs[fqn] for fqn in plan.unsharded if fqn in plan.specs]
    trained = [spec for spec in whole if spec.trainable]
    return _Rank(
        plan,
        sizes,
        optimizer,
        parameters=sum(size.shard for size in here) + sum(spec.nbytes for spec in whole) + buffers,
        states=sum(size.optimizer for size in here)
        + optimizer.state_bytes(sum(spec.numel for spec in trained), sum(spec.nbytes for spec in trained)),
        activations=trace.batch_bytes,
    )


def _forward(rank: _Rank, unit: ShardUnit, trace: Trace) -> Iterator[Point]:
    size = rank.sizes[unit.name]
    if unit.name not in rank.unsharded and size.unsharded:
        yield from _gather(rank, unit, FORWARD)
        if rank.last_forward_gather:
            rank.gathers.pop(rank.last_forward_gather, None)
        rank.unsharded[unit.name] = size.unsharded
        yield rank.point(FORWARD, unit.name)
        rank.last_forward_gather = unit.name  # kept until the next unit's copy-out, so that the two may overlap
        if rank.plan.mesh.shard_size == 1:
            rank.gathers.pop(unit.name, None)
    if rank.plan.prefetch:
        order = rank.plan.execution_order()
        ahead = order[order.index(unit) + 1 :][: rank.plan.prefetch]
        for each in ahead:
            yield from _gather(rank, each, FORWARD)


def _gather(rank: _Rank, unit: ShardUnit, moment: str) -> Iterator[Point]:
    """The flat buffer of a unit's all-gather, unless it is there or the unit is gathered already."""
    size = rank.sizes[unit.name]
    if size.gather and unit.name not in rank.gathers and unit.name not in rank.unsharded:
        rank.gathers[unit.name] = size.gather
        yield rank.point(moment, unit.name, communication=size.copy_in)


def _after_forward(rank: _Rank, unit: ShardUnit, trace: Trace) -> Iterator[Point]:
    rank.ran.append(unit)
    reshard = unit.reshard_after_forward
    held = rank.unsharded.get(unit.name, 0)
    if reshard is True:
        rank.unsharded.pop(unit.name, None)
    elif reshard is not False and held:
        kept = held // reshard
        yield rank.point(AFTER_FORWARD, unit.name, communication=kept)
        rank.unsharded[_smaller(unit)] = kept
        del rank.unsharded[unit.name]
    if unit.modules == ("",) and rank.last_forward_gather:
        rank.gathers.pop(rank.last_forward_gather, None)
        rank.last_forward_gather = None


def _smaller(unit: ShardUnit) -> str:
    return unit.name + " on fewer ranks"


def _backward(rank: _Rank, unit: ShardUnit, trace: Trace) -> Iterator[Point]:
    size = rank.sizes[unit.name]
    if unit.name not in rank.unsharded and size.unsharded:
        yield from _gather(rank, unit, BACKWARD)
        rank.unsharded[unit.name] = size.unsharded
        yield rank.point(BACKWARD, unit.name)
        rank.gathers.pop(unit.name, None)
        rank.unsharded.pop(_smaller(unit), None)
    place = next((i for i in range(len(rank.ran) - 1, -1, -1) if rank.ran[i] is unit), None)
    if place is not None:
        for each in rank.ran[max(0, place - max(1, rank.plan.prefetch)) : place][::-1]:
            yield from _gather(rank, each, BACKWARD)


def _after_backward(rank: _Rank, unit: ShardUnit, trace: Trace) -> Iterator[Point]:
    size, unsharded_grads = rank.sizes[unit.name], trace.grad_bytes[unit.name]
    rank.unsharded.pop(unit.name, None)
    rank.reduce_input = 0
    if not unsharded_grads:
        return
    rank.reduce_input = size.reduce
    yield rank.point(AFTER_BACKWARD, unit.name)
    rank.activations -= unsharded_grads
    made = size.reduced + (size.grads if size.casts_reduced else 0)
    yield rank.point(AFTER_BACKWARD, unit.name, communication=made)
    if rank.plan.mesh.replicates and size.casts_reduced:
        rank.held_reduced += size.reduced
    if not size.offloaded and not rank.optimizer.in_backward:
        rank.gradients += size.grads


_AT = {FORWARD: _forward, AFTER_FORWARD: _after_forward, BACKWARD: _backward, AFTER_BACKWARD: _after_backward}
assert START not in _AT
