"""How long a save stops the training loop: ``async_=True`` against the same save without it, on 4
gloo ranks.

Run: ``python -m benchmarks.state_async [MIB]``, where MIB is the size of the model (default 256);
AdamW's state is twice that. Wall-clock seconds from the call to its return, of the slowest rank:
medians, with the smallest and largest, of alternating saves in one run. The first save of each kind
is not counted: it allocates the memory of the copy. Each asynchronous save is complete before the
next one of either kind begins. Both go to the disk of the temporary directory and are flushed to
it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardkit import shard_model
from shardkit.checkpoint import save_checkpoint
from shardkit.testing import RankPool

REPEATS = 5
RANKS = 4
WIDTH = 1024
MOST = 0.2


def build(mib: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of ``mib`` MiB in float32, sharded, with an optimizer that has stepped."""
    model = nn.Sequential(
        *[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(mib * 2**20 // (4 * WIDTH**2))]
    )
    shard_model(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return model, optimizer


def measure(folder: Path, mib: int) -> dict[str, list[float]]:
    """Seconds that each call took on the slowest rank, and until an asynchronous
    save was complete.
    """
    torch.set_num_threads(1)
    model, optimizer = build(mib)
    times: dict[str, list[float]] = {"sync": [], "async": [], "async, complete": []}
    for _ in range(REPEATS + 1):
        for kind in ("sync", "async"):
            dist.barrier()
            start = time.perf_counter()
            handle = save_checkpoint(
                folder / "a", model, optimizer, overwrite=True, async_=kind == "async"
            )
            called = time.perf_counter() - start
            handle.wait()
            times[kind].append(slowest(called))
            if kind == "async":
                times["async, complete"].append(slowest(time.perf_counter() - start))
    return {kind: each[1:] for kind, each in times.items()}


def slowest(seconds: float) -> float:
    """The largest over all ranks. Collective."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def spread(times: list[float]) -> str:
    """Median, and the range."""
    return f"{statistics.median(times):6.3f} s ({min(times):.3f} to {max(times):.3f})"


def main(mib: int = 256) -> None:
    """Measure and print a table."""
    print(f"torch {torch.__version__}, {RANKS} ranks, model {mib} MiB, AdamW, {REPEATS} repeats")
    with (
        tempfile.TemporaryDirectory() as folder,
        RankPool(RANKS, backend="gloo", timeout=600) as pool,
    ):
        times = pool.run(measure, Path(folder), mib)[0]
    for kind, each in times.items():
        print(f"{kind:16s} {spread(each)}")
    ratio = statistics.median(times["async"]) / statistics.median(times["sync"])
    print(f"async / sync     {ratio:.3f}, at most {MOST}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
