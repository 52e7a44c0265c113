"""Gradient clipping for models whose parameters are sharded, plain, or both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter
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
        grads = [param.grad for param in params]
        buckets, plain, partial = _split(params, grads)
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
    for same in [*chain(*(each.kinds for each in buckets)), *steps.by_device_and_dtype(plain)]:
        steps.foreach_mul_(same, factor.to(same[0].device))


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
    def kinds(self) -> list[list[Tensor]]:
        """The gradients in groups that one kernel accepts, once all are there."""
        return steps.by_device_and_dtype(self.grads)

    def axes(self, *, sharding: bool) -> list[dist.ProcessGroup]:
        """Return the axes that shard, or those that do not."""
        axes = zip(self.mesh.get_all_groups(), self.placements, strict=True)
        return [
            axis for axis, place in axes if axis.size() > 1 and place.is_replicate() is not sharding
        ]


def total_norm(
    params: list[Tensor],
    buckets: list[Bucket],
    plain: list[Tensor],
    p: float,
    group: dist.ProcessGroup | None,
) -> Tensor:
    if buckets:
        has_plain = any(not isinstance(param, DTensor) for param in params)
        total = _mesh_power(buckets, plain, has_plain, p)
    elif group is None:
        return nn.utils.get_total_norm(plain, p)
    else:
        total = _power_sum(
            steps.by_device_and_dtype(plain), p, torch.device(collective_device(group))
        )
    if group is not None:
        total = _all_reduced(total, p, [group])
    doubles = not {torch.float64, torch.complex128}.isdisjoint(map(attrgetter("dtype"), params))
    return (total if p == math.inf else total.pow(1 / p)).to(
        torch.float64 if doubles else torch.float32
    )


def _split(
    params: list[Any], grads: list[Tensor | None]
) -> tuple[list[Bucket], list[Tensor], list[Tensor]]:
    """Return a bucket for each mesh that this rank is in and its placements, also without
    gradients; the plain ones.

    And the memory of those that are Partial, as tensor parallelism leaves them: buckets have their
    sums, as copies.
    """
    if steps.steps_in_backward(
        param for param, grad in zip(params, grads, strict=True) if grad is None
    ):
        raise ShardkitError(
            "parameters are stepped in backward, after which they have no gradients. A norm needs "
            "all gradients at once. Do not clip, or use an optimizer that steps after backward "
            "instead of optimizer_in_backward."
        )
    buckets: dict[tuple[DeviceMesh, tuple[Placement, ...]], Bucket] = {}
    bucket: Bucket | None = None
    plain, partial = list[Tensor](), list[Tensor]()

    def summed(grad: DTensor, param: Any) -> Tensor:
        partial.append(local_tensor(grad))
        # which a mesh of one rank may return as it is
        return steps.redistributed(grad, param).clone()

    layouts = steps.placements_of(params)
    parts = steps.local_tensors(grads, params, layouts, summed)
    for param, layout, part in zip(params, layouts, parts, strict=True):
        if layout is not None:
            mesh = steps.mesh_of(param)
            if bucket is None or mesh is not bucket.mesh or layout != bucket.placements:
                # to hash all would cost more
                bucket = buckets.setdefault((mesh, layout), Bucket(mesh, layout))
        if part is not None:
            (plain if layout is None or bucket is None else bucket.grads).append(part)
    return (
        [each for each in buckets.values() if each.mesh.get_coordinate() is not None],
        plain,
        partial,
    )


def _mesh_power(buckets: list[Bucket], plain: list[Tensor], has_plain: bool, p: float) -> Tensor:
    """Return the p-th power of the norm over all ranks of the parameters' meshes. Collective."""
    largest = max(buckets, key=lambda bucket: bucket.mesh.size())
    groups = largest.mesh.get_all_groups()
    parts = [
        each
        for each in buckets
        if each is not largest and not set(each.mesh.get_all_groups()) <= set(groups)
    ]
    ranks = {
        each: sorted(each.mesh.mesh.flatten().tolist())
        for each in ([largest, *parts] if parts else ())
    }
    if outside := [each for each in ranks.values() if not set(each) <= set(ranks[largest])]:
        raise ShardkitError(
            f"parameters are on a mesh of ranks {outside[0]} and on one of ranks {ranks[largest]}. "
            "The norm is summed over the largest mesh and the meshes inside it. Slice both from "
            "one mesh, or clip the parameters of each mesh by themselves."
        )
    # The axes to sum over must not depend on what only some ranks have, or the others would not
    # join.
    used = {axis for each in buckets if each not in parts for axis in each.axes(sharding=True)}
    axes = tuple(
        axis for axis in groups if axis.size() > 1 and (has_plain or parts or axis in used)
    )

    def share(kinds: list[list[Tensor]], copies: Iterable[dist.ProcessGroup]) -> Tensor:
        """What this rank adds to the sum, which counts each element as often as there are
        copies.
        """
        power = _power_sum(kinds, p, device_of(largest.mesh))
        return power if p == math.inf else power / math.prod(axis.size() for axis in copies)

    powers = [share(steps.by_device_and_dtype(plain), axes)] if plain else []
    for each in buckets:
        # otherwise the ranks along an axis that does not shard it hold the same
        is_own = each in parts
        copies = (
            each.axes(sharding=False) if is_own else set(axes).difference(each.axes(sharding=True))
        )
        powers.append(share(each.kinds, copies))
    stacked = torch.stack(powers)
    return _all_reduced(stacked.max() if p == math.inf else stacked.sum(), p, axes)


def _power_sum(kinds: list[list[Tensor]], p: float, device: torch.device) -> Tensor:
    """Return the sum of ``|g| ** p`` over this rank's elements, or for p = inf the largest ``|g|``:
    float64, 0-d.

    Each tensor's own norm is float32 as in torch. Across tensors and ranks, float64 keeps squares
    from overflowing, and the order of the sum below the last bit of the float32 result.
    """
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    for same in kinds:
        if p == math.inf:
            # an empty shard has no largest
            same = [grad for grad in same if grad.numel()] or [same[0].new_zeros(1)]
        dtype = torch.promote_types(same[0].dtype, torch.float32)
        norms.append(
            torch.stack(steps.foreach_norm(same, p, dtype=dtype)).to(device, torch.float64)
        )
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
