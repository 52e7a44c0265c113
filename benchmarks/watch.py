"""What ``shardkit.watching.watch`` costs a training step: a model of 100 units on 2 gloo ranks.

Run: ``python -m benchmarks.watch``. Counted in CPU time, which other programs on the machine change
little: a note, times the notes of a step, in the thread that trains; and a poll of the watch's
thread, times the polls in a step at ``after=30``, one a second. The step is forward, backward and
SGD of 100 linear layers of 256 x 256, on 16 rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from shardkit import shard_model
from shardkit.ranks import listeners
from shardkit.testing import RankPool
from shardkit.watching import watch

UNITS, WIDTH, STEPS = 100, 256, 10


def seconds(work: Callable[[], object], times: int) -> float:
    """CPU seconds of this thread for one call."""
    work()
    start = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - start) / times


def measure() -> dict[str, float]:
    """On each rank: seconds of a step, a note and a poll, and the notes of a step."""
    model = shard_model(
        nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)]), units=nn.Linear
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.ones(16, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = seconds(step, STEPS)
    with watch(model, after=3600):
        watching = listeners[0].__self__  # type: ignore[attr-defined]
        step()
        before = watching.count
        step()
        notes = watching.count - before
        note = seconds(lambda: watching._note_unit("layers.0", "all-gather"), 10_000)
        return {"step": plain, "note": note, "notes": notes, "poll": seconds(watching._poll, 200)}


def main() -> None:
    """Print the table."""
    with RankPool(2, timeout=300) as pool:
        found = pool.run(measure)[0]  # rank 0, which compares
    noted, polled = found["notes"] * found["note"], found["poll"] * found["step"]
    print(
        f"step {found['step'] * 1e3:.1f} ms CPU; {found['notes']:.0f} notes of "
        f"{found['note'] * 1e6:.1f} us"
    )
    print(f"notes: {noted / found['step']:.2%} of a step")
    print(f"polls of {found['poll'] * 1e3:.2f} ms: {polled / found['step']:.2%} of a step")


if __name__ == "__main__":
    main()
