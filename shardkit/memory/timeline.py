"""Replay what FSDP2 allocates and frees on one rank through a training step, around a trace of the model.

FSDP2 splits dim 0 into one chunk for each rank, of ``ceil(dim0 / ranks)`` rows; the last chunks are padded. Rank 0
holds the most, so rank 0 is counted. The replay follows ``FSDPParamGroup``, ``foreach_all_gather`` and
``foreach_reduce`` of torch 2.13, in the order of the CPU's calls, which is the caching allocator's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit.errors import PlanError, message
from shardkit.memory.moments import AFTER_BACKWARD, AFTER_FORWARD, BACKWARD, FORWARD
from shardkit.memory.trace import Trace
from shardkit.plan import ParamSpec, ShardingPlan, ShardUnit

STEP = "optimizer step"
CATEGORIES = ("parameters", "gradients", "optimizer", "unsharded", "communication", "activations")

# Bytes of state for each byte of parameter, and bytes of temporaries during the step for each byte of parameter.
# torch's default for GPUs, foreach, makes temporaries as large as the parameters; fused ones make none.
OPTIMIZERS = {
    "adamw": (2.0, 0.0),
    "adamw_foreach": (2.0, 1.0),
    "adam": (2.0, 0.0),
    "sgd": (0.0, 0.0),
    "sgd_momentum": (1.0, 0.0),
    "adagrad": (1.0, 0.0),
    "none": (0.0, 0.0),
}


@dataclass(frozen=True)
class OptimizerBytes:
    """State that an optimizer keeps for each trained parameter: bytes per byte, plus bytes per element.

    During a step, ``temporary`` bytes for each byte of a parameter are allocated and freed. With ``in_backward`` each
    parameter is stepped as soon as its gradient is reduced, and the gradient is freed.
    """

    per_byte: float = 0.0
    per_element: float = 0.0
    temporary: float = 0.0
    in_backward: bool = False

    @classmethod
    def of(cls, optimizer: str | float) -> OptimizerBytes:
        """Return an optimizer by its name in ``OPTIMIZERS``, or by its bytes of state for each element.

        Raises:
            PlanError: the name is unknown, or the bytes are negative.
        """
        fix = "Pass the bytes of its state for each element, such as 8 for two float32 moments"
        if not isinstance(optimizer, str):
            if optimizer < 0:
                raise PlanError(message("optimizer", f"is {optimizer:g} bytes", "Bytes cannot be negative", fix))
            return cls(per_element=optimizer)
        if optimizer not in OPTIMIZERS:
            rule = f"It must be one of {', '.join(OPTIMIZERS)}"
            raise PlanError(message("optimizer", f"is {optimizer!r}", rule, fix))
        per_byte, temporary = OPTIMIZERS[optimizer]
        return cls(per_byte, temporary=temporary)

    def state_bytes(self, elements: int, nbytes: int) -> int:
        """Return the bytes of state for that many elements of that many bytes."""
        return round(self.per_byte * nbytes + self.per_element * elements)


@dataclass(frozen=True)
class UnitBytes:
    """What one unit holds and moves on one rank, in bytes."""

    shard: int  # its parameters' shards, as stored
    grads: int  # the shards' gradients, as stored
    optimizer: int  # state of the optimizer
    unsharded: int  # its parameters gathered, in the dtype they compute in, padding included
    gather: int  # the flat output buffer of an all-gather; 0 where one rank has everything
    copy_out: int  # a temporary of what is sharded on other dims than 0, between the flat output and the parameters
    copy_in: int  # the shards cast, or copied from the CPU, as the input of an all-gather
    reduce: int  # the flat input buffer of a reduce-scatter
    kept_grad: int  # an unsharded gradient that torch still refers to while it reduces: the last one on another dim
    reduced: int  # its output, in the reduce dtype
    casts_reduced: bool  # whether the output is cast to become the gradients, instead of being used as they are
    offloaded: bool  # whether shards, gradients and optimizer state are on the CPU


def unit_bytes(plan: ShardingPlan, unit: ShardUnit, optimizer: OptimizerBytes) -> UnitBytes:
    """Return what one unit of a plan holds and moves on a rank."""
    return _unit_bytes(
        tuple(plan.split_specs(unit)),
        unit.shard_dims,
        plan.mesh_of(unit).shard_size,
        unit.mp_policy,
        unit.offloads,
        optimizer,
    )


@lru_cache(maxsize=4096)  # a search for a budget repeats the same calls
def _unit_bytes(
    specs: tuple[ParamSpec, ...],
    shard_dims: tuple[tuple[str, int], ...],
    ranks: int,
    policy: MixedPrecisionPolicy,
    offloads: bool,
    optimizer: OptimizerBytes,
) -> UnitBytes:
    dims = dict(shard_dims)

    def numel(spec: ParamSpec) -> int:
        return spec.shard_numel(ranks, dims.get(spec.fqn, 0))

    def shard_bytes(specs: Sequence[ParamSpec], dtype: torch.dtype | None) -> int:
        return sum(spec.nbytes_of(numel(spec), dtype) for spec in specs)

    trained = [spec for spec in specs if spec.trainable]
    compute, reduce_dtype = policy.param_dtype, policy.reduce_dtype or policy.param_dtype
    grads = shard_bytes(trained, None)
    unsharded = ranks * shard_bytes(specs, compute)
    reduced = shard_bytes(trained, reduce_dtype)
    others = [spec for spec in specs if spec.fqn in dims]
    casts_in = any(compute not in (None, spec.dtype) for spec in specs if not spec.element_bytes) or offloads
    return UnitBytes(
        shard=shard_bytes(specs, None),
        grads=grads,
        optimizer=optimizer.state_bytes(sum(map(numel, trained)), grads),
        unsharded=unsharded,
        gather=unsharded if ranks > 1 else 0,
        copy_out=ranks * shard_bytes(others, compute) if ranks > 1 else 0,
        copy_in=unsharded // ranks if casts_in and ranks > 1 else 0,
        reduce=ranks * reduced,
        kept_grad=ranks * shard_bytes([spec for spec in others if spec.trainable][-1:], compute) if ranks > 1 else 0,
        reduced=reduced,
        casts_reduced=any((reduce_dtype or spec.dtype) != spec.dtype for spec in trained),
        offloaded=offloads,
    )


@dataclass(frozen=True)
class Point:
    """The most that is alive on one rank in one stretch of a step, in bytes.

    Attributes:
        moment: that begins the stretch: before or after a unit's forward or backward, or the optimizer's step.
        unit: the unit's name; empty for the start and the step.
        parameters: shards of the parameters, parameters that are not sharded, and buffers.
        gradients: of the shards; in the optimizer's step also of parameters that are not sharded.
        optimizer: state, and temporaries of the step.
        unsharded: gathered parameters.
        communication: buffers of all-gathers and reduce-scatters.
        activations: everything that the model itself allocates, including unsharded gradients and the batch.
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
        """Bytes in total."""
        return sum(getattr(self, category) for category in CATEGORIES)

    @property
    def where(self) -> str:
        """The moment and its unit, in words."""
        return f"{self.moment} of {self.unit}" if self.unit else self.moment


