"""CPU time of one rank's optimizer step and clipping: DTensors against their plain local shards.

Run: ``python -m benchmarks.step``. One process takes itself for a rank (``fake_world``), so nothing
is communicated on any side; parameters, gradients and state are real. The sides take turns in this
process, every round once each in an order that rotates; a round's time is the process's CPU time of
``--calls`` calls, which other processes change less than the clock's. Printed are medians over the
rounds with the smallest and largest, and medians of each round's ratio with its quartiles.

Cases: 288 small parameters on one rank of 4, where a step is mostly Python; and the 146 parameters
of a Llama of 1B (1.24e9 elements) as the first of 1024 ranks holds them, 1.2e6 elements. On a CPU
the bytes of more would hide the time that this is about: that of Python, which a GPU waits for.

Then 96 small parameters on one rank of 2, beside FSDP1 with ``use_orig_params=True``. It cuts units
and not parameters: a rank steps 48 of them whole, where FSDP2 steps half of each of the 96.

With ``--replicate`` instead: whole steps (forward, backward, clipping, fused AdamW on local shards)
of 50 blocks with two norms each, on one rank of 8. The 100 norms are replicated, sharded with their
blocks, or units of their own.

With ``--by-hand``: the same steps with torch's clipping and AdamW on DTensors, of a model that
``shard_model`` sharded with its default plan, and of one with ``fully_shard`` on the same units:
what shardkit adds to FSDP2.

With ``--shard``: sharding itself, of a new model of 10,000 parameters in each round, by both.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from shardkit import clip_grad_norm_, shard_model
from shardkit.optim import step_on_local_shards
from shardkit.testing import comm_counts, fake_world

Shapes = list[tuple[int, ...]]
SMALL: Shapes = [(32, 32), (32,)] * 144
LLAMA_1B: Shapes = [
    (128256, 2048),
    *[
        *[(2048, 2048), (512, 2048), (512, 2048), (2048, 2048)],
        *[(8192, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,)],
    ]
    * 16,
    (2048,),
]
CASES = {
    "288 small parameters, 1 of 4 ranks": (SMALL, 4),
    "Llama 1B, 1 of 1024 ranks": (LLAMA_1B, 1024),
}
BESIDE_FSDP1: Shapes = [(16, 16), (16,)] * 48
GOALS = {
    ("default", "local/FSDP1"): 1.3,
    ("fused", "local/plain"): 1.3,
    ("fused", "local/DTensor"): 0.35,
    ("clip", "shardkit/torch"): 0.5,
    ("step", "shard_model/by hand"): 1.02,
    ("shard", "shard_model/by hand"): 1.3,
}


def sharded(shapes: Shapes, world: int) -> list[nn.Parameter]:
    """Parameters of one rank as FSDP2 makes them, with gradients that are too small to clip
    anything away.
    """
    with torch.device("meta"):
        model = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
    block = nn.Sequential(nn.Identity())  # fully_shard wants a module with a forward
    block.params = model
    fully_shard(block, mesh=init_device_mesh("cpu", (world,)))
    block.to_empty(device="cpu")
    with torch.no_grad():
        for param in block.parameters():
            param.to_local().normal_()
            param.grad = torch.full_like(param, 1e-6)
    return list(block.parameters())


def flat(shapes: Shapes) -> list[nn.Parameter]:
    """Parameters of one rank as FSDP1 makes them, four to a unit, with gradients; empty where
    others hold them.
    """
    units = [
        nn.ParameterList(map(torch.empty, shapes[at : at + 4])) for at in range(0, len(shapes), 4)
    ]
    device = torch.device("cpu")
    wrapped = [
        FullyShardedDataParallel(unit, use_orig_params=True, device_id=device) for unit in units
    ]
    params = [param for unit in wrapped for param in unit.parameters()]
    with torch.no_grad():
        for param in filter(Tensor.numel, params):
            param.normal_()
            param.grad = torch.full_like(param, 1e-6)
    return params


def plain(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """The local shards alone."""
    shards = [nn.Parameter(param.to_local().detach().clone()) for param in params]
    for shard, param in zip(shards, params, strict=True):
        shard.grad = param.grad.to_local().clone()
    return shards


def measured(
    sides: dict[str, Callable[[], object]], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Milliseconds of CPU time a call of each side in each round."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for name in sides:
        for _ in range(3):  # makes state, and DTensor's plans
            sides[name]()
    names = list(sides)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.process_time()
            for _ in range(calls):
                sides[name]()
            times[name].append((time.process_time() - start) * 1e3 / calls)
    return times


def lines(
    label: str, times: dict[str, list[float]], ratios: list[tuple[str, str]]
) -> Iterator[str]:
    """A line for each side, and one for each ratio."""
    for name, values in times.items():
        yield (
            f"  {label:8s}{name:24s}{statistics.median(values):8.3f} ms ({min(values):.3f} to "
            f"{max(values):.3f})"
        )
    for ours, base in ratios:
        each = [mine / theirs for mine, theirs in zip(times[ours], times[base], strict=True)]
        low, middle, high = statistics.quantiles(each, n=4)
        goal = GOALS.get((label, f"{ours}/{base}"))
        yield f"  {label:8s}{ours}/{base}: {middle:.2f} ({low:.2f} to {high:.2f})" + (
            f", at most {goal}" if goal else ""
        )


def steps(shapes: Shapes, world: int, flags: dict[str, bool]) -> dict[str, Callable[[], object]]:
    """The step of AdamW on DTensors, on plain shards, and on DTensors patched."""
    make = functools.partial(torch.optim.AdamW, lr=1e-3, **flags)
    return {
        "plain": make(plain(sharded(shapes, world))).step,
        "local": step_on_local_shards(make(sharded(shapes, world))).step,
        "DTensor": make(sharded(shapes, world)).step,
    }


def clips(shapes: Shapes, world: int) -> dict[str, Callable[[], object]]:
    """Clipping DTensors by torch and by shardkit; and by torch the plain shards, whose norm would
    be another.
    """
    theirs, ours = sharded(shapes, world), sharded(shapes, world)
    shards = plain(ours)
    return {
        "plain": lambda: nn.utils.clip_grad_norm_(shards, 1.0),
        "torch": lambda: nn.utils.clip_grad_norm_(theirs, 1.0),
        "shardkit": lambda: clip_grad_norm_(ours, 1.0),
    }


class Block(nn.Module):
    """A layer between two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.linear, self.after = nn.RMSNorm(64), nn.Linear(64, 64), nn.RMSNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` and what the layer adds."""
        return x + self.after(self.linear(self.before(x)))


def whole_steps(**options: Any) -> Callable[[], object]:
    """A training step of 50 blocks, sharded with these arguments."""
    model = shard_model(nn.Sequential(*(Block() for _ in range(50))), **options)
    optimizer = step_on_local_shards(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    x = torch.randn(2, 64)

    def step() -> None:
        model(x).square().mean().backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torchs_steps(shard: Callable[[nn.Module], object]) -> Callable[[], object]:
    """A training step of 50 blocks, sharded in place by ``shard``, with torch's
    clipping and AdamW.
    """
    model = nn.Sequential(*(Block() for _ in range(50)))
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(2, 64)

    def step() -> None:
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(model: nn.Module) -> None:
    """Shard each block, and the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def compare_by_hand(rounds: int, calls: int) -> None:
    """Measure steps of the same units, made by ``shard_model`` and by hand."""
    print("50 blocks, 1 of 8 ranks")
    with fake_world(8):
        sides = {"shard_model": torchs_steps(shard_model), "by hand": torchs_steps(by_hand)}
        times = measured(sides, rounds, calls)
        print(*lines("step", times, [("shard_model", "by hand")]), sep="\n")


def compare_sharding(rounds: int) -> None:
    """Measure sharding 100 blocks of 50 layers each, by ``shard_model`` and by hand."""
    print("10,000 parameters, 1 of 4 ranks")
    sides: dict[str, Callable[[nn.Module], object]] = {
        "shard_model": shard_model,
        "by hand": by_hand,
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    with fake_world(4):
        for number in range(rounds):
            for name in sorted(sides, reverse=number % 2 == 1):
                blocks = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(50))) for _ in range(100))
                model = nn.Sequential(*blocks)
                start = time.process_time()
                sides[name](model)
                times[name].append((time.process_time() - start) * 1e3)
    print(*lines("shard", times, [("shard_model", "by hand")]), sep="\n")


def compare_replicated(rounds: int, calls: int) -> None:
    """Measure and count steps with 100 norms replicated, in their blocks' units, and as units."""
    rules: dict[str, dict[str, Any]] = {
        "replicated": {"units": Block, "replicate": nn.RMSNorm},
        "in blocks": {"units": Block},
        "own units": {"units": [nn.RMSNorm, Block]},
    }
    print("50 blocks and 100 norms, 1 of 8 ranks")
    with fake_world(8):
        sides = {name: whole_steps(**options) for name, options in rules.items()}
        times = measured(sides, rounds, calls)
        print(
            *lines("step", times, [("replicated", "in blocks"), ("replicated", "own units")]),
            sep="\n",
        )
        for name, step in sides.items():
            with comm_counts() as counts:
                step()
            print(f"  step    {name}: {counts}")


def main() -> None:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument(
        "--replicate", action="store_true", help="measure replicated modules instead"
    )
    parser.add_argument(
        "--by-hand", action="store_true", help="measure whole steps against fully_shard instead"
    )
    parser.add_argument(
        "--shard", action="store_true", help="measure sharding of 10,000 parameters instead"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, {options.rounds} rounds of {options.calls} calls, 1 thread, "
        "AdamW in float32"
    )
    if options.replicate:
        compare_replicated(options.rounds, options.calls)
        return
    if options.by_hand:
        compare_by_hand(options.rounds, options.calls)
        return
    if options.shard:
        compare_sharding(options.rounds)
        return
    for title, (shapes, world) in CASES.items():
        print(title)
        with fake_world(world):
            for label, flags in (("fused", {"fused": True}), ("foreach", {"foreach": True})):
                times = measured(steps(shapes, world, flags), options.rounds, options.calls)
                print(*lines(label, times, [("local", "plain"), ("local", "DTensor")]), sep="\n")
            sides = clips(shapes, world)
            times = measured(sides, options.rounds, options.calls)
            print(*lines("clip", times, [("shardkit", "plain"), ("shardkit", "torch")]), sep="\n")
            with comm_counts() as counts:
                sides["shardkit"]()
            print(f"  clip    shardkit: {counts.all_reduces} all-reduce")
    print("96 small parameters, 1 of 2 ranks")
    with fake_world(2):
        beside = {
            **steps(BESIDE_FSDP1, 2, {}),
            "FSDP1": torch.optim.AdamW(flat(BESIDE_FSDP1), lr=1e-3).step,
        }
        times = measured(beside, options.rounds, options.calls)
        print(*lines("default", times, [("local", "FSDP1"), ("local", "DTensor")]), sep="\n")


if __name__ == "__main__":
    main()
