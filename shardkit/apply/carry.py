"""What a model's tensors have besides their values: carried over to the sharded ones, or put back when sharding fails.

A parameter has attributes, hooks, and places besides its module's registry, as in ``self.heads = [self.a.weight]``.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit._fsdp import fsdp_units
from shardkit._fsdp.params import (
    follow,
    forget,
    forward_pre_hooks,
    post_accumulate_hooks,
    set_post_accumulate_hooks,
    slot_of,
    tensor_hooks,
)
from shardkit._torch import has_own_dispatch
from shardkit.errors import listing, message
from shardkit.plan import ShardingPlan, ancestors
from shardkit.planning.tree import ModelTree
from shardkit.reach import Held, Put, Snapshot, held_tensors

logger = logging.getLogger("shardkit")


class Original:
    """A model before sharding: its modules' classes, attributes and hooks, and its tensors. Making it changes nothing.

    It holds the model's own tensors and copies nothing. Tensors on an accelerator are released as they are sharded,
    because their memory is needed; after that the model cannot be restored.

    Args:
        model: not sharded yet, except for modules that the plan ignores.
        plan: what it will be sharded by, checked by :func:`cannot_carry`.
        device: the device type that sharding moves tensors to.
    """

    def __init__(self, model: nn.Module, plan: ShardingPlan, device: str) -> None:
        self.is_whole = True  # whether it can be restored
        self._snapshot = Snapshot(model)
        carried = {id(param): fqn for fqn, param in model.named_parameters() if fqn not in plan.unsharded}
        held = [each for each in held_tensors(model) if id(each.tensor) in carried]
        places = defaultdict(list)
        for each in held:
            assert each.put is not None, "refused by cannot_carry"
            places[id(each.tensor)].append(each.put)
        self._params = {id(param): _State(param, device, places[id(param)]) for param in model.parameters()}
        for key in carried:
            self._params[key].find_carried()
        self._buffers = [_State(buffer, device, []) for buffer in model.buffers()]
        self._modules = list(model.modules())
        self._slots = [
            (module, name, self._params[id(param)])
            for module in self._modules
            for name, param in module._parameters.items()
            if param is not None
        ]
        self._carried = {id(self._params[key]) for key in carried}
        self._elsewhere = [each.name for each in held if not _in_one_unit(plan, each.owner, carried[id(each.tensor)])]

    def carry_over(self, model: nn.Module) -> None:
        """Give attributes, hooks and places to the sharded parameters of the model. Local; in place."""
        states = {(id(module), name): state for module, name, state in self._slots if id(state) in self._carried}
        for fsdp_param in (each for unit in fsdp_units(model) for each in unit.fsdp_params):
            state = states.get(slot_of(fsdp_param))
            if state is not None:
                _carry_over(fsdp_param, state)
        if self._elsewhere and dist.get_rank() == 0:
            rule = "A parameter is gathered only while its own unit runs, wherever else it is held"
            fix = "To compute with it here, put both modules into one unit, or leave its module to the root's unit"
            logger.warning(message(listing(self._elsewhere, 6), "holds parameters of another unit", rule, fix))

    def release(self, params: Iterable[nn.Parameter]) -> None:
        """Free the accelerator memory of parameters that are sharded now. Local."""
        for param in params:
            state = self._params.get(id(param))
            if state is not None and state.is_kept:
                state.restore_data()
            elif state is not None:
                self.is_whole = False
                self._params.pop(id(param)).release()

    def restore(self) -> None:
        """Undo everything that sharding changed. Local; in place."""
        for state in (*self._params.values(), *self._buffers):
            for put in state.places:
                put(state.tensor)
            state.restore_data()
            vars(state.tensor).clear()
            vars(state.tensor).update(state.attributes)
        self._snapshot.restore()
        for module in self._modules:
            forget(module)
        for module, name, state in self._slots:
            if state.tensor is not None:
                module._parameters[name] = state.tensor


class _State:
    """A tensor's attributes, hooks and places; and its data, where sharding would move or rearrange it."""

    def __init__(self, tensor: Any, device: str, places: list[Put]) -> None:
        moves = tensor.device.type not in (device, "meta")
        self.tensor, self.places = tensor, places
        self.attributes = dict(vars(tensor))
        self.hooks: dict[int, Any] | None = None
        self.carried: dict[str, Any] = {}
        self.data = tensor.data if moves or not tensor.is_contiguous() else None
        self.is_kept = tensor.device.type in ("cpu", "meta") and not (moves and has_own_dispatch(type(tensor)))

    def find_carried(self) -> None:
        """Find the hooks and the attributes to carry over; only for parameters to be sharded, which can be detached."""
        self.hooks, self.carried = post_accumulate_hooks(self.tensor), self.attributes
        if type(self.tensor) is not nn.Parameter:
            with torch.no_grad():
                of_class = vars(
                    self.tensor.detach()
                )  # any tensor of the class has them, as a quantized weight's scales
            self.carried = {name: value for name, value in self.attributes.items() if name not in of_class}

    def release(self) -> None:
        """Drop the tensor and everything that holds its memory."""
        self.tensor = self.data = None
        self.attributes = {}

    def restore_data(self) -> None:
        if self.data is not None:
            self.tensor.data = self.data


