"""The values that ranks start from: compared before sharding, or broadcast from the first rank.

Each rank shards its own copy of the model. Copies that differ, as after different seeds, would make a mosaic of them,
and with HSDP replicas that never meet again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._torch import FakeTensor, has_own_dispatch, local_tensor, plain_attributes
from shardkit.errors import PlanError, listing, message
from shardkit.ranks import Groups, collective_device, gather_by_rank, groups_of, raise_together

SAMPLED = 8  # elements of each tensor, evenly from its first to its last
_NOWHERE = -(2**63)  # below every digest, so that a rank with the tensor on meta decides nothing
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def states_of(model: nn.Module, ignored: Collection[str] = ()) -> dict[str, Tensor]:
    """The parameters but for ``ignored`` ones, and the buffers by name, each once. Local, pure."""
    params = ((fqn, param) for fqn, param in model.named_parameters() if fqn not in ignored)
    return dict(chain[tuple[str, Tensor]](params, sorted(model.named_buffers())))  # ranks may register in other orders


def facts_of(model: nn.Module, sync_module_states: bool) -> dict[str, str]:
    """What ranks must have alike besides the plan, by what an error calls it. Local, pure.

    Raises:
        PlanError: ``sync_module_states`` with a tensor that cannot be broadcast.
    """
    opaque = [fqn for fqn, state in states_of(model).items() if _is_opaque(state)] if sync_module_states else []
    if opaque:
        problem = f"{listing(opaque, 6)} cannot be broadcast, of {type(states_of(model)[opaque[0]]).__name__}"
        rule = "Dense tensors are broadcast, and subclasses that name their dense tensors in __tensor_flatten__"
        raise PlanError(message("sync_module_states", problem, rule, "Call torch.manual_seed(0) on every rank instead"))
    buffers = {f"buffer {fqn}": f"{tuple(state.shape)} of {state.dtype}" for fqn, state in model.named_buffers()}
    return {"sync_module_states": str(sync_module_states), **buffers}


def check_same_start(model: nn.Module, ignored: Collection[str], groups: Groups, sync_module_states: bool) -> None:
    """Raise on every rank unless all start from the same values, or can be given the first rank's. Collective, pure.

    A sample of each tensor is compared, bit by bit: one all-reduce of 24 bytes a tensor. Tensors on meta are left
    out, and those of ranks on other axes of the model's mesh, as tensor parallelism has.

    Args:
        model: whose parameters and buffers all ranks have, of the same names and shapes.
        ignored: FQNs of parameters that each rank may have its own of.
        groups: which together reach all ranks that shard.
        sync_module_states: whether the first rank's values will be broadcast.

    Raises:
        PlanError: names the first tensor that differs, and the ranks; or that is on meta on some ranks only.
    """
    if all(dist.get_world_size(group) == 1 for group in groups):
        return
    states = states_of(model, ignored)
    digests = _digests(states.values())
    table = _reduced([(_NOWHERE, _NOWHERE, 1) if each is None else (each, -each, 0) for each in digests], groups)
    rows = list(zip(states, digests, table, strict=True))
    somewhere = [(fqn, mine, row) for fqn, mine, row in rows if row[0] != _NOWHERE]
    if sync_module_states:
        problem = _mixed([fqn for fqn, _, (_, _, some_on_meta) in somewhere if some_on_meta])
    else:
        differing = {fqn: mine for fqn, mine, (most, minus_least, _) in somewhere if most != -minus_least}
        problem = _different(differing, len(rows), groups) if differing else None
    raise_together(problem, groups_of(model), PlanError)  # beside the mesh, where there is tensor parallelism


def broadcast_from_first(states: Iterable[Tensor], groups: Groups, device: str) -> None:
    """Overwrite each tensor with that of the first rank of each group in turn, in place. Collective over ``groups``.

    Args:
        states: of the same shapes on all ranks; of DTensors the local part. One at a time is copied to the device.
        groups: those of a mesh's axes, the replicating one first.
        device: the type of the mesh's device.
    """
    with torch.no_grad():
        for state in states:
            for part in _dense_parts(state):
                for group in groups:
                    _broadcast(part, group, device)


def _different(differing: Mapping[str, int | None], total: int, groups: Groups) -> PlanError:
    fqn, mine = next(iter(differing.items()))
    by_rank = {rank: digest for rank, digest in gather_by_rank(mine, groups).items() if digest is not None}
    first = next(iter(by_rank))
    others = listing((str(rank) for rank, digest in by_rank.items() if digest != by_rank[first]), 8)
    count = f"{len(differing)} of {total} parameters and buffers differ"
    problem = f"starts from other values on rank {others} than on rank {first}; {count}"
    rule = "Each rank shards its own copy of the model, so all copies must be the same"
    fix = "Call torch.manual_seed(0) on every rank before the model is built, or pass sync_module_states=True to "
    return PlanError(message(fqn, problem, rule, fix + "broadcast the first rank's values"))


def _mixed(fqns: list[str]) -> PlanError | None:
    if not fqns:
        return None
    problem = f"{listing(fqns, 6)} on the meta device on some ranks only"
    rule = "Values are broadcast into memory that every rank has"
    fix = "Build the model on meta on all ranks and give it rank 0's values by load_full_state_dict"
    return PlanError(message("sync_module_states", problem, rule, fix))


def _reduced(table: list[tuple[int, int, int]], groups: Groups) -> list[list[int]]:
    """The largest of each entry over all ranks."""
    reduced = torch.tensor(table, dtype=torch.int64, device="cpu").view(-1, 3)
    for group in groups:
        reduced = reduced.to(collective_device(group))
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=group)
    return reduced.tolist()


def _digests(states: Iterable[Tensor]) -> list[int | None]:
    """63 bits for each tensor's sample, None for one on meta. One copy from each device for each size of element."""
    values: list[list[int] | None] = []
    samples: dict[tuple[torch.device, torch.dtype], list[tuple[list[int], Tensor]]] = {}
    with torch.no_grad(), plain_attributes():
        for state in states:
            parts = list(_dense_parts(state))
            found: list[int] = []
            on_meta = any(part.is_meta for part in parts)
            values.append(None if on_meta else found)
            for sample in map(_sample, parts) if not on_meta else ():
                samples.setdefault((sample.device, sample.dtype), []).append((found, sample))
        for pairs in samples.values():
            flat = iter(torch.cat([sample for _, sample in pairs]).tolist())
            for found, sample in pairs:
                found.extend(islice(flat, len(sample)))
    return [None if each is None else _digest(each) for each in values]


