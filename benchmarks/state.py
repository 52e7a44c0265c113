"""State in memory, against torch's own calls, on 4 gloo ranks of this machine.

Run with ``python -m benchmarks.state [width] [repeats]``. Both sides run in turn in one run, in
wall-clock seconds until the last rank is done: medians with the smallest and largest; a first turn
is not counted. The model is 24 blocks of two linear layers and a norm, of 8 ``width``^2 parameters
each, in float32, with AdamW.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from shardkit.state import full_optimizer_state_dict, full_state_dict, load_full_state_dict

RANKS, BLOCKS = 4, 24
FULL = StateDictOptions(full_state_dict=True)
TO_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@dataclass
class Bench:
    """What the cases use: on each rank a sharded model, its optimizer with state, and the full
    state dict.
    """

    model: nn.Module
    optimizer: Optimizer
    state: dict[str, Any]

    @property
    def on_rank_0(self) -> dict[str, Any]:
        """The full state dict on rank 0, nothing elsewhere; torch's function changes the dict that
        it is given.
        """
        return dict(self.state) if dist.get_rank() == 0 else {}


@dataclass(frozen=True)
class Case:
    """Two ways to do the same.

    Attributes:
        name: what both do.
        ours: by shardkit.
        theirs: by torch.
        goal: the ratio of times to stay below.
    """

    name: str
    ours: Callable[[Bench], object]
    theirs: Callable[[Bench], object]
    goal: float


CASES = (
    Case(
        "full gather to rank 0",
        lambda b: full_state_dict(b.model),
        lambda b: get_model_state_dict(b.model, options=TO_RANK_0),
        0.12,
    ),
    Case(
        "load, every rank has the dict",
        lambda b: load_full_state_dict(b.model, b.state, src="all"),
        lambda b: set_model_state_dict(b.model, dict(b.state), options=FULL),
        0.10,
    ),
    Case(
        "load, rank 0 has it",
        lambda b: load_full_state_dict(b.model, b.on_rank_0),
        lambda b: set_model_state_dict(b.model, b.on_rank_0, options=FROM_RANK_0),
        0.20,
    ),
    Case(
        "full optimizer state to rank 0",
        lambda b: full_optimizer_state_dict(b.model, b.optimizer),
        lambda b: get_optimizer_state_dict(b.model, b.optimizer, options=TO_RANK_0),
        0.4,
    ),
)


def block(width: int) -> nn.Module:
    """Two linear layers and a norm."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


def bench_of(width: int) -> Bench:
    """A sharded model after one step."""
    model = nn.Sequential(*(block(width) for _ in range(BLOCKS)))
    for each in model:
        fully_shard(each)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), fused=True)
    model(torch.ones(2, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return Bench(model, optimizer, full_state_dict(model, rank0_only=False))


def seconds(call: Callable[[Bench], object], bench: Bench) -> float:
    """Wall-clock time until all ranks are done."""
    dist.barrier()
    start = time.perf_counter()
    kept = call(bench)
    dist.barrier()
    took = time.perf_counter() - start
    del kept  # its memory is given back outside of what is timed
    return took


def measure(rank: int, file: str, width: int, repeats: int) -> None:
    """One rank: run the cases, and on rank 0 print a line for each."""
    warnings.simplefilter("ignore")  # torch's functions warn of torch's own deprecated calls
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    bench = bench_of(width)
    for case in CASES:
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for turn in range(repeats + 1):
            # the first finds colder memory
            for side in ("ours", "theirs") if turn % 2 else ("theirs", "ours"):
                times[side].append(seconds(getattr(case, side), bench))
        if rank == 0:
            print(line(case, times["ours"][1:], times["theirs"][1:]), flush=True)
    dist.barrier()
    os._exit(0)  # gloo may abort when a process ends


def line(case: Case, ours: list[float], theirs: list[float]) -> str:
    """A case with its ratio."""
    ratio = statistics.median(ours) / statistics.median(theirs)
    return (
        f"{case.name:32s} shardkit {spread(ours)}  torch {spread(theirs)}  ratio {ratio:.2f} (goal "
        f"{case.goal:.2f})"
    )


def spread(times: list[float]) -> str:
    """Median, and the range."""
    return f"{statistics.median(times):6.3f} s ({min(times):.3f} to {max(times):.3f})"


def main(width: int = 512, repeats: int = 5) -> None:
    """Measure all cases in turn."""
    mebibytes = sum(p.numel() for p in block(width).parameters()) * BLOCKS * 4 / 2**20
    print(
        f"torch {torch.__version__}, {RANKS} ranks, gloo, {mebibytes:.0f} MiB of parameters, "
        f"{repeats} repeats"
    )
    with tempfile.TemporaryDirectory() as directory:
        file = str(Path(directory) / "rendezvous")
        mp.spawn(measure, (file, width, repeats), RANKS)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
