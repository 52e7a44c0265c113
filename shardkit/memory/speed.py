"""Model the time of a step, to rank plans; not a measurement.

Compute is FLOPs over a rate of matrix products; a collective is its bytes over a bandwidth, and a latency for each hop;
FSDP2 gathers one unit ahead, and reduces one unit behind, while it computes. Left out: kernels that are not matrix
products, launch gaps, congestion, stragglers, and compute that slows down beside communication.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardkit.memory.moments import BACKWARD, FORWARD
from shardkit.memory.timeline import OptimizerBytes, UnitBytes, timeline, unit_bytes
from shardkit.memory.trace import Loss, Trace, trace
from shardkit.plan import MeshSpec, ShardingPlan
from shardkit.plan.table import aligned, nbytes
from shardkit.planning.dims import on_mesh


@dataclass(frozen=True)
class Hardware:
    """Rates of one rank and its links. Replace them with your own measurements.

    Attributes:
        name: in tables.
        matmul_flops: FLOP per second that large matrix products reach in the compute dtype.
        memory_bandwidth: bytes per second of the device's memory.
        node_bandwidth: bytes per second and direction between ranks of one node.
        network_bandwidth: bytes per second and direction of one rank's share of the network between nodes.
        host_bandwidth: bytes per second between device and CPU, one direction.
        latency: seconds for each hop of a collective.
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


# From data sheets, except matmul_flops, the most that dense bf16 products were seen to reach: 794.5 of 989 TFLOP/s
# (stas00/ml-engineering, compute/accelerator), and the same share of the A100's 312. Node: one direction of NVLink.
# Network: 400 (A100: 200) Gbit/s for each GPU, as in common clusters. Host: PCIe 5 (4) x16 without its overhead.
HARDWARE = {
    "h100": Hardware("h100", 794e12, 3.35e12, 450e9, 50e9, 50e9),
    "h200": Hardware("h200", 794e12, 4.8e12, 450e9, 50e9, 50e9),
    "a100": Hardware("a100", 250e12, 2.0e12, 300e9, 25e9, 25e9),
}


@dataclass(frozen=True)
class StepTime:
    """The modelled time of a step, in seconds."""

    compute: float  # matrix products of forward and backward, including recomputation
    communication: float  # all collectives, overlapped or not
    exposed: float  # communication that no compute overlaps
    optimizer: float  # the optimizer's step, on the device or the CPU

    @property
    def total(self) -> float:
        """Seconds in total."""
        return self.compute + self.exposed + self.optimizer


def step_time(plan: ShardingPlan, trace: Trace, hardware: Hardware, optimizer: OptimizerBytes) -> StepTime:
    """Return the time of one step on every rank.

    In forward each unit's compute overlaps the next unit's all-gather; in backward, the previous unit's all-gather and
    the last unit's reduce-scatter and all-reduce, which share the links.
    """
    sizes = {unit.name: unit_bytes(plan, unit, optimizer) for unit in plan.units}
    order = [unit for unit in plan.execution_order() if sizes[unit.name].unsharded or unit.modules == ("",)]
    flops: dict[tuple[str, str], int] = defaultdict(int)
    for interval in trace.intervals:
        flops[interval.moment, interval.unit] += interval.flops
    forward = [flops[FORWARD, unit.name] / hardware.matmul_flops for unit in order]
    backward = [flops[BACKWARD, unit.name] / hardware.matmul_flops for unit in order]
    meshes = [plan.mesh_of(unit) for unit in order]
    pairs = list(zip(order, meshes, strict=True))
    gathers = [_all_gather(mesh, True, sizes[unit.name], hardware) for unit, mesh in pairs]
    again = [_all_gather(mesh, unit.reshard_after_forward, sizes[unit.name], hardware) for unit, mesh in pairs]
    reduces = [_reduce(mesh, sizes[unit.name], hardware) for unit, mesh in pairs]
    exposed = gathers[0] + sum(max(0, gather - work) for work, gather in zip(forward, gathers[1:], strict=False))
    for place in range(len(order) - 1, -1, -1):
        beside = (again[place - 1] if place else 0) + (reduces[place + 1] if place + 1 < len(order) else 0)
        exposed += max(0, beside - backward[place])
    exposed += again[-1] + reduces[0]
    compute = trace.flops / hardware.matmul_flops
    # The optimizer reads parameters, gradients and state, and writes parameters and state; the CPU has a tenth of the
    # GPU's bandwidth.
    moved = [(2 * s.shard + s.grads + 2 * s.optimizer) * (10 if s.offloaded else 1) for s in sizes.values()]
    stepping = sum(moved) / hardware.memory_bandwidth
    return StepTime(compute, sum(gathers) + sum(again) + sum(reduces), exposed, stepping)


