"""Gradient clipping for models whose parameters are sharded, plain, or both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardkit._torch import (
    is_wrapped,
    local_tensor,
    plain_attributes,
    plain_shards,
    sharded_parameters,
    steps,
)
from shardkit.errors import ShardkitError
from shardkit.ranks import collective_device, note
from shardkit.runtime.stepping import check_awake
from shardkit.shards import device_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients in place so that their norm over all ranks is at most ``max_norm``.

    As :func:`torch.nn.utils.clip_grad_norm_`: each gradient is multiplied by ``min(1, max_norm /
    (norm + 1e-6))``, where the norm is that of all unsharded gradients as one vector.

    **Collective**: every rank must call it with the same parameters, with or without gradients. It
    takes one all-reduce of one float64 for each axis of the largest mesh that shards: one on a 1-D
    mesh and on HSDP, two for TP x FSDP. Nothing waits for the device, except gradients offloaded to
    the CPU and ``error_if_nonfinite``.

    Parameters may be on the largest mesh and on meshes inside it. Slices, such as ``mesh["dp"]`` of
    ``mesh["dp", "tp"]``, hold the same parameters, which count once. Any other mesh of some of its
    ranks, such as an expert's, holds parameters of its own, which all count. Plain gradients beside
    sharded ones (``ignored_params``) count once: by the mean over the ranks of their p-th power sum
    (for p = inf, by their maximum). Both add the axes that replicate to the all-reduces.

    Args:
        parameters: the model, or one tensor, or an iterable of them, DTensor and plain, on any
            devices. Prefer the model: ``model.parameters()`` of a unit left unsharded yields
            parameters that have no gradients.
        max_norm: the largest norm allowed, >= 0; inf returns the norm without clipping.
        norm_type: p > 0 of the p-norm, or inf for the largest absolute value.
        error_if_nonfinite: raise on every rank for a norm of nan or inf, which otherwise makes
            gradients nan or zero.
        group: ranks that hold different models, such as ``mesh["pp"].get_group()`` of pipeline
            stages: the norm is that of all their gradients, by one more all-reduce.

    Returns:
        The norm before clipping: plain, without dimensions, equal on every rank, on the device of
        the largest mesh, float32 (float64 if any parameter is). Without any DTensor it is torch's
        own.

    Raises:
        ShardkitError: for a bad argument, ranks outside the largest mesh, a step in backward,
            ``error_if_nonfinite``.

    Examples:
        >>> norm = clip_grad_norm_(model, max_norm=1.0)
    """
    p, limit, params = float(norm_type), float(max_norm), _parameters(parameters)
    if not p > 0:  # or nan
        raise ShardkitError(
            f"norm_type must be > 0 or inf, got {norm_type!r}. Use 2.0, 1.0 or inf."
        )
    if not limit >= 0:
        raise ShardkitError(
            f"max_norm must be at least 0, got {max_norm!r}. Pass 1.0, for example."
        )
    check_awake(params)
    note("clip_grad_norm_", max_norm=limit, norm_type=p, error_if_nonfinite=error_if_nonfinite)
    with plain_attributes():
        buckets, plain, partial = _split(params, [param.grad for param in params])
        norm = total_norm(params, buckets, plain, p, group)
    if error_if_nonfinite and not norm.isfinite():
        raise ShardkitError(
            f"gradients have the norm {norm.item()} of order {p:g}, and error_if_nonfinite=True. No "
            "gradient was changed. Skip this step, or lower the loss scale or learning rate."
        )
    scale_to(limit, norm, buckets, [*plain, *partial])
    return norm


def scale_to(limit: float, norm: Tensor, buckets: list[Bucket], plain: list[Tensor]) -> None:
    """Scale gradients of a norm to at most ``limit``, in place. Local."""
    # Also by a factor of 1: to look at it would wait for the device.
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    alike = steps.by_device_and_dtype(plain)
    for bucket in buckets:
        alike += bucket.alike
    for grads in alike:
        steps.foreach_mul_(grads, factor.to(grads[0].device))


