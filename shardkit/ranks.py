"""Exchange bytes, flags and errors between ranks: an error on one alone would leave the others in a
collective.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._torch import real_tensors, sharded_parameters
from shardkit.errors import ShardkitError, listing

logger = logging.getLogger("shardkit")

PATIENCE = 60.0  # seconds that a rank waits for the others before it says so
_MOST = 5  # differences of one argument that a message shows

_warned: set[str] = set()  # texts that this process has logged by warn_once
listeners: list[Callable[[str], None]] = []  # of each ``watch`` that runs

Groups: TypeAlias = "Sequence[dist.ProcessGroup | None]"


def note(call: str, **arguments: object) -> None:
    """Tell ``watch`` that this rank makes a call that all ranks must make, with these arguments.
    Local.
    """
    if listeners:
        text = f"{call}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
        for listen in list(listeners):
            listen(text)


def warn_once(text: str) -> None:
    """Log a warning on the first rank, once in a process. Local."""
    if text not in _warned and (not dist.is_initialized() or dist.get_rank() == 0):
        _warned.add(text)
        logger.warning(text)


def accelerator() -> str:
    """Return the type of this process's accelerator, or ``"cpu"`` if no backend
    communicates on it.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    # no backend serves mps
    return "cpu" if device is None or device.type == "mps" else device.type


def device_type() -> str:
    """Return the device type that meshes are built on: the accelerator, or the CPU if the backend
    is gloo alone.

    gloo has no all-gather for GPU tensors.
    """
    only_gloo = dist.is_initialized() and dist.get_backend() == "gloo"
    return "cpu" if only_gloo else accelerator()


def collective_device(group: dist.ProcessGroup | None) -> str:
    """Return the CPU if the backend communicates on it, which NCCL alone does not; else the
    accelerator.
    """
    backend = dist.get_backend(group)
    return (
        "cpu" if any(name in backend for name in ("gloo", "fake", "mpi", "ucc")) else device_type()
    )


def groups_of(model: nn.Module) -> Groups:
    """Return the process groups of all axes of the meshes of a model's parameters, in order of
    appearance.

    Together they reach every rank that holds a shard of the model. Empty for a plain model. Local.
    """
    check_module(model)
    params = sharded_parameters(model)  # also while units are left unsharded
    meshes = dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor))
    return list(
        dict.fromkeys(
            group for mesh in meshes for group in mesh.get_all_groups() if group.size() > 1
        )
    )


def own_rank() -> int:
    """Return this process's global rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def one_group(group: dist.ProcessGroup | None = None) -> tuple[Groups, list[int]]:
    """Return the group of a call, or the default group, and its global ranks; no group for one
    rank. Local.
    """
    if not dist.is_initialized():
        return [], [0]
    if group is not None and dist.get_rank(group) < 0:
        raise ShardkitError(
            f"group does not have rank {dist.get_rank()}. Pass each rank a group that it is in."
        )
    ranks = sorted(dist.get_process_group_ranks(group or dist.group.WORLD))
    return [group] if len(ranks) > 1 else [], ranks


def check_module(model: object) -> None:
    """Raise ShardkitError if ``model`` is not a module, but for example its ``state_dict()``."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ShardkitError(f"model must be an nn.Module, got {kind}. Pass the model itself.")


