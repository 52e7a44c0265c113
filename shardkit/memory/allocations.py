"""Replay what FSDP2 allocates and frees on one rank through a training step, around a trace of the
model.

FSDP2 pads the last chunks of dim 0, so rank 0, which holds the most, is counted. The replay follows
``FSDPParamGroup``, ``foreach_all_gather`` and ``foreach_reduce`` of torch 2.13, in the order of the
CPU's calls, as the caching allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardkit.errors import PlanError
from shardkit.memory.tracing import AFTER_BACKWARD, AFTER_FORWARD, BACKWARD, FORWARD, Trace
from shardkit.plan import ShardingPlan, ShardUnit

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
    unsharded: int  # its unsharded parameters, in the dtype they compute in, with padding
    gather: int  # the flat output buffer of an all-gather; 0 where one rank has everything
    # Parameters sharded on other dims than 0 are copied once more, between the flat output and
    # the unsharded parameters.
    copy_out: int
    copy_in: int  # the shards cast, or copied from the CPU, as the input of an all-gather
    reduce: int  # the flat input buffer of a reduce-scatter
    # The unsharded gradient of the last parameter on another dim: torch still refers to it while
    # it reduces.
    kept_grad: int
    reduced: int  # the output of the reduce-scatter, in the reduce dtype
    accumulated: int  # the unsharded gradients of earlier micro-batches, in the reduce dtype
    casts_reduced: bool  # whether the output is cast to become the gradients
    offloaded: bool  # whether shards, gradients and optimizer state are on the CPU


def unit_bytes(plan: ShardingPlan, unit: ShardUnit, optimizer: OptimizerBytes) -> UnitBytes:
    """Return what one unit of a plan holds and moves on a rank."""
    ranks = plan.mesh_of(unit).shard_size
    compute = unit.mp_policy.param_dtype
    reduce_dtype = unit.mp_policy.reduce_dtype or compute
    dims = dict(unit.shard_dims)
    shard = grads = elements = unsharded_shard = reduced = accumulated = 0
    on_other_dims = kept_grad = 0
    casts = casts_reduced = False
    for spec in plan.split_specs(unit):
        numel = spec.shard_numel(ranks, dims.get(spec.fqn, 0))
        shard += spec.nbytes_of(numel)
        computed = spec.nbytes_of(numel, compute)
        unsharded_shard += computed
        casts |= compute not in (None, spec.dtype) and not spec.element_bytes
        if spec.fqn in dims:
            on_other_dims += computed
        if not spec.trainable:
            continue
        elements += numel
        grads += spec.nbytes_of(numel)
        reduced += spec.nbytes_of(numel, reduce_dtype)
        accumulated += spec.nbytes_of(spec.numel, reduce_dtype)
        casts_reduced |= (reduce_dtype or spec.dtype) != spec.dtype
        if spec.fqn in dims:
            kept_grad = computed
    # What only several ranks allocate.
    gather = copy_out = copy_in = 0
    if ranks > 1:
        gather = ranks * unsharded_shard
        copy_out = ranks * on_other_dims
        copy_in = unsharded_shard if casts or unit.offloads else 0
        kept_grad *= ranks
    else:
        kept_grad = 0
    return UnitBytes(
        shard=shard,
        grads=grads,
        optimizer=optimizer.state_bytes(elements, grads),
        unsharded=ranks * unsharded_shard,
        gather=gather,
        copy_out=copy_out,
        copy_in=copy_in,
        reduce=ranks * reduced,
        kept_grad=kept_grad,
        reduced=reduced,
        accumulated=accumulated,
        casts_reduced=casts_reduced,
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
    unsharded: int  # parameters
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
) -> tuple[Point, ...]:
    """Return every stretch of one steady step of ``plan``, in order: the second step or a later
    one.

    ``trace`` is of the same units, with the same ones checkpointed; ``buffers`` are bytes of the
    model's buffers. Of several micro-batches, as ``accumulate`` runs them, the first, the second
    and the last are in it.
    """
    rank = _Rank(plan, trace, optimizer, buffers)
    units = {unit.name: unit for unit in plan.units}
    hooks = {
        FORWARD: rank.before_forward,
        AFTER_FORWARD: rank.after_forward,
        BACKWARD: rank.before_backward,
        AFTER_BACKWARD: rank.after_backward,
    }
    count = min(micro_batches, 3)
    for micro_batch in range(count):
        rank.is_last = micro_batch == count - 1
        for interval in trace.intervals:
            if interval.moment in hooks:
                hooks[interval.moment](units[interval.unit])
            rank.record(interval.moment, interval.unit, activations=interval.peak)
            rank.activations += interval.delta
        rank.end_micro_batch()
    rank.gradients += trace.other_grad_bytes
    if not optimizer.in_backward:
        rank.states += round(optimizer.temporary * rank.gradients)
    rank.record(STEP, "")
    return tuple(rank.points)


class _Rank:
    """What FSDP2 holds on one rank right now, in bytes, and every point recorded so far."""

    def __init__(
        self, plan: ShardingPlan, trace: Trace, optimizer: OptimizerBytes, buffers: int
    ) -> None:
        self.points: list[Point] = []
        self.is_last = True  # of the micro-batches
        # Units that all micro-batches but the last leave unsharded.
        self.stays = {unit.name for unit in plan.units if plan.stays(unit, None)}

        self.parameters = buffers
        self.gradients = 0
        self.states = 0
        self.activations = trace.batch_bytes
        # By unit.
        self.unsharded: dict[str, int] = {}
        self.on_fewer_ranks: dict[str, int] = {}  # what an int of reshard_after_forward keeps
        self.gathers: dict[str, int] = {}  # flat buffers of all-gathers
        self.accumulated: dict[str, int] = {}  # unreduced gradients; "" for those without a unit
        # Buffers of the last reduce-scatter, and of all-reduces, which FSDP2 keeps until backward
        # ends.
        self.reduce_input = self.held_reduced = 0

        self._prefetch = plan.prefetch
        self._all_reduces = plan.mesh.replicates
        self._trace = trace
        self._in_backward = optimizer.in_backward
        self._order = [unit.name for unit in plan.execution_order()]
        self._ran: list[str] = []  # in the order of forward, for the prefetch of backward
        self._last_forward_gather = ""

        self._sizes: dict[str, UnitBytes] = {}
        for unit in plan.units:
            size = self._sizes[unit.name] = unit_bytes(plan, unit, optimizer)
            if not size.offloaded:
                self.parameters += size.shard
                self.states += size.optimizer
        elements = trained = 0
        for fqn in plan.not_in_units:
            if fqn in plan.specs:
                spec = plan.specs[fqn].local
                self.parameters += spec.nbytes
                if spec.trainable:
                    elements += spec.numel
                    trained += spec.nbytes
        self.states += optimizer.state_bytes(elements, trained)

    def record(self, moment: str, unit: str, communication: int = 0, activations: int = 0) -> None:
        """Record what is alive, plus these short-lived bytes."""
        communication += sum(self.gathers.values()) + self.reduce_input + self.held_reduced
        activations += self.activations + sum(self.accumulated.values())
        unsharded = sum(self.unsharded.values()) + sum(self.on_fewer_ranks.values())
        point = Point(
            moment,
            unit,
            self.parameters,
            self.gradients,
            self.states,
            unsharded,
            communication,
            activations,
        )
        self.points.append(point)

    def before_forward(self, unit: ShardUnit) -> None:
        size = self._sizes[unit.name]
        if unit.name not in self.unsharded and size.unsharded:
            self._all_gather(unit.name, FORWARD)
            self.gathers.pop(self._last_forward_gather, None)
            self.unsharded[unit.name] = size.unsharded
            self.record(FORWARD, unit.name, communication=size.copy_out)
            # Kept until the next unit's copy-out, so that both may overlap.
            self._last_forward_gather = unit.name
        if self._prefetch:
            after = self._order.index(unit.name) + 1
            for name in self._order[after : after + self._prefetch]:
                self._all_gather(name, FORWARD)

    def _all_gather(self, name: str, moment: str) -> None:
        """Allocate the flat buffer of a unit's all-gather, unless it exists or the unit is
        unsharded already.
        """
        size = self._sizes[name]
        if size.gather and name not in self.gathers and name not in self.unsharded:
            self.gathers[name] = size.gather
            self.record(moment, name, communication=size.copy_in)

    def after_forward(self, unit: ShardUnit) -> None:
        self._ran.append(unit.name)
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

    def before_backward(self, unit: ShardUnit) -> None:
        size = self._sizes[unit.name]
        if unit.name not in self.unsharded and size.unsharded:
            self._all_gather(unit.name, BACKWARD)
            self.unsharded[unit.name] = size.unsharded
            self.record(BACKWARD, unit.name, communication=size.copy_out)
            self.gathers.pop(unit.name, None)
            self.on_fewer_ranks.pop(unit.name, None)
        # Prefetch the units that ran before its last call.
        place = len(self._ran) - 1
        while place > 0 and self._ran[place] != unit.name:
            place -= 1
        first = max(0, place - max(1, self._prefetch))
        for name in reversed(self._ran[first:place]):
            self._all_gather(name, BACKWARD)

    def after_backward(self, unit: ShardUnit) -> None:
        size = self._sizes[unit.name]
        unsharded_grads = self._trace.grad_bytes[unit.name]
        if self.is_last or unit.name not in self.stays:
            self.unsharded.pop(unit.name, None)
        self.reduce_input = 0  # of the unit before
        if not unsharded_grads:
            return
        if not self.is_last:  # kept unsharded, in the reduce dtype
            self.activations -= unsharded_grads
            self.accumulated[unit.name] = size.accumulated
            return
        if unit.name in self.accumulated:  # to which the last gradients are added
            del self.accumulated[unit.name]
            self.activations += size.accumulated - unsharded_grads
            unsharded_grads = size.accumulated
        self.reduce_input = size.reduce
        self.record(AFTER_BACKWARD, unit.name, communication=size.kept_grad)
        self.activations -= unsharded_grads
        made = size.kept_grad + size.reduced + (size.grads if size.casts_reduced else 0)
        self.record(AFTER_BACKWARD, unit.name, communication=made)
        if self._all_reduces and size.casts_reduced:
            self.held_reduced += size.reduced
        if not size.offloaded and not self._in_backward:
            self.gradients += size.grads

    def end_micro_batch(self) -> None:
        """Free what FSDP2 frees when a backward ends, of units before the first trained parameter
        too.
        """
        self.on_fewer_ranks.clear()
        self.gathers.clear()
        self._ran.clear()
        self.reduce_input = self.held_reduced = 0
        self.activations -= self._trace.other_grad_bytes  # made by the model itself
        if self.is_last:
            self.unsharded.clear()
            self.accumulated.clear()
            return
        for name in set(self.unsharded) - self.stays:
            del self.unsharded[name]
        self.accumulated[""] = self._trace.other_grad_bytes
