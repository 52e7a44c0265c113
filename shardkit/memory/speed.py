"""A model of a step's time, to rank plans by; not a measurement.

Compute takes FLOPs over a rate of matrix products; a collective takes its bytes over a bandwidth and a latency for each
rank it passes; FSDP2 gathers one unit ahead, and reduces one unit behind, while it computes. Left out: kernels that are
not matrix products, launch gaps, congestion, stragglers, the loss of compute speed under communication.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardkit.memory.moments import BACKWARD, FORWARD
from shardkit.memory.timeline import OptimizerBytes, UnitBytes, timeline, unit_bytes
from shardkit.memory.trace import Loss, Trace, trace
from shardkit.plan import MeshSpec, ShardingPlan
from shardkit.plan.table import aligned, nbytes


@dataclass(frozen=True)
class Hardware:
    """Rates of one rank and its links. Replace them by what you measured.

    Attributes:
        name: as tables call it.
        matmul_flops: FLOP per second that large matrix products reach in the compute dtype.
        memory_bandwidth: bytes per second of the device's memory.
        node_bandwidth: bytes per second and direction between ranks of one node.
        network_bandwidth: bytes per second and direction of one rank's share of the network between nodes.
        host_bandwidth: bytes per second between device and CPU, one direction.
        latency: seconds for each rank that a collective passes.
        ranks_per_node: ranks that share a node.
    """

    name: str
    matmul_flops: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    latency: float = 5e-6
    ranks_per_node: int = 8


# From data sheets, but matmul_flops is what dense bf16 products were seen to reach at most: 794.5 of 989 TFLOP/s
# (stas00/ml-engineering, compute/accelerator), and the same share of the A100's 312. Node: one direction of NVLink.
# Network: 400 (A100: 200) Gbit/s for each GPU, as in common clusters. Host: PCIe 5 (4) x16, less its overhead.
HARDWARE = {
    "h100": Hardware("h100", 794e12, 3.35e12, 450e9, 50e9, 50e9),
    "h200": Hardware("h200", 794e12, 4.8e12, 450e9, 50e9, 50e9),
    "a100": Hardware("a100", 250e12, 2.0e12, 300e9, 25e9, 25e9),
}


@dataclass(frozen=True)
class StepTime:
    """A step's time as the model has it, in seconds."""

    compute: float  # matrix products of forward and backward, recomputation among them
    communication: float  # all collectives, hidden or not
    exposed: float  # communication that nothing hides
    optimizer: float  # the optimizer's step, on the device or the CPU

    @property
    def total(self) -> float:
        """Seconds in all."""
        return self.compute + self.exposed + self.optimizer


def step_time(plan: ShardingPlan, trace: Trace, hardware: Hardware, optimizer: OptimizerBytes) -> StepTime:
    """The time of one step on every rank. Pure.

    Forward: each unit's compute beside the next one's all-gather. Backward: each unit's compute beside the previous
    one's all-gather and the last one's reduce-scatter and all-reduce, which share the links.
    """
    sizes = {unit.name: unit_bytes(plan, unit, optimizer) for unit in plan.units}
    order = [unit for unit in plan.execution_order() if sizes[unit.name].unsharded or unit.modules == ("",)]
    flops: dict[tuple[str, str], int] = defaultdict(int)
    for interval in trace.intervals:
        flops[interval.moment, interval.unit] += interval.flops
    forward = [flops[FORWARD, unit.name] / hardware.matmul_flops for unit in order]
    backward = [flops[BACKWARD, unit.name] / hardware.matmul_flops for unit in order]
    gathers = [_all_gather(plan, True, sizes[unit.name], hardware) for unit in order]
    again = [_all_gather(plan, unit.reshard_after_forward, sizes[unit.name], hardware) for unit in order]
    reduces = [_reduce(plan, sizes[unit.name], hardware) for unit in order]
    exposed = gathers[0] + sum(max(0, gather - work) for work, gather in zip(forward, gathers[1:], strict=False))
    for place in range(len(order) - 1, -1, -1):
        beside = (again[place - 1] if place else 0) + (reduces[place + 1] if place + 1 < len(order) else 0)
        exposed += max(0, beside - backward[place])
    exposed += again[-1] + reduces[0]
    compute = trace.flops / hardware.matmul_flops
    return StepTime(compute, sum(gathers) + sum(again) + sum(reduces), exposed, _optimizer(sizes, hardware))


