"""The values that ranks start from: compared before sharding, since each shards its own copy, or
broadcast.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._torch import FakeTensor, has_own_dispatch, local_tensor, plain_attributes
from shardkit.errors import PlanError, listing
from shardkit.plan import ShardingPlan
from shardkit.ranks import Groups, digest, extremes, gather_by_rank, groups_of, raise_together

SAMPLED = 8  # elements of each tensor, evenly from its first to its last
_HIGHEST = 1 << 60  # above every digest
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def states_of(model: nn.Module, ignored: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the parameters except ``ignored`` ones, and the buffers, each once, by name."""
    states: dict[str, Tensor] = {}
    for fqn, param in model.named_parameters():
        if fqn not in ignored:
            states[fqn] = param
    states.update(sorted(model.named_buffers()))  # ranks may register them in another order
    return states


def facts_of(model: nn.Module, sync_module_states: bool) -> dict[str, str]:
    """Return what must be equal on all ranks besides the plan, by the name in an error."""
    if sync_module_states:
        states = states_of(model)
        opaque = [fqn for fqn, state in states.items() if _is_opaque(state)]
        if opaque:
            raise PlanError(
                f"sync_module_states cannot broadcast {listing(opaque, 6)}, a "
                f"{type(states[opaque[0]]).__name__}. Only dense tensors are broadcast, and "
                "subclasses that name their dense tensors in __tensor_flatten__. Call "
                "torch.manual_seed(0) on every rank instead."
            )
    facts = {"sync_module_states": str(sync_module_states)}
    for fqn, state in model.named_buffers():
        facts[f"buffer {fqn}"] = f"{tuple(state.shape)} of {state.dtype}"
    return facts


def other_groups(model: nn.Module, groups: Groups) -> Groups:
    """Return the groups of further axes that parameters of the model lie on, such as those of
    tensor parallelism. Local.
    """
    known = [dist.get_process_group_ranks(group) for group in groups]
    others = groups_of(model) if isinstance(model, nn.Module) else []
    return [group for group in others if dist.get_process_group_ranks(group) not in known]


def check_same_start(
    model: nn.Module, plan: ShardingPlan, groups: Groups, sync_module_states: bool
) -> None:
    """Raise on every rank unless all start from the same values, or can receive the first rank's.

    A sample of each tensor is compared bit by bit, by one all-reduce; what stays whole on every
    rank, buffers and replicated parameters, is compared whole. Tensors on meta are left out.
    Ignored parameters may differ between ranks. Collective, pure.
    """
    if all(dist.get_world_size(group) == 1 for group in groups):
        return
    whole = {*plan.replicated, *dict(model.named_buffers())}
    by_groups: dict[Groups, dict[str, Any]] = {tuple(groups): {}}
    with torch.no_grad(), plain_attributes():
        for fqn, state in states_of(model, plan.ignored).items():
            sample: Any = _sample(state, fqn in whole)
            if sync_module_states:  # only the place matters, since the values are overwritten
                sample = sample is None
            by_groups.setdefault(_copied(state, groups), {})[fqn] = sample
    problem = None
    for held_by, samples in by_groups.items():
        found = _unequal(samples, held_by, sync_module_states)
        problem = problem or found
    # parallel ranks hold other parts, and may have seen no difference
    raise_together(problem, groups_of(model), PlanError)


def _copied(state: Tensor, groups: Groups) -> Groups:
    """The groups whose ranks hold copies: those that a DTensor, as an expert, is not split over."""
    if not isinstance(state, DTensor):
        return tuple(groups)
    others: set[int] = set()  # ranks with another part
    for group, placement in zip(state.device_mesh.get_all_groups(), state.placements, strict=True):
        if not placement.is_replicate():
            others.update(dist.get_process_group_ranks(group))
    others.discard(dist.get_rank())
    return tuple(g for g in groups if others.isdisjoint(dist.get_process_group_ranks(g)))


