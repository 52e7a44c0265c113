"""Find the process groups of a save or a load, and check that all ranks pass the same arguments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, all_gather_bytes, gather_by_rank

_MOST = 5  # differences of one argument that a message shows


def axes_of(tensors: Iterable[Tensor]) -> Groups:
    """Return the process groups of all mesh axes of these tensors that have more than one rank. Local."""
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups() if group.size() > 1))


def spanning_axes(tensors: Iterable[Tensor]) -> Groups:
    """Return groups that reach each rank of the tensors once: the axes of a mesh with all ranks, or the world."""
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    ranks = {rank for mesh in {each.device_mesh for each in sharded} for rank in mesh.mesh.flatten().tolist()}
    widest = max(sharded, key=lambda tensor: tensor.device_mesh.size(), default=None)
    if widest is None or widest.device_mesh.size() < len(ranks):
        return world()
    return axes_of([widest])


def world(group: dist.ProcessGroup | None = None) -> Groups:
    """Return the group that was passed, which must contain this rank, or the default group; none for one rank."""
    if not dist.is_initialized():
        return []
    if group is not None and dist.get_rank(group) < 0:
        rule = "Only the ranks of the group make this call"
        problem = f"rank {dist.get_rank()} is not in it"
        raise CheckpointError(message("group", problem, rule, "Pass each rank a group that it is in"))
    return [group] if dist.get_world_size(group) > 1 else []


@contextmanager
def connected(groups: Groups, call: str) -> Iterator[None]:
    """Raise a CheckpointError if a collective fails because a rank died or its group was destroyed."""
    try:
        yield
    except RuntimeError as error:
        if not groups:
            raise
        rule = "All ranks must stay in the call until its end"
        fix = "See the first error of the lost rank, and load again: values may be partly loaded"
        raise CheckpointError(message(call, f"the connection to a rank was lost ({error})", rule, fix)) from error


def agree(values: Mapping[str, Any], groups: Groups, subject: str, fix: str = "Make them equal") -> bool:
    """Check that all ranks have the same values, and return whether this rank is the first. Collective.

    One all-gather of 40 bytes for each group; values, which JSON must be able to write, are sent only if they differ.
    Then every rank raises which arguments differ, on which ranks, and how.
    """
    own = hashlib.sha256(json.dumps(values).encode()).digest()
    first, differ = dist.get_rank() if groups else 0, False
    for group in groups:
        found = all_gather_bytes(own + first.to_bytes(8, "little"), group)
        differ |= any(each[:-8] != own for each in found)
        own = bytes(len(own)) if differ else own  # so that the ranks of the next group differ too
        first = min(int.from_bytes(each[-8:], "little") for each in found)
    if differ:
        raise CheckpointError(
            message(subject, _differences(values, first, groups), "All ranks must pass the same arguments", fix)
        )
    return not groups or first == dist.get_rank()


def _differences(values: Mapping[str, Any], first: int, groups: Groups) -> str:
    """Describe which arguments differ from the first rank's, on which ranks, and how. Collective."""
    is_first = dist.get_rank() == first
    model = gather_by_rank(dict(values) if is_first else None, groups)[first]
    own = json.loads(json.dumps(values))
    unlike = {name: list(_unlike(model[name], own[name])) for name in own if own[name] != model[name]}
    found = gather_by_rank(unlike, groups)
    parts = []
    for name in dict.fromkeys(name for differing in found.values() for name in differing):
        ranks = [rank for rank, differing in found.items() if name in differing]
        how = found[ranks[0]][name]
        where = f"rank {ranks[0]} differs" if len(ranks) == 1 else f"ranks {listing(map(str, ranks))} differ"
        parts.append(f"{where} from rank {first} in {name} ({listing(how, _MOST)})")
    return "; ".join(parts)


def _unlike(one: Any, other: Any) -> Iterator[str]:
    def short(value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return text if len(text) <= 200 else f"{text[:200]}..."

    if not (isinstance(one, dict) and isinstance(other, dict)):
        yield f"{short(other)} instead of {short(one)}"
        return
    keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key, ...) != other.get(key, ...)]
    if not keys:
        yield "in another order"
    for key in keys[: _MOST + 1]:
        yield f"{key}: {short(other.get(key, 'absent'))} instead of {short(one.get(key, 'absent'))}"
