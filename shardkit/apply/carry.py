"""What goes over from a parameter to the sharded one: its attributes, its hooks, and its other places in the model."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit._fsdp import fsdp_units
from shardkit._fsdp.params import (
    follow,
    forward_pre_hooks,
    post_accumulate_hooks,
    set_post_accumulate_hooks,
    slot_of,
    tensor_hooks,
)
from shardkit.errors import listing, message
from shardkit.plan import ShardingPlan, ancestors
from shardkit.planning.tree import ModelTree
from shardkit.reach import Held, Put, held_tensors

logger = logging.getLogger("shardkit")


@dataclass(frozen=True)
class Belongings:
    """What one parameter has besides its values."""

    attributes: dict[str, Any]  # that the user set on it
    hooks: dict[int, Callable[[Tensor], None]] | None  # of register_post_accumulate_grad_hook: called after reducing
    places: list[Put]  # each puts a tensor where else the parameter is held, as in ``self.heads = [self.a.weight]``


class Carried:
    """What the parameters of a model have besides their values. To be made before sharding; changes nothing.

    Args:
        model: not sharded yet, but for what the plan ignores.
        plan: what it will be sharded by, checked by :func:`cannot_carry`.

    Attributes:
        of: by ``id`` of the parameter, which is its own as long as the parameter lives.
    """

    def __init__(self, model: nn.Module, plan: ShardingPlan) -> None:
        params = {id(param): fqn for fqn, param in model.named_parameters() if fqn not in plan.unsharded}
        held = [each for each in held_tensors(model) if id(each.tensor) in params]
        places = defaultdict(list)
        for each in held:
            assert each.put is not None, "refused by cannot_carry"
            places[id(each.tensor)].append(each.put)
        slots = {
            (id(module), name): param
            for module in model.modules()
            for name, param in module._parameters.items()
            if id(param) in params and param is not None
        }
        self.of = {
            id(param): Belongings(_attributes(param), post_accumulate_hooks(param), places[id(param)])
            for param in slots.values()
        }
        self._slots = {slot: self.of[id(param)] for slot, param in slots.items()}
        self._elsewhere = [each.name for each in held if not _in_one_unit(plan, each.owner, params[id(each.tensor)])]

    def hand_over(self, model: nn.Module) -> None:
        """Give them to the sharded parameters. Local; in place."""
        for unit in fsdp_units(model):
            for each in unit.fsdp_params:
                belongings = self._slots.get(slot_of(each))
                if belongings is not None:
                    _hand_over(each, belongings)
        if self._elsewhere and dist.get_rank() == 0:
            rule = "Wherever a parameter is held, it is gathered while its own unit runs, and sharded otherwise"
            fix = "To compute with it here, put both modules into one unit, or leave its module to the root's"
            logger.warning(message(listing(self._elsewhere, 6), "holds parameters of another unit", rule, fix))


def _in_one_unit(plan: ShardingPlan, module: str, param: str) -> bool:
    units = {fqn: unit for unit in plan.units for fqn in unit.modules}
    around = next(units[fqn] for fqn in (module, *ancestors(module)) if fqn in units)
    return param in around.params


def _hand_over(fsdp_param: Any, belongings: Belongings) -> None:
    param = fsdp_param.sharded_param
    torchs_own = frozenset(vars(param))
    vars(param).update({k: v for k, v in belongings.attributes.items() if k not in torchs_own})
    if belongings.hooks:
        set_post_accumulate_hooks(param, belongings.hooks)

    def registered(tensor: Tensor) -> None:
        """FSDP2 registered another form of it: gathered for forward and backward, or sharded again."""
        now = vars(fsdp_param.sharded_param)
        if vars(tensor) is not now:
            vars(tensor).update({k: v for k, v in now.items() if k not in torchs_own})
        for put in belongings.places:
            put(tensor)

    if belongings.attributes or belongings.places:
        follow(fsdp_param, registered)
        registered(param)


def _attributes(param: nn.Parameter) -> dict[str, Any]:
    if type(param) is nn.Parameter:
        return dict(vars(param))
    with torch.no_grad():  # what a tensor of the class has anyway, such as a quantized weight's scales
        own = vars(param.detach())
    return {name: value for name, value in vars(param).items() if name not in own}


def cannot_carry(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Why some of it would be lost, each reason once, all parameters named. Local, pure."""
    hooked = [fqn for fqn, param in tree.params.items() if fqn not in plan.ignored and tensor_hooks(param)]
    if hooked:
        problem = "has a hook of register_hook"
        rule = "FSDP2 sets the gradient of a sharded parameter without autograd, so the hook would never be called"
        fix = "Remove it, and after sharding use param.register_post_accumulate_grad_hook, where param.grad is reduced"
        yield message(listing(hooked, 6), problem, rule, fix)
    early = [fqn for fqn in plan.replicated if post_accumulate_hooks(tree.params[fqn])]
    if early:
        problem = "has a hook of register_post_accumulate_grad_hook, and is replicated"
        rule = "Its gradient is reduced at the end of backward, after the hook would be called"
        fix = "Remove it, and read param.grad after backward"
        yield message(listing(early, 6), problem, rule, fix)
    params = {fqn: param for fqn, param in tree.params.items() if fqn not in plan.unsharded}
    names = {id(param): fqn for fqn, param in params.items()}
    held = held_tensors(tree.modules[0])
    for each in held:
        if id(each.tensor) in names and each.put is None:
            problem = f"is the parameter {names[id(each.tensor)]}, and cannot be replaced there"
            rule = "Sharding replaces parameters, and this place would keep the one from before"
            fix = "Hold it in an attribute, a list or a dict's values, or take it from its module where it is used"
            yield message(each.name, problem, rule, fix)
    yield from _shared_memory(tree, [each for each in held if id(each.tensor) not in names], params)


def _shared_memory(tree: ModelTree, held: list[Held], params: dict[str, nn.Parameter]) -> Iterator[str]:
    """Views and detached parameters follow an optimizer's steps in a plain model, and would keep the old values."""
    plain = [each for each in held if type(each.tensor) in (Tensor, nn.Parameter) and not _made_by_hook(each)]
    # A parameter among them is ignored, and not sharded; what is sparse has no one storage.
    plain = [each for each in plain if id(each.tensor) not in tree.names and each.tensor.layout is torch.strided]
    if not plain:
        return
    storages = {fqn: p.untyped_storage() for fqn, p in params.items() if type(p) is nn.Parameter}
    names = {id(storage): fqn for fqn, storage in storages.items()}
    for each in plain:
        storage = each.tensor.untyped_storage()
        if id(storage) in names:
            problem = f"is in the memory of the parameter {names[id(storage)]}"
            rule = "Sharding gives parameters memory of their own, so this would keep the values from before"
            fix = "Compute it where it is used, or clone it if it is to keep them"
            yield message(each.name, problem, rule, fix)


def _made_by_hook(held: Held) -> bool:
    """Whether forward begins with making it anew, as the hooks of ``torch.nn.utils.spectral_norm`` do."""
    hooks = forward_pre_hooks(held.module)
    return held.name.rpartition(".")[2] in {getattr(hook, "name", None) for hook in hooks}
