"""Predicted memory of one rank of 8 against what torch's allocator saw, of Llamas of 1B and 8B
under six plans.

Run: ``python -m benchmarks.memory`` on one GPU: the ``fake`` process group gives rank 0 of 8 its
real memory, though values are wrong. Measured are ``max_memory_allocated`` and
``max_memory_reserved`` of the third step with fused AdamW, goal: at most 5 and 10 % away. Without a
GPU they stay "not yet measured". ``--tiny`` counts the storages of a tiny Llama on a CPU instead
(``tests/helpers/memory_count.py``), goal: 3 %, and then without an optimizer. Both also time
``plan_for_budget`` for a 70B on 64 ranks, in CPU seconds of this process, goal: under 10.
``--out DIRECTORY`` gets ``memory.json`` and ``memory.png``.

``--table`` prints a Markdown table of the models of ``memory_models.py`` instead: on a GPU of width
1024, measured by the allocator in steps with AdamW, else of width 64, counted as with ``--tiny``.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.memory_models import models
from benchmarks.models import SHAPES, Llama, llama, tokens
from shardkit import MeshSpec, MixedPrecisionPolicy, ShardingPlan, apply_plan, plan_model
from shardkit.memory import plan_for_budget
from shardkit.memory.allocations import OptimizerBytes, timeline
from shardkit.memory.tracing import trace
from shardkit.plan.text import aligned
from shardkit.plan.types import nbytes
from shardkit.testing import fake_world

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {},
    "ZeRO-2": {"reshard_after_forward": False},
    "hpZ, 2 ranks": {"reshard_after_forward": 2},
    "HSDP, 2 x 4": {"mesh": MeshSpec.hybrid(2, 4)},
    "ZeRO-3, checkpointed": {"checkpoint_activations": True},
    "ZeRO-3, float32": {"mp_policy": MixedPrecisionPolicy()},
}
SHAPE_OF_BATCH = {"1B": (1, 4096), "8B": (1, 4096), "tiny": (2, 64)}
HELPERS = Path(__file__).parent.parent / "tests" / "helpers"


def plans(model: Llama) -> dict[str, ShardingPlan]:
    """All six."""
    common = {"mesh": MeshSpec.sharded(8), "mp_policy": HALF}
    return {name: plan_model(model, **(common | changes)) for name, changes in PLANS.items()}


def predicted(model: Llama, plan: ShardingPlan, batch: torch.Tensor, optimizer: str) -> int:
    """Peak bytes of a step."""
    points = timeline(plan, trace(model, plan, batch), OptimizerBytes.of(optimizer))
    return max(point.total for point in points)


def counted(size: str, plan: ShardingPlan) -> dict[str, int]:
    """What is alive at the peak on the CPU, storage by storage, the batch among it."""
    sys.path.append(str(HELPERS))
    from memory_count import counted_peak

    ids = torch.zeros(SHAPE_OF_BATCH[size], dtype=torch.long)
    return {
        "allocated": counted_peak(Llama(SHAPES[size]), plan, lambda model: model(ids).backward())
        + ids.nbytes
    }


def on_gpu(size: str, plan: ShardingPlan) -> dict[str, int]:
    """What the allocator saw in the third step, of all that this process has on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    with fake_world(8):
        model = llama(size)
        apply_plan(model, plan)
        model.to_empty(device="cuda")
        ids = torch.zeros(SHAPE_OF_BATCH[size], dtype=torch.long, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            model(ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }


def measure(size: str) -> list[dict[str, Any]]:
    """A record for each plan."""
    tiny = size == "tiny"
    model, batch = llama(size), tokens(*SHAPE_OF_BATCH[size])
    records = []
    for name, plan in plans(model).items():
        expected = predicted(model, plan, batch, "none" if tiny else "adamw")
        seen = (
            counted(size, plan) if tiny else on_gpu(size, plan) if torch.cuda.is_available() else {}
        )
        records.append({"size": size, "plan": name, "predicted": expected, **seen})
    return records


def mean_loss(output: Any) -> torch.Tensor:
    """Return the output's loss, or a mean of its first tensor."""
    loss = getattr(output, "loss", None)
    loss = output if loss is None else loss
    first = loss if isinstance(loss, torch.Tensor) else loss[0]
    return first.float().square().mean()


def table_of_models() -> str:
    """Return predicted beside measured for rank 0 of 8, a row for each model."""
    gpu = torch.cuda.is_available()
    how = "allocated" if gpu else "counted"
    rows = [f"| model | parameters | predicted | {how} | off by |", "| --- |" + " ---: |" * 4]
    for name, (build, batch) in models(1024 if gpu else 64).items():
        torch.manual_seed(0)
        model = build()
        size = sum(param.numel() for param in model.parameters())
        plan = plan_model(model, mesh=MeshSpec.sharded(8), mp_policy=HALF)
        step = trace(model, plan, batch, loss=mean_loss)
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        state = OptimizerBytes.of("adamw" if gpu else "none")
        expected = max(point.total for point in timeline(plan, step, state, buffers))
        measured = model_on_gpu(model, plan, batch) if gpu else model_on_cpu(model, plan, batch)
        off = f"{expected / measured - 1:+.2%}"
        rows.append(f"| {name} | {size:,} | {nbytes(expected)} | {nbytes(measured)} | {off} |")
        print(rows[-1], file=sys.stderr, flush=True)
    return "\n".join(rows)


def model_on_cpu(model: nn.Module, plan: ShardingPlan, batch: dict[str, torch.Tensor]) -> int:
    """Count storages, the batch among them, without an optimizer."""
    sys.path.append(str(HELPERS))
    from memory_count import counted_peak

    peak = counted_peak(model, plan, lambda sharded: mean_loss(sharded(**batch)).backward())
    return peak + sum(
        tensor.nbytes for tensor in {id(each): each for each in batch.values()}.values()
    )


def model_on_gpu(model: nn.Module, plan: ShardingPlan, batch: dict[str, torch.Tensor]) -> int:
    """What the allocator saw in the third step with AdamW, of what this model added."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with fake_world(8):
        apply_plan(model, plan)
        moved = {name: tensor.cuda() for name, tensor in batch.items()}
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            mean_loss(model(**moved)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated() - before


def seconds_for_70b() -> float:
    """CPU seconds of a plan for a budget."""
    start = time.process_time()
    model = llama("70B")
    plan = plan_model(model, mesh=MeshSpec.sharded(64), mp_policy=HALF)
    plan_for_budget(model, "80GiB", plan, batch=tokens(1, 4096))
    return time.process_time() - start


def table(records: list[dict[str, Any]]) -> str:
    """Predicted beside measured."""
    titles = ["Llama", "plan", "predicted", "allocated", "off by", "reserved", "off by"]
    return "\n".join(aligned([titles, *map(_row, records)], left={0, 1}))


def _row(record: dict[str, Any]) -> list[str]:
    cells = [record["size"], record["plan"], nbytes(record["predicted"])]
    for name in ("allocated", "reserved"):
        seen = record.get(name)
        cells += (
            ["not yet measured", "-"]
            if seen is None
            else [nbytes(seen), f"{record['predicted'] / seen - 1:+.2%}"]
        )
    return cells


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Bars of each plan, predicted beside what was measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.5 + 0.42 * len(records)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    names = [f"{record['size']}, {record['plan']}" for record in records]
    unit = 2**30 if max(record["predicted"] for record in records) > 2**30 else 2**20
    colors = {"predicted": "#0072B2", "allocated": "#E69F00", "reserved": "#BBBBBB"}
    shown = [name for name in colors if any(name in record for record in records)]
    for place, name in enumerate(shown):
        at = [index + place * 0.8 / len(shown) for index in range(len(records))]
        sizes = [record.get(name, 0) / unit for record in records]
        axes.barh(at, sizes, height=0.8 / len(shown), color=colors[name], label=name)
    axes.set_yticks([index + 0.4 * (1 - 1 / len(shown)) for index in range(len(records))], names)
    axes.invert_yaxis()
    axes.set_xlabel(f"{'GiB' if unit == 2**30 else 'MiB'} at the peak of a step, rank 0 of 8")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(shown))
    figure.savefig(path)


def main() -> None:
    """Measure, print a table, and write both files where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny Llama, counted on the CPU")
    parser.add_argument("--out", type=Path, help="directory for memory.json and memory.png")
    parser.add_argument("--table", action="store_true", help="20 models of many kinds")
    options = parser.parse_args()
    if options.table:
        print(table_of_models())
        return
    records = [
        record for size in (["tiny"] if options.tiny else ["1B", "8B"]) for record in measure(size)
    ]
    seconds = seconds_for_70b()
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() and not options.tiny else "CPU"
    )
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {device}")
    print(table(records))
    print(f"plan_for_budget of a 70B on 64 ranks: {seconds:.1f} CPU seconds")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        facts = {
            "torch": torch.__version__,
            "device": device,
            "plan_70b_seconds": seconds,
            "records": records,
        }
        (options.out / "memory.json").write_text(json.dumps(facts, indent=2) + "\n")
        draw(records, options.out / "memory.png")


if __name__ == "__main__":
    main()