def _digest(values: list[int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big") >> 1


def _sample(tensor: Tensor) -> Tensor:
    """The bits of a few elements of a dense tensor, as integers: so that NaN equals itself, and 0.0 not -0.0."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.view(_BITS[tensor.itemsize])
    evenly = torch.arange(SAMPLED if bits.numel() else 0, device=bits.device) * (bits.numel() - 1) // (SAMPLED - 1)
    return torch.take(bits, evenly)


def _dense_parts(state: Tensor) -> Iterator[Tensor]:
    """The dense tensors of this rank that a state is made of: itself, as a rule; none of what has no values."""
    if isinstance(state, DTensor):
        yield from _dense_parts(local_tensor(state))
    elif has_own_dispatch(type(state)):
        names = state.__tensor_flatten__()[0] if hasattr(state, "__tensor_flatten__") else ()
        yield from (part for name in names for part in _dense_parts(getattr(state, name)))
    elif state.layout is torch.strided:
        yield state.detach()


def _is_opaque(state: Tensor) -> bool:
    local = local_tensor(state) if isinstance(state, DTensor) else state
    if isinstance(local, FakeTensor):
        return False
    return local.layout is not torch.strided or has_own_dispatch(type(local)) > hasattr(local, "__tensor_flatten__")


def _broadcast(part: Tensor, group: dist.ProcessGroup | None, device: str) -> None:
    """As bytes, since gloo knows few dtypes."""
    if dist.get_world_size(group) == 1 or not part.numel() or part.is_meta:
        return
    for dim, stride in enumerate(part.stride()):
        part = part if stride else part.narrow(dim, 0, 1)  # an expanded tensor has one element in place of many
    staged = part.to(device).resolve_conj().resolve_neg().contiguous()
    source = dist.get_global_rank(group, 0) if group is not None else 0
    dist.broadcast(staged.view(-1).view(torch.uint8), source, group=group)
    if staged is not part:
        part.copy_(staged)
