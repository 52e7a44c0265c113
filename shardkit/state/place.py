"""The tensors that a load writes to, and new memory for those that cannot be written in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._torch import is_wrapper, local_tensor
from shardkit.errors import ShardkitError, listing, message
from shardkit.meta.materialize import Replay, check_unbound, find_targets, forget, is_on_meta
from shardkit.meta.shards import Target, install, target_device
from shardkit.shards import as_sharded, local_value, wrapped_as
from shardkit.state.names import ModelState, is_extra, model_state


def live_state(model: nn.Module) -> ModelState:
    """Return :func:`model_state`; raise if a hook replaced tensors, which cannot be written to. Local."""
    state = model_state(model)
    live = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    made = [name for name, tensor in state.tensors.items() if id(tensor) not in live]
    made += [name for name in state.others if not is_extra(name)]
    if made:
        rule = "Values are written into the model's own parameters and buffers, by name"
        fix = "Load it with model.load_state_dict, which calls the hooks that undo this"
        raise ShardkitError(message(listing(made), "was replaced by a hook on state_dict()", rule, fix))
    return state


class Room:
    """The memory that a load writes to, for the tensors in ``dtypes``. Local.

    A tensor that is on meta, or changes its dtype, gets new memory; others are written in place. Meta tensors that the
    load does not write, such as non-persistent buffers, get the values of their construction. Making it changes
    nothing; it raises if a meta tensor would get no value, or cannot be replaced.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
        given = {id(tensors[name]): dtype for name, dtype in dtypes.items()}
        self._model = model
        others = [target for target in find_targets(model) if id(target.tensor) not in given]
        self._others = Replay(model, others, draw_all=False)
        self._targets = new_memory(model, given)
        self._new = {id(target.tensor): target.value for target in self._targets}
        self.digest = self._others.digest  # of the construction's values, which must be equal on all ranks

    def of(self, tensor: Tensor) -> Tensor:
        """Return the tensor to write to for one of the model's."""
        new = self._new.get(id(tensor))
        return tensor if new is None else new

    def compute(self) -> None:
        """Compute the values that the load does not write. Local; the model is unchanged."""
        self._others.compute()

    def install(self) -> None:
        """Put new memory under the model's tensor objects. Local."""
        if targets := [*self._targets, *self._others.targets]:
            install(self._model, targets)
            forget(self._model)


def new_memory(model: nn.Module, given: Mapping[int, torch.dtype]) -> list[Target]:
    """Make memory for the given tensors, by ``id``, that are on meta or of another dtype. Local.

    The value of each target is uninitialized, for ``shardkit.meta.shards.install``.
    """
    changed = {id(t) for t in (*model.parameters(), *model.buffers()) if is_on_meta(t) or t.dtype != given.get(id(t))}
    if not (changed := changed & given.keys()):
        return []
    targets = [target for target in find_targets(model, lambda t: id(t) in changed) if id(target.tensor) in changed]
    check_unbound(targets)
    device_of = target_device(model)
    for target in targets:
        home = device_of(target.tensor) if is_on_meta(target.tensor) else target.tensor.device
        target.value = unwritten(target.tensor, given[id(target.tensor)], home)
    return targets


def unwritten(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory with the placement of another tensor, and in its subclass if that wraps memory."""
    own = local_tensor(like) if isinstance(like, DTensor) else like
    local = torch.empty(own.shape, dtype=dtype, device=device)
    if not is_wrapper(local_value(like)):
        local = wrapped_as(local, own.detach())
    return as_sharded(local, like) if isinstance(like, DTensor) else local


def check_memory(state: ModelState) -> None:
    """Until nobody imports it: torch raises where it writes elements that share memory."""