class Predicted(Protocol):
    """A prediction of one step: a row of an estimate, or the choice for a budget."""

    @property
    def timeline(self) -> Sequence[Point]:
        """Every stretch of the step, in order."""

    @property
    def peak(self) -> Point | None:
        """The stretch with the most bytes alive."""


def timeline(plan: ShardingPlan, trace: Trace, optimizer: OptimizerBytes, buffers: int = 0) -> list[Point]:
    """Return every stretch of one steady step of ``plan``, in order: the second step or a later one.

    Args:
        plan: of the same units as the trace.
        trace: of the model with the plan's recomputation.
        optimizer: its bytes of state.
        buffers: bytes of the model's buffers.
    """
    sizes = {unit.name: unit_bytes(plan, unit, optimizer) for unit in plan.units}
    here = [size for size in sizes.values() if not size.offloaded]
    whole = [plan.specs[fqn] for fqn in plan.unsharded if fqn in plan.specs]
    trained = [spec for spec in whole if spec.trainable]
    of_whole = optimizer.state_bytes(sum(spec.numel for spec in trained), sum(spec.nbytes for spec in trained))
    rank = _Rank(
        plan,
        trace.grad_bytes,
        sizes,
        optimizer.in_backward,
        parameters=sum(size.shard for size in here) + sum(spec.nbytes for spec in whole) + buffers,
        states=sum(size.optimizer for size in here) + of_whole,
        activations=trace.batch_bytes,
    )
    units = {unit.name: unit for unit in plan.units}
    points: list[Point] = []
    for interval in trace.intervals:
        if interval.moment in _AT:
            points += _AT[interval.moment](rank, units[interval.unit])
        points.append(rank.point(interval.moment, interval.unit, activations=interval.peak))
        rank.activations += interval.delta
    rank.reduce_input = rank.held_reduced = 0
    rank.gathers.clear()
    rank.gradients += trace.other_grad_bytes  # made by the model itself, so counted as activations until here
    rank.activations -= trace.other_grad_bytes
    rank.states += 0 if optimizer.in_backward else round(optimizer.temporary * rank.gradients)
    return [*points, rank.point(STEP, "")]


