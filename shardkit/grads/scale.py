"""Scale losses and gradients: to the mean over all tokens of a step, and for fp16."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._fsdp import fsdp_units
from shardkit._torch import named_sharded_parameters
from shardkit._torch.steps import (
    UnscalingGradScaler,
    amp_unscale_,
    by_device_and_dtype,
    foreach_mul_,
)
from shardkit.errors import ShardkitError, listing
from shardkit.ranks import device_type, note
from shardkit.runtime.means import divisor, reduce_groups, reduce_size
from shardkit.runtime.stepping import check_awake


@torch.no_grad()
def global_token_count(num_tokens: Tensor | float, model: nn.Module) -> Tensor:
    """Return the sum of ``num_tokens`` over the ranks that reduce the model's gradients.

    **Collective**: one all-reduce of 8 bytes; two on an HSDP mesh that is not the whole world; none
    for a plain model or one rank. Nothing waits for the device.

    Args:
        num_tokens: the tokens in this rank's loss, over all of its micro-batches, such as ``(labels
            != -100).sum()``; or the sum of their weights. It may be 0.
        model: sharded. Tensor-parallel ranks, which hold the same tokens, are not counted twice. If
            parts are on meshes of different sizes (experts), the ranks of the largest are counted.

    Returns:
        A tensor without dimensions on the mesh's device, equal on these ranks: int64, or float64
        for weights.

    Raises:
        ShardkitError: ``num_tokens`` has dimensions.

    Examples:
        >>> tokens = global_token_count(sum((labels != -100).sum() for _, labels in micro_batches), model)
    """
    count = torch.as_tensor(num_tokens).detach()
    if count.ndim:
        raise ShardkitError(
            "num_tokens must be one number, the count of this rank's tokens, got shape "
            f"{tuple(count.shape)}. Pass its sum()."
        )
    dtype = torch.float64 if count.is_floating_point() else torch.int64
    note("global_token_count")
    largest = max(fsdp_units(model), key=reduce_size, default=None)
    if largest is None:
        return count.to(dtype, copy=True)
    count = _copied(count, largest.device, dtype)
    is_world = reduce_size(largest) == dist.get_world_size()  # one all-reduce, also on an HSDP mesh
    for group in [None] if is_world else reduce_groups(largest):
        if dist.get_world_size(group) > 1:
            dist.all_reduce(count, group=group)
    return count


def scale_loss(loss: Tensor, num_tokens: Tensor | float, model: nn.Module) -> Tensor:
    """Scale a sum over this rank's tokens so that gradients are those of the mean over the tokens
    of all ranks.

    The result is ``loss * divisor / num_tokens``, where ``divisor`` is what torch divides reduced
    gradients by: the ranks on the model's mesh for FSDP and HSDP, or 1 after
    ``set_gradient_reduction(model, "sum")``. Call it for each micro-batch with the count of all.
    Local, pure, no host sync. Under fp16 call ``scaler.scale(scale_loss(...))`` with a sum of
    float32 losses; a sum in fp16 overflows.

    Args:
        loss: the sum, not the mean, over the tokens of this rank's micro-batch.
        num_tokens: from :func:`global_token_count`, or a number that all ranks know; 0 counts as 1.
        model: as given to ``global_token_count``.

    Returns:
        The scaled loss, float32 at least. To log the mean, divide the loss by ``num_tokens`` and
        sum over ranks.

    Raises:
        ShardkitError: trainable units divide by different numbers, because their meshes differ in
            size, or torch's ``set_gradient_divide_factor`` was called on some of them only.

    Examples:
        >>> loss = F.cross_entropy(model(inputs), labels, ignore_index=-100, reduction="sum")
        >>> scale_loss(loss, tokens, model).backward()
    """
    dtype = torch.promote_types(loss.dtype, torch.float32)
    return loss.to(dtype) * _factor(num_tokens, model, dtype)


@torch.no_grad()
def scale_grads_(num_tokens: Tensor | float, model: nn.Module) -> None:
    """Scale all gradients in place as :func:`scale_loss` scales a loss, when tokens are counted
    after backward.

    Call it once after the last backward, then clip and step. Local, no host sync. If the count is
    known first, prefer ``scale_loss``, with the same errors: gradients of sums are larger, which
    fp16 cannot hold. Gradients of ``ignored_params`` are scaled too: reduce them to the mean over
    ranks, as FSDP does, before or after.

    Args:
        num_tokens, model: as for ``scale_loss``; the gradients are complete, so after
            ``accumulate(model, last=True)``.
    """
    params = [param for _, param in named_sharded_parameters(model)]
    check_awake(params)
    for grads in by_device_and_dtype(param.grad for param in params):
        dtype = torch.promote_types(grads[0].dtype, torch.float32)
        foreach_mul_(grads, _copied(_factor(num_tokens, model, dtype), grads[0].device, dtype))


def set_gradient_reduction(model: nn.Module, reduction: Literal["mean", "sum"]) -> None:
    """Let every unit of ``model`` reduce gradients to their sum over ranks, or to their mean as
    torch does.

    Use the sum for experts that you sharded on a mesh of their own: they are reduced over fewer
    ranks than the rest, so the means differ. ``shard_model`` makes them equal. Local; all ranks
    must make the same call. torch's ``set_gradient_divide_factor`` sets one unit, and needs NCCL.

    Args:
        model: sharded, a root or a part of one.
        reduction: "sum", or "mean" to go back. With ``reduce_dtype=torch.float16`` a sum may
            overflow.

    Raises:
        ShardkitError: another ``reduction``.
    """
    if reduction not in ("mean", "sum"):
        raise ShardkitError(f'reduction must be "mean" or "sum", got {reduction!r}.')
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0 if reduction == "sum" else None)  # type: ignore[arg-type]
            if reduction == "sum":  # else torch uses PREMUL_SUM, which gloo does not have
                module.set_force_sum_reduction_for_comms(True)


def _copied(number: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a copy of a number; one on the CPU is filled in, since a copy would make the host
    wait.
    """
    if number.is_cpu:
        return torch.full((), number.item(), device=device, dtype=dtype)
    return number.to(device, dtype, copy=True)