def _unequal(
    samples: Mapping[str, Any], groups: Groups, sync_module_states: bool
) -> PlanError | None:
    """Return the error for samples that are not equal on all ranks, None if they are.
    Collective.
    """
    total = digest(list(samples.values()))
    (lowest,), (highest,) = extremes([total], [total], groups)
    if lowest == highest:
        return None
    # Which differ, without what is on meta.
    lows = [_HIGHEST if sample is None else digest(sample) for sample in samples.values()]
    highs = [0 if sample is None else digest(sample) for sample in samples.values()]
    lows, highs = extremes(lows, highs, groups)
    differing = []
    for fqn, low, high in zip(samples, lows, highs, strict=True):
        if low < high:
            differing.append(fqn)
    if not differing:
        return None
    if sync_module_states:
        return PlanError(
            f"sync_module_states needs {listing(differing, 6)} on real memory, and some ranks have "
            "it on the meta device. Build the model on meta on all ranks and give it rank 0's "
            "values by load_full_state_dict."
        )
    fqn = differing[0]
    gathered = gather_by_rank(samples[fqn], groups)
    by_rank = {rank: sample for rank, sample in gathered.items() if sample is not None}
    first = next(iter(by_rank))
    others = [str(rank) for rank, sample in by_rank.items() if sample != by_rank[first]]
    return PlanError(
        f"{fqn} has different values on rank {listing(others, 8)} than on rank {first}; "
        f"{len(differing)} of {len(samples)} parameters and buffers differ. Each rank shards its "
        "own copy of the model, so all copies must be equal. Call torch.manual_seed(0) on every "
        "rank before the model is built, or pass sync_module_states=True to broadcast the first "
        "rank's values."
    )


def broadcast_from_first(states: Iterable[Tensor], groups: Groups, device: str) -> None:
    """Overwrite each tensor with that of the first rank of each group in turn, in place.

    Collective over ``groups``. States have the same shapes on all ranks; of a DTensor it is the
    local part. ``groups`` are those of a mesh's axes, the replicating one first, and ``device`` is
    the type of its device.
    """
    with torch.no_grad():
        for state in states:
            held_by = [group for group in _copied(state, groups) if dist.get_world_size(group) > 1]
            for part in _dense_parts(state):
                for group in held_by if not part.is_meta else ():
                    _broadcast(part, group, device)


def _broadcast(part: Tensor, group: dist.ProcessGroup | None, device: str) -> None:
    for dim, stride in enumerate(part.stride()):
        if stride == 0:
            part = part.narrow(dim, 0, 1)  # an expanded dim has one element in memory
    staged = part.to(device).resolve_conj().resolve_neg().contiguous()
    source = dist.get_global_rank(group, 0) if group is not None else 0
    dist.broadcast(staged.view(-1).view(torch.uint8), source, group=group)  # gloo: few dtypes
    if staged is not part:
        part.copy_(staged)


def _sample(state: Tensor, whole: bool) -> list[list[int]] | None:
    """Return a sample of each dense part of a tensor, with ``whole`` also a hash of all elements;
    None on meta.
    """
    parts = _dense_parts(state)
    if any(part.is_meta for part in parts):
        return None
    return [_bits(part, whole) for part in parts]


def _bits(tensor: Tensor, whole: bool) -> list[int]:
    """The bits of a few elements of a dense tensor, as integers: NaN equals itself, 0.0
    not -0.0.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().view(_BITS[tensor.itemsize])
    evenly = torch.arange(SAMPLED, device=bits.device) * (bits.numel() - 1) // (SAMPLED - 1)
    sampled: list[int] = torch.take(bits, evenly).tolist()
    if whole:
        sampled.append(torch.hash_tensor(bits).item())  # type: ignore[arg-type]
    return sampled


def _dense_parts(state: Tensor) -> list[Tensor]:
    """The dense tensors of a state on this rank: usually itself; none if it has no values."""
    if isinstance(state, DTensor):
        return _dense_parts(local_tensor(state))
    if has_own_dispatch(type(state)):
        parts = []
        for name in state.__tensor_flatten__()[0] if hasattr(state, "__tensor_flatten__") else ():
            parts += _dense_parts(getattr(state, name))
        return parts
    return [state] if state.layout is torch.strided and state.numel() else []


def _is_opaque(state: Tensor) -> bool:
    local = local_tensor(state) if isinstance(state, DTensor) else state
    if isinstance(local, FakeTensor):
        return False
    if has_own_dispatch(type(local)):
        return not hasattr(local, "__tensor_flatten__")
    return local.layout is not torch.strided
