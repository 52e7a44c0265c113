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
    ``min(1, max_norm / (norm + 1e-6))``, where the norm is that of the whole, unsharded gradients taken as
    one vector.

    **Collective**: every rank must call it with its copy of the same parameters, with or without gradients. One
    all-reduce of one float64 for each axis that shards of the largest mesh (one in all for a 1-D mesh and for
    HSDP, whose replicas are equal already; two for TP x FSDP); none for an axis of one rank. Which axes take part
    is read off the parameters, never off their gradients. Nothing waits for the device, except that gradients
    offloaded to the CPU wait for the norm, and ``error_if_nonfinite`` reads it.

    Several meshes: a slice of the largest, such as ``mesh["dp"]`` beside ``mesh["dp", "tp"]``, holds equal
    parameters on the other slices, which count once. Any other mesh of some of its ranks, such as that of an
    expert, holds parameters of its own, which count in the norm of all ranks, also of those that have none of them.
    The numbers of parameters may then differ between ranks. Meshes of further ranks have a sum of their own.

    Plain gradients beside sharded ones (such as those of ``ignored_params``) count once, not once a rank: the
    mean over the ranks of their p-th power sum, for p = inf their maximum, joins the same all-reduces, and
    axes of the largest mesh that only replicate are then reduced too. Where the ranks hold equal ones that is
    exact for a power of two ranks, else within a rounding of float64; where they differ, every rank still gets
    one norm.

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
        The norm before clipping: a plain tensor without dimensions, equal on every rank, on the device of
        the largest mesh; 0 if no rank has a gradient. Computed in float32, also for bf16 and fp16 gradients
        (float64 if any parameter is). Without any DTensor it is torch's own, with torch's device and dtype.

    Raises:
        ShardkitError: for a ``parameters``, ``max_norm`` or ``norm_type`` that cannot be used, for parameters that
            are stepped in backward, and for ``error_if_nonfinite``.

    Example:
        >>> loss.backward()
        >>> norm = clip_grad_norm_(model, max_norm=1.0)
        >>> optimizer.step()
    """
    p = _checked_norm_type(norm_type)
    limit = _checked_max_norm(max_norm)
    params = _parameters(parameters)
    with plain_attributes():
        grads = [param.grad for param in params]
        _check_when_stepped(params, grads)
        norm = _total_norm(params, grads, p, group)
    if error_if_nonfinite and not norm.isfinite():
        raise ShardkitError(
            message(
                "gradients",
                f"their norm of order {p:g} is {norm.item()}",
                "error_if_nonfinite=True asks for a finite norm",
                "No gradient was changed: skip this step, or lower the loss scale or learning rate",
            )
        )
    _scale_grads_(grads, limit, norm)
    return norm


# What was asked.


def _checked_norm_type(norm_type: float) -> float:
    p = float(norm_type)
    if p > 0:  # False for nan
        return p
    raise ShardkitError(
        message("norm_type", f"is {norm_type!r}", "A norm has an order p > 0, or inf", "Use 2.0, 1.0 or inf")
    )


def _checked_max_norm(max_norm: float) -> float:
    limit = float(max_norm)
    if limit >= 0:  # False for nan
        return limit
    raise ShardkitError(
        message("max_norm", f"is {max_norm!r}", "It is the largest norm allowed, so >= 0", "Use such as 1.0")
    )


def _parameters(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Each parameter once, in order; of a unit left unsharded the sharded ones, which have the gradients."""
    if isinstance(parameters, nn.Module):
        return [param for _, param in named_sharded_parameters(parameters)]
    if isinstance(parameters, Tensor):
        return [parameters]
    params = list(dict.fromkeys(parameters))
    strangers = sorted({type(param).__name__ for param in params if not isinstance(param, Tensor)})
    if strangers:
        raise ShardkitError(
            message(
                "parameters",
                f"yields {', '.join(strangers)}",
                "It is a module, a tensor, or an iterable of tensors",
                "Pass the model",
            )
        )
    if not params and isinstance(parameters, Iterator):
        raise ShardkitError(
            message(
                "parameters",
                "is an iterator that yields nothing",
                "A generator such as model.parameters() can be read once",
                "Pass the model",
            )
        )
    return params


def _check_when_stepped(params: list[Tensor], grads: list[Tensor | None]) -> None:
    without = (param for param, grad in zip(params, grads, strict=True) if grad is None)  # as such parameters are
    if not steps_in_backward(without):
        return
    problem = "are stepped in backward, and have no gradients when it is over"
    rule = "A norm of all gradients needs all of them at once"
    fix = "Clip a model whose optimizer steps after backward, or do without one of the two"
    raise ShardkitError(message("parameters", problem, rule, fix))


# The norm.