def _in_one_unit(plan: ShardingPlan, module: str, param: str) -> bool:
    units = {fqn: unit for unit in plan.units for fqn in unit.modules}
    around = next(units[fqn] for fqn in (module, *ancestors(module)) if fqn in units)
    return param in around.params


def _carry_over(fsdp_param: Any, state: _State) -> None:
    param = fsdp_param.sharded_param
    torchs_own = frozenset(vars(param))
    vars(param).update({k: v for k, v in state.carried.items() if k not in torchs_own})
    if state.hooks:
        set_post_accumulate_hooks(param, state.hooks)

    def registered(tensor: Tensor) -> None:
        """FSDP2 registered another form of the parameter: gathered for forward and backward, or sharded again."""
        now = vars(fsdp_param.sharded_param)
        if vars(tensor) is not now:
            vars(tensor).update({k: v for k, v in now.items() if k not in torchs_own})
        for put in state.places:
            put(tensor)

    if state.carried or state.places:
        follow(fsdp_param, registered)
        registered(param)


def cannot_carry(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Say what sharding would lose, each reason once with all its parameters. Local, pure."""
    hooked = [fqn for fqn, param in tree.params.items() if fqn not in plan.ignored and tensor_hooks(param)]
    if hooked:
        problem = "has a hook from register_hook"
        rule = "FSDP2 sets the gradient of a sharded parameter without autograd, so the hook would never be called"
        fix = "Remove it, and after sharding use param.register_post_accumulate_grad_hook, where param.grad is reduced"
        yield message(listing(hooked, 6), problem, rule, fix)
    early = [fqn for fqn in plan.replicated if post_accumulate_hooks(tree.params[fqn])]
    if early:
        problem = "has a hook from register_post_accumulate_grad_hook, and is replicated"
        rule = "Its gradient is reduced at the end of backward, after the hook would be called"
        fix = "Remove the hook, and read param.grad after backward"
        yield message(listing(early, 6), problem, rule, fix)
    params = {fqn: param for fqn, param in tree.params.items() if fqn not in plan.unsharded}
    names = {id(param): fqn for fqn, param in params.items()}
    others = []
    for each in held_tensors(tree.modules[0]):
        if id(each.tensor) not in names:
            others.append(each)
        elif each.put is None:
            problem = f"is the parameter {names[id(each.tensor)]}, and cannot be replaced there"
            rule = "Sharding replaces parameters, and this place would keep the unsharded one"
            fix = "Hold it in an attribute, a list or a dict's values, or take it from its module where it is used"
            yield message(each.name, problem, rule, fix)
    # Ignored parameters are not sharded; a sparse tensor has no single storage.
    plain = [t for t in others if type(t.tensor) in (Tensor, nn.Parameter) and id(t.tensor) not in tree.names]
    plain = [each for each in plain if each.tensor.layout is torch.strided and not _made_by_hook(each)]
    # Views and detached parameters follow an optimizer's steps in a plain model; after sharding they would not.
    storages = {fqn: p.untyped_storage() for fqn, p in params.items() if type(p) is nn.Parameter} if plain else {}
    owners = {id(storage): fqn for fqn, storage in storages.items()}
    for each in plain:
        owner = owners.get(id(each.tensor.untyped_storage()))
        if owner is not None:
            problem = f"shares the memory of the parameter {owner}"
            rule = "Sharding gives parameters new memory, so this tensor would keep the old values"
            fix = "Compute it where it is used, or clone it if it is meant to keep them"
            yield message(each.name, problem, rule, fix)


def _made_by_hook(held: Held) -> bool:
    """Whether each forward first computes it again, as the hooks of ``torch.nn.utils.spectral_norm`` do."""
    hooks = forward_pre_hooks(held.module)
    return held.name.rpartition(".")[2] in {getattr(hook, "name", None) for hook in hooks}
