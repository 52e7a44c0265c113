"""Exchange bytes, flags and errors between ranks: an error on one alone would leave the others in a collective."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._torch import real_tensors, sharded_parameters
from shardkit.errors import ShardkitError, listing, message

logger = logging.getLogger("shardkit")

PATIENCE = 60.0  # seconds that a rank waits for the others before it says so
_MOST = 5  # differences of one argument that a message shows
_FAILED = 1 << 62  # what a rank with a problem sends as its own

_warned: set[str] = set()  # texts that this process has logged by warn_once
listeners: list[Callable[[str], None]] = []  # of each ``watch`` that runs

Groups: TypeAlias = "Sequence[dist.ProcessGroup | None]"


def note(call: str, **arguments: object) -> None:
    """Tell ``watch`` that this rank makes a call that all ranks must make, with these arguments. Local."""
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
    """Return the type of this process's accelerator, or ``"cpu"`` if no backend communicates on it."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None and found.type != "mps" else "cpu"  # no backend serves mps


def device_type() -> str:
    """Return the device type that meshes are built on: the accelerator, or the CPU if the backend is gloo alone.

    gloo has no all-gather for GPU tensors.
    """
    only_gloo = dist.is_initialized() and dist.get_backend() == "gloo"
    return "cpu" if only_gloo else accelerator()


def collective_device(group: dist.ProcessGroup | None) -> str:
    """Return the CPU if the backend communicates on it, which NCCL alone does not; else the accelerator."""
    backend = dist.get_backend(group)
    return "cpu" if any(name in backend for name in ("gloo", "fake", "mpi", "ucc")) else device_type()


def groups_of(model: nn.Module) -> Groups:
    """Return the process groups of all axes of the meshes of a model's parameters, in order of appearance.

    Together they reach every rank that holds a shard of the model. Empty for a plain model. Local.
    """
    check_module(model)
    params = sharded_parameters(model)  # also while units are left unsharded
    meshes = dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor))
    return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups() if group.size() > 1))


def own_rank() -> int:
    """Return this process's global rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def one_group(group: dist.ProcessGroup | None = None) -> tuple[Groups, list[int]]:
    """Return the group of a call, or the default group, and its global ranks; no group for one rank. Local."""
    if not dist.is_initialized():
        return [], [0]
    if group is not None and dist.get_rank(group) < 0:
        raise ShardkitError(f"group does not have rank {dist.get_rank()}. Pass each rank a group that it is in.")
    ranks = sorted(dist.get_process_group_ranks(group or dist.group.WORLD))
    return [group] if len(ranks) > 1 else [], ranks


def check_module(model: object) -> None:
    """Raise ShardkitError if ``model`` is not a module, but for example its ``state_dict()``."""
    if not isinstance(model, nn.Module):
        problem = f"must be an nn.Module, got {type(model).__name__}"
        raise ShardkitError(message("model", problem, "", "Pass the model itself"))


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
    return [bytes(each.tolist())[: int(length)] for each, length in zip(gathered, sizes, strict=True)]


def gather_by_rank(value: Any, groups: Groups) -> dict[int, Any]:
    """Gather a JSON-ready value of each rank, by global rank in order. Collective over ``groups``."""
    known: list[tuple[int, Any]] = [(dist.get_rank(), value)]
    for group in groups:
        known = [each for data in all_gather_bytes(json.dumps(known).encode(), group) for each in json.loads(data)]
    return dict(sorted(dict(known).items()))


def from_first(value: Any, groups: Groups, source: int = 0) -> Any:
    """Return the JSON-ready value of the first rank of all, or of another in one group. Collective over ``groups``."""
    for group in groups:
        data, device = json.dumps(value).encode(), collective_device(group)
        size = torch.tensor([len(data)], device=device)
        dist.broadcast(size, group=group, group_src=source)
        content = torch.frombuffer(bytearray(data.ljust(int(size))[: int(size)]), dtype=torch.uint8).to(device)
        dist.broadcast(content, group=group, group_src=source)
        value = json.loads(bytes(content.tolist()))
    return value


def highest(values: list[int], groups: Groups) -> list[int]:
    """Return the maxima over all ranks of numbers of 64 bits. Collective: one all-reduce per group."""
    for group in groups:
        highest = torch.tensor(values, dtype=torch.int64, device=collective_device(group))
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        values = highest.tolist()
    return values


def sum_over_ranks(numbers: Sequence[int], groups: Groups) -> list[int]:
    """Return sums over all ranks of numbers of 64 bits, mod 2**64. Collective: one all-reduce per group."""
    signed = [number - (number >> 63 << 64) for number in numbers]
    for group in groups:
        total = torch.tensor(signed, dtype=torch.int64, device=collective_device(group))
        dist.all_reduce(total, group=group)
        signed = total.tolist()
    return [number % (1 << 64) for number in signed]


def each_equal(values: Iterable[Any], groups: Groups) -> list[bool]:
    """Return of each of as many JSON-ready values whether it is equal on all ranks. Collective: one all-reduce."""
    found = highest([number for value in values for number in both_ways(value)], groups)
    return [most == -least for most, least in zip(found[::2], found[1::2], strict=True)]


def both_ways(value: Any) -> tuple[int, int]:
    """Return a digest and its negative: ranks have equal values if and only if the maxima are each other's negative."""
    digest = int.from_bytes(hashlib.sha256(json.dumps(value, default=repr).encode()).digest()[:7], "little")
    return digest, -digest