def _parameters(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return each parameter once, in order; of a unit left unsharded the sharded ones, which have
    the gradients.
    """
    if isinstance(parameters, nn.Module):
        return list(sharded_parameters(parameters))
    params = [parameters] if isinstance(parameters, Tensor) else list(dict.fromkeys(parameters))
    if plain_shards and any(param in plain_shards for param in params):
        raise is_wrapped()
    if not params and isinstance(parameters, Iterator):
        raise ShardkitError(
            "parameters is a generator that was read before. Pass the model, or call "
            "model.parameters() again."
        )
    return params


@dataclass(eq=False)
class Bucket:
    """Local gradients of one mesh and its placements."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    grads: list[Tensor] = field(default_factory=list)

    @cached_property
    def alike(self) -> list[list[Tensor]]:
        """The gradients in groups that one kernel accepts, once all are there."""
        return steps.by_device_and_dtype(self.grads)

    def axes(self, *, sharding: bool) -> list[dist.ProcessGroup]:
        """Return the axes that shard, or those that do not."""
        axes = []
        for axis, placement in zip(self.mesh.get_all_groups(), self.placements, strict=True):
            if axis.size() > 1 and placement.is_replicate() is not sharding:
                axes.append(axis)
        return axes


def total_norm(
    params: list[Tensor],
    buckets: list[Bucket],
    plain: list[Tensor],
    p: float,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return the norm of the gradients over all ranks of the parameters' meshes, and over those of
    ``group``. Collective.
    """
    if buckets:
        has_plain = any(not isinstance(param, DTensor) for param in params)
        total = _mesh_power(buckets, plain, has_plain, p)
    elif group is None:
        return nn.utils.get_total_norm(plain, p)
    else:
        device = torch.device(collective_device(group))
        total = _power_sum(steps.by_device_and_dtype(plain), p, device)
    if group is not None:
        total = _all_reduced(total, p, [group])
    doubles = any(param.dtype in (torch.float64, torch.complex128) for param in params)
    norm = total if p == math.inf else total.pow(1 / p)
    return norm.to(torch.float64 if doubles else torch.float32)


def _split(
    params: list[Any], grads: list[Tensor | None]
) -> tuple[list[Bucket], list[Tensor], list[Tensor]]:
    """Return a bucket for each mesh that this rank is in and its placements, also without
    gradients; the plain ones.

    And the memory of those that are Partial, as tensor parallelism leaves them: buckets have their
    sums, as copies.
    """
    without_grad = [param for param, grad in zip(params, grads, strict=True) if grad is None]
    if steps.steps_in_backward(without_grad):
        raise ShardkitError(
            "parameters are stepped in backward, after which they have no gradients. A norm needs "
            "all gradients at once. Do not clip, or use an optimizer that steps after backward "
            "instead of optimizer_in_backward."
        )
    plain: list[Tensor] = []
    partial: list[Tensor] = []

    def summed(grad: DTensor, param: Any) -> Tensor:
        partial.append(local_tensor(grad))
        # which a mesh of one rank may return as it is
        return steps.redistributed(grad, param).clone()

    local_grads = steps.local_tensors(grads, params, summed)
    buckets: dict[tuple[DeviceMesh, tuple[Placement, ...]], Bucket] = {}
    bucket: Bucket | None = None
    for param, grad in zip(params, local_grads, strict=True):
        if not isinstance(param, DTensor):
            if grad is not None:
                plain.append(grad)
            continue
        mesh, layout = steps.mesh_of(param), param.placements
        if bucket is None or mesh is not bucket.mesh or layout != bucket.placements:
            # to hash all would cost more
            bucket = buckets.setdefault((mesh, layout), Bucket(mesh, layout))
        if grad is not None:
            bucket.grads.append(grad)
    own = [bucket for bucket in buckets.values() if bucket.mesh.get_coordinate() is not None]
    return own, plain, partial


def _mesh_power(buckets: list[Bucket], plain: list[Tensor], has_plain: bool, p: float) -> Tensor:
    """Return the p-th power of the norm over all ranks of the parameters' meshes. Collective."""
    largest = max(buckets, key=lambda bucket: bucket.mesh.size())
    groups = largest.mesh.get_all_groups()
    device = device_of(largest.mesh)
    # On other groups of its ranks are parameters of their own, such as experts.
    experts = []
    for bucket in buckets:
        if bucket is not largest and not set(bucket.mesh.get_all_groups()) <= set(groups):
            _check_inside(bucket.mesh, largest.mesh)
            experts.append(bucket)
    # The axes to sum over must not depend on what only some ranks have, or the others would not
    # join.
    used = set()
    for bucket in buckets:
        if bucket not in experts:
            used.update(bucket.axes(sharding=True))
    axes = []
    for axis in groups:
        if axis.size() > 1 and (has_plain or experts or axis in used):
            axes.append(axis)
    # What this rank adds to the sum, which counts each element as often as there are copies.
    powers = []
    if plain:
        power = _power_sum(steps.by_device_and_dtype(plain), p, device)
        powers.append(_per_copy(power, p, axes))
    for bucket in buckets:
        if bucket in experts:
            copies = bucket.axes(sharding=False)
        else:  # the ranks along an axis that does not shard it hold the same
            copies = list(set(axes).difference(bucket.axes(sharding=True)))
        powers.append(_per_copy(_power_sum(bucket.alike, p, device), p, copies))
    stacked = torch.stack(powers)
    return _all_reduced(stacked.max() if p == math.inf else stacked.sum(), p, axes)


def _check_inside(mesh: DeviceMesh, largest: DeviceMesh) -> None:
    ranks, all_ranks = (sorted(m.mesh.flatten().tolist()) for m in (mesh, largest))
    if not set(ranks) <= set(all_ranks):
        raise ShardkitError(
            f"parameters are on a mesh of ranks {ranks} and on one of ranks {all_ranks}. "
            "The norm is summed over the largest mesh and the meshes inside it. Slice both from "
            "one mesh, or clip the parameters of each mesh by themselves."
        )


def _per_copy(power: Tensor, p: float, axes: list[dist.ProcessGroup]) -> Tensor:
    return power if p == math.inf else power / math.prod(axis.size() for axis in axes)


def _power_sum(alike: list[list[Tensor]], p: float, device: torch.device) -> Tensor:
    """Return the sum of ``|g| ** p`` over this rank's elements, or for p = inf the largest ``|g|``:
    float64, 0-d.

    Each tensor's own norm is float32 as in torch. Across tensors and ranks, float64 keeps squares
    from overflowing, and the order of the sum below the last bit of the float32 result.
    """
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    for grads in alike:
        if p == math.inf:  # an empty shard has no largest
            grads = [grad for grad in grads if grad.numel()]
        if grads:
            dtype = torch.promote_types(grads[0].dtype, torch.float32)
            by_grad = torch.stack(steps.foreach_norm(grads, p, dtype=dtype))
            norms.append(by_grad.to(device, torch.float64))
    flat = torch.cat(norms)
    return flat.max() if p == math.inf else flat.pow(p).sum()


def _all_reduced(value: Tensor, p: float, axes: Iterable[dist.ProcessGroup]) -> Tensor:
    if p != math.inf:
        for axis in axes:
            dist.all_reduce(value, group=axis)
        return value
    # The maximum of gloo and NCCL may lose a nan. Floats that are not negative are ordered like
    # their bits read as integers, with nan above inf, so the maximum of the bits keeps it.
    bits = value.abs().view(torch.int64)
    for axis in axes:
        dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=axis)
    return bits.view(torch.float64)
