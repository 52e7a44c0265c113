"""Estimate what each common sharding strategy needs on one rank; a strategy is a change of a
plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from shardkit.errors import PlanError, listing
from shardkit.memory.allocations import CATEGORIES, OptimizerBytes, Prediction, timeline, unit_bytes
from shardkit.memory.tracing import Loss, Trace, mixed, trace
from shardkit.plan import MeshSpec, ShardingPlan
from shardkit.plan.text import aligned
from shardkit.plan.types import nbytes
from shardkit.planning.dims import on_mesh


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimates of all strategies, by name or in order, most memory first in general; prints as a
    table.
    """

    rows: tuple[Prediction, ...]
    ranks: int

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Prediction:
        """Return the row named ``name``, or whose name has it in parentheses, as ``"ZeRO-3"``; else
        PlanError.
        """
        for row in self.rows:
            if row.name == name or f"({name})" in row.name:
                return row
        names = listing(row.name for row in self.rows)
        raise PlanError(f"strategy {name!r} is not in the estimate. Use one of {names}.")

    def __str__(self) -> str:
        table = [["strategy", *CATEGORIES, "peak", "at", "on the CPU"]]
        for row in self.rows:
            sizes = [nbytes(getattr(row.peak, category)) for category in CATEGORIES]
            sizes.append(nbytes(row.peak.total))
            table.append([row.name, *sizes, row.peak.where, nbytes(row.host)])
        headline = f"bytes on each of {self.ranks} ranks at the peak of a training step"
        return "\n".join([headline, "", *aligned(table, left={0, 8})])


def estimate(
    model: nn.Module,
    plan: ShardingPlan,
    *,
    batch: Any,
    loss: Loss | None = None,
    optimizer: str | float = "adamw",
    ranks_per_node: int = 8,
    micro_batches: int = 1,
) -> MemoryEstimate:
    """Estimate what every strategy needs on one rank, before anything runs. Local; needs no process
    group and no GPU.

    Sharding and communication are arithmetic on shapes; activations are measured by one forward and
    backward on fake tensors, or where that fails on copies of model and batch. Counted are the
    bytes alive on rank 0, which holds the most, in a steady step: the second or a later one. Not
    counted: the allocator's rounding and fragmentation, NCCL's workspace, CUDA's context.

    Args:
        model: on any device, meta too, in its present train or eval mode.
        plan: of the model, such as ``plan_model(model, mesh=MeshSpec.sharded(64))``: the ranks,
            units, dtypes and settings.
        batch: one rank's micro-batch: a mapping of keyword arguments, a tuple of positional ones,
            or the only one; only shapes and dtypes count. With one token the rows show little
            besides parameters, gradients and optimizer state.
        loss: maps what forward returns to the loss; by default its ``loss``, else the mean of its
            first tensor.
        optimizer: a name in ``shardkit.memory.OPTIMIZERS``, or bytes of state for each element.
        ranks_per_node: for the strategies that shard within a node.
        micro_batches: of a step with ``shardkit.accumulate``, which keeps gradients in between, and
            units with ``reshard_after_forward=False`` unsharded.

    Raises:
        PlanError: the model does not run.
    """
    step = Step(model, plan, batch, loss, micro_batches)
    return estimates(step, OptimizerBytes.of(optimizer), ranks_per_node)


