"""The pictures of the README: a plan, unit by unit, and the memory of one step under it.

Run: ``python -m benchmarks.pictures``, which writes ``docs/pictures/plan.png`` and
``docs/pictures/step.png``. Both are computed, for a Llama of the 8B shape on 64 ranks in bf16 with
float32 masters; nothing is measured.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from matplotlib.figure import Figure

from benchmarks.models import llama, tokens
from shardkit import MeshSpec, MixedPrecisionPolicy, ShardingPlan, plan_model
from shardkit.memory import Prediction, estimate
from shardkit.memory.allocations import CATEGORIES, STEP
from shardkit.memory.tracing import BACKWARD
from shardkit.plan.types import nbytes

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
MESH = MeshSpec.sharded(64)
COLORS = {"after forward": "#0072B2", "after backward": "#E69F00"}
# Okabe and Ito's, for the color-blind
OF_CATEGORIES = (
    "#0072B2",
    "#009E73",
    "#56B4E9",
    "#F0E442",
    "#E69F00",
    "#BBBBBB",
)
GIB = 2**30


def draw_plan(plan: ShardingPlan, path: Path) -> None:
    """Bars of what each unit's all-gather brings, in the order of forward, by when
    it is resharded.
    """
    units = [unit for unit in plan.units if unit.params]
    sizes = {spec.fqn: math.prod(spec.shape) for spec in plan.params}
    figure = Figure(figsize=(10, 3), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for when, color in COLORS.items():
        at = [
            i
            for i, unit in enumerate(units)
            if bool(unit.reshard_after_forward) == (when == "after forward")
        ]
        # bf16: 2 bytes an element
        height = [2 * sum(sizes[name] for name in units[i].params) / GIB for i in at]
        axes.bar(at, height, color=color, label=f"resharded {when}")
    axes.set_xticks(
        range(len(units)), [" + ".join(unit.modules) for unit in units], rotation=90, fontsize=7
    )
    axes.set(ylabel="GiB gathered at once", title=str(plan).splitlines()[0])
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2)
    figure.savefig(path)


def draw_step(predicted: Prediction, path: Path) -> None:
    """What is alive through one step, from one hook of FSDP2 to the next: the height of a stretch
    is its peak.
    """
    points, highest = predicted.timeline, predicted.peak
    figure = Figure(figsize=(10, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    sizes = [
        [getattr(point, category) / GIB for point in (*points, points[-1])]
        for category in CATEGORIES
    ]
    axes.stackplot(
        range(len(points) + 1),
        *sizes,
        labels=CATEGORIES,
        colors=OF_CATEGORIES,
        step="post",
        linewidth=0,
    )
    moments = [point.moment for point in points]
    starts = [0, moments.index(BACKWARD), moments.index(STEP)]
    axes.set_xticks(starts, ["forward", "backward", "step"], ha="left")
    for start in starts:
        axes.axvline(start, color="black", linewidth=0.6)
    axes.plot(points.index(highest) + 0.5, highest.total / GIB, "kv")
    axes.set_title(f"peak {nbytes(highest.total)}, {highest.where}")
    axes.set(ylabel="GiB on one rank", xlabel="one step, from hook to hook (not time)")
    axes.margins(x=0)
    axes.set_ylim(0, 1.1 * highest.total / GIB)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, reverse=True)
    figure.savefig(path)


def main() -> None:
    """Write both pictures; the same bytes every time."""
    FOLDER.mkdir(exist_ok=True)
    model = llama("8B")
    plan = plan_model(model, mesh=MESH, mp_policy=HALF)
    estimated = estimate(model, plan, batch=tokens(1, 4096))
    draw_plan(estimated.plan, FOLDER / "plan.png")
    draw_step(estimated["ZeRO-3"], FOLDER / "step.png")


if __name__ == "__main__":
    main()
