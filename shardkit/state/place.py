"""The tensors that a load writes to, and new memory for those that cannot be written in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._torch import is_wrapper, local_tensor
from shardkit.errors import ShardkitError, listing, message
from shardkit.meta.materialize import Replay, check_unbound, find_targets, forget, install, is_on_meta, target_device
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
        new = {id(t) for n, dtype in dtypes.items() if is_on_meta(t := tensors[n]) or t.dtype != dtype}
        self._model = model
        self._others = Replay(model, [t for t in find_targets(model) if id(t.tensor) not in given], draw_all=False)
        self._targets = find_targets(model, lambda tensor: id(tensor) in new) if new else []
        self._targets = [target for target in self._targets if id(target.tensor) in new]
        check_unbound(self._targets)
        device_of = target_device(model)
        for target in self._targets:
            home = device_of(target.tensor) if is_on_meta(target.tensor) else target.tensor.device
            target.value = unwritten(target.tensor, given[id(target.tensor)], home)
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


def unwritten(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory with the placement of another tensor, and in its subclass if that wraps memory."""
    own = local_tensor(like) if isinstance(like, DTensor) else like
    local = torch.empty(own.shape, dtype=dtype, device=device)
    if not is_wrapper(local_value(like)):
        local = wrapped_as(local, own.detach())
    return as_sharded(local, like) if isinstance(like, DTensor) else local
