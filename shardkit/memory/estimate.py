"""The strategies that people choose between, as changes of a plan, and what each needs on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardkit.errors import PlanError, listing, message
from shardkit.memory.timeline import CATEGORIES, OptimizerBytes, Point, timeline
from shardkit.memory.trace import Loss, Trace, trace, without_activations
from shardkit.plan import MeshSpec, ShardingPlan, ShardUnit
from shardkit.plan.table import aligned, nbytes
from shardkit.planning.build import Settings, build_plan
from shardkit.planning.tree import ModelTree


@dataclass(frozen=True)
class Strategy:
    """A plan under a name, with what is sharded of the model's states."""

    name: str  # as tables call it
    plan: ShardingPlan | None  # that carries it out; None for one that FSDP2 does not support, shown for reference
    optimizer: OptimizerBytes
    sharded: tuple[str, ...] = ("parameters", "gradients", "optimizer")  # of these every rank holds a part only

    def states(self, plan: ShardingPlan) -> dict[str, int]:
        """Bytes of the model's states on one rank by the textbook: P, G and O whole, or divided by the ranks.

        Source: ZeRO (arXiv 1910.02054), table 1. Without padding, buffers or anything that is gathered.
        """
        trained = [spec for spec in plan.params if spec.trainable]
        grads = sum(spec.nbytes for spec in trained)
        whole = {
            "parameters": sum(spec.nbytes for spec in plan.params),
            "gradients": grads,
            "optimizer": self.optimizer.state_bytes(sum(spec.numel for spec in trained), grads),
        }
        ranks = (self.plan or plan).mesh.shard_size
        return {name: size // ranks if name in self.sharded else size for name, size in whole.items()}


def strategies(plan: ShardingPlan, optimizer: OptimizerBytes, ranks_per_node: int) -> list[Strategy]:
    """Every strategy for the units of ``plan`` on as many ranks, most memory first. Pure.

    Those that make no difference there are left out: hybrid and int resharding on one node. A plan that is hybrid keeps
    its own groups of ranks.

    Raises:
        PlanError: ``ranks_per_node`` is not positive.
    """
    if ranks_per_node < 1:
        fix = "Pass how many ranks share a node, such as 8"
        raise PlanError(message("ranks_per_node", f"is {ranks_per_node}", "It is a positive number", fix))
    ranks = plan.mesh.size
    sharded = replace(plan, mesh=MeshSpec.sharded(ranks))
    every = {unit.name for unit in plan.units}
    without_activations = recompute(sharded, recomputed(plan) | {unit.name for unit in blocks(plan)})
    in_nodes: list[tuple[str, ShardingPlan]] = []
    divides = ranks_per_node < ranks and ranks % ranks_per_node == 0
    if plan.mesh.replicates and plan.mesh.shard_size > 1:
        in_nodes.append((f"sharded over {plan.mesh.shard_size} ranks (HSDP)", plan))
    elif divides:
        hybrid = MeshSpec.hybrid(ranks // ranks_per_node, ranks_per_node)
        in_nodes.append(("sharded in a node (HSDP)", replace(plan, mesh=hybrid)))
    if divides and ranks_per_node > 1:
        in_nodes.append(("secondary shards in a node (hpZ)", keep_on(sharded, _resharding(plan), ranks_per_node)))
    return [
        Strategy("replicated (DDP)", replace(plan, mesh=MeshSpec.hybrid(ranks, 1)), optimizer, ()),
        Strategy("optimizer sharded (ZeRO-1)", None, optimizer, ("optimizer",)),
        Strategy("kept gathered (ZeRO-2)", keep_gathered(sharded, every), optimizer, ("gradients", "optimizer")),
        Strategy("sharded (ZeRO-3)", sharded, optimizer),
        *(Strategy(name, changed, optimizer) for name, changed in in_nodes),
        Strategy("ZeRO-3, blocks recomputed", without_activations, optimizer),
        Strategy("ZeRO-3, optimizer in backward", sharded, replace(optimizer, in_backward=True)),
        Strategy("ZeRO-3, offloaded to the CPU", offload(sharded), optimizer),
        Strategy("ZeRO-3, recomputed and offloaded", offload(without_activations), optimizer),
    ]


def blocks(plan: ShardingPlan) -> list[ShardUnit]:
    """The units whose activations are worth recomputing: one module, not the root, of several parameters.

    What repeats: units whose parameters have the same shapes as another's.
    """
    shapes = [tuple(spec.shape for spec in plan.specs_of(unit)) for unit in plan.units]
    return [
        unit
        for unit, own in zip(plan.units, shapes, strict=True)
        if len(unit.modules) == 1 and unit.modules != ("",) and len(own) > 1 and shapes.count(own) > 1
    ]


def _changed(plan: ShardingPlan, names: set[str] | None = None, **settings: Any) -> ShardingPlan:
    """The plan with these settings of the units of these names, or of all."""
    units = (replace(u, **settings) if names is None or u.name in names else u for u in plan.units)
    return replace(plan, units=tuple(units))


def recomputed(plan: ShardingPlan) -> set[str]:
    """Names of the units that are recomputed in backward."""
    return {unit.name for unit in plan.units if unit.checkpoint_activations}


def recompute(plan: ShardingPlan, names: set[str]) -> ShardingPlan:
    """Exactly the units of these names are recomputed in backward."""
    return _changed(_changed(plan, checkpoint_activations=False), names, checkpoint_activations=True)


def offload(plan: ShardingPlan) -> ShardingPlan:
    """Shards, gradients and optimizer state of all units live on the CPU."""
    return _changed(plan, offload_policy=CPUOffloadPolicy())


def keep_gathered(plan: ShardingPlan, names: set[str]) -> ShardingPlan:
    """The units of these names stay gathered from forward to backward; others as they are."""
    return _changed(plan, names, reshard_after_forward=False)


def keep_on(plan: ShardingPlan, names: set[str], ranks: int) -> ShardingPlan:
    """The units of these names are resharded to that many ranks after forward; others as they are."""
    return _changed(plan, names, reshard_after_forward=ranks)


def resharded(plan: ShardingPlan) -> ShardingPlan:
    """Every unit that reshards after forward, to however many ranks, reshards fully."""
    return _changed(plan, _resharding(plan), reshard_after_forward=True)


def _resharding(plan: ShardingPlan) -> set[str]:
    return {unit.name for unit in plan.units if unit.reshard_after_forward is not False}


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
        ranks = self.plan.mesh.size
        return f"bytes on each of {ranks} ranks: model states by the textbook, then the {what} by category"


def _row(row: StrategyEstimate) -> list[str]:
    states = nbytes(sum(row.states.values()))
    if row.peak is None:
        return [row.name, states, *("-" for _ in CATEGORIES), "-", "not supported by FSDP2"]
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
    module, plan = (None, plan or model) if isinstance(model, ShardingPlan) else (model, plan)
    base = base_plan(module, plan, world_size, mesh, mp_policy)
    if batch is not None and module is None:
        fix = "Pass the model, with plan=... for its plan"
        raise PlanError(message("batch", "given with a plan", "Activations are measured on the model", fix))
    found = strategies(base, OptimizerBytes.of(optimizer), ranks_per_node)
    traces = _traces(module, base, batch, loss)
    rows = [_estimated(each, base, traces, buffer_bytes(module)) for each in found]
    return MemoryEstimate(tuple(rows), base)


def base_plan(
    model: nn.Module | None,
    plan: ShardingPlan | None,
    world_size: int | None,
    mesh: MeshSpec | None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
) -> ShardingPlan:
    """``plan``, or that of the default rule, on the mesh that one of the others names, or neither where a plan has one.

    Raises:
        PlanError: both name one, or neither without a plan.
    """
    if world_size is not None and mesh is not None:
        rule = "One of them says how many ranks there are"
        raise PlanError(message("mesh", "given beside world_size", rule, "Pass one"))
    found = MeshSpec.sharded(world_size) if world_size is not None else mesh or (plan.mesh if plan else None)
    if found is None:
        rule, fix = "Bytes on a rank depend on how many there are", "Pass world_size=8, or mesh=MeshSpec.hybrid(2, 4)"
        raise PlanError(message("world_size", "not given, nor a mesh", rule, fix))
    if plan is not None:
        return replace(plan, mesh=found)
    assert model is not None
    return build_plan(ModelTree(model), found, None, Settings(None, mp_policy, OffloadPolicy(), False, False))


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
