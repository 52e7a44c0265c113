"""What accumulation and a reduce dtype save on the wire: a step of 4 micro-batches, on 4 gloo
ranks.

Run: ``python -m benchmarks.accumulate``. A row is a schedule of ``shardkit.accumulate``; the first
is torch's own, which reduces every micro-batch. Counted on each rank: all-gathers, reduce-scatters,
and the megabytes it sends, as the payload of the collectives by the least that any algorithm sends,
(N - 1) / N of what is gathered or scattered. Times are wall-clock, all schedules in turn in the
same processes; medians with the smallest and largest. On the memory bus of one machine they say
little of a network, where bytes count.

The second table reduces the gradients of one backward in bf16: by torch's float32 reduce-scatter,
and by its bf16 one. The difference is that of all gradients as one vector, relative to the first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit import shard_model
from shardkit.grads import accumulate
from shardkit.testing import RankPool, comm_counts

RANKS = 4
MICRO_BATCHES = 4
SCHEDULES: dict[str, dict[str, Any] | None] = {
    "every micro-batch (torch)": None,
    "accumulate": {},
    "keep_unsharded": {"keep_unsharded": True},
    "shard_gradients": {"shard_gradients": True},
}
FLOAT32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
REDUCTIONS = {
    "float32 reduce-scatter": FLOAT32,
    "bf16 reduce-scatter": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
    ),
}


class SentBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Payload that this rank sends, to gather parameters and to reduce gradients."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gathers = self.reductions = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        operator = func.name().removeprefix("c10d::")
        if operator == "_allgather_base_":
            self.gathers += args[0].nbytes * (RANKS - 1) / RANKS
        elif operator == "_reduce_scatter_base_":
            self.reductions += args[1].nbytes * (RANKS - 1) / RANKS
        return func(*args, **(kwargs or {}))


def build(width: int, policy: MixedPrecisionPolicy) -> nn.Module:
    """8 linear layers, each a unit."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)])
    return shard_model(model, units=nn.Sequential, mp_policy=policy)


def step(model: nn.Module, width: int, options: dict[str, Any] | None) -> None:
    """One step of all micro-batches."""
    model.zero_grad()
    for i in range(MICRO_BATCHES):
        inputs = torch.randn(
            8, width, generator=torch.Generator().manual_seed(i * RANKS + dist.get_rank())
        )
        if options is None:
            model(inputs).square().mean().backward()
        else:
            with accumulate(model, last=i == MICRO_BATCHES - 1, **options):
                model(inputs).square().mean().backward()


def schedules(width: int, repeats: int) -> list[str]:
    """The rows of the first table."""
    model = build(width, FLOAT32)
    times: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for repeat in range(repeats + 1):
        for name, options in SCHEDULES.items():
            dist.barrier()
            start = time.perf_counter()
            step(model, width, options)
            if repeat:  # the first warms up
                times[name].append(time.perf_counter() - start)
    rows = []
    for name, options in SCHEDULES.items():
        with comm_counts() as counted, SentBytes() as sent:
            step(model, width, options)
        ratio = statistics.median(times[name]) / statistics.median(
            times["every micro-batch (torch)"]
        )
        megabytes = (sent.gathers + sent.reductions) / 1e6
        rows.append(
            f"{name:28s} {counted.all_gathers:4d} {counted.reduce_scatters:4d} {megabytes:8.1f} MB"
            f"  {spread(times[name])}  {ratio:.2f} of torch"
        )
    return rows


def reductions(width: int, repeats: int) -> list[str]:
    """The rows of the second table."""
    models = {name: build(width, policy) for name, policy in REDUCTIONS.items()}
    sent_by, grads_of = {}, {}
    times: dict[str, list[float]] = {name: [] for name in REDUCTIONS}
    inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    for repeat in range(repeats + 1):
        for name, model in models.items():
            model.zero_grad()
            loss = model(inputs).square().mean()
            dist.barrier()
            start = time.perf_counter()
            with SentBytes() as sent:
                loss.backward()
            if repeat:
                times[name].append(time.perf_counter() - start)
            sent_by[name], grads_of[name] = sent.reductions, gradients(model)
    first = next(iter(REDUCTIONS))
    rows = []
    for name in REDUCTIONS:
        difference = ((grads_of[name] - grads_of[first]).norm() / grads_of[first].norm()).item()
        ratio = statistics.median(times[name]) / statistics.median(times[first])
        rows.append(
            f"{name:28s} {sent_by[name] / 1e6:8.1f} MB  {sent_by[name] / sent_by[first]:.2f} of "
            f"float32  difference {difference:.1e}  {spread(times[name])}  {ratio:.2f} of float32"
        )
    return rows


def gradients(model: nn.Module) -> torch.Tensor:
    """All gradients as one float64 vector."""
    grads = [param.grad for param in model.parameters()]
    return torch.cat(
        [grad.full_tensor().double().flatten() for grad in grads if isinstance(grad, DTensor)]
    )


def spread(times: list[float]) -> str:
    """Median, and the range, in milliseconds."""
    median, least, most = (
        1e3 * value for value in (statistics.median(times), min(times), max(times))
    )
    return f"{median:6.1f} ms ({least:.1f} to {most:.1f})"


def main() -> None:
    """Run both tables on fresh ranks and print rank 0's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024, help="features of each layer")
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    print(
        f"torch {torch.__version__}, {RANKS} gloo ranks, 8 layers of {arguments.width}, "
        f"{MICRO_BATCHES} micro-batches"
    )
    with RankPool(RANKS, backend="gloo", timeout=500) as pool:
        for table in (schedules, reductions):
            print("\n".join(pool.run(table, arguments.width, arguments.repeats)[0]) + "\n")


if __name__ == "__main__":
    main()
