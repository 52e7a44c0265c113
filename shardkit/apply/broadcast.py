"""``sync_module_states``: every rank gets the first rank's values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._torch import FakeTensor, local_tensor
from shardkit.apply.init_sync import dense_parts, groups_of_copies
from shardkit.errors import PlanError, listing
from shardkit.ranks import Groups


def check_can_broadcast(states: Mapping[str, Tensor]) -> None:
    """Raise PlanError if some state has no dense tensors to broadcast. Local."""
    opaque = []
    for fqn, state in states.items():
        local = local_tensor(state) if isinstance(state, DTensor) else state
        if local.numel() and not isinstance(local, FakeTensor) and not dense_parts(local):
            opaque.append(fqn)
    if opaque:
        raise PlanError(
            f"sync_module_states cannot broadcast {listing(opaque, 6)}. Only dense tensors are "
            "broadcast, and subclasses that name their dense tensors in __tensor_flatten__. Call "
            "torch.manual_seed(0) on every rank instead."
        )


def broadcast_from_first(states: Iterable[Tensor], groups: Groups, device: str) -> None:
    """Overwrite each tensor with that of the first rank of each group in turn, in place.

    Collective over ``groups``. States have the same shapes on all ranks; of a DTensor it is the
    local part. ``groups`` are those of a mesh's axes, the replicating one first, and ``device`` is
    the type of its device.
    """
    with torch.no_grad():
        for state in states:
            for part in dense_parts(state):
                for group in groups_of_copies(state, groups):
                    if not part.is_meta:
                        _broadcast(part, group, device)


def _broadcast(part: Tensor, group: dist.ProcessGroup | None, device: str) -> None:
    for dim, stride in enumerate(part.stride()):
        if stride == 0:
            part = part.narrow(dim, 0, 1)  # an expanded dim has one element in memory
    staged = part.to(device).resolve_conj().resolve_neg().contiguous()
    # as bytes, since gloo knows few dtypes
    dist.broadcast(staged.view(-1).view(torch.uint8), group=group, group_src=0)
    if staged is not part:
        part.copy_(staged)
