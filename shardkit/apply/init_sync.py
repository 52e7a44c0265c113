"""The values that ranks start from: compared before sharding, since each shards its own copy, or broadcast."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._torch import FakeTensor, has_own_dispatch, local_tensor, plain_attributes
from shardkit.errors import PlanError, listing, message
from shardkit.ranks import Groups, both_ways, each_equal, gather_by_rank, groups_of, highest, raise_together

SAMPLED = 8  # elements of each tensor, evenly from its first to its last
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def states_of(model: nn.Module, ignored: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the parameters except ``ignored`` ones, and the buffers, each once, by name. Local, pure."""
    ignored = set(ignored)
    params = ((fqn, param) for fqn, param in model.named_parameters() if fqn not in ignored)
    buffers = sorted(model.named_buffers())  # ranks may register them in another order
    return dict(chain[tuple[str, Tensor]](params, buffers))


def facts_of(model: nn.Module, sync_module_states: bool) -> dict[str, str]:
    """Return what must be equal on all ranks besides the plan, by the name that an error gives it. Local, pure."""
    states = states_of(model) if sync_module_states else {}
    opaque = [fqn for fqn, state in states.items() if _is_opaque(state)]
    if opaque:
        problem = f"cannot broadcast {listing(opaque, 6)}, a {type(states[opaque[0]]).__name__}"
        rule = "Only dense tensors are broadcast, and subclasses that name their dense tensors in __tensor_flatten__"
        raise PlanError(message("sync_module_states", problem, rule, "Call torch.manual_seed(0) on every rank instead"))
    buffers = {f"buffer {fqn}": f"{tuple(state.shape)} of {state.dtype}" for fqn, state in model.named_buffers()}
    return {"sync_module_states": str(sync_module_states), **buffers}


def check_same_start(model: nn.Module, ignored: Collection[str], groups: Groups, sync_module_states: bool) -> None:
    """Raise on every rank unless all start from the same values, or can receive the first rank's. Collective, pure.

    A sample of each tensor is compared bit by bit, by one all-reduce of 16 bytes. Tensors on meta are left out, and
    other axes of the model's mesh, such as a tensor-parallel one. ``ignored`` parameters may differ between ranks.
    """
    if all(dist.get_world_size(group) == 1 for group in groups):
        return
    alike: dict[tuple[dist.ProcessGroup | None, ...], dict[str, Tensor]] = {tuple(groups): {}}
    for fqn, state in states_of(model, ignored).items():
        alike.setdefault(_copied(state, groups), {})[fqn] = state
    problems = [_unequal(states, each, sync_module_states) for each, states in alike.items()]
    problem = next(filter(None, problems), None)
    raise_together(problem, groups_of(model), PlanError)  # parallel ranks, which the groups do not reach


def _copied(state: Tensor, groups: Groups) -> tuple[dist.ProcessGroup | None, ...]:
    """The groups whose ranks hold copies of ``state``: those that a DTensor, such as an expert, is not split over."""
    if not isinstance(state, DTensor):
        return tuple(groups)
    axes = zip(state.device_mesh.get_all_groups(), state.placements, strict=True)
    split = [dist.get_process_group_ranks(group) for group, placement in axes if placement.is_shard()]
    return tuple(group for group in groups if dist.get_process_group_ranks(group) not in split)


