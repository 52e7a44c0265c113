"""The values that ranks start from: compared before sharding, since each shards its own copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._torch import has_own_dispatch, local_tensor, plain_attributes
from shardkit.errors import PlanError, listing
from shardkit.plan import ShardingPlan
from shardkit.ranks import (
    Groups,
    digest,
    equal_on_all,
    gather_by_rank,
    groups_of,
    raise_on_all_ranks,
)

SAMPLED = 8  # elements of each tensor, evenly from its first to its last
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def states_of(model: nn.Module, ignored: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the parameters except ``ignored`` ones, and the buffers, each once, by name."""
    states: dict[str, Tensor] = {}
    for fqn, param in model.named_parameters():
        if fqn not in ignored:
            states[fqn] = param
    states.update(sorted(model.named_buffers()))  # ranks may register them in another order
    return states


def state_facts(states: Mapping[str, Tensor], compare_meta: bool) -> dict[str, str]:
    """Return what must be equal on all ranks of their states. ``compare_meta``: a state on the meta
    device cannot be broadcast to.
    """
    facts = {}
    for fqn, state in states.items():
        device = " on the meta device" if compare_meta and state.is_meta else ""
        facts[fqn] = f"{tuple(state.shape)} of {state.dtype}{device}"
    return facts


def check_same_start(model: nn.Module, plan: ShardingPlan, groups: Groups) -> None:
    """Raise on every rank unless all start from the same values. Collective, pure.

    A sample of each tensor is compared bit by bit; what stays whole on every rank, buffers and
    replicated parameters, is compared whole. Tensors on meta are left out. Ignored parameters may
    differ between ranks.
    """
    if all(dist.get_world_size(group) == 1 for group in groups):
        return
    whole = {*plan.replicated, *dict(model.named_buffers())}
    by_groups: dict[Groups, dict[str, list[list[int]] | None]] = {}
    with torch.no_grad(), plain_attributes():
        for fqn, state in states_of(model, plan.ignored).items():
            samples = by_groups.setdefault(groups_of_copies(state, groups), {})
            samples[fqn] = _sample(state, fqn in whole)
    problems = [_difference(samples, copies) for copies, samples in by_groups.items()]
    # Ranks of tensor parallelism hold other parts, and may have seen no difference.
    with raise_on_all_ranks(groups_of(model), PlanError):
        for problem in filter(None, problems):
            raise problem


def groups_of_copies(state: Tensor, groups: Groups) -> Groups:
    """The groups whose ranks hold copies: those that a DTensor, as an expert, is not split over."""
    if not isinstance(state, DTensor):
        return tuple(groups)
    others: set[int] = set()  # ranks with another part
    for group, placement in zip(state.device_mesh.get_all_groups(), state.placements, strict=True):
        if not placement.is_replicate():
            others.update(dist.get_process_group_ranks(group))
    others.discard(dist.get_rank())
    return tuple(g for g in groups if others.isdisjoint(dist.get_process_group_ranks(g)))


def _difference(samples: dict[str, list[list[int]] | None], groups: Groups) -> PlanError | None:
    """Return the error for samples that are not equal on all ranks, None if they are.
    Collective.
    """
    # A tensor on meta has no values.
    digests = {fqn: None if own is None else digest(own) for fqn, own in samples.items()}
    equal = equal_on_all(digests, groups)
    differing = [fqn for fqn in samples if fqn not in equal]
    if not differing:
        return None
    fqn = differing[0]
    by_rank = gather_by_rank(samples[fqn], groups)
    first = next(rank for rank, sample in by_rank.items() if sample is not None)
    others = [str(rank) for rank, own in by_rank.items() if own not in (None, by_rank[first])]
    return PlanError(
        f"{fqn} has different values on rank {listing(others, 8)} than on rank {first}; "
        f"{len(differing)} of {len(samples)} parameters and buffers differ. Each rank shards its "
        "own copy of the model, so all copies must be equal. Call torch.manual_seed(0) on every "
        "rank before the model is built, or pass sync_module_states=True to broadcast the first "
        "rank's values."
    )


def _sample(state: Tensor, whole: bool) -> list[list[int]] | None:
    """Return the bits of a few elements of each dense part of a tensor, as integers, with ``whole``
    also a hash of all elements; None on meta. NaN equals itself, 0.0 does not equal -0.0.
    """
    samples = []
    for part in dense_parts(state):
        if part.is_meta:
            return None
        if part.is_complex():
            part = torch.view_as_real(part.resolve_conj())
        bits = part.resolve_neg().view(_BITS[part.itemsize])
        evenly = torch.arange(SAMPLED, device=bits.device) * (bits.numel() - 1) // (SAMPLED - 1)
        sample: list[int] = torch.take(bits, evenly).tolist()
        if whole:
            sample.append(torch.hash_tensor(bits).item())  # type: ignore[arg-type]
        samples.append(sample)
    return samples


def dense_parts(state: Tensor) -> list[Tensor]:
    """The dense tensors of a state on this rank: usually itself; none if it has no values."""
    if isinstance(state, DTensor):
        return dense_parts(local_tensor(state))
    if has_own_dispatch(type(state)):
        parts = []
        for name in state.__tensor_flatten__()[0] if hasattr(state, "__tensor_flatten__") else ():
            parts += dense_parts(getattr(state, name))
        return parts
    return [state] if state.layout is torch.strided and state.numel() else []
