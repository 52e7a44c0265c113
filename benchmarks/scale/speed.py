"""Model the time of a step, to rank plans; not a measurement.

Compute is FLOPs over a rate of matrix products; a collective is its bytes over a bandwidth, and a
latency for each hop; FSDP2 gathers one unit ahead, and reduces one unit behind, while it computes.
The CPU runs ahead of the device, so a step takes at least the time of FSDP2's hooks. Left out:
kernels that are not matrix products, launches, congestion, stragglers, and compute that slows down
beside communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from torch import nn

from benchmarks.scale.flops import Step, step_of
from shardkit.memory.allocations import OptimizerBytes, UnitBytes, timeline, unit_bytes
from shardkit.memory.strategies import resharded
from shardkit.memory.tracing import BACKWARD, FORWARD, Loss
from shardkit.plan import MeshSpec, ShardingPlan
from shardkit.plan.text import aligned
from shardkit.plan.types import nbytes
from shardkit.planning.dims import on_mesh


@dataclass(frozen=True)
class Hardware:
    """Rates of one rank and its links. Replace them with your own measurements.

    Attributes:
        name: in tables.
        matmul_flops: FLOP per second that large matrix products reach in the compute dtype.
        memory_bandwidth: bytes per second of the device's memory.
        node_bandwidth: bytes per second and direction between ranks of one node.
        network_bandwidth: bytes per second and direction of one rank's share of the network between
            nodes.
        host_bandwidth: bytes per second between device and CPU, one direction.
        latency: seconds for each hop of a collective within a node.
        network_latency: the same between nodes.
        ranks_per_node: ranks that share a node.
        hook_time: CPU seconds that FSDP2's hooks take in a step, for each unit.
    """

    name: str
    matmul_flops: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    latency: float = 3.4e-6
    network_latency: float = 14e-6
    ranks_per_node: int = 8
    hook_time: float = 3e-4  # measured on x86-64 with torch 2.13, by benchmarks/train/outside.py


# From data sheets, except matmul_flops, the most that dense bf16 products were seen to reach: 794.5
# of 989 TFLOP/s (stas00/ml-engineering, compute/accelerator), and the same share of the A100's 312.
# Node: one direction of NVLink. Network: 400 (A100: 200) Gbit/s for each GPU, as in common
# clusters. Host: PCIe 5 (4) x16 without its overhead. Latencies are those by which NCCL itself
# chooses algorithms (src/graph/tuning.cc: rings, protocol Simple).
HARDWARE = {
    "h100": Hardware("h100", 794e12, 3.35e12, 450e9, 50e9, 50e9),
    "h200": Hardware("h200", 794e12, 4.8e12, 450e9, 50e9, 50e9),
    "a100": Hardware("a100", 250e12, 2.0e12, 300e9, 25e9, 25e9),
}


@dataclass(frozen=True)
class Traffic:
    """What one rank sends: bytes by link, and messages that wait for each other."""

    messages_in_node: int = 0
    bytes_in_node: float = 0
    messages_between_nodes: int = 0
    bytes_between_nodes: float = 0
    bytes_to_host: float = 0  # between the device and the CPU

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            *(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))
        )

    def seconds(self, hardware: Hardware) -> float:
        """Return the time it takes, where the links in a node and between nodes work at the same
        time.
        """
        in_node = self.bytes_in_node / hardware.node_bandwidth
        between = self.bytes_between_nodes / hardware.network_bandwidth
        waits = (
            hardware.latency * self.messages_in_node
            + hardware.network_latency * self.messages_between_nodes
        )
        return max(in_node, between) + waits + self.bytes_to_host / hardware.host_bandwidth


@dataclass(frozen=True)
class StepTime:
    """The modeled time of a step, in seconds, and what it sends."""

    compute: float  # matrix products of forward and backward, including checkpointed forwards
    communication: float  # all collectives, overlapped or not
    exposed: float  # communication that no compute overlaps
    optimizer: float  # the optimizer's step, on the device or the CPU
    hooks: float  # FSDP2's hooks on the CPU, which runs ahead of the device
    traffic: Traffic  # of all collectives

    @property
    def device(self) -> float:
        """Seconds that the device takes, if it never waits for the CPU."""
        return self.compute + self.exposed + self.optimizer

    @property
    def total(self) -> float:
        """Seconds in total: those of the device or of the hooks, whichever take longer."""
        return max(self.device, self.hooks)


def step_time(
    plan: ShardingPlan, step: Step, hardware: Hardware, optimizer: OptimizerBytes
) -> StepTime:
    """Return the time of one step on every rank, and what a rank sends in it."""
    sizes = {unit.name: unit_bytes(plan, unit, optimizer) for unit in plan.units}
    order = [
        unit
        for unit in plan.execution_order()
        if sizes[unit.name].unsharded or unit.modules == ("",)
    ]
    flops, rate = step.flops, hardware.matmul_flops
    work = [
        [flops.get((moment, unit.name), 0) / rate for unit in order]
        for moment in (FORWARD, BACKWARD)
    ]
    each = [(plan.mesh_of(unit), unit.reshard_after_forward, sizes[unit.name]) for unit in order]
    node = hardware.ranks_per_node
    gathered = [_all_gather(mesh, True, size, node) for mesh, _, size in each]
    again = [_all_gather(mesh, reshard, size, node) for mesh, reshard, size in each]
    reduced = [_reduce(mesh, size, node) for mesh, _, size in each]
    seconds = [
        [traffic.seconds(hardware) for traffic in kind] for kind in (gathered, again, reduced)
    ]
    # The optimizer reads parameters, gradients and state, and writes parameters and state; the CPU
    # has a tenth of the GPU's bandwidth.
    moved = [
        (2 * s.shard + s.grads + 2 * s.optimizer) * (10 if s.offloaded else 1)
        for s in sizes.values()
    ]
    return StepTime(
        compute=sum(flops.values()) / rate,
        communication=sum(map(sum, seconds)),
        exposed=_exposed(*work, *seconds),
        optimizer=sum(moved) / hardware.memory_bandwidth,
        hooks=len(order) * hardware.hook_time,
        traffic=sum([*gathered, *again, *reduced], Traffic()),
    )


def _exposed(
    forward: list[float],
    backward: list[float],
    gathers: list[float],
    again: list[float],
    reduces: list[float],
) -> float:
    """Return the seconds of communication that no compute overlaps.

    In forward each unit's compute overlaps the next unit's all-gather; in backward, the previous
    unit's all-gather and the last unit's reduce-scatter and all-reduce, which share the links.
    """
    exposed = gathers[0] + sum(
        max(0, gather - work) for work, gather in zip(forward, gathers[1:], strict=False)
    )
    for place, work in enumerate(backward):
        beside = (again[place - 1] if place else 0) + (
            reduces[place + 1] if place + 1 < len(backward) else 0
        )
        exposed += max(0, beside - work)
    return exposed + again[-1] + reduces[0]


def collective(nbytes: int, ranks: int, in_node: int) -> Traffic:
    """Return what a rank sends in an all-gather or reduce-scatter over ``ranks``, of which a node
    has ``in_node``.

    Each rank sends ``(ranks - 1) / ranks`` of the bytes. A node's network, which its ranks share,
    carries them once. Messages follow rings within and between nodes (github.com/NVIDIA/nccl-tests,
    PERFORMANCE.md).
    """
    if not nbytes:
        return Traffic()
    in_node = min(ranks, in_node)
    between = nbytes * (1 - in_node / ranks) / in_node
    return Traffic(
        in_node - 1, nbytes * (ranks - 1) / ranks - between, -(-ranks // in_node) - 1, between
    )


def _all_gather(mesh: MeshSpec, resharded: bool | int, size: UnitBytes, node: int) -> Traffic:
    """Return what is sent for a unit that is sharded over all ranks (True), over that many, or not
    at all (False).
    """
    if resharded is False:
        return Traffic()
    from_host = size.shard if size.offloaded and resharded is True else 0
    ranks = mesh.shard_size if resharded is True else resharded
    return collective(size.gather, ranks, node) + Traffic(bytes_to_host=from_host)


def _reduce(mesh: MeshSpec, size: UnitBytes, node: int) -> Traffic:
    sent = collective(size.reduce, mesh.shard_size, node)
    # an all-reduce is a reduce-scatter and an all-gather; between nodes NCCL follows trees
    if mesh.replicates:
        half = collective(size.reduced, mesh.shape[0], max(1, node // mesh.shard_size))
        half = replace(half, messages_between_nodes=half.messages_between_nodes.bit_length())
        sent += half + half
    return sent + Traffic(bytes_to_host=size.grads if size.offloaded else 0)


WORLDS = tuple(2**power for power in range(3, 15))


@dataclass(frozen=True)
class ScalingRow:
    """One plan on one mesh: the peak in bytes on each rank, and the modeled time of a step."""

    strategy: str  # FSDP, HSDP or hpZ
    plan: ShardingPlan
    peak: int
    time: StepTime

    @property
    def mesh(self) -> MeshSpec:
        """The mesh of the plan."""
        return self.plan.mesh

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.mesh.size

    @property
    def hides(self) -> bool:
        """Whether at most a tenth of the compute's time is added by communication."""
        return self.time.exposed <= 0.1 * self.time.compute

    @property
    def efficiency(self) -> float:
        """Compute over the whole step: 1.0 if all communication is overlapped and the optimizer
        takes no time.
        """
        return self.time.compute / self.time.total if self.time.total else 0.0


