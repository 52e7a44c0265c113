"""Compare a prediction with what a rank holds after a step, and draw it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._fsdp.undone import gathered_tensors
from shardkit._torch import local_tensor, named_sharded_parameters
from shardkit._torch.dispatch import tree_leaves
from shardkit.errors import ShardkitError, message
from shardkit.memory.budget import parse_bytes
from shardkit.memory.hook_points import BACKWARD
from shardkit.memory.timeline import CATEGORIES, STEP, Point, Prediction
from shardkit.plan.table import aligned
from shardkit.plan.types import nbytes

_HELD = ("parameters", "gradients", "optimizer", "unsharded")
_COLORS = ("#0072B2", "#009E73", "#56B4E9", "#F0E442", "#E69F00", "#BBBBBB")  # Okabe and Ito's, for color-blind readers
_GIB = 2**30


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank, measured and predicted; prints as a table.

    Attributes:
        measured: by category: "parameters", "gradients", "optimizer" and "unsharded" on the device, and "on the CPU"
            what of the first three is offloaded; on an accelerator also "allocated", "reserved" and "peak" (the most
            that was allocated) of torch's allocator.
        predicted: the same categories after a step, and the peak, as predicted; empty without a prediction.
        peak: the stretch of the predicted peak.
    """

    measured: Mapping[str, int]
    predicted: Mapping[str, int]
    peak: Point | None

    def __str__(self) -> str:
        rows = [["bytes on this rank", "predicted", "measured", "off by"]]
        for name in (*_HELD, "on the CPU", "allocated", "reserved", "peak"):
            predicted, measured = self.predicted.get(name), self.measured.get(name)
            if predicted is None or measured is None or predicted == measured == 0:
                off = "-"
            else:
                off = f"{(measured - predicted) / predicted:+.1%}" if predicted else nbytes(measured)
            rows.append([name, *("-" if size is None else nbytes(size) for size in (predicted, measured)), off])
        return "\n".join([*aligned(rows), *([f"predicted peak: {self.peak.where}"] if self.peak else [])])


def memory_report(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, predicted: Prediction | None = None
) -> MemoryReport:
    """Report what this rank holds of ``model`` and ``optimizer``, beside a prediction. Local; changes nothing.

    Call it after ``optimizer.step()`` and before ``zero_grad()``, in the second step or a later one: the prediction is
    for that moment. Works on any FSDP2 model, whoever sharded it, and on a plain one. Each storage counts once, with
    the padding of its shard. torch's allocator counts everything that the process has on the device, other models
    included, and its peak since ``torch.accelerator.reset_peak_memory_stats()``.

    Args:
        model: the whole model. Its device is that of its first gathered or plain parameter.
        optimizer: its state is counted; None counts none.
        predicted: a row of :func:`shardkit.memory.estimate` or the result of :func:`shardkit.memory.plan_for_budget`,
            made before the model was sharded, because activations are measured on the plain model. It is the
            prediction for rank 0, which holds the most.
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
    storages = {name: _storages(found) for name, found in tensors.items()}
    measured = {name: sum(s.nbytes() for s in found if s.device.type == device) for name, found in storages.items()}
    away = sum(s.nbytes() for found in storages.values() for s in found if s.device.type != device)
    expected = {}
    if predicted is not None:
        last = predicted.timeline[-1]
        expected = {name: getattr(last, name) for name in _HELD}
        expected["optimizer"] = predicted.timeline[0].optimizer  # without what the step itself makes and frees
        expected |= {"allocated": sum(expected.values()), "peak": predicted.peak.total}
    return MemoryReport(
        measured | {"on the CPU": away} | _allocator(device), expected, predicted.peak if predicted else None
    )


def _device_type(params: list[nn.Parameter]) -> str:
    """Return where the model computes: for a DTensor that is its mesh, since its shard may be offloaded."""
    for first in params:
        return first.device_mesh.device_type if isinstance(first, DTensor) else first.device.type
    return "cpu"


def _storages(tensors: Iterable[Any]) -> set[torch.UntypedStorage]:
    found = [each for each in tensors if isinstance(each, Tensor) and each.device.type != "meta"]
    return {(local_tensor(each) if isinstance(each, DTensor) else each).untyped_storage() for each in found}


def _allocator(device: str) -> dict[str, int]:
    of = torch.accelerator
    counted = {"allocated": of.memory_allocated, "reserved": of.memory_reserved, "peak": of.max_memory_allocated}
    return {} if device == "cpu" else {name: count() for name, count in counted.items()}


def plot_timeline(predicted: Prediction, path: str | Path, *, budget: int | str | None = None) -> None:
    """Plot what is alive on one rank through one step, by category, into a file. Local; needs matplotlib.

    The horizontal axis is the order of events, from one hook of FSDP2 to the next, not time: every stretch has the same
    width. The height of a stretch is its peak.

    Args:
        predicted: a row of :func:`shardkit.memory.estimate`, or the result of :func:`shardkit.memory.plan_for_budget`.
        path: of the file; its suffix is the format, such as ``.png`` or ``.svg``.
        budget: bytes, or a string such as ``"80GiB"``, to draw as a line.

    Raises:
        ShardkitError: matplotlib is not installed.
        PlanError: ``budget`` is not bytes.
    """
    limit = 0 if budget is None else parse_bytes(budget)
    try:
        from matplotlib.figure import Figure  # not pyplot, whose current figure and backend belong to the user
    except ImportError as error:
        raise ShardkitError(message("matplotlib", "is not installed", "", "pip install matplotlib")) from error
    points, highest = predicted.timeline, predicted.peak
    figure = Figure(figsize=(10, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    sizes = [[getattr(point, category) / _GIB for point in (*points, points[-1])] for category in CATEGORIES]
    axes.stackplot(range(len(points) + 1), *sizes, labels=CATEGORIES, colors=_COLORS, step="post", linewidth=0)
    moments = [point.moment for point in points]
    starts = [0, moments.index(BACKWARD), moments.index(STEP)]
    axes.set_xticks(starts, ["forward", "backward", "step"], ha="left")
    for start in starts:
        axes.axvline(start, color="black", linewidth=0.6)
    axes.plot(points.index(highest) + 0.5, highest.total / _GIB, "kv")
    axes.set_title(f"peak {nbytes(highest.total)}, {highest.where}")
    if limit:
        axes.axhline(limit / _GIB, color="#D55E00", linestyle="--", label=f"budget, {nbytes(limit)}")
    axes.set(ylabel="GiB on one rank", xlabel="one step, from hook to hook (not time)")
    axes.margins(x=0)
    axes.set_ylim(0, 1.1 * max(highest.total, limit) / _GIB)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, reverse=True)
    figure.savefig(path)
