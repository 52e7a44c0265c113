"""CPU time of a training step outside of the model: the hooks of FSDP2, clipping and the optimizer.

A GPU waits for this time wherever kernels are short. Four things take turns in one process:
shardkit's default with its own clipping and :func:`step_on_local_shards`; torchtitan's grouping by
hand with torch's clipping and AdamW on DTensors; and the bare model's forward and backward. A
side's time outside of the model is that of its whole step less that of the bare forward and
backward in the same round: what is left are hooks, copies into and out of buffers, clipping, and
the update.

Time is CPU time of all of this process's threads. The row's model sees ``TOKENS`` tokens, so that a
GPU is done before the CPU can issue more: a full queue would be waited for, and waiting is CPU time
too. On a CPU kernels are CPU time themselves, so there the model is as deep as the row's, and
narrow, and both sides pay the same for them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models import NARROW, SHAPES
from benchmarks.train.case import Case
from benchmarks.train.meter import collected
from benchmarks.train.sides import SIDES
from benchmarks.train.sides.ours import make
from benchmarks.train.training import build

TOKENS = 16
CALLS = 5  # steps in a round
WARM_UP = 3  # make state, and DTensor's plans


def measure(
    case: Case, device: torch.device, rounds: int, together: int = 1
) -> list[tuple[float, float]]:
    """CPU seconds of a step outside of the model, of shardkit and by hand, a pair for each round.
    Collective.

    Args:
        case: model, world and precision; the rest is set here.
        device: of the step.
        rounds: in each of them every side runs ``CALLS`` steps, in an order that rotates.
        together: consecutive blocks in one unit of shardkit's; 1 is its default.
    """
    return [(each["shardkit"], each["expert"]) for each in seconds(case, device, rounds, together)]


def seconds(case: Case, device: torch.device, rounds: int, together: int) -> list[dict[str, float]]:
    """The same of every side, by name, a dict for each round. Collective."""
    runs = _runs(case, device, together)
    ids = torch.randint(1000, (1, TOKENS), device=device)
    for run in runs.values():
        for _ in range(WARM_UP):
            run(ids)
    names, found = list(runs), []
    for number in range(rounds):
        first = number % len(names)
        times = {
            name: _cpu_seconds(runs[name], ids, device) for name in names[first:] + names[:first]
        }
        found.append({name: each - times["model"] for name, each in times.items()})
    return found


def _runs(case: Case, device: torch.device, together: int) -> dict[str, Callable[[Tensor], object]]:
    model = case.model if device.type == "cuda" else NARROW.get(case.model, case.model)
    plain = replace(
        case,
        model=model,
        sequence=TOKENS,
        micro_batch=1,
        compile=False,
        checkpointing="none",
        offload=False,
    )
    ours = make(replace(plain, side="shardkit", stepping="local"), device, together)
    theirs = SIDES["expert"].build(replace(plain, side="expert", stepping="fused"), device)
    # the dtype that it computes in
    bare = build(plain, device).to(torch.bfloat16 if case.bf16 else torch.float32)
    alone = {"hooks": _without_step(theirs.model), "model": _without_step(bare)}
    return {"shardkit": ours.step, "expert": theirs.step, **alone}


def _without_step(model: nn.Module) -> Callable[[Tensor], object]:
    """Forward and backward of a model."""
    params = list(model.parameters())

    def run(ids: Tensor) -> None:
        model(ids).backward()
        for param in params:
            param.grad = None

    return run


def _cpu_seconds(run: Callable[[Tensor], object], ids: Tensor, device: torch.device) -> float:
    """Of one call, not counting what the device still has to do afterwards."""
    seconds = 0.0
    with collected():
        for _ in range(CALLS):
            start = time.process_time()
            run(ids)
            seconds += time.process_time() - start
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    return seconds / CALLS


def main() -> None:
    """``python -m benchmarks.train.outside``: a table of this, as one rank of 8."""
    import argparse

    from benchmarks.train.world import world

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="1B", choices=[name for name in SHAPES if name != "70B"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--together", type=int, default=1, help="blocks in one unit of shardkit's")
    parser.add_argument("--float32", action="store_true", help="no mixed precision")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    case = Case("outside", "shardkit", options.model, fake_ranks=8, bf16=not options.float32)
    with world(8, device, "outside"):
        assert dist.get_world_size() == 8
        found = seconds(case, device, options.rounds, options.together)
    low, middle, high = statistics.quantiles(
        [each["shardkit"] / each["expert"] for each in found], n=4
    )
    floor = statistics.median([each["hooks"] / each["expert"] for each in found])
    mine, other = (
        statistics.median(each[side] for each in found) * 1e3 for side in ("shardkit", "expert")
    )
    print(
        f"torch {torch.__version__}, {device.type}, {options.model} as deep, one rank of 8 "
        "pretended ones"
    )
    print(f"shardkit, {options.together} block(s) a unit, {mine:.2f} ms, by hand {other:.2f} ms")
    print(
        f"ratio {middle:.3f} ({low:.3f} to {high:.3f}), goal: at most 0.6; FSDP2's hooks and "
        f"copies alone {floor:.3f}"
    )


if __name__ == "__main__":
    main()
