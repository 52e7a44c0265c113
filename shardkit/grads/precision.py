"""Send gradients in 16 bits and add them in 32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardkit._fsdp import fsdp_units
from shardkit._fsdp.states import reduce_dtype
from shardkit.errors import ShardkitError, listing, message

WIRE = (torch.bfloat16, torch.float16)


def set_reduce_precision(
    model: nn.Module, *, wire: torch.dtype = torch.bfloat16, accumulate: torch.dtype = torch.float32
) -> None:
    """Send gradients as ``wire`` and add them in ``accumulate``, in every unit of ``model``.

    torch's reduce-scatter adds in the dtype that it sends: bf16 loses bits with each addition, float32 sends twice the
    bytes. Here each rank sends its parts in ``wire`` by an all-to-all, and adds in ``accumulate``. Gradients that
    ``wire`` can represent, such as those of ``param_dtype=wire``, arrive exactly: the sum is the float32 one but for
    the order of its terms.

    Local; all ranks must make the same call, after sharding and before the first backward. It sets torch's
    ``set_custom_reduce_scatter``, and needs 4 more bytes for each gradient element while a unit reduces. Limits:

    - Accumulation without sync rounds the local float32 sum of several backwards to ``wire``, by 2**-8 (bf16) at most.
      ``accumulate(..., shard_gradients=True)`` sends each micro-batch by itself, and adds them exactly.
    - The all-reduce of an HSDP mesh, after the reduce-scatter, stays in ``reduce_dtype``.
    - ``set_gradient_divide_factor`` does not work on NCCL: use :func:`set_gradient_reduction`.

    Args:
        model: sharded; its policies have ``reduce_dtype=accumulate``.
        wire: ``torch.bfloat16``; ``torch.float16`` is for models that compute in it: larger values become inf.
        accumulate: the ``reduce_dtype`` of the units, ``torch.float32``.

    Raises:
        ShardkitError: another ``wire``; a unit reduces in another dtype than ``accumulate``. Nothing was changed.
        ValueError: torch's, for a module with parameters on several meshes.
    """
    names = {module: name or "(root)" for name, module in model.named_modules()}
    units = [(names[unit.modules[0]], unit) for unit in fsdp_units(model)]
    problems = []
    if wire not in WIRE or accumulate in WIRE or not accumulate.is_floating_point:
        problem = f"must be bfloat16 or float16, and accumulate wider, got {wire} and {accumulate}"
        problems.append(message("wire", problem, "", "Pass wire=torch.bfloat16, accumulate=torch.float32"))
    dtypes = [(name, reduce_dtype(unit)) for name, unit in units]
    if wrong := [f"{name} in {dtype}" for name, dtype in dtypes if dtype not in (None, accumulate)]:
        problem = f"is {accumulate}, and units reduce in another dtype: {listing(wrong)}"
        rule = "torch allocates reduction buffers in reduce_dtype, which is fixed when a model is sharded"
        fix = f"Shard with MixedPrecisionPolicy(..., reduce_dtype={accumulate})"
        problems.append(message("accumulate", problem, rule, fix))
    if problems:
        raise ShardkitError("\n".join(problems))
    comm = _ReduceScatter(wire)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]  # the base class is not public


class _ReduceScatter:
    """torch calls ``allocate`` for input and output, then the object itself, in groups of several ranks.

    On the stream on which it reduces, with async_op=False; it keeps the input alive until that stream is done.
    """

    def __init__(self, wire: torch.dtype) -> None:
        self.wire = wire

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            problem = f"asks for {op}, and set_reduce_precision supports sums and means"
            fix = 'Call set_gradient_reduction(model, "sum"), or set_force_sum_reduction_for_comms(True) on each unit'
            raise ShardkitError(message("set_gradient_divide_factor", problem, "", fix))
        sent = input_tensor.to(self.wire)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        torch.sum(received.view(group.size(), -1), 0, dtype=output_tensor.dtype, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