@dataclass
class Poll:
    """What :func:`together` finds out about all ranks without another collective."""

    own: int = 0  # a flag or a number of at most 62 bits, set by this rank
    any: int = 0  # the highest of all ranks; known after the context
    same: Mapping[str, Any] = field(default_factory=dict)  # set by this rank; all ranks raise unless it is equal on all
    fix: str = "Make them equal"  # what to do if it is not


def raise_together(
    problem: Exception | None,
    groups: Groups,
    error: type[ShardkitError] = ShardkitError,
    poll: Poll | None = None,
    call: str | None = None,
) -> None:
    """Return on every rank if no rank has a problem; else raise on every rank. Collective over ``groups``.

    One small all-reduce for each group; reasons are exchanged only when there is one. A rank with a
    ShardkitError of its own raises that one, so that all ranks raise the same where all saw the same.

    Args:
        problem: what went wrong on this rank, or None.
        groups: which together reach all ranks concerned, as from :func:`groups_of`; None is the world.
        error: what the ranks without a problem raise, with the reason of each rank that has one.
        poll: what to find out in the same all-reduce.
        call: the public function; ranks that are in another one raise, as those with another ``poll.same``.
    """
    if problem is not None and not groups:  # a process alone
        raise problem
    poll = poll or Poll()
    with real_tensors():  # the caller may be in a FakeTensorMode
        same = {"call": call, **poll.same}
        own = _FAILED if problem is not None else int(poll.own)
        poll.any, most, least = highest([own, *both_ways(same)], groups)
        if poll.any < _FAILED:
            if most != -least:
                raise error(_unequal(same, groups, call, poll.fix))
            return
        reasons = gather_by_rank(None if problem is None else f"{type(problem).__name__}: {problem}", groups)
    if isinstance(problem, ShardkitError):
        raise problem
    lines = [f"- rank {rank}: {reason}" for rank, reason in reasons.items() if reason is not None]
    raise error("\n".join([f"{len(lines)} of {len(reasons)} ranks failed:", *lines])) from problem


@contextmanager
def together(groups: Groups, error: type[ShardkitError] = ShardkitError, *, call: str | None = None) -> Iterator[Poll]:
    """Run a body without collectives; when it raises on any rank, every rank raises, as :func:`raise_together` says.

    With ``call``, the public function that begins here, ranks that wait ``PATIENCE`` seconds log a warning.

    Yields:
        a poll: ``own`` and ``same`` are for the body to set; after the context every rank knows ``any``.
    """
    problem: Exception | None = None
    poll, timer = Poll(), None
    if call is not None:
        note(call)
        if groups:
            timer = threading.Timer(PATIENCE, _warn_of_waiting, [call])
            timer.daemon = True
            timer.start()
    try:
        try:
            yield poll
        except Exception as caught:  # whatever it is, the other ranks must not wait for this one
            problem = caught
        raise_together(problem, groups, error, poll, call)
    finally:
        if timer is not None:
            timer.cancel()


def _warn_of_waiting(call: str) -> None:
    problem = f"has waited {PATIENCE:g} s on rank {dist.get_rank()} for other ranks"
    rule = "The call is collective: every rank must make it, in the same order among its collectives"
    fix = "Move it out of `if rank == 0:`. SHARDKIT_WATCH=30 names the ranks in another call, and their lines"
    logger.warning(message(call, problem, rule, fix))


def _unequal(values: Mapping[str, Any], groups: Groups, call: str | None, fix: str = "Make them equal") -> str:
    """Return the error that says which arguments differ from the first rank's, on which ranks, and how. Collective."""
    own = json.loads(json.dumps(values, default=repr))
    first, model = from_first([dist.get_rank(), own], groups)
    names = [name for name in {**model, **own} if own.get(name) != model.get(name)]
    found = gather_by_rank({name: list(_unlike(model.get(name), own.get(name))) for name in names}, groups)
    parts = []
    for name in dict.fromkeys(name for differing in found.values() for name in differing):
        ranks = [rank for rank, differing in found.items() if name in differing]
        where = f"rank {ranks[0]} differs" if len(ranks) == 1 else f"ranks {listing(map(str, ranks))} differ"
        parts.append(f"{where} from rank {first} in {name} ({listing(found[ranks[0]][name], _MOST)})")
    subject, problem = (call, "was called differently") if call else ("ranks", "disagree")
    rule = "All ranks must make the same call with the same arguments"
    return message(subject, f"{problem}: {'; '.join(parts)}", rule, fix)


def _unlike(one: Any, other: Any) -> Iterator[str]:
    """Yield how the second value differs from the first, key by key where both are dicts."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        one, other = (each if isinstance(each, str) else json.dumps(each) for each in (one, other))
        yield f"{other:.200} instead of {one:.200}"
        return
    keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key, ...) != other.get(key, ...)]
    if not keys:
        yield "in another order"
    for key in keys[: _MOST + 1]:
        yield from (f"{key}: {how}" for how in _unlike(one.get(key, "missing"), other.get(key, "missing")))