def collective_time(nbytes: int, ranks: int, hardware: Hardware, in_node: int) -> float:
    """Seconds of an all-gather or reduce-scatter of ``nbytes`` in all over ``ranks``, of which a node has ``in_node``.

    Each rank receives ``(ranks - 1) / ranks`` of them. Between nodes everything passes a node's network once, which its
    ranks share (NCCL's rings: github.com/NVIDIA/nccl-tests, PERFORMANCE.md).
    """
    if ranks == 1:
        return 0.0
    in_node = min(ranks, in_node)
    inside = nbytes * (ranks - 1) / ranks / hardware.node_bandwidth
    across = nbytes * (1 - in_node / ranks) / (in_node * hardware.network_bandwidth)
    hops = (in_node - 1) + (-(-ranks // in_node) - 1)  # rings or trees within and between nodes
    return max(inside, across) + hardware.latency * hops


def _all_gather(plan: ShardingPlan, resharded: bool | int, size: UnitBytes, hardware: Hardware) -> float:
    """Of a unit that is sharded over all ranks (True), over that many, or not at all (False)."""
    if resharded is False:
        return 0.0
    ranks = plan.mesh.shard_size if resharded is True else resharded
    seconds = collective_time(size.gather, ranks, hardware, hardware.ranks_per_node)
    return seconds + (size.shard / hardware.host_bandwidth if size.offloaded and resharded is True else 0)


def _reduce(plan: ShardingPlan, size: UnitBytes, hardware: Hardware) -> float:
    ranks = plan.mesh.shard_size
    seconds = collective_time(size.reduce, ranks, hardware, hardware.ranks_per_node)
    if plan.mesh.replicates:  # an all-reduce is a reduce-scatter and an all-gather
        in_node = max(1, hardware.ranks_per_node // ranks)
        seconds += 2 * collective_time(size.reduced, plan.mesh.shape[0], hardware, in_node)
    return seconds + (size.grads / hardware.host_bandwidth if size.offloaded else 0)


def _optimizer(sizes: dict[str, UnitBytes], hardware: Hardware) -> float:
    """Reads parameters, gradients and state, writes parameters and state; on the CPU at a tenth of the GPU's rate."""
    moved = (
        (2 * size.shard + size.grads + 2 * size.optimizer) * (10 if size.offloaded else 1) for size in sizes.values()
    )
    return sum(moved) / hardware.memory_bandwidth


# One plan on ever more ranks.

WORLDS = tuple(2**power for power in range(3, 15))


@dataclass(frozen=True)
class ScalingRow:
    """One plan on one mesh: the peak in bytes on each rank, and a step's time by the model."""

    mesh: MeshSpec
    peak: int
    time: StepTime

    @property
    def ranks(self) -> int:
        """In all."""
        return self.mesh.size

    @property
    def efficiency(self) -> float:
        """Compute over the whole step: 1.0 where communication hides and the optimizer takes no time."""
        return self.time.compute / self.time.total if self.time.total else 0.0

    def cells(self) -> list[str]:
        times = [f"{self.time.total:.3g} s", f"{self.time.exposed:.3g} s", f"{self.efficiency:.1%}"]
        return [f"{self.ranks:,}", str(self.mesh), nbytes(self.peak), *times]


@dataclass(frozen=True)
class ScalingTable:
    """Rows for growing worlds, FSDP beside HSDP; prints as a table, with the answer first."""

    rows: tuple[ScalingRow, ...]
    hardware: Hardware

    def __str__(self) -> str:
        titles = ["ranks", "mesh", "peak", "step", "exposed", "compute / step"]
        cells = [row.cells() for row in self.rows]
        return "\n".join([*self._answers(), "", *aligned([titles, *cells], left={1})])

    def _answers(self) -> Iterator[str]:
        for name, hybrid in (("FSDP", False), ("HSDP", True)):
            rows = [row for row in self.rows if row.mesh.replicates is hybrid]
            shown = next((row for row in rows if row.time.exposed > 0.1 * row.time.compute), None)
            if rows:
                where = (
                    f"stops hiding at {shown.ranks:,} ranks (more than a tenth of compute is exposed)" if shown else ""
                )
                answer = where or f"hides up to {rows[-1].ranks:,} ranks"
                yield f"{name}: communication {answer}, on {self.hardware.name} by the model"


def scaling_table(
    model: nn.Module,
    plan: ShardingPlan,
    batch: Any,
    hardware: Hardware,
    *,
    loss: Loss | None = None,
    optimizer: str | float = "adamw",
    worlds: Sequence[int] = WORLDS,
) -> ScalingTable:
    """The same micro-batch on each of ever more ranks, sharded over all and over a node only. Local, pure.

    A model on paper: what it leaves out stands in :mod:`shardkit.memory.speed`.

    Args:
        model: on any device, meta too.
        plan: whose units and settings hold; its mesh is replaced.
        batch: one rank's micro-batch, as for :func:`shardkit.memory.estimate`.
        hardware: rates of ranks and links.
        loss: as for :func:`shardkit.memory.estimate`.
        optimizer: as for :func:`shardkit.memory.estimate`.
        worlds: numbers of ranks.
    """
    step, kept = trace(model, plan, batch, loss=loss), OptimizerBytes.of(optimizer)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    rows = []
    for mesh in (mesh for ranks in worlds for mesh in _meshes(ranks, hardware.ranks_per_node)):
        changed = replace(plan, mesh=mesh)
        peak = max(point.total for point in timeline(changed, step, kept, buffers))
        rows.append(ScalingRow(mesh, peak, step_time(changed, step, hardware, kept)))
    return ScalingTable(tuple(rows), hardware)


def _meshes(ranks: int, node: int) -> list[MeshSpec]:
    hybrid = [MeshSpec.hybrid(ranks // node, node)] if ranks > node and ranks % node == 0 else []
    return [MeshSpec.sharded(ranks), *hybrid]
