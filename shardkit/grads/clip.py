"""Gradient clipping for models whose parameters are sharded, plain, or both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardkit._torch import (
    by_device_and_dtype,
    foreach_mul_,
    foreach_norm,
    layout_of,
    local_tensor,
    plain_attributes,
    sharded_parameters,
    steps_in_backward,
)
from shardkit.errors import ShardkitError, message
from shardkit.ranks import collective_device, note

Axes = tuple[dist.ProcessGroup, ...]  # of a mesh, those of more than one rank


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

    Same arguments and formula as :func:`torch.nn.utils.clip_grad_norm_`: each gradient is multiplied by
    ``min(1, max_norm / (norm + 1e-6))``, where the norm is that of all unsharded gradients as one vector.

    **Collective**: every rank must call it with the same parameters, with or without gradients. It takes one all-reduce
    of one float64 for each axis of the largest mesh that shards: one on a 1-D mesh and on HSDP, whose replicas are
    equal already; two for TP x FSDP; none for an axis of one rank. The axes depend on the parameters, never on which
    have gradients. Nothing waits for the device, except that gradients offloaded to the CPU wait for the norm, and
    ``error_if_nonfinite`` reads it.

    Parameters may be on several meshes. A slice of the largest, such as ``mesh["dp"]`` beside ``mesh["dp", "tp"]``,
    holds the same parameters as the other slices; they count once. Any other submesh of the largest, such as an
    expert's, holds parameters of its own; they count in the norm of all ranks, and their number may differ between
    ranks. A mesh with ranks outside of the largest has a sum of its own.

    Plain gradients beside sharded ones (such as those of ``ignored_params``) count once, not once a rank: the mean over
    the ranks of their p-th power sum (for p = inf, their maximum) joins the same all-reduces, which then include the
    axes of the largest mesh that replicate. If all ranks hold equal ones, the result is exact for a power of two
    ranks, else within a rounding of float64; if they differ, every rank still gets the same norm.

    Args:
        parameters: the model, or one tensor, or an iterable of them: DTensor and plain, on any meshes and
            devices. Prefer the model: ``model.parameters()`` of a unit left unsharded
            (``set_reshard_after_backward(False)``) are the unsharded parameters, which have no gradients.
        max_norm: the largest norm allowed, >= 0; inf returns the norm without clipping.
        norm_type: p > 0 of the p-norm, or inf for the largest absolute value.
        error_if_nonfinite: raise if the norm is nan or inf, on every rank, before any gradient is changed.
            Otherwise a norm of inf or nan makes the gradients nan or zero, as in torch's function.
        group: ranks that hold different models, such as ``mesh["pp"].get_group()`` of pipeline stages: the norm is
            that of all their gradients. It takes one more all-reduce of one float64.

    Returns:
        The norm before clipping: a plain tensor without dimensions, equal on every rank, on the device of the largest
        mesh; 0 if no rank has a gradient. It is computed in float32, also for bf16 and fp16 gradients (float64 if any
        parameter is). Without any DTensor it is torch's own, with torch's device and dtype.

    Raises:
        ShardkitError: for a ``parameters``, ``max_norm`` or ``norm_type`` that cannot be used, for parameters that
            are stepped in backward, and for ``error_if_nonfinite``.

    Example:
        >>> loss.backward()
        >>> norm = clip_grad_norm_(model, max_norm=1.0)
        >>> optimizer.step()
    """
    p, limit = float(norm_type), float(max_norm)
    if not p > 0:  # or nan
        rule, fix = "The order of a norm must be > 0, or inf", "Use 2.0, 1.0 or inf"
        raise ShardkitError(message("norm_type", f"is {norm_type!r}", rule, fix))
    if not limit >= 0:
        rule = "It must be at least 0"
        raise ShardkitError(message("max_norm", f"is {max_norm!r}", rule, "Use a number such as 1.0"))
    params = _parameters(parameters)
    note("clip_grad_norm_", max_norm=limit, norm_type=p, error_if_nonfinite=error_if_nonfinite)
    with plain_attributes():
        grads = [param.grad for param in params]
        if steps_in_backward(param for param, grad in zip(params, grads, strict=True) if grad is None):
            problem = "are stepped in backward, after which they have no gradients"
            rule = "A norm of all gradients needs all of them at once"
            fix = "Do not clip, or use an optimizer that steps after backward instead of optimizer_in_backward"
            raise ShardkitError(message("parameters", problem, rule, fix))
        norm = _total_norm(params, grads, p, group)
    if error_if_nonfinite and not norm.isfinite():
        problem = f"their norm of order {p:g} is {norm.item()}"
        fix = "No gradient was changed: skip this step, or lower the loss scale or learning rate"
        raise ShardkitError(message("gradients", problem, "error_if_nonfinite=True requires a finite norm", fix))
    # Also by a factor of 1: to look at it would wait for the device.
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for same in by_device_and_dtype(grads):
        foreach_mul_(same, factor.to(same[0].device))
    return norm


