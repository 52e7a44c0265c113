"""CPU time of one rank's training step: the FSDP1 drop-in against torch's FSDP1, and
``fully_shard`` by hand.

Run: ``python -m benchmarks.dropin``. Two gloo ranks build the same Llama on each side and train it
on the same tokens. The sides take turns, a step each, in an order that rotates; the drop-in's
replacements in torch are there in its own turns only. A time is the process's CPU time with all
threads, which other processes change less than the clock's. Wrapping and the first steps are not
counted.

Printed are medians of rank 0 over the steps, by phase, and the ratio of the sums of the phases'
medians to FSDP1's, and to ``fully_shard``'s: the former is what a program sees, the latter what the
drop-in adds to FSDP2. By hand is ``fully_shard`` on blocks and root, torch's clipping, and
``step_on_local_shards``, without which DTensors' step would hide all else.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks.models import Block, Llama, Shape
from shardkit.fsdp1 import FullyShardedDataParallel as DropIn
from shardkit.fsdp1.dropin import guards
from shardkit.optim import step_on_local_shards

RANKS, WARM_UP = 2, 3
PHASES = ("forward", "backward", "clip", "step")
BFLOAT16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@dataclass(frozen=True)
class Program:
    """A training program: its model, and what it does in a step."""

    width: int
    layers: int
    tokens: int
    flat: bool = False
    bfloat16: bool = False
    gathered: bool = False  # SHARD_GRAD_OP
    micro_batches: int = 1
    clips: bool = True


PROGRAMS = {
    "tiny, as in tests": Program(32, 2, 16),
    "pretraining": Program(256, 8, 64),
    "pretraining, more tokens": Program(256, 4, 512),
    "flat parameters, no clip": Program(512, 4, 64, flat=True, clips=False),
    "bf16, SHARD_GRAD_OP, 2 micro-batches": Program(
        256, 6, 64, bfloat16=True, gathered=True, micro_batches=2
    ),
}


def llama(program: Program) -> Llama:
    """The program's model, equal on all ranks and sides."""
    torch.manual_seed(0)
    return Llama(Shape(program.width, program.width * 3, program.layers, 4, 4, 1000))


def by_fsdp1(model: nn.Module, program: Program, wrapper: Any) -> Any:
    """The model in torch's FSDP1, or in the drop-in."""
    return wrapper(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
        if program.gathered
        else ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(**BFLOAT16) if program.bfloat16 else None,
        device_id=torch.device("cpu"),
        use_orig_params=not program.flat,
    )


def by_hand(model: Llama, program: Program) -> Any:
    """The model under ``fully_shard``, by block."""
    policy = MixedPrecisionPolicy(**BFLOAT16) if program.bfloat16 else MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=not program.gathered)
    return fully_shard(model, mp_policy=policy)


@dataclass
class Side:
    """One way to train a program's model, and the milliseconds of each phase of each
    of its steps.
    """

    program: Program
    model: Any
    optimizer: torch.optim.Optimizer
    times: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    def step(self, ids: Tensor) -> None:
        """Train on each row of ``ids``, and note what each phase took."""
        spent = dict.fromkeys(PHASES, 0.0)

        def timed(phase: str, call: Callable[[], Any]) -> Any:
            start = time.process_time()
            found = call()
            spent[phase] += (time.process_time() - start) * 1e3
            return found

        for number, row in enumerate(ids):
            with self.synced(number == len(ids) - 1):
                loss = timed("forward", lambda row=row: self.model(row[None]))
                timed("backward", loss.backward)
        if self.program.clips:
            timed("clip", self.clip)
        timed("step", lambda: (self.optimizer.step(), self.optimizer.zero_grad()))
        for phase, milliseconds in spent.items():
            self.times[phase].append(milliseconds)

    def synced(self, last: bool) -> AbstractContextManager[None]:
        """What a micro-batch runs in: FSDP1's ``no_sync``, and FSDP2's flag, until the last."""
        # The drop-in answers for the methods of FSDPModule too.
        if isinstance(self.model, FSDPModule) and not isinstance(self.model, DropIn):
            self.model.set_requires_gradient_sync(last)
            return nullcontext()
        return nullcontext() if last else self.model.no_sync()  # type: ignore[no-any-return]

    def clip(self) -> Any:
        """Clip as the program would."""
        if hasattr(self.model, "clip_grad_norm_"):
            return self.model.clip_grad_norm_(1.0)
        return nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def medians(self) -> dict[str, float]:
        """The median of each phase after the first steps."""
        return {phase: statistics.median(times[WARM_UP:]) for phase, times in self.times.items()}


def sides(program: Program) -> dict[str, Side]:
    """All sides of a program, with models of equal values."""
    models = {
        "FSDP1": by_fsdp1(llama(program), program, TorchFSDP),
        "fully_shard": by_hand(llama(program), program),
        "drop-in": by_fsdp1(llama(program), program, DropIn),
    }
    guards.uninstall()
    made = {
        name: Side(program, model, torch.optim.AdamW(model.parameters()))
        for name, model in models.items()
    }
    step_on_local_shards(made["fully_shard"].optimizer)
    return made


def measure(program: Program, steps: int) -> dict[str, dict[str, float]]:
    """The medians of each side's phases."""
    each = sides(program)
    names = list(each)
    for number in range(steps + WARM_UP):
        generator = torch.Generator().manual_seed(number * RANKS + dist.get_rank())
        ids = torch.randint(1000, (program.micro_batches, program.tokens), generator=generator)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name == "drop-in":
                guards.install(DropIn)
            each[name].step(ids)
            guards.uninstall()
    return {name: side.medians() for name, side in each.items()}


def table(title: str, found: dict[str, dict[str, float]]) -> str:
    """A line for each side."""
    total = {name: sum(phases.values()) for name, phases in found.items()}
    lines = [title]
    for name, phases in found.items():
        parts = "  ".join(f"{phase} {milliseconds:7.2f}" for phase, milliseconds in phases.items())
        lines.append(
            f"  {name:12s}{total[name]:8.2f} ms = {parts}   {total[name] / total['FSDP1']:.2f} of "
            "FSDP1"
        )
    return "\n".join(
        [*lines, f"  drop-in / fully_shard: {total['drop-in'] / total['fully_shard']:.2f}"]
    )


def rank(number: int, file: str, steps: int, wanted: str) -> None:
    """Measure in one rank, and print in the first."""
    dist.init_process_group(
        "gloo", rank=number, world_size=RANKS, store=dist.FileStore(file, RANKS)
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch says of each use of FSDP1 that it is deprecated
    for title, program in PROGRAMS.items():
        if wanted in title:
            found = measure(program, steps)
            if number == 0:
                print(table(title, found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Measure all programs and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", default="", help="programs whose title contains this")
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, {RANKS} gloo ranks, {options.steps} steps a side, 1 thread, "
        "AdamW"
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (str(Path(folder) / "store"), options.steps, options.only), RANKS)


if __name__ == "__main__":
    main()
