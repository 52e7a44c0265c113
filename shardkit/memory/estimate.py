"""Bytes on one rank, for every strategy side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardkit.errors import PlanError, listing, message
from shardkit.memory.sizes import Optimizer
from shardkit.memory.strategies import Strategy, blocks, recomputed, strategies
from shardkit.memory.text import aligned
from shardkit.memory.timeline import CATEGORIES, Point, timeline
from shardkit.memory.trace import Loss, Trace, trace, without_activations
from shardkit.plan import MeshSpec, ShardingPlan
from shardkit.plan.table import nbytes
from shardkit.planning.build import Settings, build_plan
from shardkit.planning.tree import ModelTree


@dataclass(frozen=True)
class StrategyEstimate:
    """What one strategy needs on one rank, in bytes.

    Attributes:
        strategy: the plan under its name.
        states: parameters, gradients and optimizer state by the textbook, on the device or the CPU.
        timeline: every stretch of a step; empty for a strategy without a plan.
        measured: whether activations are in it, for which a batch is needed.
    """

    strategy: Strategy
    states: dict[str, int]
    timeline: tuple[Point, ...]
    measured: bool

    @property
    def name(self) -> str:
        """As tables call it."""
        return self.strategy.name

    @cached_property
    def peak(self) -> Point | None:
        """The stretch in which most is alive."""
        return max(self.timeline, key=lambda point: point.total, default=None)


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimates of all strategies, by name or in order; prints as a table.

    Attributes:
        rows: most memory first, as far as the order of strategies goes.
        plan: the plan whose units they share.
    """

    rows: tuple[StrategyEstimate, ...]
    plan: ShardingPlan

    def __iter__(self) -> Iterator[StrategyEstimate]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> StrategyEstimate:
        """The row that is called ``name``, or has it in parentheses, such as ``"ZeRO-3"``.

        Raises:
            PlanError: no row is.
        """
        exact = [row for row in self.rows if row.name == name or f"({name})" in row.name]
        if len(exact) == 1:
            return exact[0]
        names = listing(row.name for row in self.rows)
        raise PlanError(message("strategy", f"{name!r} is not one of them", f"They are {names}", "Use one of these"))

    def __str__(self) -> str:
        titles = ["strategy", "states", *CATEGORIES, "peak", "at"]
        return "\n".join([self._headline(), "", *aligned([titles, *map(_row, self.rows)], left={0, len(titles) - 1})])

    def _headline(self) -> str:
        measured = any(row.measured for row in self.rows)
        what = "peak of a training step" if measured else "peak without activations (no batch given)"
        return (
            f"bytes on each of {self.plan.mesh.size} ranks: model states by the textbook, then the {what} by category"
        )


def _row(row: StrategyEstimate) -> list[str]:
    states = nbytes(sum(row.states.values()))
    if row.peak is None:
        return [row.name, states, *("-" for _ in CATEGORIES), "-", "no way to do it with FSDP2"]
    cells = [nbytes(getattr(row.peak, category)) for category in CATEGORIES]
    return [row.name, states, *cells, nbytes(row.peak.total), row.peak.where]


def estimate(
    model: nn.Module | ShardingPlan,
    *,
    world_size: int | None = None,
    mesh: MeshSpec | None = None,
    plan: ShardingPlan | None = None,
    batch: Any = None,
    loss: Loss | None = None,
    optimizer: str | float = "adamw",
    ranks_per_node: int = 8,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
) -> MemoryEstimate:
    """What every strategy needs on one rank, before anything runs. Local, pure; needs no process group and no GPU.

    Sharding and communication are arithmetic on shapes; activations are measured by one forward and backward on
    fake tensors, in which two blocks of each kind run. Counted are bytes that are alive on the first rank, which
    has the most, in the second or a later step. Not counted: the allocator's rounding and fragmentation, NCCL's
    workspace, CUDA's context.

    Args:
        model: on any device, meta too, in train or eval mode as it is; or a plan, whose shapes are enough where there
            is no ``batch``.
        world_size: ranks in all; or ``mesh``, or neither for that of the plan.
        mesh: instead of ``world_size``.
        plan: whose units, dtypes and settings hold; None is the default rule with ``mp_policy``.
        batch: one rank's micro-batch: a mapping of keyword arguments, a tuple of positional ones, or the only one;
            only shapes and dtypes count. None leaves out activations.
        loss: from what forward returns to the loss; by default its ``loss``, else the mean of its first tensor.
        optimizer: a name in ``shardkit.memory.OPTIMIZERS``, or bytes of state for each element.
        ranks_per_node: for the strategies that shard within a node.
        mp_policy: where no plan is given.

    Raises:
        PlanError: arguments that do not fit each other, or a model that does not run on fake tensors.
    """
    if isinstance(model, ShardingPlan):
        module, base = None, plan or model
    else:
        module, base = model, plan or default_plan(model, mesh_of(world_size, mesh, None), mp_policy)
    base = replace(base, mesh=mesh_of(world_size, mesh, base))
    if batch is not None and module is None:
        fix = "Pass the model, with plan=... for its plan"
        raise PlanError(message("batch", "given with a plan", "Activations are measured on the model", fix))
    found = strategies(base, Optimizer.of(optimizer), ranks_per_node)
    traces = _traces(module, base, batch, loss)
    rows = [_estimated(each, base, traces, buffer_bytes(module)) for each in found]
    return MemoryEstimate(tuple(rows), base)


def default_plan(model: nn.Module, mesh: MeshSpec, mp_policy: MixedPrecisionPolicy) -> ShardingPlan:
    """The plan by the default rule."""
    return build_plan(ModelTree(model), mesh, None, Settings(None, mp_policy, OffloadPolicy(), False, False))


def mesh_of(world_size: int | None, mesh: MeshSpec | None, plan: ShardingPlan | None) -> MeshSpec:
    """The mesh that arguments name: one of the first two, or neither where a plan has one.

    Raises:
        PlanError: both, or neither without a plan.
    """
    if world_size is not None and mesh is not None:
        raise PlanError(
            message("mesh", "given beside world_size", "One of them says how many ranks there are", "Pass one")
        )
    if mesh is not None:
        return mesh
    if world_size is not None:
        return MeshSpec.sharded(world_size)
    if plan is None:
        fix = "Pass world_size=8, or mesh=MeshSpec.hybrid(2, 4)"
        raise PlanError(
            message("world_size", "not given, nor a mesh", "Bytes on a rank depend on how many there are", fix)
        )
    return plan.mesh


def buffer_bytes(model: nn.Module | None) -> int:
    """Bytes of a model's buffers, which every rank has whole."""
    return sum(buffer.nbytes for buffer in model.buffers()) if model is not None else 0


def _traces(model: nn.Module | None, plan: ShardingPlan, batch: Any, loss: Loss | None) -> dict[bool, Trace]:
    """The step with the plan's own recomputation, and with that of all blocks."""
    if model is None or batch is None:
        return {}
    everything = {unit.name for unit in blocks(plan)}
    return {
        False: trace(model, plan, batch, loss=loss),
        True: trace(model, plan, batch, loss=loss, checkpointed=recomputed(plan) | everything),
    }


def _estimated(each: Strategy, base: ShardingPlan, traces: dict[bool, Trace], buffers: int) -> StrategyEstimate:
    points: list[Point] = []
    if each.plan is not None:
        step = traces[recomputed(each.plan) != recomputed(base)] if traces else without_activations(each.plan)
        points = timeline(each.plan, step, each.optimizer, buffers)
    return StrategyEstimate(each, each.states(base), tuple(points), bool(traces))
