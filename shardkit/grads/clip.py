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
    named_sharded_parameters,
    plain_attributes,
    steps_in_backward,
)
from shardkit.errors import ShardkitError, message
from shardkit.ranks import collective_device

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
    ``min(1, max_norm / (norm + 1e-6))``, where the norm is that of the whole, unsharded gradients taken as one vector.

    **Collective**: every rank must call it with its copy of the same parameters, with or without gradients. One
    all-reduce of one float64 for each axis of the largest mesh that shards: one on a 1-D mesh and on HSDP, whose
    replicas are equal already; two for TP x FSDP; none for an axis of one rank. The axes are read off the parameters,
    never off their gradients. Nothing waits for the device, except that gradients offloaded to the CPU wait for the
    norm, and ``error_if_nonfinite`` reads it.

    Parameters may lie on several meshes. A slice of the largest, such as ``mesh["dp"]`` beside ``mesh["dp", "tp"]``,
    holds the same parameters as the other slices; they count once. Any other mesh of some of its ranks, such as an
    expert's, holds parameters of its own; they count in the norm of all ranks, also of ranks that have none of them,
    and their number may differ between ranks. A mesh with ranks outside of the largest has a sum of its own.

    Plain gradients beside sharded ones (such as those of ``ignored_params``) count once, not once a rank: the mean over
    the ranks of their p-th power sum (for p = inf, their maximum) joins the same all-reduces, which then include the
    axes of the largest mesh that only replicate. Where the ranks hold equal ones, the result is exact for a power of
    two ranks, else within a rounding of float64; where they differ, every rank still gets the same norm.

    Args:
        parameters: the model, or one tensor, or an iterable of them: DTensor and plain, on any meshes and
            devices. Prefer the model: in a unit left unsharded (``set_reshard_after_backward(False)``)
            ``model.parameters()`` are stand-ins without gradients, which the model sees through.
        max_norm: largest norm allowed, >= 0; inf measures without clipping.
        norm_type: p > 0 of the p-norm, or inf for the largest absolute value.
        error_if_nonfinite: raise if the norm is nan or inf, on every rank, before any gradient is changed.
            Otherwise a norm of inf or nan spoils the gradients just as torch's function does.
        group: ranks that hold different models, such as ``mesh["pp"].get_group()`` of pipeline stages: the norm is
            that of all their gradients. One more all-reduce of one float64.

    Returns:
        The norm before clipping: a plain tensor without dimensions, equal on every rank, on the device of the largest
        mesh; 0 if no rank has a gradient. Computed in float32, also for bf16 and fp16 gradients (float64 if any
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
    _check_numbers(norm_type, max_norm)
    params = _parameters(parameters)
    with plain_attributes():
        grads = [param.grad for param in params]
        _check_not_stepped(param for param, grad in zip(params, grads, strict=True) if grad is None)
        norm = _total_norm(params, grads, p, group)
    if error_if_nonfinite and not norm.isfinite():
        problem = f"their norm of order {p:g} is {norm.item()}"
        fix = "No gradient was changed: skip this step, or lower the loss scale or learning rate"
        raise ShardkitError(message("gradients", problem, "error_if_nonfinite=True asks for a finite norm", fix))
    # Also by a factor of 1: to look at it would wait for the device.
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for same in by_device_and_dtype(grads):
        foreach_mul_(same, factor.to(same[0].device))
    return norm


def _check_numbers(norm_type: float, max_norm: float) -> None:
    if not norm_type > 0:  # or nan
        raise ShardkitError(
            message("norm_type", f"is {norm_type!r}", "A norm has an order p > 0, or inf", "Use 2.0, 1.0 or inf")
        )
    if not max_norm >= 0:
        rule = "It is the largest norm allowed, so >= 0"
        raise ShardkitError(message("max_norm", f"is {max_norm!r}", rule, "Use a number such as 1.0"))


def _parameters(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Each parameter once, in order; of a unit left unsharded the sharded ones, which have the gradients."""
    if isinstance(parameters, nn.Module):
        return [param for _, param in named_sharded_parameters(parameters)]
    if isinstance(parameters, Tensor):
        return [parameters]
    params = list(dict.fromkeys(parameters))
    others = sorted({type(param).__name__ for param in params if not isinstance(param, Tensor)})
    if others:
        rule = "It is a module, a tensor, or an iterable of tensors"
        raise ShardkitError(message("parameters", f"yields {', '.join(others)}", rule, "Pass the model"))
    if not params and isinstance(parameters, Iterator):
        rule = "A generator such as model.parameters() can be read once"
        raise ShardkitError(message("parameters", "is an iterator that yields nothing", rule, "Pass the model"))
    return params


def _check_not_stepped(without_grad: Iterable[Tensor]) -> None:
    if steps_in_backward(without_grad):
        problem = "are stepped in backward, and have no gradients when it is over"
        rule = "A norm of all gradients needs all of them at once"
        fix = "Clip a model whose optimizer steps after backward, or do without one of the two"
        raise ShardkitError(message("parameters", problem, rule, fix))


@dataclass(eq=False)
class _Bucket:
    """Local gradients of one mesh and one way to lie on it; ``device`` is where the mesh reduces."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    device: torch.device
    grads: list[Tensor]

    def axes(self, *, sharding: bool) -> Axes:
        """The axes that shard, or those that do not."""
        axes = zip(self.mesh.get_all_groups(), self.placements, strict=True)
        return tuple(axis for axis, place in axes if axis.size() > 1 and place.is_replicate() is not sharding)

    def ranks(self) -> set[int]:
        return set(self.mesh.mesh.flatten().tolist())


def _total_norm(params: list[Tensor], grads: list[Tensor | None], p: float, group: dist.ProcessGroup | None) -> Tensor:
    buckets, plain = _buckets(params, grads)
    if not buckets and group is None:
        return nn.utils.get_total_norm(plain, p)
    here = torch.device(collective_device(group))
    has_plain = any(not isinstance(param, DTensor) for param in params)
    total = _mesh_power(buckets, plain, has_plain, p) if buckets else _power_sum(plain, p, here)
    if group is not None:
        total = _all_reduced(total, p, [group])
    doubles = any(param.dtype in (torch.float64, torch.complex128) for param in params)
    return (total if p == math.inf else total.pow(1 / p)).to(torch.float64 if doubles else torch.float32)


def _buckets(params: list[Tensor], grads: list[Tensor | None]) -> tuple[list[_Bucket], list[Tensor]]:
    """A bucket for each mesh and placements, also without gradients; and the gradients of plain parameters.

    Meshes that this rank is not in hold nothing of its own, and nothing that it could reduce.
    """
    buckets: dict[tuple[DeviceMesh, tuple[Placement, ...]], _Bucket] = {}
    plain = []
    bucket: _Bucket | None = None
    for param, grad in zip(params, grads, strict=True):
        if not isinstance(param, DTensor):
            plain += [] if grad is None else [grad]
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
    return [bucket for bucket in buckets.values() if bucket.mesh.get_coordinate() is not None], plain


def _reduce_device(param: DTensor) -> torch.device:
    """Where the mesh of ``param`` reduces: its own device, though CPU offload keeps the shard elsewhere."""
    local, mesh_type = local_tensor(param).device, param.device_mesh.device_type
    return local if local.type == mesh_type else torch.device(mesh_type)


def _mesh_power(buckets: list[_Bucket], plain: list[Tensor], has_plain: bool, p: float) -> Tensor:
    """The p-th power of the norm, over all ranks of the parameters' meshes. Collective.

    The axes of the largest mesh, the parent, serve its slices, its submeshes and plain gradients; a disjoint mesh has a
    sum of its own. What only some ranks have must not decide the axes, or the others would not join: submeshes use
    those that slices shard over, where these reach all ranks of the submesh, and else all.
    """
    parent = max(buckets, key=lambda bucket: bucket.mesh.size())
    groups = parent.mesh.get_all_groups()
    slices = [each for each in buckets if set(each.mesh.get_all_groups()) <= set(groups)]
    submeshes = [each for each in buckets if each not in slices and each.ranks() <= parent.ranks()]
    used = tuple(axis for axis in groups if any(axis in each.axes(sharding=True) for each in slices))
    complete = [each for each in submeshes if each.ranks() <= _reach(parent, used)]
    every = tuple(axis for axis in groups if axis.size() > 1)
    axes = every if has_plain or len(complete) < len(submeshes) else used

    powers = [_power_sum(plain, p, parent.device) / _times(axes, (), p)]
    for each in slices:
        powers.append(_power_sum(each.grads, p, parent.device) / _times(axes, each.axes(sharding=True), p))
    for each in submeshes:
        times = _times(axes, used if each in complete else every, p) * _times(each.axes(sharding=False), (), p)
        powers.append(_power_sum(each.grads, p, parent.device) / times)
    parts = [_all_reduced(_combined(powers, p), p, axes)]
    for each in buckets:
        if each not in slices and each not in submeshes:
            power = _power_sum(each.grads, p, each.device)
            parts.append(_all_reduced(power, p, each.axes(sharding=True)).to(parent.device))
    return _combined(parts, p)


def _reach(parent: _Bucket, axes: Axes) -> set[int]:
    """Global ranks that all-reduces over these axes of the mesh connect with this one."""
    coordinate = parent.mesh.get_coordinate()
    assert coordinate is not None, "a rank outside its parameters' mesh"
    groups = zip(parent.mesh.get_all_groups(), coordinate, strict=True)
    index = tuple(slice(None) if group in axes else at for group, at in groups)
    return set(parent.mesh.mesh[index].flatten().tolist())


def _times(axes: Axes, needed: Axes, p: float) -> int:
    """How often a sum over ``axes`` counts an element that one over ``needed`` counts once; a maximum does not mind."""
    return 1 if p == math.inf else math.prod(axis.size() for axis in axes if axis not in needed)


def _combined(powers: list[Tensor], p: float) -> Tensor:
    flat = torch.stack(powers)
    return flat.max() if p == math.inf else flat.sum()


def _power_sum(grads: list[Tensor], p: float, device: torch.device) -> Tensor:
    """Sum of ``|g| ** p`` over this rank's elements, or the largest ``|g|`` for p = inf: float64, 0-d.

    Each tensor's own norm is float32 as in torch. Across tensors and ranks float64 keeps the order of the sum
    below the last bit of the float32 result, and squares of large norms from overflowing.
    """
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    if p == math.inf:
        grads = [grad for grad in grads if grad.numel()]  # no element is the largest of an empty shard
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