def all_gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Gather bytes of any length from each rank; torch's all_gather_object would need numpy."""
    device = collective_device(group)
    size = torch.tensor([len(data)], device=device)
    sizes = [size.clone() for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(each) for each in sizes)
    padded = torch.frombuffer(bytearray(data.ljust(longest) or b" "), dtype=torch.uint8).to(device)
    gathered = [padded.clone() for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [
        bytes(each.tolist())[: int(length)] for each, length in zip(gathered, sizes, strict=True)
    ]


def gather_by_rank(value: Any, groups: Groups) -> dict[int, Any]:
    """Gather a JSON-ready value of each rank, by global rank in order.
    Collective over ``groups``.
    """
    known: list[tuple[int, Any]] = [(dist.get_rank(), value)]
    for group in groups:
        gathered = all_gather_bytes(json.dumps(known).encode(), group)
        known = []
        for data in gathered:
            known += json.loads(data)
    return dict(sorted(dict(known).items()))


def from_first(value: Any, groups: Groups, source: int = 0) -> Any:
    """Return the JSON-ready value of the first rank of all, or of another in one group. Collective
    over ``groups``.
    """
    for group in groups:
        data, device = json.dumps(value).encode(), collective_device(group)
        size = torch.tensor([len(data)], device=device)
        dist.broadcast(size, group=group, group_src=source)
        content = torch.frombuffer(
            bytearray(data.ljust(int(size))[: int(size)]), dtype=torch.uint8
        ).to(device)
        dist.broadcast(content, group=group, group_src=source)
        value = json.loads(bytes(content.tolist()))
    return value


def extremes(lows: list[int], highs: list[int], groups: Groups) -> tuple[list[int], list[int]]:
    """Return the lowest of each low and the highest of each high over all ranks. Collective.

    One all-reduce for each group finds both: the lowest is the highest of the negatives, negated.
    """
    values = [*highs, *(-low for low in lows)]
    for group in groups:
        tensor = torch.tensor(values, dtype=torch.int64, device=collective_device(group))
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        values = tensor.tolist()
    return [-value for value in values[len(highs) :]], values[: len(highs)]


def sum_over_ranks(numbers: Sequence[int], groups: Groups) -> list[int]:
    """Return sums over all ranks of numbers of 64 bits, mod 2**64. Collective: one all-reduce per
    group.
    """
    signed = [number - (number >> 63 << 64) for number in numbers]
    for group in groups:
        total = torch.tensor(signed, dtype=torch.int64, device=collective_device(group))
        dist.all_reduce(total, group=group)
        signed = total.tolist()
    return [number % (1 << 64) for number in signed]


def digest(value: Any) -> int:
    """Return a number of 56 bits that is equal for equal JSON-ready values."""
    text = json.dumps(value, default=repr)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


@dataclass
class Poll:
    """What :func:`together` finds out about all ranks without another collective."""

    own: int = 0  # a flag or a number, set by this rank
    any: int = 0  # the highest of all ranks; known after the context
    same: Mapping[str, Any] = field(default_factory=dict)  # all ranks raise unless equal on all
    fix: str = "Make them equal"  # what to do if it is not


def raise_together(
    problem: Exception | None,
    groups: Groups,
    error: type[ShardkitError] = ShardkitError,
    poll: Poll | None = None,
    call: str | None = None,
) -> None:
    """Return on every rank if no rank has a problem; else raise on every rank. Collective.

    One small all-reduce for each group; reasons are exchanged only when there is one. A rank with a
    ShardkitError of its own raises that one, so that all ranks raise the same where all saw the
    same.

    Args:
        problem: what went wrong on this rank, or None.
        groups: which together reach all ranks concerned, as from :func:`groups_of`; None is the
            world.
        error: what the ranks without a problem raise, with the reason of each rank that has one.
        poll: what to find out in the same all-reduce.
        call: the public function; ranks that are in another one raise, as those with another
            ``poll.same``.
    """
    if problem is not None and not groups:  # a process alone
        raise problem
    poll = poll or Poll()
    with real_tensors():  # the caller may be in a FakeTensorMode
        same = {"call": call, **poll.same}
        own = digest(same)
        failed = int(problem is not None)
        (lowest,), (highest, any_failed, poll.any) = extremes(
            [own], [own, failed, int(poll.own)], groups
        )
        if not any_failed and lowest == highest:
            return
        if not any_failed:
            raise error(_difference(same, groups, call, poll.fix))
        reason = f"{type(problem).__name__}: {problem}" if problem is not None else None
        reasons = gather_by_rank(reason, groups)
    if isinstance(problem, ShardkitError):
        raise problem
    lines = [f"- rank {rank}: {why}" for rank, why in reasons.items() if why is not None]
    heading = f"{len(lines)} of {len(reasons)} ranks failed:"
    raise error("\n".join([heading, *lines])) from problem


@contextmanager
def together(
    groups: Groups, error: type[ShardkitError] = ShardkitError, *, call: str | None = None
) -> Iterator[Poll]:
    """Run a body without collectives; when it raises on any rank, every rank raises.

    As :func:`raise_together` says. With ``call``, the public function that begins here, ranks that
    wait ``PATIENCE`` seconds log a warning.

    Yields:
        a poll: ``own`` and ``same`` are for the body to set; after it every rank knows ``any``.
    """
    timer = threading.Timer(PATIENCE, _warn_of_waiting, [call])
    timer.daemon = True
    if call is not None:
        note(call)
        if groups:
            timer.start()
    poll = Poll()
    problem: Exception | None = None
    try:
        try:
            yield poll
        except Exception as caught:  # whatever it is, the other ranks must not wait for this one
            problem = caught
        raise_together(problem, groups, error, poll, call)
    finally:
        timer.cancel()


def _warn_of_waiting(call: str) -> None:
    logger.warning(
        f"{call} has waited {PATIENCE:g} s on rank {dist.get_rank()} for other ranks. The call is "
        "collective: every rank must make it, in the same order among its collectives. Move it "
        "out of `if rank == 0:`. SHARDKIT_WATCH=30 names the ranks in another call, and their "
        "lines."
    )


def _difference(same: Mapping[str, Any], groups: Groups, call: str | None, fix: str) -> str:
    """Return the error for arguments that differ from the first rank's: which, where, how.
    Collective.
    """
    own = json.loads(json.dumps(same, default=repr))
    first, model = from_first([dist.get_rank(), own], groups)
    differing = {}
    for name in [*model, *own]:
        if own.get(name) != model.get(name):
            differing[name] = _unlike(model.get(name), own.get(name))
    by_rank = gather_by_rank(differing, groups)
    parts = []
    for name in dict.fromkeys(name for found in by_rank.values() for name in found):
        ranks = [rank for rank, found in by_rank.items() if name in found]
        where = (
            f"rank {ranks[0]} differs"
            if len(ranks) == 1
            else f"ranks {listing(map(str, ranks))} differ"
        )
        how = listing(by_rank[ranks[0]][name], _MOST)
        parts.append(f"{where} from rank {first} in {name} ({how})")
    problem = f"{call} was called differently" if call else "ranks disagree"
    return (
        f"{problem}: {'; '.join(parts)}. All ranks must make the same call with the same "
        f"arguments. {fix}."
    )


def _unlike(model: Any, other: Any) -> list[str]:
    """Say how a value differs from the first rank's, key by key where both are dicts."""
    if not (isinstance(model, dict) and isinstance(other, dict)):
        texts = [each if isinstance(each, str) else json.dumps(each) for each in (other, model)]
        return ["{:.200} instead of {:.200}".format(*texts)]
    found = []
    for key in dict.fromkeys([*model, *other]):
        if model.get(key, ...) != other.get(key, ...):
            for how in _unlike(model.get(key, "missing"), other.get(key, "missing")):
                found.append(f"{key}: {how}")
    return found[: _MOST + 1] or ["in another order"]