def _unequal(states: Mapping[str, Tensor], groups: Groups, sync_module_states: bool) -> PlanError | None:
    """Return the error for states that are not alike on the ranks of the groups, None if they are. Collective."""
    samples: list[Any] = _samples(states.values())
    if sync_module_states:  # only the place matters, since the values are overwritten
        samples = [sample is None for sample in samples]
    if each_equal([samples], groups)[0]:
        return None
    both = [(-1, -1 << 63) if sample is None else both_ways(sample) for sample in samples]
    ends = highest(list(chain(*both)), groups)  # of each over all ranks, without those on meta
    differ = [most >= 0 and most != -least for most, least in zip(ends[::2], ends[1::2], strict=True)]
    found = [fqn for fqn, is_found in zip(states, differ, strict=True) if is_found]
    if not found:
        return None
    if sync_module_states:
        problem = f"needs {listing(found, 6)} on real memory, and some ranks have it on the meta device"
        fix = "Build the model on meta on all ranks and give it rank 0's values by load_full_state_dict"
        return PlanError(message("sync_module_states", problem, "", fix))
    of_ranks = gather_by_rank(samples[differ.index(True)], groups)
    column = {rank: sample for rank, sample in of_ranks.items() if sample is not None}
    first = next(iter(column))
    others = listing((str(rank) for rank, sample in column.items() if sample != column[first]), 8)
    problem = f"has different values on rank {others} than on rank {first}; "
    problem += f"{len(found)} of {len(states)} parameters and buffers differ"
    rule = "Each rank shards its own copy of the model, so all copies must be equal"
    fix = "Call torch.manual_seed(0) on every rank before the model is built, or pass sync_module_states=True to "
    return PlanError(message(found[0], problem, rule, fix + "broadcast the first rank's values"))


def broadcast_from_first(states: Iterable[Tensor], groups: Groups, device: str) -> None:
    """Overwrite each tensor with that of the first rank of each group in turn, in place. Collective over ``groups``.

    States have the same shapes on all ranks; of a DTensor it is the local part. ``groups`` are those of a mesh's axes,
    the replicating one first, and ``device`` is the type of its device.
    """
    with torch.no_grad():
        for state in states:
            for part, group in product(_dense_parts(state), _copied(state, groups)):
                if dist.get_world_size(group) == 1 or part.is_meta:
                    continue
                for dim in (dim for dim, stride in enumerate(part.stride()) if not stride):
                    part = part.narrow(dim, 0, 1)  # an expanded dim has one element in memory
                staged = part.to(device).resolve_conj().resolve_neg().contiguous()
                source = dist.get_global_rank(group, 0) if group is not None else 0
                dist.broadcast(staged.view(-1).view(torch.uint8), source, group=group)  # gloo supports few dtypes
                if staged is not part:
                    part.copy_(staged)


def _samples(states: Iterable[Tensor]) -> list[list[list[int]] | None]:
    """Return a sample of each dense part of each tensor, None for one on meta; those of a device are read at once."""
    taken: dict[torch.device, list[Tensor]] = defaultdict(list)
    with torch.no_grad(), plain_attributes():
        parts = [list(_dense_parts(state)) for state in states]
        real = [[part for part in each if not part.is_meta] for each in parts]
        for part in chain(*real):
            taken[part.device].append(_sample(part))
        rows = {device: iter(torch.stack(samples).tolist()) for device, samples in taken.items()}
        found = [[next(rows[part.device]) for part in each] for each in real]
    return [each if len(each) == len(expected) else None for each, expected in zip(found, parts, strict=True)]


def _sample(tensor: Tensor) -> Tensor:
    """The bits of a few elements of a dense tensor as integers: NaN equals itself, and 0.0 does not equal -0.0."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().view(_BITS[tensor.itemsize])
    return torch.take(bits, _evenly(bits.numel(), bits.device))


@functools.lru_cache(maxsize=64)
def _evenly(numel: int, device: torch.device) -> Tensor:
    return torch.arange(SAMPLED, device=device) * (numel - 1) // (SAMPLED - 1)


def _dense_parts(state: Tensor) -> Iterator[Tensor]:
    """The dense tensors that a state consists of on this rank: usually itself; none if it has no values."""
    if isinstance(state, DTensor):
        yield from _dense_parts(local_tensor(state))
    elif has_own_dispatch(type(state)):
        names = state.__tensor_flatten__()[0] if hasattr(state, "__tensor_flatten__") else ()
        yield from (part for name in names for part in _dense_parts(getattr(state, name)))
    elif state.layout is torch.strided and state.numel():
        yield state


def _is_opaque(state: Tensor) -> bool:
    local = local_tensor(state) if isinstance(state, DTensor) else state
    if isinstance(local, FakeTensor):
        return False
    return local.layout is not torch.strided or has_own_dispatch(type(local)) > hasattr(local, "__tensor_flatten__")