def _parameters(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return each parameter once, in order; of a unit left unsharded the sharded ones, which have the gradients."""
    if isinstance(parameters, nn.Module):
        return list(sharded_parameters(parameters))
    if isinstance(parameters, Tensor):
        return [parameters]
    params = list(dict.fromkeys(parameters))
    others = sorted({type(param).__name__ for param in params if not isinstance(param, Tensor)})
    if others:
        rule = "It must be a module, a tensor, or an iterable of tensors"
        raise ShardkitError(message("parameters", f"yields {', '.join(others)}", rule, "Pass the model"))
    if not params and isinstance(parameters, Iterator):
        rule = "A generator such as model.parameters() can be read once"
        raise ShardkitError(message("parameters", "is an iterator that yields nothing", rule, "Pass the model"))
    return params


@dataclass(eq=False)
class _Bucket:
    """Local gradients of one mesh and its placements; ``device`` is where the mesh reduces."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    device: torch.device
    grads: list[Tensor]

    def axes(self, *, sharding: bool) -> Axes:
        """Return the axes that shard, or those that do not."""
        axes = zip(self.mesh.get_all_groups(), self.placements, strict=True)
        return tuple(axis for axis, place in axes if axis.size() > 1 and place.is_replicate() is not sharding)

    def ranks(self) -> set[int]:
        return set(self.mesh.mesh.flatten().tolist())


def _total_norm(params: list[Tensor], grads: list[Tensor | None], p: float, group: dist.ProcessGroup | None) -> Tensor:
    pairs = zip(params, grads, strict=True)
    plain = [grad for param, grad in pairs if not isinstance(param, DTensor) and grad is not None]
    buckets = _buckets(params, grads)
    if not buckets and group is None:
        return nn.utils.get_total_norm(plain, p)
    if buckets:
        has_plain = any(not isinstance(param, DTensor) for param in params)
        total = _mesh_power(buckets, plain, has_plain, p)
    else:
        total = _power_sum(plain, p, torch.device(collective_device(group)))
    if group is not None:
        total = _all_reduced(total, p, [group])
    doubles = any(param.dtype in (torch.float64, torch.complex128) for param in params)
    return (total if p == math.inf else total.pow(1 / p)).to(torch.float64 if doubles else torch.float32)


def _buckets(params: list[Tensor], grads: list[Tensor | None]) -> list[_Bucket]:
    """Return a bucket for each mesh that this rank is in and its placements, also without gradients."""
    buckets: dict[tuple[DeviceMesh, tuple[Placement, ...]], _Bucket] = {}
    bucket: _Bucket | None = None
    for param, grad in zip(params, grads, strict=True):
        if not isinstance(param, DTensor):
            continue
        layout = layout_of(param)
        if bucket is None or layout.mesh is not bucket.mesh or layout.placements != bucket.placements:
            fresh = _Bucket(layout.mesh, layout.placements, _reduce_device(param), [])
            bucket = buckets.setdefault((layout.mesh, layout.placements), fresh)  # to hash all would cost more
        if isinstance(grad, DTensor):
            # Tensor parallelism may leave Partial gradients, whose parts have no norm of their own.
            same = layout_of(grad).placements == bucket.placements
            local = local_tensor(grad) if same else grad.redistribute(placements=param.placements).to_local()
            bucket.grads.append(local)
    return [bucket for bucket in buckets.values() if bucket.mesh.get_coordinate() is not None]


def _reduce_device(param: DTensor) -> torch.device:
    """Return where the mesh of ``param`` reduces: its own device, though CPU offload keeps the shard elsewhere."""
    local, mesh_type = local_tensor(param).device, param.device_mesh.device_type
    return local if local.type == mesh_type else torch.device(mesh_type)


def _mesh_power(buckets: list[_Bucket], plain: list[Tensor], has_plain: bool, p: float) -> Tensor:
    """Return the p-th power of the norm over all ranks of the parameters' meshes. Collective.

    The sum over the parent, the largest mesh, includes its slices, its submeshes and plain gradients; each disjoint
    mesh has a sum of its own. The axes to sum over must not depend on what only some ranks have, or the others would
    not join. They are those that slices shard over, if these reach all ranks of each submesh, and else all.
    """
    parent = max(buckets, key=lambda bucket: bucket.mesh.size())
    groups = parent.mesh.get_all_groups()
    slices = [each for each in buckets if each is parent or set(each.mesh.get_all_groups()) <= set(groups)]
    others = [each for each in buckets if each not in slices]
    submeshes = [each for each in others if each.ranks() <= parent.ranks()]
    every = tuple(axis for axis in groups if axis.size() > 1)
    used = tuple(axis for axis in every if any(axis in each.axes(sharding=True) for each in slices))
    reached = _reached(parent.mesh, used) if submeshes else set()
    axes = every if has_plain or not all(each.ranks() <= reached for each in submeshes) else used

    def times(summed: Axes, needed: Axes) -> int:  # how often the sum counts an element; a maximum does not mind
        return 1 if p == math.inf else math.prod(axis.size() for axis in summed if axis not in needed)

    powers = [_power_sum(plain, p, parent.device) / times(axes, ())] if plain else []
    for each in slices:
        powers.append(_power_sum(each.grads, p, parent.device) / times(axes, each.axes(sharding=True)))
    for each in submeshes:
        copies = times(each.axes(sharding=False), ()) * times(axes, used if each.ranks() <= reached else every)
        powers.append(_power_sum(each.grads, p, parent.device) / copies)
    parts = [_all_reduced(_combined(powers, p), p, axes)]
    for each in others:
        if each not in submeshes:
            power = _power_sum(each.grads, p, each.device)
            parts.append(_all_reduced(power, p, each.axes(sharding=True)).to(parent.device))
    return _combined(parts, p)


def _reached(mesh: DeviceMesh, axes: Axes) -> set[int]:
    """Return the ranks that sums over these axes connect with this one. Local."""
    at = mesh.get_coordinate()
    assert at is not None, "a rank outside its parameters' mesh"
    index = tuple(slice(None) if group in axes else at[number] for number, group in enumerate(mesh.get_all_groups()))
    return set(mesh.mesh[index].flatten().tolist())


def _combined(powers: list[Tensor], p: float) -> Tensor:
    if len(powers) == 1:
        return powers[0]
    each = torch.stack(powers)
    return each.max() if p == math.inf else each.sum()


def _power_sum(grads: list[Tensor], p: float, device: torch.device) -> Tensor:
    """Return the sum of ``|g| ** p`` over this rank's elements, or for p = inf the largest ``|g|``: float64, 0-d.

    Each tensor's own norm is float32 as in torch. Across tensors and ranks float64 keeps the order of the sum
    below the last bit of the float32 result, and squares of large norms from overflowing.
    """
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    if p == math.inf:
        grads = [grad for grad in grads if grad.numel()]  # an empty shard has no largest element
    for same in by_device_and_dtype(grads):
        dtype = torch.promote_types(same[0].dtype, torch.float32)
        norms.append(torch.stack(foreach_norm(same, p, dtype=dtype)).to(device, torch.float64))
    flat = torch.cat(norms)
    return flat.max() if p == math.inf else flat.pow(p).sum()


def _all_reduced(value: Tensor, p: float, axes: Iterable[dist.ProcessGroup]) -> Tensor:
    if p != math.inf:
        for axis in axes:
            dist.all_reduce(value, group=axis)
        return value
    # The maximum of gloo and NCCL may lose a nan. Floats that are not negative are ordered like their bits
    # read as integers, with nan above inf, so the maximum of the bits keeps it.
    bits = value.abs().view(torch.int64)
    for axis in axes:
        dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=axis)
    return bits.view(torch.float64)
