"""Which tensors of a model a load writes to, and new memory for those that cannot be written where they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit import _torch
from shardkit.errors import ShardkitError, listing, message
from shardkit.meta.materialize import check_unbound, find_targets, is_on_meta
from shardkit.meta.rest import Rest
from shardkit.meta.shards import Homes, Target, install
from shardkit.shards import as_sharded, local_value, wrapped_as
from shardkit.state.names import ModelState, is_extra, model_state
from shardkit.state.routes import local_of


def live_state(model: nn.Module) -> ModelState:
    """:func:`model_state`, of a model that can be written to by name; raises for any other. Local."""
    state = model_state(model)
    live = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    made = [name for name, tensor in state.tensors.items() if id(tensor) not in live]
    made += [name for name in state.others if not is_extra(name)]
    if made:
        rule = "Values are written into the parameters and buffers that the model has, by name"
        fix = "Load it with model.load_state_dict, which calls the hooks that undo this"
        raise ShardkitError(message(listing(made), "replaced by a hook on state_dict()", rule, fix))
    check_memory(state)
    return state


def check_memory(state: ModelState) -> None:
    """Raise for tensors whose elements share memory, which torch refuses to write when others are written already."""
    shared = [
        name
        for name, part in ((name, local_of(tensor)) for name, tensor in state.tensors.items())
        if any(size > 1 and not step for size, step in zip(part.shape, part.stride(), strict=True))
    ]
    if shared:
        rule, fix = "Each element that is loaded has memory of its own", "Register tensor.expand(...).contiguous()"
        raise ShardkitError(message(listing(shared), "expanded, so that elements share memory", rule, fix))


class Room:
    """The memory that a load of some of a model's tensors, those in ``dtypes``, writes to. Local.

    A tensor that is on meta, or changes its dtype, has new memory; any other its own. Meta tensors that the load does
    not write, such as non-persistent buffers, get what the construction computes. Making it changes nothing, and raises
    where a meta tensor would get no value, or cannot be replaced.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
        given = {id(tensors[name]): dtype for name, dtype in dtypes.items()}
        self._model = model
        self._rest = Rest(model, given.keys())
        self._targets = new_memory(model, given)
        self._new = {id(target.tensor): target.value for target in self._targets}
        self.digest = self._rest.digest  # of what the construction computes, which must be equal on all ranks

    def of(self, tensor: Tensor) -> Tensor:
        """What is written for one of the model's tensors."""
        new = self._new.get(id(tensor))
        return tensor if new is None else new

    def compute(self) -> None:
        """Compute what the load does not write. Local; the model is unchanged."""
        self._rest.compute()

    def install(self) -> None:
        """Give the model all that has new memory; tensor objects stay. Local."""
        if targets := [*self._targets, *self._rest.targets]:
            install(self._model, targets)
            self._rest.forget()


def new_memory(model: nn.Module, given: Mapping[int, torch.dtype]) -> list[Target]:
    """The given tensors, by ``id``, that cannot be written where they are: on meta, or of another dtype. Local.

    Each with unwritten memory of its dtype as its value, for ``shardkit.meta.shards.install``.
    """

    def cannot(tensor: Tensor) -> bool:
        return id(tensor) in given and (is_on_meta(tensor) or tensor.dtype != given[id(tensor)])

    if not any(cannot(tensor) for tensor in (*model.parameters(), *model.buffers())):
        return []
    targets = [target for target in find_targets(model, cannot) if cannot(target.tensor)]
    check_unbound(targets)
    homes = Homes(model)
    for target in targets:
        home = homes.of(target.tensor) if is_on_meta(target.tensor) else target.tensor.device
        target.value = unwritten(target.tensor, given[id(target.tensor)], home)
    return targets


def unwritten(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory, placed like another tensor, and inside of the same subclass where that wraps plain memory."""
    local = torch.empty(local_of(like).shape, dtype=dtype, device=device)
    if not _torch.is_wrapper(local_value(like)):
        local = wrapped_as(local, local_of(like))
    return as_sharded(local, like) if isinstance(like, DTensor) else local