@dataclass
class _Rank:
    """What FSDP2 holds on one rank right now, in bytes."""

    plan: ShardingPlan
    grad_bytes: Mapping[str, int]  # of the unsharded gradients of each unit
    sizes: dict[str, UnitBytes]
    in_backward: bool
    parameters: int
    states: int
    activations: int
    gradients: int = 0
    unsharded: dict[str, int] = field(default_factory=dict)
    gathers: dict[str, int] = field(default_factory=dict)  # flat buffers in flight or kept
    last_forward_gather: str | None = None
    reduce_input: int = 0
    held_reduced: int = 0  # buffers of all-reduces, which FSDP2 keeps until backward ends
    ran: list[ShardUnit] = field(default_factory=list)  # in the order of forward, for the prefetch of backward

    def point(self, moment: str, unit: str, communication: int = 0, activations: int = 0) -> Point:
        """Return what is alive, plus these short-lived bytes."""
        communication += sum(self.gathers.values()) + self.reduce_input + self.held_reduced
        unsharded, activations = sum(self.unsharded.values()), self.activations + activations
        return Point(moment, unit, self.parameters, self.gradients, self.states, unsharded, communication, activations)

    def free_last_forward_gather(self) -> None:
        self.gathers.pop(self.last_forward_gather or "", None)
        self.last_forward_gather = None


_ON_FEWER_RANKS = " on fewer ranks"  # after a unit's name: its shards over that many ranks


def _forward(rank: _Rank, unit: ShardUnit) -> Iterator[Point]:
    size = rank.sizes[unit.name]
    if unit.name not in rank.unsharded and size.unsharded:
        yield from _gather(rank, unit, FORWARD)
        rank.free_last_forward_gather()
        rank.unsharded[unit.name] = size.unsharded
        yield rank.point(FORWARD, unit.name, communication=size.copy_out)
        rank.last_forward_gather = unit.name  # kept until the next unit's copy-out, so that both may overlap
    if rank.plan.prefetch:
        order = rank.plan.execution_order()
        for each in order[order.index(unit) + 1 :][: rank.plan.prefetch]:
            yield from _gather(rank, each, FORWARD)


def _gather(rank: _Rank, unit: ShardUnit, moment: str) -> Iterator[Point]:
    """Allocate the flat buffer of a unit's all-gather, unless it exists or the unit is gathered already."""
    size = rank.sizes[unit.name]
    if size.gather and unit.name not in rank.gathers and unit.name not in rank.unsharded:
        rank.gathers[unit.name] = size.gather
        yield rank.point(moment, unit.name, communication=size.copy_in)


def _after_forward(rank: _Rank, unit: ShardUnit) -> Iterator[Point]:
    rank.ran.append(unit)
    reshard = unit.reshard_after_forward
    if reshard is True:
        rank.unsharded.pop(unit.name, None)
    elif reshard is not False and unit.name in rank.unsharded:
        kept = rank.unsharded[unit.name] // reshard
        yield rank.point(AFTER_FORWARD, unit.name, communication=kept)
        rank.unsharded[unit.name + _ON_FEWER_RANKS] = kept
        del rank.unsharded[unit.name]
    if unit.modules == ("",):
        rank.free_last_forward_gather()


def _backward(rank: _Rank, unit: ShardUnit) -> Iterator[Point]:
    size = rank.sizes[unit.name]
    if unit.name not in rank.unsharded and size.unsharded:
        yield from _gather(rank, unit, BACKWARD)
        rank.unsharded[unit.name] = size.unsharded
        yield rank.point(BACKWARD, unit.name, communication=size.copy_out)
        rank.gathers.pop(unit.name, None)
        rank.unsharded.pop(unit.name + _ON_FEWER_RANKS, None)
    places = [place for place, each in enumerate(rank.ran) if each is unit]
    if places:
        for each in rank.ran[max(0, places[-1] - max(1, rank.plan.prefetch)) : places[-1]][::-1]:
            yield from _gather(rank, each, BACKWARD)


def _after_backward(rank: _Rank, unit: ShardUnit) -> Iterator[Point]:
    size, unsharded_grads = rank.sizes[unit.name], rank.grad_bytes[unit.name]
    rank.unsharded.pop(unit.name, None)
    rank.reduce_input = 0
    if not unsharded_grads:
        return
    rank.reduce_input = size.reduce
    yield rank.point(AFTER_BACKWARD, unit.name, communication=size.kept_grad)
    rank.activations -= unsharded_grads
    made = size.kept_grad + size.reduced + (size.grads if size.casts_reduced else 0)
    yield rank.point(AFTER_BACKWARD, unit.name, communication=made)
    if rank.plan.mesh.replicates and size.casts_reduced:
        rank.held_reduced += size.reduced
    if not size.offloaded and not rank.in_backward:
        rank.gradients += size.grads


_AT = {FORWARD: _forward, AFTER_FORWARD: _after_forward, BACKWARD: _backward, AFTER_BACKWARD: _after_backward}