@dataclass
class _Bucket:
    """Local gradients of one mesh and one way to lie on it.

    Attributes:
        device: where the mesh reduces, though CPU offload keeps the shards elsewhere.
        grads: local tensors.
        over: axes of the largest mesh whose sum of p-th powers makes this bucket's complete.
        copies: how often that sum counts each element.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    device: torch.device
    grads: list[Tensor]
    over: tuple[dist.ProcessGroup, ...] = ()
    copies: int = 1

    def axes(self, *, sharding: bool) -> tuple[dist.ProcessGroup, ...]:
        """The axes of more than one rank; those that shard, or those that do not."""
        axes = zip(self.mesh.get_all_groups(), self.placements, strict=True)
        return tuple(axis for axis, place in axes if axis.size() > 1 and place.is_replicate() is not sharding)

    def ranks(self) -> set[int]:
        """Global ranks."""
        return set(self.mesh.mesh.flatten().tolist())


def _total_norm(
    params: list[Tensor], grads: list[Tensor | None], p: float, group: dist.ProcessGroup | None = None
) -> Tensor:
    buckets, plain = _buckets(params, grads)
    if not buckets and group is None:
        return nn.utils.get_total_norm(plain, p)
    here = torch.device(collective_device(group))
    total = _mesh_power(buckets, plain, params, p) if buckets else _power_sum(plain, p, here)
    if group is not None:
        total = _all_reduced(total, p, [group])
    return (total if p == math.inf else total.pow(1 / p)).to(_norm_dtype(params))


def _mesh_power(buckets: list[_Bucket], plain: list[Tensor], params: list[Tensor], p: float) -> Tensor:
    """The p-th power of the norm, over all ranks of the parameters' meshes. Collective."""
    host = max(buckets, key=lambda bucket: bucket.mesh.size())
    axes, inside, apart = _arranged(buckets, host, with_plain=any(not isinstance(param, DTensor) for param in params))
    powers = [
        _power_sum(each.grads, p, host.device) / _times_counted(each, axes, p)
        for each in (*inside, _Bucket(host.mesh, (), host.device, plain))
    ]
    parts = [_all_reduced(_combined(powers, p), p, axes)]
    parts += [_all_reduced(_power_sum(each.grads, p, each.device), p, each.over).to(host.device) for each in apart]
    return _combined(parts, p)


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
            home = layout_of(grad).placements == bucket.placements
            bucket.grads.append(local_tensor(grad) if home else _brought_home(grad, param))
    return [bucket for bucket in buckets.values() if bucket.mesh.get_coordinate() is not None], plain


def _brought_home(grad: DTensor, param: DTensor) -> Tensor:
    return grad.redistribute(placements=param.placements).to_local()


def _reduce_device(param: DTensor) -> torch.device:
    """Where the mesh of ``param`` reduces: its own device, though CPU offload keeps the shard elsewhere."""
    local, mesh_type = local_tensor(param).device, param.device_mesh.device_type
    return local if local.type == mesh_type else torch.device(mesh_type)


def _arranged(
    buckets: list[_Bucket], host: _Bucket, with_plain: bool
) -> tuple[tuple[dist.ProcessGroup, ...], list[_Bucket], list[_Bucket]]:
    """The axes of the largest mesh to reduce over, the buckets that do so, and those that cannot.

    ``over`` and ``copies`` are set. What only some ranks have must not decide the axes, or the others would not join:
    guests use those that the slices use, wherever these reach all of the guest's ranks.
    """
    all_axes = tuple(axis for axis in host.mesh.get_all_groups() if axis.size() > 1)
    slices = [each for each in buckets if set(each.mesh.get_all_groups()) <= set(host.mesh.get_all_groups())]
    for each in slices:
        each.over = each.axes(sharding=True)
    used = tuple(axis for axis in all_axes if any(axis in each.over for each in slices))
    others = [each for each in buckets if each not in slices]
    guests = [each for each in others if each.ranks() <= host.ranks()]
    for guest in guests:
        guest.over = used if guest.ranks() <= _reach(host, used) else all_axes
        guest.copies = _size(guest.axes(sharding=False))
    apart = [each for each in others if each not in guests]
    for each in apart:
        each.over = each.axes(sharding=True)
    everything = with_plain or any(guest.over != used for guest in guests)
    return (all_axes if everything else used), slices + guests, apart


def _reach(host: _Bucket, axes: tuple[dist.ProcessGroup, ...]) -> set[int]:
    """Global ranks that all-reduces over these axes of the largest mesh connect with this one."""
    coordinate = host.mesh.get_coordinate()
    assert coordinate is not None, "a rank outside its parameters' mesh"
    groups = zip(host.mesh.get_all_groups(), coordinate, strict=True)
    index = tuple(slice(None) if group in axes else at for group, at in groups)
    return set(host.mesh.mesh[index].flatten().tolist())


def _times_counted(bucket: _Bucket, axes: Iterable[dist.ProcessGroup], p: float) -> int:
    """How often all-reduces over the axes count each element, which a maximum does not mind."""
    return 1 if p == math.inf else bucket.copies * _size(set(axes) - set(bucket.over))


def _size(axes: Iterable[dist.ProcessGroup]) -> int:
    return math.prod(axis.size() for axis in axes)


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
    for group in by_device_and_dtype(grads):
        dtype = torch.promote_types(group[0].dtype, torch.float32)
        norms.append(torch.stack(foreach_norm(group, p, dtype=dtype)).to(device, torch.float64))
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


def _norm_dtype(params: Iterable[Tensor]) -> torch.dtype:
    doubles = (torch.float64, torch.complex128)
    return torch.float64 if any(param.dtype in doubles for param in params) else torch.float32


# The scaling.


def _scale_grads_(grads: Iterable[Tensor | None], max_norm: float, norm: Tensor) -> None:
    """Scale local gradients in place; also when the factor is 1, since to look would wait for the device."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    locals_ = [local_tensor(grad) if isinstance(grad, DTensor) else grad for grad in grads if grad is not None]
    for group in by_device_and_dtype(locals_):
        foreach_mul_(group, factor.to(group[0].device))