@dataclass(frozen=True)
class ScalingTable:
    """Rows for growing numbers of ranks, FSDP, HSDP and hpZ; prints as a table, with the answer
    first.
    """

    rows: tuple[ScalingRow, ...]
    hardware: Hardware

    def of(self, strategy: str) -> list[ScalingRow]:
        """Return the rows of one strategy, fewest ranks first."""
        return [row for row in self.rows if row.strategy == strategy]

    def __str__(self) -> str:
        answers, cells = (
            [],
            [
                [
                    "ranks",
                    "strategy",
                    "mesh",
                    "peak",
                    "sent in node",
                    "between",
                    "step",
                    "exposed",
                    "compute / step",
                ]
            ],
        )
        for name, rows in ((name, self.of(name)) for name in STRATEGIES):
            exposed = [row.ranks for row in rows if not row.hides]
            if rows:
                answer = f"compute hides communication up to {rows[-1].ranks:,} ranks"
                if exposed:
                    answer = (
                        f"communication is exposed from {exposed[0]:,} ranks on (more than a tenth "
                        "of compute)"
                    )
                answers.append(f"{name}: {answer}, estimated for {self.hardware.name}")
        for row in self.rows:
            sent = [
                nbytes(round(row.time.traffic.bytes_in_node)),
                nbytes(round(row.time.traffic.bytes_between_nodes)),
            ]
            times = [
                f"{row.time.total:.3g} s",
                f"{row.time.exposed:.3g} s",
                f"{row.efficiency:.1%}",
            ]
            cells.append(
                [f"{row.ranks:,}", row.strategy, str(row.mesh), nbytes(row.peak), *sent, *times]
            )
        return "\n".join([*answers, "", *aligned(cells, left={1, 2})])


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
    """Model the same micro-batch on growing numbers of ranks, sharded over all of them (FSDP), over
    a node only (HSDP), and over all with gathered parameters resharded to a node (hpZ). Local.

    Args:
        model: on any device, meta too.
        plan: the units and settings; its mesh is replaced.
        batch: one rank's micro-batch, as for :func:`shardkit.memory.estimate`.
        hardware: rates of ranks and links.
        loss: as for :func:`shardkit.memory.estimate`.
        optimizer: as for :func:`shardkit.memory.estimate`.
        worlds: the numbers of ranks.
    """
    step, kept = step_of(model, plan, batch, loss), OptimizerBytes.of(optimizer)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    rows = []
    for ranks in worlds:
        for strategy, changed in _scaled_plans(plan, ranks, hardware.ranks_per_node):
            peak = max(point.total for point in timeline(changed, step.trace, kept, buffers))
            rows.append(
                ScalingRow(strategy, changed, peak, step_time(changed, step, hardware, kept))
            )
    return ScalingTable(tuple(rows), hardware)


STRATEGIES = ("FSDP", "HSDP", "hpZ")


def _scaled_plans(plan: ShardingPlan, ranks: int, node: int) -> Iterator[tuple[str, ShardingPlan]]:
    sharded = on_mesh(plan, MeshSpec.sharded(ranks))
    yield "FSDP", sharded
    if 1 < node < ranks and ranks % node == 0:
        yield "HSDP", on_mesh(plan, MeshSpec.hybrid(ranks // node, node))
        yield "hpZ", resharded(sharded, node)