def _factor(num_tokens: Tensor | float, model: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return what to multiply sums by: what every trainable unit divides by (1 if plain), per
    token.
    """
    count = torch.as_tensor(num_tokens)
    units = []
    for unit in fsdp_units(model):
        if any(param.sharded_param.requires_grad for param in unit.fsdp_params):
            units.append(unit)
    divisors = [divisor(unit) for unit in units] or [1.0]
    if len(set(divisors)) > 1:
        names = {module: name or "(root)" for name, module in model.named_modules()}
        numbers = [f"{names[unit.modules[0]]} by {divisor(unit):g}" for unit in units]
        raise ShardkitError(
            f"model has units that divide gradients by different numbers: {listing(numbers)}. One "
            "scale of the loss is right for all units only if they divide by the same number. Call "
            'set_gradient_reduction(model, "sum") once, after sharding.'
        )
    return divisors[0] / torch.where(count == 0, 1, count).to(dtype)


class GradScaler(UnscalingGradScaler):
    """``torch.amp.GradScaler`` for gradients on any meshes and devices: an inf on one rank skips
    the step on all.

    A gradient that overflows ends up in the shard of one rank, and all must skip that step. torch's
    own scaler does so for DTensors of one mesh; on two meshes (tensor parallel beside plain FSDP)
    ranks diverge silently, a plain parameter beside DTensors is an error, and a rank without
    gradients a hang (torch 2.13). Use it in the same way, with any optimizer, and
    :func:`clip_grad_norm_` between ``unscale_`` and ``step``.

    ``unscale_``, or a ``step`` without it, is **collective**: one all-reduce of 4 bytes for each
    axis of the meshes of the optimizer's parameters. All ranks must call it with their optimizers
    in the same order. As in torch, ``step`` waits for the device, except with fused optimizers.

    Args:
        device: of the loss; None is the accelerator's type, or "cpu" where there is none.
        args, kwargs: as for torch's, ``init_scale``, ``growth_factor``, ``backoff_factor``,
            ``growth_interval``, ``enabled``.

    Examples:
        >>> scaler = GradScaler()
        >>> scaler.scale(scale_loss(loss, tokens, model)).backward()
        >>> scaler.unscale_(optimizer)
        >>> clip_grad_norm_(model, 1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    def __init__(self, device: str | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(device or device_type(), *args, **kwargs)

    @torch.no_grad()
    def unscale_grads(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Tensor:
        """Unscale this rank's shards in place; 1.0 on every rank if any of them found inf or nan,
        else 0.0.
        """
        params: list[Tensor] = []
        for group in optimizer.param_groups:
            params += group["params"]
        check_awake(params)
        grads = [param.grad for param in params if param.grad is not None]
        if not allow_fp16 and any(grad.dtype == torch.float16 for grad in grads):
            raise ShardkitError(
                "optimizer has gradients in float16. Unscaling in float16 loses small values. Keep "
                "parameters in float32, and compute in fp16 by "
                "MixedPrecisionPolicy(param_dtype=torch.float16)."
            )
        device = found_inf.device
        for local in by_device_and_dtype(grads):
            own_inf = torch.zeros((), device=local[0].device)
            amp_unscale_(local, own_inf, inv_scale.to(own_inf.device))
            found_inf = torch.maximum(found_inf, own_inf.to(device))
        meshes = dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor))
        reduced = set()
        for mesh in meshes:
            for ranks in mesh.get_all_groups():
                if ranks.size() > 1 and ranks not in reduced:
                    reduced.add(ranks)
                    # where the mesh reduces: offloaded shards are elsewhere
                    found_inf = found_inf.to(mesh.device_type)
                    dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=ranks)
        return found_inf.to(device)