class Step:
    """One rank's training step under any plan of the same units and tiles.

    Units that ``plan`` checkpoints stay so; ``blocks`` are the others that checkpointing applies
    to.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        batch: Any,
        loss: Loss | None = None,
        micro_batches: int = 1,
    ) -> None:
        self.plan = plan
        self.micro_batches = micro_batches
        self.blocks: list[str] = []
        for unit in plan.units:
            if unit.blocks and not unit.checkpoint_activations:
                self.blocks.append(unit.name)
        self._model = model
        self._batch = batch
        self._loss = loss
        self._buffers = sum(buffer.nbytes for buffer in model.buffers())
        self._traces: dict[tuple[bool | str, ...], Trace] = {}  # by how units are checkpointed

    def predict(self, name: str, plan: ShardingPlan, optimizer: OptimizerBytes) -> Prediction:
        """Return what the step needs on one rank under a plan."""
        points = timeline(plan, self.trace_of(plan), optimizer, self._buffers, self.micro_batches)
        host = 0
        for unit in plan.units:
            if unit.offloads:
                size = unit_bytes(plan, unit, optimizer)
                host += size.shard + size.grads + size.optimizer
        return Prediction(name, plan, points, host)

    def trace_of(self, plan: ShardingPlan) -> Trace:
        """Return the trace of a plan, which depends on how its units are checkpointed only."""
        policies = tuple(unit.checkpoint_activations for unit in plan.units)
        if policies not in self._traces:
            self._traces[policies] = self._mixed(plan) or self.measure(plan)
        return self._traces[policies]

    def _mixed(self, plan: ShardingPlan) -> Trace | None:
        """Put the trace of a plan whose blocks differ in policy together from those in which all
        have the same, so that few are measured. None where that is not possible, or where all have
        the same, which is what ends the recursion.
        """
        chosen = {unit.name: unit.checkpoint_activations for unit in plan.units}
        policies = sorted({chosen[name] for name in self.blocks}, key=str)
        if len(policies) < 2:
            return None
        uniform = {}
        for policy in policies:
            same = changed(plan, self.blocks, checkpoint_activations=policy)
            uniform[policy] = self.trace_of(same)
        return mixed(uniform, chosen)

    def measure(self, plan: ShardingPlan) -> Trace:
        """Run the model once on fake tensors, checkpointed as the plan says."""
        return trace(self._model, plan, self._batch, loss=self._loss)


def estimates(step: Step, optimizer: OptimizerBytes, ranks_per_node: int) -> MemoryEstimate:
    """Return the estimates of all strategies for the units of the step's plan."""
    rows = []
    for name, plan in _strategies(step.plan, ranks_per_node).items():
        state = replace(optimizer, in_backward="optimizer in backward" in name)
        if step.micro_batches > 1 and state.in_backward:
            continue  # accumulate refuses it
        rows.append(step.predict(name, plan, state))
    return MemoryEstimate(tuple(rows), step.plan.mesh.size)


def _strategies(plan: ShardingPlan, ranks_per_node: int) -> dict[str, ShardingPlan]:
    """Return every strategy for the units of ``plan`` on as many ranks, by name, most memory first.

    Hybrid sharding and int resharding on one node make no difference and are left out. A hybrid
    plan keeps its mesh.
    """
    ranks, node = plan.mesh.size, ranks_per_node
    strategies: dict[str, ShardingPlan] = {}
    # The model has split its experts over axes of the mesh, so every strategy keeps it.
    has_experts = any(unit.mesh for unit in plan.units)
    divides = not has_experts and node < ranks and ranks % node == 0
    if has_experts:
        sharded = plan
    else:
        sharded = on_mesh(plan, MeshSpec.sharded(ranks))
        strategies["replicated (DDP)"] = on_mesh(plan, MeshSpec.hybrid(ranks, 1))
    strategies["kept unsharded (ZeRO-2)"] = changed(sharded, reshard_after_forward=False)
    strategies["sharded (ZeRO-3)"] = sharded
    if not has_experts and plan.mesh.replicates and plan.mesh.shard_size > 1:
        strategies[f"sharded over {plan.mesh.shard_size} ranks (HSDP)"] = plan
    elif divides:
        in_node = MeshSpec.hybrid(ranks // node, node)
        strategies["sharded in a node (HSDP)"] = on_mesh(plan, in_node)
    if divides and node > 1:
        strategies["secondary shards in a node (hpZ)"] = resharded(sharded, node)
    blocks = [unit.name for unit in plan.units if unit.blocks]
    checkpointed = changed(sharded, blocks, checkpoint_activations=True)
    offload = CPUOffloadPolicy()
    strategies["ZeRO-3, blocks checkpointed"] = checkpointed
    strategies["ZeRO-3, optimizer in backward"] = sharded
    strategies["ZeRO-3, offloaded to the CPU"] = changed(sharded, offload_policy=offload)
    strategies["ZeRO-3, checkpointed and offloaded"] = changed(checkpointed, offload_policy=offload)
    return strategies


def changed(
    plan: ShardingPlan, names: Collection[str] | None = None, **settings: Any
) -> ShardingPlan:
    """Return the plan with these settings for the units of these names, or for all units."""
    chosen = {unit.name for unit in plan.units} if names is None else set(names)
    units = []
    for unit in plan.units:
        units.append(replace(unit, **settings) if unit.name in chosen else unit)
    return replace(plan, units=tuple(units))


def resharded(plan: ShardingPlan, to: bool | int = True) -> ShardingPlan:
    """Return the plan in which blocks, and other units that reshard after forward, do so fully, or
    to that many ranks, which torch does on dim 0 only.
    """
    names = []
    for unit in plan.units:
        reshards = bool(unit.blocks) or unit.reshard_after_forward is not False
        if reshards and (to is True or not unit.shard_dims):
            names.append(unit.name)
    return changed(plan, names, reshard_after_forward=to)
