"""Replay what FSDP2 allocates and frees on one rank through a training step, around a trace of the
model.

FSDP2 pads the last chunks of dim 0, so rank 0, which holds the most, is counted. The replay follows
``FSDPParamGroup``, ``foreach_all_gather`` and ``foreach_reduce`` of torch 2.13, in the order of the
CPU's calls, as the caching allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardkit.errors import PlanError
from shardkit.memory.trace import AFTER_BACKWARD, AFTER_FORWARD, BACKWARD, FORWARD, Trace
from shardkit.plan import ParamSpec, ShardingPlan, ShardUnit

STEP = "optimizer step"
CATEGORIES = ("parameters", "gradients", "optimizer", "unsharded", "communication", "activations")


@dataclass(frozen=True)
class OptimizerBytes:
    """State that an optimizer keeps for each trained parameter: bytes per byte, plus bytes per
    element.
    """

    per_byte: float = 0.0
    per_element: float = 0.0
    # bytes for each byte of a parameter that are allocated and freed in a step
    temporary: float = 0.0
    # each parameter is stepped once its gradient is reduced, and the gradient is freed
    in_backward: bool = False

    @classmethod
    def of(cls, optimizer: str | float) -> OptimizerBytes:
        """Return an optimizer by its name in ``OPTIMIZERS``, or by its bytes per element; else
        raise PlanError.
        """
        if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
            return OPTIMIZERS[optimizer]
        if isinstance(optimizer, str) or optimizer < 0:
            raise PlanError(
                f"optimizer must be one of {', '.join(OPTIMIZERS)}, or bytes of state per element, "
                f"got {optimizer!r}. Pass, for example, 8 for two float32 moments."
            )
        return cls(per_element=optimizer)

    def state_bytes(self, elements: int, nbytes: int) -> int:
        """Return the bytes of state for that many elements of that many bytes."""
        return round(self.per_byte * nbytes + self.per_element * elements)


# torch's default for GPUs, foreach, makes temporaries as large as the parameters; fused ones make
# none.
OPTIMIZERS = {
    "adamw": OptimizerBytes(2.0),
    "adamw_foreach": OptimizerBytes(2.0, temporary=1.0),
    "adam": OptimizerBytes(2.0),
    "sgd": OptimizerBytes(),
    "sgd_momentum": OptimizerBytes(1.0),
    "adagrad": OptimizerBytes(1.0),
    "none": OptimizerBytes(),
}


@dataclass(frozen=True)
class UnitBytes:
    """What one unit holds and moves on one rank, in bytes."""

    shard: int  # its parameters' shards, as stored
    grads: int  # the shards' gradients, as stored
    optimizer: int  # state of the optimizer
    unsharded: int  # its parameters gathered, in the dtype they compute in, padding included
    gather: int  # the flat output buffer of an all-gather; 0 where one rank has everything
    # a temporary of what is sharded on other dims than 0, between the flat output and the
    # parameters
    copy_out: int
    copy_in: int  # the shards cast, or copied from the CPU, as the input of an all-gather
    reduce: int  # the flat input buffer of a reduce-scatter
    # an unsharded gradient that torch still refers to while it reduces: the last one on another dim
    kept_grad: int
    reduced: int  # its output, in the reduce dtype
    accumulated: int  # the unsharded gradients of earlier micro-batches, in the reduce dtype
    # whether the output is cast to become the gradients, instead of being used as they are
    casts_reduced: bool
    offloaded: bool  # whether shards, gradients and optimizer state are on the CPU


def unit_bytes(plan: ShardingPlan, unit: ShardUnit, optimizer: OptimizerBytes) -> UnitBytes:
    """Return what one unit of a plan holds and moves on a rank."""
    specs, dims, ranks = (
        plan.split_specs(unit),
        dict(unit.shard_dims),
        plan.mesh_of(unit).shard_size,
    )
    compute, reduce_dtype = (
        unit.mp_policy.param_dtype,
        unit.mp_policy.reduce_dtype or unit.mp_policy.param_dtype,
    )
    several = ranks > 1

    def shard_bytes(specs: Sequence[ParamSpec], dtype: torch.dtype | None) -> int:
        return sum(
            spec.nbytes_of(spec.shard_numel(ranks, dims.get(spec.fqn, 0)), dtype) for spec in specs
        )

    trained = [spec for spec in specs if spec.trainable]
    others = [spec for spec in specs if spec.fqn in dims]
    elements = sum(spec.shard_numel(ranks, dims.get(spec.fqn, 0)) for spec in trained)
    grads, reduced = shard_bytes(trained, None), shard_bytes(trained, reduce_dtype)
    unsharded = ranks * shard_bytes(specs, compute)
    casts = any(compute not in (None, spec.dtype) for spec in specs if not spec.element_bytes)
    return UnitBytes(
        shard=shard_bytes(specs, None),
        grads=grads,
        optimizer=optimizer.state_bytes(elements, grads),
        unsharded=unsharded,
        gather=several * unsharded,
        copy_out=several * ranks * shard_bytes(others, compute),
        copy_in=unsharded // ranks if several and (casts or unit.offloads) else 0,
        reduce=ranks * reduced,
        kept_grad=several
        * ranks
        * shard_bytes([spec for spec in others if spec.trainable][-1:], compute),
        reduced=reduced,
        accumulated=sum(spec.nbytes_of(spec.numel, reduce_dtype) for spec in trained),
        casts_reduced=any((reduce_dtype or spec.dtype) != spec.dtype for spec in trained),
        offloaded=unit.offloads,
    )


@dataclass(frozen=True)
class Point:
    """The most that is alive on one rank in one stretch of a step, in bytes."""

    # that begins it: before or after a unit's forward or backward, or the optimizer's step
    moment: str
    unit: str  # its name; empty for the start and the step
    parameters: int  # shards, parameters that are not sharded, and buffers
    gradients: int  # of the shards; in the optimizer's step also of parameters that are not sharded
    optimizer: int  # state, and temporaries of the step
    unsharded: int  # gathered parameters
    communication: int  # buffers of all-gathers and reduce-scatters
    # everything that the model itself allocates, including unsharded gradients and the batch
    activations: int

    @property
    def total(self) -> int:
        """Bytes in total."""
        return sum(getattr(self, category) for category in CATEGORIES)

    @property
    def where(self) -> str:
        """The moment and its unit."""
        return f"{self.moment} of {self.unit}" if self.unit else self.moment


@dataclass(frozen=True)
class Prediction:
    """The memory of one step under a plan."""

    name: str  # how the plan differs from the one that was estimated
    plan: ShardingPlan  # to shard by
    timeline: tuple[Point, ...]  # every stretch of the step, in order
    host: int  # bytes of CPU memory for what is offloaded

    @cached_property
    def peak(self) -> Point:
        """The stretch with the most bytes alive."""
        return max(self.timeline, key=lambda point: point.total)


def timeline(
    plan: ShardingPlan,
    trace: Trace,
    optimizer: OptimizerBytes,
    buffers: int = 0,
    micro_batches: int = 1,
    keep_unsharded: bool | str | None = None,
) -> tuple[Point, ...]:
    """Return every stretch of one steady step of ``plan``, in order: the second step or a later
    one.

    ``trace`` is of the same units, with the same ones checkpointed; ``buffers`` are bytes of the
    model's buffers. Of several micro-batches, as ``accumulate`` runs them, the first, the second
    and the last are in it.
    """
    rank = _Rank(plan, trace, optimizer, buffers)
    rank.stays = {unit.name for unit in plan.units if plan.stays(unit, keep_unsharded)}
    units = {unit.name: unit for unit in plan.units}
    hooks = {FORWARD: rank.forward, AFTER_FORWARD: rank.after_forward}
    hooks |= {BACKWARD: rank.backward, AFTER_BACKWARD: rank.after_backward}
    for left in range(min(micro_batches, 3) - 1, -1, -1):
        rank.is_last = not left
        for interval in trace.intervals:
            if interval.moment in hooks:
                hooks[interval.moment](units[interval.unit])
            rank.record(interval.moment, interval.unit, activations=interval.peak)
            rank.activations += interval.delta
        rank.end_micro_batch()
    rank.gradients += trace.other_grad_bytes
    rank.states += 0 if optimizer.in_backward else round(optimizer.temporary * rank.gradients)
    rank.record(STEP, "")
    return tuple(rank.points)


class _Rank:
    """What FSDP2 holds on one rank right now, in bytes, and all that was recorded of it."""

    def __init__(
        self, plan: ShardingPlan, trace: Trace, optimizer: OptimizerBytes, buffers: int
    ) -> None:
        self.points: list[Point] = []
        self.unsharded: dict[str, int] = {}  # gathered parameters by unit
        # what an int of reshard_after_forward keeps of them
        self.on_fewer_ranks: dict[str, int] = {}
        self.gathers: dict[str, int] = {}  # flat buffers in flight or kept
        self.reduce_input = self.gradients = 0
        self.held_reduced = 0  # buffers of all-reduces, which FSDP2 keeps until backward ends
        # unreduced gradients by unit, and those of parameters without a unit
        self.accumulated: dict[str, int] = {}
        self.stays: set[str] = set()  # the units that micro-batches but the last leave gathered
        self.is_last = True
        self.activations = trace.batch_bytes
        self._plan, self._trace, self._in_backward = plan, trace, optimizer.in_backward
        self._sizes = {unit.name: unit_bytes(plan, unit, optimizer) for unit in plan.units}
        self._last_forward_gather = ""
        self._ran: list[ShardUnit] = []  # in the order of forward, for the prefetch of backward
        here = [size for size in self._sizes.values() if not size.offloaded]
        whole = [plan.specs[fqn] for fqn in plan.unsharded if fqn in plan.specs]
        trained = [spec for spec in whole if spec.trainable]
        of_whole = optimizer.state_bytes(
            sum(spec.numel for spec in trained), sum(spec.nbytes for spec in trained)
        )
        self.parameters = (
            sum(size.shard for size in here) + sum(spec.nbytes for spec in whole) + buffers
        )
        self.states = sum(size.optimizer for size in here) + of_whole

    def record(self, moment: str, unit: str, communication: int = 0, activations: int = 0) -> None:
        """Record what is alive, plus these short-lived bytes."""
        communication += sum(self.gathers.values()) + self.reduce_input + self.held_reduced
        activations += sum(self.accumulated.values())
        unsharded = sum(self.unsharded.values()) + sum(self.on_fewer_ranks.values())
        kept = self.parameters, self.gradients, self.states, unsharded
        self.points.append(
            Point(moment, unit, *kept, communication, self.activations + activations)
        )

    def forward(self, unit: ShardUnit) -> None:
        size = self._sizes[unit.name]
        if unit.name not in self.unsharded and size.unsharded:
            self._gather(unit, FORWARD)
            self.gathers.pop(self._last_forward_gather, None)
            self.unsharded[unit.name] = size.unsharded
            self.record(FORWARD, unit.name, communication=size.copy_out)
            # kept until the next unit's copy-out, so that both may overlap
            self._last_forward_gather = unit.name
        if self._plan.prefetch:
            order = self._plan.execution_order()
            for each in order[order.index(unit) + 1 :][: self._plan.prefetch]:
                self._gather(each, FORWARD)

    def _gather(self, unit: ShardUnit, moment: str) -> None:
        """Allocate the flat buffer of a unit's all-gather, unless it exists or the unit is gathered
        already.
        """
        size = self._sizes[unit.name]
        if size.gather and unit.name not in self.gathers and unit.name not in self.unsharded:
            self.gathers[unit.name] = size.gather
            self.record(moment, unit.name, communication=size.copy_in)

    def after_forward(self, unit: ShardUnit) -> None:
        self._ran.append(unit)
        reshard = False if unit.name in self.stays else unit.reshard_after_forward
        if reshard is True:
            self.unsharded.pop(unit.name, None)
        elif reshard is not False and unit.name in self.unsharded:
            self.on_fewer_ranks[unit.name] = self.unsharded[unit.name] // reshard
            self.record(AFTER_FORWARD, unit.name)  # both are alive
            del self.unsharded[unit.name]
        if unit.modules == ("",):
            self.gathers.pop(self._last_forward_gather, None)
            self._last_forward_gather = ""

    def backward(self, unit: ShardUnit) -> None:
        size = self._sizes[unit.name]
        if unit.name not in self.unsharded and size.unsharded:
            self._gather(unit, BACKWARD)
            self.unsharded[unit.name] = size.unsharded
            self.record(BACKWARD, unit.name, communication=size.copy_out)
            self.gathers.pop(unit.name, None)
            self.on_fewer_ranks.pop(unit.name, None)
        last = max((place for place, each in enumerate(self._ran) if each is unit), default=0)
        for each in self._ran[max(0, last - max(1, self._plan.prefetch)) : last][::-1]:
            self._gather(each, BACKWARD)

    def end_micro_batch(self) -> None:
        """Free what FSDP2 frees when a backward ends: units that came before the first trained
        parameter, too.
        """
        self.unsharded = (
            {}
            if self.is_last
            else {name: n for name, n in self.unsharded.items() if name in self.stays}
        )
        self.on_fewer_ranks.clear()
        self.gathers.clear()
        self._ran.clear()
        self.reduce_input = self.held_reduced = 0
        self.activations -= self._trace.other_grad_bytes  # made by the model itself
        self.accumulated = (
            {} if self.is_last else {**self.accumulated, "": self._trace.other_grad_bytes}
        )

    def after_backward(self, unit: ShardUnit) -> None:
        size, unsharded_grads = self._sizes[unit.name], self._trace.grad_bytes[unit.name]
        if self.is_last or unit.name not in self.stays:
            self.unsharded.pop(unit.name, None)
        self.reduce_input = size.reduce if unsharded_grads and self.is_last else 0
        if not unsharded_grads:
            return
        # the last ones are added to those before
        if not self.is_last or unit.name in self.accumulated:
            self.activations += size.accumulated * self.is_last - unsharded_grads
            self.accumulated[unit.name] = unsharded_grads = size.accumulated
        if not self.is_last:
            return
        self.accumulated.pop(unit.name, None)
        self.record(AFTER_BACKWARD, unit.name, communication=size.kept_grad)
        self.activations -= unsharded_grads
        made = size.kept_grad + size.reduced + (size.grads if size.casts_reduced else 0)
        self.record(AFTER_BACKWARD, unit.name, communication=made)
        if self._plan.mesh.replicates and size.casts_reduced:
            self.held_reduced += size.reduced
        if not size.offloaded and not self._in_backward:
            self.gradients += size.grads