def collective_time(nbytes: int, ranks: int, hardware: Hardware, in_node: int) -> float:
    """Return the seconds of an all-gather or reduce-scatter of ``nbytes`` over ``ranks``, ``in_node`` of them a node.

    Each rank receives ``(ranks - 1) / ranks`` of the bytes. Between nodes all bytes pass a node's network once, which
    its ranks share (NCCL's rings: github.com/NVIDIA/nccl-tests, PERFORMANCE.md).
    """
    if ranks == 1:
        return 0.0
    in_node = min(ranks, in_node)
    inside = nbytes * (ranks - 1) / ranks / hardware.node_bandwidth
    across = nbytes * (1 - in_node / ranks) / (in_node * hardware.network_bandwidth)
    hops = (in_node - 1) + (-(-ranks // in_node) - 1)  # rings or trees within and between nodes
    return max(inside, across) + hardware.latency * hops


def _all_gather(mesh: MeshSpec, resharded: bool | int, size: UnitBytes, hardware: Hardware) -> float:
    """Return the time for a unit that is sharded over all ranks (True), over that many, or not at all (False)."""
    if resharded is False:
        return 0.0
    ranks = mesh.shard_size if resharded is True else resharded
    seconds = collective_time(size.gather, ranks, hardware, hardware.ranks_per_node)
    return seconds + (size.shard / hardware.host_bandwidth if size.offloaded and resharded is True else 0)


def _reduce(mesh: MeshSpec, size: UnitBytes, hardware: Hardware) -> float:
    ranks = mesh.shard_size
    seconds = collective_time(size.reduce, ranks, hardware, hardware.ranks_per_node)
    if mesh.replicates:  # an all-reduce is a reduce-scatter and an all-gather
        in_node = max(1, hardware.ranks_per_node // ranks)
        seconds += 2 * collective_time(size.reduced, mesh.shape[0], hardware, in_node)
    return seconds + (size.grads / hardware.host_bandwidth if size.offloaded else 0)


WORLDS = tuple(2**power for power in range(3, 15))


@dataclass(frozen=True)
class ScalingRow:
    """One plan on one mesh: the peak in bytes on each rank, and the modelled time of a step."""

    mesh: MeshSpec
    peak: int
    time: StepTime

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.mesh.size

    @property
    def efficiency(self) -> float:
        """Compute over the whole step: 1.0 if all communication is overlapped and the optimizer takes no time."""
        return self.time.compute / self.time.total if self.time.total else 0.0


@dataclass(frozen=True)
class ScalingTable:
    """Rows for growing numbers of ranks, FSDP and HSDP; prints as a table, with the answer first."""

    rows: tuple[ScalingRow, ...]
    hardware: Hardware

    def __str__(self) -> str:
        answers, cells = [], [["ranks", "mesh", "peak", "step", "exposed", "compute / step"]]
        for name, hybrid in (("FSDP", False), ("HSDP", True)):
            rows = [row for row in self.rows if row.mesh.replicates is hybrid]
            exposed = [row.ranks for row in rows if row.time.exposed > 0.1 * row.time.compute]
            if rows:
                limit = (
                    f"stops hiding at {exposed[0]:,} ranks (more than a tenth of compute is exposed)" if exposed else ""
                )
                answer = limit or f"hides up to {rows[-1].ranks:,} ranks"
                answers.append(f"{name}: communication {answer}, on {self.hardware.name} by the model")
        for row in self.rows:
            times = [f"{row.time.total:.3g} s", f"{row.time.exposed:.3g} s", f"{row.efficiency:.1%}"]
            cells.append([f"{row.ranks:,}", str(row.mesh), nbytes(row.peak), *times])
        return "\n".join([*answers, "", *aligned(cells, left={1})])


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
    """Model the same micro-batch on growing numbers of ranks, sharded over all and over a node only. Local.

    :mod:`shardkit.memory.speed` says what the model leaves out.

    Args:
        model: on any device, meta too.
        plan: the units and settings; its mesh is replaced.
        batch: one rank's micro-batch, as for :func:`shardkit.memory.estimate`.
        hardware: rates of ranks and links.
        loss: as for :func:`shardkit.memory.estimate`.
        optimizer: as for :func:`shardkit.memory.estimate`.
        worlds: the numbers of ranks.
    """
    step, kept = trace(model, plan, batch, loss=loss), OptimizerBytes.of(optimizer)
    buffers, node = sum(buffer.nbytes for buffer in model.buffers()), hardware.ranks_per_node
    rows = []
    for ranks in worlds:
        hybrid = [MeshSpec.hybrid(ranks // node, node)] if ranks > node and ranks % node == 0 else []
        for mesh in (MeshSpec.sharded(ranks), *hybrid):
            changed = on_mesh(plan, mesh)
            peak = max(point.total for point in timeline(changed, step, kept, buffers))
            rows.append(ScalingRow(mesh, peak, step_time(changed, step, hardware, kept)))
    return ScalingTable(tuple(rows), hardware)
