"""A prediction shown: beside what a rank really holds after a step, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._fsdp import gathered_tensors
from shardkit._torch import local_tensor, named_sharded_parameters, tree_leaves
from shardkit.errors import PlanError, ShardkitError, message
from shardkit.memory.budget import parse_bytes
from shardkit.memory.moments import BACKWARD
from shardkit.memory.timeline import CATEGORIES, STEP, Point, Predicted
from shardkit.plan.table import aligned, nbytes

HELD = ("parameters", "gradients", "optimizer", "unsharded")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank, measured and predicted; prints as a table.

    Attributes:
        measured: by category, what is there now: "parameters", "gradients", "optimizer" and "unsharded" on the
            device, and "on the CPU" what of the first three is offloaded; on an accelerator also "allocated",
            "reserved" and "peak" (the most that was allocated) of torch's allocator.
        predicted: what the prediction says of them after a step, and of its peak; empty without one.
        peak: the stretch in which the prediction has its peak.
    """

    measured: Mapping[str, int]
    predicted: Mapping[str, int]
    peak: Point | None

    def __str__(self) -> str:
        names = [*HELD, "on the CPU", "allocated", "reserved", "peak"]
        lines = aligned([["bytes on this rank", "predicted", "measured", "off by"], *map(self._row, names)])
        return "\n".join([*lines, *([f"predicted peak: {self.peak.where}"] if self.peak else [])])

    def _row(self, name: str) -> list[str]:
        sizes = [self.predicted.get(name), self.measured.get(name)]
        return [name, *("-" if size is None else nbytes(size) for size in sizes), _off(*sizes)]


def memory_report(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, predicted: Predicted | None = None
) -> MemoryReport:
    """What this rank holds of ``model`` and ``optimizer``, beside a prediction. Local, pure.

    Call it after ``optimizer.step()`` and before ``zero_grad()``, in the second step or a later one: that is what is
    predicted. Works on any FSDP2 model, whoever sharded it, and on a plain one. Each storage counts once, with the
    padding of its shard. torch's allocator counts all that the process has on the device, other models among it, and
    its peak since ``torch.accelerator.reset_peak_memory_stats()``.

    Args:
        model: the whole model. Its device is that of its first gathered or plain parameter.
        optimizer: whose state counts; None counts none.
        predicted: a row of :func:`shardkit.memory.estimate` or what :func:`shardkit.memory.plan_for_budget` chose,
            made before the model was sharded, for activations are measured on the plain model. It is that of the
            first rank, which has the most.
    """
    params = [param for _, param in named_sharded_parameters(model)]
    device = _device_type(params)
    state = optimizer.state.values() if optimizer is not None else []
    tensors: dict[str, Iterable[Any]] = {
        "parameters": [*params, *model.buffers()],
        "gradients": [param.grad for param in params],
        "optimizer": [leaf for entry in state for leaf in tree_leaves(entry)],
        "unsharded": gathered_tensors(model),
    }
    storages = {name: set(_storages(found)) for name, found in tensors.items()}
    measured = {name: sum(s.nbytes() for s in found if s.device.type == device) for name, found in storages.items()}
    away = sum(s.nbytes() for found in storages.values() for s in found if s.device.type != device)
    measured |= {"on the CPU": away} | _allocator(device)
    return MemoryReport(measured, _after_step(predicted), predicted.peak if predicted else None)


def _device_type(params: list[nn.Parameter]) -> str:
    """Where the model computes: of a DTensor its mesh, for its shard may be offloaded."""
    for first in params:
        return first.device_mesh.device_type if isinstance(first, DTensor) else first.device.type
    return "cpu"


