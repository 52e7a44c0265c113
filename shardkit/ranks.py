"""What ranks tell each other: errors, values that must be equal, numbers and bytes.

An error on one rank alone would leave the others waiting in a collective. So each collective call
of shardkit checks everything it can first: :func:`raise_on_all_ranks`, then :func:`check_equal`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._torch import real_tensors, sharded_parameters
from shardkit.errors import ShardkitError, listing

logger = logging.getLogger("shardkit")

PATIENCE = 60.0  # seconds that a rank waits for the others before it says so
_MOST = 1 << 62  # more than any digest

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
    if text not in _warned and own_rank() == 0:
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
    on_cpu = any(name in backend for name in ("gloo", "fake", "mpi", "ucc"))
    return "cpu" if on_cpu else device_type()


def groups_of(model: nn.Module) -> Groups:
    """Return the process groups of all axes of the meshes of a model's parameters, in order of
    appearance.

    Together they reach every rank that holds a shard of the model. Empty for a plain model. Local.
    """
    check_module(model)
    groups: list[dist.ProcessGroup | None] = []
    params = sharded_parameters(model)  # also while units are left unsharded
    for mesh in dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor)):
        for group in mesh.get_all_groups():
            if group.size() > 1 and group not in groups:
                groups.append(group)
    return groups


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
    ranks = sorted(dist.get_process_group_ranks(group))
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
    lengths = [int(size) for size in sizes]
    padded = torch.frombuffer(bytearray(data.ljust(max(*lengths, 1))), dtype=torch.uint8).to(device)
    gathered = [padded.clone() for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    content = []
    for length, tensor in zip(lengths, gathered, strict=True):
        content.append(bytes(tensor.tolist())[:length])
    return content


def gather_by_rank(value: Any, groups: Groups) -> dict[int, Any]:
    """Gather a JSON-ready value of each rank, by global rank in order.
    Collective over ``groups``.
    """
    known: list[tuple[int, Any]] = [(own_rank(), value)]
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
        fitted = bytearray(data.ljust(int(size))[: int(size)])  # other ranks' is overwritten
        content = torch.frombuffer(fitted, dtype=torch.uint8).to(device)
        dist.broadcast(content, group=group, group_src=source)
        value = json.loads(bytes(content.tolist()))
    return value


def max_over_ranks(numbers: Sequence[int], groups: Groups) -> list[int]:
    """Return the highest of each number over all ranks. Collective: one all-reduce per group."""
    highest = list(numbers)
    for group in groups:
        tensor = torch.tensor(highest, dtype=torch.int64, device=collective_device(group))
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        highest = tensor.tolist()
    return highest


def equal_on_all(numbers: Mapping[str, int | None], groups: Groups) -> set[str]:
    """Return the names whose numbers are equal on all ranks that have one. Collective.

    One all-reduce for each group finds the highest and the lowest of each: the lowest is the
    highest of the negatives, negated. Where a rank has None, what it sends is neither.
    """
    highs = [-_MOST if number is None else number for number in numbers.values()]
    negatives = [-_MOST if number is None else -number for number in numbers.values()]
    most = max_over_ranks([*highs, *negatives], groups)
    return {name for at, name in enumerate(numbers) if most[at] <= -most[at + len(numbers)]}


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


@contextmanager
def raise_on_all_ranks(
    groups: Groups, error: type[ShardkitError] = ShardkitError, *, call: str | None = None
) -> Iterator[None]:
    """Run a body without collectives; if it raises on any rank, every rank raises. Collective.

    One small all-reduce for each group; reasons are exchanged only when there is one. A rank with a
    ShardkitError of its own raises that one, so that all ranks raise the same where all saw the
    same.

    Args:
        groups: which together reach all ranks concerned, as from :func:`groups_of`; None is the
            world, none is a process alone.
        error: what the other ranks raise, with the reason of each rank that has one.
        call: the public function that begins here. A rank that waits ``PATIENCE`` seconds for the
            others logs a warning.
    """
    if call is not None:
        note(call)
    problem: Exception | None = None
    try:
        yield
    except Exception as caught:  # whatever it is, the other ranks must not wait for this one
        problem = caught
    if not groups:
        if problem is not None:
            raise problem
        return

    timer = threading.Timer(PATIENCE, _warn_of_waiting, [call])
    timer.daemon = True
    if call is not None:
        timer.start()
    try:
        with real_tensors():  # the caller may be in a FakeTensorMode
            (any_failed,) = max_over_ranks([int(problem is not None)], groups)
            if not any_failed:
                return
            reason = f"{type(problem).__name__}: {problem}" if problem is not None else None
            reasons = gather_by_rank(reason, groups)
    finally:
        timer.cancel()
    if isinstance(problem, ShardkitError):
        raise problem
    lines = [f"- rank {rank}: {why}" for rank, why in reasons.items() if why is not None]
    heading = f"{len(lines)} of {len(reasons)} ranks failed:"
    raise error("\n".join([heading, *lines])) from problem


def _warn_of_waiting(call: str) -> None:
    logger.warning(
        f"{call} has waited {PATIENCE:g} s on rank {dist.get_rank()} for other ranks. The call is "
        "collective: every rank must make it, in the same order among its collectives. Move it "
        "out of `if rank == 0:`. SHARDKIT_WATCH=30 names the ranks in another call, and their "
        "lines."
    )


def check_equal(
    values: Mapping[str, Any],
    groups: Groups,
    error: type[ShardkitError] = ShardkitError,
    fix: str = "Make them equal",
) -> None:
    """Raise on every rank unless ``values`` are equal on all of them. Collective.

    They are JSON-ready, or compared by their ``repr``. One all-reduce of a hash for each group; the
    values are exchanged only where hashes differ.
    """
    own = {}
    for name, value in values.items():
        own[name] = value if isinstance(value, str) else json.dumps(value, default=repr)
    hashed = digest(sorted(own.items()))
    with real_tensors():  # the caller may be in a FakeTensorMode
        # The highest negative is the negative of the highest if all are equal.
        highest, negative = max_over_ranks([hashed, -hashed], groups)
        if highest == -negative:
            return
        first, others = from_first([own_rank(), own], groups)
        differences = []
        for name in {**own, **others}:
            here, there = own.get(name, "nothing"), others.get(name, "nothing")
            if here != there:
                differences.append(f"{name} ({here:.200} instead of {there:.200})")
        by_rank = gather_by_rank(differences[:6], groups)
    ranks = [str(rank) for rank, differences in by_rank.items() if differences]
    who = f"rank {ranks[0]} differs" if len(ranks) == 1 else f"ranks {listing(ranks)} differ"
    raise error(
        f"{who} from rank {first} in {listing(by_rank[int(ranks[0])], 5)}. All ranks "
        f"must make the same call with the same arguments. {fix}."
    )
