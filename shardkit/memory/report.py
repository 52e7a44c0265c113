"""What a rank really holds after a step, beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._fsdp import gathered_tensors
from shardkit._torch import local_tensor, named_sharded_parameters, tree_leaves
from shardkit.memory.text import aligned
from shardkit.memory.timeline import STEP, Point, Predicted
from shardkit.plan.table import nbytes

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
    device = _device_type(model)
    params = [param for _, param in named_sharded_parameters(model)]
    grads = [param.grad for param in params if param.grad is not None]
    state = optimizer.state.values() if optimizer is not None else []
    tensors: dict[str, Iterable[Any]] = {
        "parameters": [*params, *model.buffers()],
        "gradients": grads,
        "optimizer": [leaf for entry in state for leaf in tree_leaves(entry)],
        "unsharded": gathered_tensors(model),
    }
    storages = {name: set(_storages(found)) for name, found in tensors.items()}
    here = {name: sum(s.nbytes() for s in found if s.device.type == device) for name, found in storages.items()}
    away = sum(s.nbytes() for found in storages.values() for s in found if s.device.type != device)
    measured = here | {"on the CPU": away} | _allocator(device)
    return MemoryReport(measured, _after_step(predicted), predicted.peak if predicted else None)


def _storages(tensors: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.device.type != "meta":
            yield (local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _device_type(model: nn.Module) -> str:
    """Where the model computes: of a DTensor its mesh, for its shard may be offloaded."""
    first = next(iter(model.parameters()), None)
    if first is None:
        return "cpu"
    return first.device_mesh.device_type if isinstance(first, DTensor) else first.device.type


def _allocator(device: str) -> dict[str, int]:
    if device == "cpu":
        return {}
    memory = torch.accelerator
    return {
        "allocated": memory.memory_allocated(),
        "reserved": memory.memory_reserved(),
        "peak": memory.max_memory_allocated(),
    }


def _after_step(predicted: Predicted | None) -> dict[str, int]:
    if predicted is None or predicted.peak is None:
        return {}
    last = predicted.timeline[-1]
    assert last.moment == STEP
    held = {name: getattr(last, name) for name in HELD}
    held["optimizer"] = predicted.timeline[0].optimizer  # without what the step itself makes and frees
    return held | {"allocated": sum(held.values()), "peak": predicted.peak.total}


def _off(predicted: int | None, measured: int | None) -> str:
    if predicted is None or measured is None:
        return "-"
    return f"{(measured - predicted) / predicted:+.1%}" if predicted else "-" if measured == 0 else nbytes(measured)