def _storages(tensors: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.device.type != "meta":
            yield (local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _allocator(device: str) -> dict[str, int]:
    of = torch.accelerator
    counted = {"allocated": of.memory_allocated, "reserved": of.memory_reserved, "peak": of.max_memory_allocated}
    return {} if device == "cpu" else {name: count() for name, count in counted.items()}


def _after_step(predicted: Predicted | None) -> dict[str, int]:
    if predicted is None or predicted.peak is None:
        return {}
    last = predicted.timeline[-1]
    held = {name: getattr(last, name) for name in HELD}
    held["optimizer"] = predicted.timeline[0].optimizer  # without what the step itself makes and frees
    return held | {"allocated": sum(held.values()), "peak": predicted.peak.total}


def _off(predicted: int | None, measured: int | None) -> str:
    if predicted is None or measured is None:
        return "-"
    return f"{(measured - predicted) / predicted:+.1%}" if predicted else "-" if measured == 0 else nbytes(measured)


# The picture.

# Okabe and Ito's, which the colour-blind can tell apart too.
_COLORS = ("#0072B2", "#009E73", "#56B4E9", "#F0E442", "#E69F00", "#BBBBBB")
_GIB = 2**30


def plot_timeline(predicted: Predicted, path: str | Path, *, budget: int | str | None = None) -> None:
    """Draw what is alive on one rank through one step, by category, into a file. Local; needs matplotlib.

    The horizontal axis is the order of events, from one moment of FSDP2 to the next, not time: each stretch has the
    same width, whatever it takes. The height of a stretch is its peak.

    Args:
        predicted: a row of :func:`shardkit.memory.estimate`, or what :func:`shardkit.memory.plan_for_budget` chose.
        path: of the file; its suffix says the format, such as ``.png`` or ``.svg``.
        budget: bytes, or such as ``"80GiB"``, to draw as a line.

    Raises:
        ShardkitError: matplotlib is missing.
        PlanError: the strategy has no timeline, as one that FSDP2 does not support, or ``budget`` is not bytes.
    """
    if predicted.peak is None:
        rule = "FSDP2 does not support this strategy, so there is no step to draw"
        raise PlanError(message("predicted", "has no timeline", rule, "Take another row"))
    limit = None if budget is None else parse_bytes(budget)
    points, highest = predicted.timeline, predicted.peak
    figure = _figure()
    axes = figure.add_subplot()
    sizes = [[getattr(point, category) / _GIB for point in (*points, points[-1])] for category in CATEGORIES]
    edges = range(len(points) + 1)
    axes.stackplot(edges, *sizes, labels=CATEGORIES, colors=_COLORS, step="post", linewidth=0)
    moments = [point.moment for point in points]
    for name, start in {"forward": 0, "backward": moments.index(BACKWARD), "step": moments.index(STEP)}.items():
        axes.axvline(start, color="black", linewidth=0.6)
        at = {"transform": axes.get_xaxis_transform(), "va": "top", "clip_on": False}
        axes.text(start + 0.004 * len(points), 0.99, name, **at)
    place = points.index(highest)
    side, offset = ("right", -8) if place > len(points) / 2 else ("left", 8)
    axes.annotate(
        f"peak {nbytes(highest.total)}, {highest.where}",
        (place + 0.5, highest.total / _GIB),
        xytext=(offset, 10),
        textcoords="offset points",
        ha=side,
        arrowprops={"arrowstyle": "-", "linewidth": 0.6},
    )
    if limit is not None:
        axes.axhline(limit / _GIB, color="#D55E00", linestyle="--", label=f"budget, {nbytes(limit)}")
    axes.set(ylabel="GiB on one rank", xlabel="one step, from moment to moment (not time)", xticks=[])
    axes.margins(x=0)
    axes.set_ylim(0, 1.18 * max(highest.total, limit or 0) / _GIB)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, reverse=True)
    figure.savefig(path)


def _figure() -> Any:
    """A figure of its own: pyplot's current one and its backend stay as the user has them."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        problem, rule = "is not installed", "Pictures are drawn with it"
        raise ShardkitError(message("matplotlib", problem, rule, "pip install matplotlib")) from error
    return Figure(figsize=(10, 4.5), dpi=150, layout="constrained")
