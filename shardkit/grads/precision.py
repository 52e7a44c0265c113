"""Gradients that cross the wire in 16 bits and are added up in 32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardkit._fsdp import FSDPUnit, fsdp_units, reduce_dtype
from shardkit.errors import ShardkitError, listing, message

WIRE = (torch.bfloat16, torch.float16)


def set_reduce_precision(
    model: nn.Module, *, wire: torch.dtype = torch.bfloat16, accumulate: torch.dtype = torch.float32
) -> None:
    """Send gradients as ``wire`` and add them up in ``accumulate``, in every unit of ``model``.

    torch's reduce-scatter adds in the dtype that it sends: bf16 loses bits with each addition, and float32 sends
    twice the bytes. Here each rank sends its parts in ``wire`` by an all-to-all, and adds in ``accumulate``. Of G
    elements of gradients in a unit over N ranks, each rank sends ``(N - 1) / N * G * 2`` bytes, half of a float32
    reduce-scatter. Gradients that ``wire`` can hold, as those of ``param_dtype=wire`` are, arrive exactly: the sum is
    the float32 one but for the order of its N terms.

    Local; all ranks must make the same call, after sharding and before the first backward. It sets torch's
    ``set_custom_reduce_scatter``, and needs 4 more bytes for each of the G elements while a unit reduces. It cannot:

    - accumulate without sync and lose nothing: the local sum of several backwards, kept in float32, is rounded to
      ``wire`` when it is sent, by 2**-8 (bf16) at most. ``accumulate(..., shard_gradients=True)`` sends each
      micro-batch by itself, and adds them exactly.
    - narrow the all-reduce of an HSDP mesh, which stays in ``reduce_dtype``, after the reduce-scatter.
    - divide by a factor of your own, ``set_gradient_divide_factor``, on NCCL: use :func:`set_gradient_reduction`.

    Args:
        model: sharded; its policies have ``reduce_dtype=accumulate``.
        wire: ``torch.bfloat16``; ``torch.float16`` is for models that compute in it: what is larger becomes inf.
        accumulate: the ``reduce_dtype`` of the units, ``torch.float32``.

    Raises:
        ShardkitError: another ``wire``; a unit reduces in another dtype than ``accumulate``; or it has parameters
            on several meshes, for which torch refuses a reduce-scatter that is not its own. Nothing was changed.
    """
    units = fsdp_units(model)
    problems = [*_wrong_wire(wire, accumulate), *_wrong_reduce_dtype(model, units, accumulate)]
    problems += _several_meshes(model, units)
    if problems:
        raise ShardkitError("\n".join(problems))
    comm = _ReduceScatter(wire)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]  # the base class is not public


class _ReduceScatter:
    """What torch calls instead of its own: first ``allocate`` for input and output, then the object itself.

    It is called on the stream on which torch reduces, with async_op=False, and only in groups of several ranks;
    torch keeps the input alive until that stream is done (torch 2.11 to 2.13).
    """

    def __init__(self, wire: torch.dtype) -> None:
        self.wire = wire

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            rule = "A reduce precision goes with sums and means"
            fix = 'Call set_gradient_reduction(model, "sum"), or set_force_sum_reduction_for_comms(True) on each unit'
            raise ShardkitError(message("set_gradient_divide_factor", f"asks for {op}", rule, fix))
        sent = input_tensor.to(self.wire)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        torch.sum(received.view(group.size(), -1), 0, dtype=output_tensor.dtype, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


def _wrong_wire(wire: torch.dtype, accumulate: torch.dtype) -> list[str]:
    if wire in WIRE and accumulate not in WIRE and accumulate.is_floating_point:
        return []
    rule = "Gradients are sent in 16 bits and added in more"
    return [message("wire", f"is {wire} for sums in {accumulate}", rule, "Use torch.bfloat16 and torch.float32")]


def _wrong_reduce_dtype(model: nn.Module, units: list[FSDPUnit], accumulate: torch.dtype) -> list[str]:
    dtypes = [(unit, reduce_dtype(unit)) for unit in units]
    wrong = [f"{_name(model, unit)} in {dtype}" for unit, dtype in dtypes if dtype not in (None, accumulate)]
    problem = f"is {accumulate}, but units reduce in another dtype: {listing(wrong)}"
    rule = "torch gives the reduction buffers of reduce_dtype, which is fixed when a model is sharded"
    fix = f"Shard with MixedPrecisionPolicy(..., reduce_dtype={accumulate})"
    return [message("accumulate", problem, rule, fix)] if wrong else []


def _several_meshes(model: nn.Module, units: list[FSDPUnit]) -> list[str]:
    counts = Counter(unit.modules for unit in units)
    several = dict.fromkeys(_name(model, unit) for unit in units if counts[unit.modules] > 1)
    problem = "torch shards its parameters on several meshes, by shard_placement_fn"
    rule, fix = "A custom reduce-scatter is for modules with one", "Shard the parts of each mesh as units of their own"
    return [message(listing(several), problem, rule, fix)] if several else []


def _name(model: nn.Module, unit: FSDPUnit) -> str:
    return next(name or "(root)" for name, module in model.named_modules() if module is unit.modules[0])
