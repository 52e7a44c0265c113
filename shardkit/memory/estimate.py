"""Estimate what each common sharding strategy needs on one rank; a strategy is a change of a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, groupby
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from shardkit.errors import PlanError, listing, message
from shardkit.memory.timeline import CATEGORIES, OptimizerBytes, Point, timeline
from shardkit.memory.trace import Loss, Trace, mixed, trace, without_activations
from shardkit.plan import MeshSpec, ParamSpec, ShardingPlan, ShardUnit, check
from shardkit.plan.table import aligned
from shardkit.plan.types import nbytes
from shardkit.planning.build import Request, Settings, build_plan
from shardkit.planning.default import find_mlps
from shardkit.planning.dims import on_mesh
from shardkit.planning.tree import ModelTree


@dataclass(frozen=True)
class Strategy:
    """A named plan, and which of the model's states it shards."""

    name: str  # in tables
    plan: ShardingPlan | None  # None for a strategy that FSDP2 does not support, shown for reference
    optimizer: OptimizerBytes
    sharded: tuple[str, ...] = ("parameters", "gradients", "optimizer")

    def states(self, plan: ShardingPlan) -> dict[str, int]:
        """Return the bytes of the model's states on one rank: each whole, or divided by the number of ranks.

        As in ZeRO (arXiv 1910.02054), table 1: without padding, buffers, or gathered parameters.
        """
        split = {spec.fqn: spec for unit in plan.units for spec in plan.split_specs(unit)}
        here = self._whole(split.get(spec.fqn, spec) for spec in plan.params)
        ranks = (self.plan or plan).mesh.shard_size
        shards = {name: size // ranks for name, size in self._whole(plan.params).items()}
        return {name: shards[name] if name in self.sharded else size for name, size in here.items()}

    def _whole(self, params: Iterable[ParamSpec]) -> dict[str, int]:
        specs = list(params)
        trained = [spec for spec in specs if spec.trainable]
        grads = sum(spec.nbytes for spec in trained)
        optimizer = self.optimizer.state_bytes(sum(spec.numel for spec in trained), grads)
        return {"parameters": sum(spec.nbytes for spec in specs), "gradients": grads, "optimizer": optimizer}


def strategies(plan: ShardingPlan, optimizer: OptimizerBytes, ranks_per_node: int) -> list[Strategy]:
    """Return every strategy for the units of ``plan`` on the same number of ranks, most memory first.

    Strategies that make no difference are left out: hybrid sharding and int resharding on one node. A hybrid plan keeps
    its own mesh.

    Raises:
        PlanError: ``ranks_per_node`` is not positive.
    """
    if ranks_per_node < 1:
        fix = "Pass how many ranks share a node, such as 8"
        raise PlanError(message("ranks_per_node", f"is {ranks_per_node}", "It must be a positive number", fix))
    ranks = plan.mesh.size
    has_experts = any(unit.mesh for unit in plan.units)  # split by the model, so every strategy keeps the mesh
    sharded = plan if has_experts else on_mesh(plan, MeshSpec.sharded(ranks))
    all_recomputed = recompute(sharded, recomputed(plan).union(blocks(plan)))
    in_nodes: list[tuple[str, ShardingPlan]] = []
    divides = not has_experts and ranks_per_node < ranks and ranks % ranks_per_node == 0
    if not has_experts and plan.mesh.replicates and plan.mesh.shard_size > 1:
        in_nodes.append((f"sharded over {plan.mesh.shard_size} ranks (HSDP)", plan))
    elif divides:
        hybrid = MeshSpec.hybrid(ranks // ranks_per_node, ranks_per_node)
        in_nodes.append(("sharded in a node (HSDP)", on_mesh(plan, hybrid)))
    if divides and ranks_per_node > 1:
        in_nodes.append(("secondary shards in a node (hpZ)", resharded(sharded, ranks_per_node)))
    replicated = [] if has_experts else [on_mesh(plan, MeshSpec.hybrid(ranks, 1))]
    return [
        *(Strategy("replicated (DDP)", each, optimizer, ()) for each in replicated),
        Strategy("optimizer sharded (ZeRO-1)", None, optimizer, ("optimizer",)),
        Strategy(
            "kept gathered (ZeRO-2)",
            changed(sharded, reshard_after_forward=False),
            optimizer,
            ("gradients", "optimizer"),
        ),
        Strategy("sharded (ZeRO-3)", sharded, optimizer),
        *(Strategy(name, changed, optimizer) for name, changed in in_nodes),
        Strategy("ZeRO-3, blocks recomputed", all_recomputed, optimizer),
        Strategy("ZeRO-3, optimizer in backward", sharded, replace(optimizer, in_backward=True)),
        Strategy("ZeRO-3, offloaded to the CPU", offload(sharded), optimizer),
        Strategy("ZeRO-3, recomputed and offloaded", offload(all_recomputed), optimizer),
    ]


def blocks(plan: ShardingPlan) -> list[str]:
    """Return the names of the units worth recomputing: one module of several parameters that repeats; not the root.

    A unit repeats if another one has parameters of the same shapes.
    """
    shapes = [tuple(spec.shape for spec in plan.specs_of(unit)) for unit in plan.units]
    return [
        unit.name
        for unit, own in zip(plan.units, shapes, strict=True)
        if len(unit.modules) == 1 and unit.modules != ("",) and len(own) > 1 and shapes.count(own) > 1
    ]


def changed(plan: ShardingPlan, names: Collection[str] | None = None, **settings: Any) -> ShardingPlan:
    """Return the plan with these settings for the units of these names, or for all units."""
    units = (replace(u, **settings) if names is None or u.name in names else u for u in plan.units)
    return replace(plan, units=tuple(units))


def fused(plan: ShardingPlan, number: int, names: Collection[str]) -> ShardingPlan:
    """Return the plan with up to ``number`` consecutive blocks of ``names`` in each unit."""
    fusible, units = set(blocks(plan)).intersection(names), []
    for _, run in groupby(plan.units, lambda unit: _settings(unit) if unit.name in fusible else unit):
        same = list(run)
        units += [_as_one(same[start : start + number]) for start in range(0, len(same), number)]
    return replace(plan, units=tuple(units))


def _settings(unit: ShardUnit) -> tuple[str, ShardUnit]:
    """Return what blocks of one unit have in common: the module around them, and every setting."""
    return unit.modules[0].rpartition(".")[0], replace(unit, modules=(), params=(), shard_dims=())


def _as_one(units: Sequence[ShardUnit]) -> ShardUnit:
    modules, params, dims = (
        tuple(chain.from_iterable(getattr(unit, name) for unit in units))
        for name in ("modules", "params", "shard_dims")
    )
    return replace(units[0], modules=modules, params=params, shard_dims=dims)


def recomputed(plan: ShardingPlan) -> set[str]:
    """Return the names of the units that are recomputed in backward."""
    return {unit.name for unit in plan.units if unit.checkpoint_activations}


def recompute(plan: ShardingPlan, names: Collection[str]) -> ShardingPlan:
    """Return the plan in which exactly the units of these names are recomputed."""
    return changed(changed(plan, checkpoint_activations=False), names, checkpoint_activations=True)


def offload(plan: ShardingPlan) -> ShardingPlan:
    """Return the plan with shards, gradients and optimizer state of all units on the CPU."""
    return changed(plan, offload_policy=CPUOffloadPolicy())


def resharded(plan: ShardingPlan, to: bool | int = True) -> ShardingPlan:
    """Return the plan in which what reshards after forward does so fully, or to that many ranks, on dim 0 only."""
    can = (unit for unit in plan.units if to is True or not unit.shard_dims)
    names = {unit.name for unit in can if unit.reshard_after_forward is not False}
    return changed(plan, names, reshard_after_forward=to)


class Measured:
    """The traces of one micro-batch that serve every plan of the same units, whatever is recomputed."""

    def __init__(self, model: nn.Module, plan: ShardingPlan, batch: Any, loss: Loss | None) -> None:
        self.plan = plan
        self.already = recomputed(plan)
        self.blocks = [name for name in blocks(plan) if name not in self.already]
        self.buffers = buffer_bytes(model)
        self.mlps = _may_tile(model, plan)
        self._trace = partial(trace, model, plan, batch, loss=loss)
        self._traces: dict[frozenset[str], Trace] = {}  # by the names of the blocks that are recomputed
        self.of = partial(Measured, model, batch=batch, loss=loss)  # the same of another plan's units

    def trace_of(self, plan: ShardingPlan) -> Trace:
        """Return the trace in which the plan's units are recomputed; measures twice for all plans, where they mix."""
        names, blocks = frozenset(recomputed(plan) - self.already), frozenset(self.blocks)
        if not names or names == blocks:
            return self._measure(names)
        return mixed(self._measure(frozenset()), self._measure(blocks), names) or self._measure(names)

    def _measure(self, names: frozenset[str]) -> Trace:
        if names not in self._traces:
            self._traces[names] = self._trace(checkpointed=self.already.union(names))
        return self._traces[names]


def _may_tile(model: nn.Module, plan: ShardingPlan) -> list[str]:
    """Return the FQNs of the MLPs that may compute in tiles beside the modules that do."""
    found = [fqn for fqn in find_mlps(ModelTree(model)) if fqn not in dict(plan.tiles)]
    wrong = check.tile_problems(replace(plan, tiles=(*plan.tiles, *((fqn, 2) for fqn in found))))
    return [fqn for fqn in found if fqn not in wrong]


@dataclass(frozen=True)
class StrategyEstimate:
    """What one strategy needs on one rank, in bytes.

    Attributes:
        strategy: the named plan.
        states: parameters, gradients and optimizer state by ZeRO's arithmetic, on the device or the CPU.
        timeline: every stretch of a step; empty for a strategy without a plan.
        measured: whether activations are included, which needs a batch.
    """

    strategy: Strategy
    states: dict[str, int]
    timeline: tuple[Point, ...]
    measured: bool

    @property
    def name(self) -> str:
        """The strategy's name in tables."""
        return self.strategy.name

    @cached_property
    def peak(self) -> Point | None:
        """The stretch with the most bytes alive."""
        return max(self.timeline, key=lambda point: point.total, default=None)


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimates of all strategies, by name or in order; prints as a table.

    Attributes:
        rows: most memory first, in general.
        plan: the plan whose units all strategies share.
    """

    rows: tuple[StrategyEstimate, ...]
    plan: ShardingPlan

    def __iter__(self) -> Iterator[StrategyEstimate]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> StrategyEstimate:
        """Return the row named ``name``, or whose name has it in parentheses, such as ``"ZeRO-3"``.

        Raises:
            PlanError: there is no such row.
        """
        exact = [row for row in self.rows if row.name == name or f"({name})" in row.name]
        if len(exact) == 1:
            return exact[0]
        names = listing(row.name for row in self.rows)
        raise PlanError(message("strategy", f"{name!r} is not in the estimate", f"It has {names}", "Use one of these"))

    def __str__(self) -> str:
        measured = any(row.measured for row in self.rows)
        what = "peak of a training step" if measured else "peak without activations (no batch given)"
        ranks = self.plan.mesh.size
        headline = f"bytes on each of {ranks} ranks: model states by ZeRO's formulas, then the {what} by category"
        titles = ["strategy", "states", *CATEGORIES, "peak", "at"]
        return "\n".join([headline, "", *aligned([titles, *map(_row, self.rows)], left={0, len(titles) - 1})])


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
    """Estimate what every strategy needs on one rank, before anything runs. Local; needs no process group and no GPU.

    Sharding and communication are arithmetic on shapes; activations are measured by one forward and backward on fake
    tensors. Counted are the bytes alive on rank 0, which holds the most, in a steady step: the second or a later one.
    Not counted: the allocator's rounding and fragmentation, NCCL's workspace, CUDA's context.

    Args:
        model: on any device, meta too, in its present train or eval mode; or a plan, which is enough without ``batch``.
        world_size: the number of ranks. Pass this, or ``mesh``, or neither to use the plan's mesh.
        mesh: instead of ``world_size``.
        plan: the units, dtypes and settings; None is the default rule with ``mp_policy``.
        batch: one rank's micro-batch: a mapping of keyword arguments, a tuple of positional ones, or the only one;
            only shapes and dtypes count. None leaves out activations.
        loss: maps what forward returns to the loss; by default its ``loss``, else the mean of its first tensor.
        optimizer: a name in ``shardkit.memory.OPTIMIZERS``, or bytes of state for each element.
        ranks_per_node: for the strategies that shard within a node.
        mp_policy: used where no plan is given.

    Raises:
        PlanError: the arguments contradict each other, or the model does not run on fake tensors.
    """
    module, plan = (None, plan or model) if isinstance(model, ShardingPlan) else (model, plan)
    base = base_plan(module, plan, world_size, mesh, mp_policy)
    if batch is not None and module is None:
        fix = "Pass the model, with plan=... for its plan"
        raise PlanError(message("batch", "given with a plan", "Activations are measured on the model", fix))
    measured = Measured(module, base, batch, loss) if module is not None and batch is not None else None
    return estimates(base, OptimizerBytes.of(optimizer), ranks_per_node, buffer_bytes(module), measured)


def estimates(
    base: ShardingPlan, optimizer: OptimizerBytes, ranks_per_node: int, buffers: int, measured: Measured | None
) -> MemoryEstimate:
    """Return the estimates of all strategies, with activations where they are measured."""
    rows = []
    for each in strategies(base, optimizer, ranks_per_node):
        points: list[Point] = []
        if each.plan is not None:
            step = measured.trace_of(each.plan) if measured else without_activations(each.plan)
            points = timeline(each.plan, step, each.optimizer, buffers)
        rows.append(StrategyEstimate(each, each.states(base), tuple(points), measured is not None))
    return MemoryEstimate(tuple(rows), base)


def base_plan(
    model: nn.Module | None,
    plan: ShardingPlan | None,
    world_size: int | None,
    mesh: MeshSpec | None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
) -> ShardingPlan:
    """Return ``plan``, or the default rule's, on ``world_size`` ranks, on ``mesh``, or on the plan's own mesh.

    Raises:
        PlanError: both are given, or neither and no plan.
    """
    if world_size is not None and mesh is not None:
        rule = "Each of them sets the number of ranks"
        raise PlanError(message("mesh", "given together with world_size", rule, "Pass either mesh= or world_size="))
    found = MeshSpec.sharded(world_size) if world_size is not None else mesh or (plan.mesh if plan else None)
    if found is None:
        rule, fix = "Bytes on a rank depend on the number of ranks", "Pass world_size=8, or mesh=MeshSpec.hybrid(2, 4)"
        raise PlanError(message("world_size", "not given, and no mesh either", rule, fix))
    if plan is not None:
        return on_mesh(plan, found)
    assert model is not None
    return build_plan(ModelTree(model), found, Request(settings=Settings(mp_policy=mp_policy)))


def buffer_bytes(model: nn.Module | None) -> int:
    """Return the bytes of a model's buffers, which every rank holds whole."""
    return sum(buffer.nbytes for buffer in model.buffers()) if model is not None else 0
