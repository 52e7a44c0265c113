"""What parameters have besides their values, carried over to the sharded ones: attributes, hooks, and references."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardkit._fsdp import fsdp_units
from shardkit._fsdp.params import follow, post_accumulate_hooks, set_post_accumulate_hooks, slot_of, tensor_hooks
from shardkit.errors import listing, message
from shardkit.plan import ShardingPlan
from shardkit.planning.tree import ModelTree
from shardkit.references import Reference, Setter, references


class ParamAttrs:
    """The attributes, post-accumulate hooks and references of a model's parameters before sharding. Holds no tensor."""

    def __init__(self, model: nn.Module, plan: ShardingPlan) -> None:
        params = {id(param): param for fqn, param in model.named_parameters() if fqn not in plan.unsharded}
        puts: dict[int, list[Setter]] = defaultdict(list)
        for each in references(model):
            puts[id(each.tensor)].append(each.put)
        kept = {key: (_attributes(param), post_accumulate_hooks(param), puts[key]) for key, param in params.items()}
        self._by_slot = {
            (id(module), name): kept[id(param)]
            for module in model.modules()
            for name, param in module._parameters.items()
            if id(param) in kept and any(kept[id(param)])
        }

    def carry_over(self, model: nn.Module) -> None:
        """Give them to the sharded parameters of the model. Local; in place."""
        for fsdp_param in (each for unit in fsdp_units(model) for each in unit.fsdp_params) if self._by_slot else ():
            if slot_of(fsdp_param) in self._by_slot:
                _carry_over(fsdp_param, *self._by_slot[slot_of(fsdp_param)])


def _attributes(param: nn.Parameter) -> dict[str, Any]:
    if type(param) is nn.Parameter or not vars(param):
        return dict(vars(param))
    with torch.no_grad():
        of_class = vars(param.detach())  # any tensor of the class has them, as a quantized weight's scales
    return {name: value for name, value in vars(param).items() if name not in of_class}


def _carry_over(fsdp_param: Any, attributes: dict[str, Any], hooks: dict[int, Any] | None, puts: list[Setter]) -> None:
    param = fsdp_param.sharded_param
    torchs_own = frozenset(vars(param))
    vars(param).update({k: v for k, v in attributes.items() if k not in torchs_own})
    if hooks:
        set_post_accumulate_hooks(param, hooks)

    def registered(tensor: Tensor) -> None:
        """FSDP2 registered another form of the parameter: gathered for forward and backward, or sharded again."""
        now = vars(fsdp_param.sharded_param)
        if vars(tensor) is not now:
            vars(tensor).update({k: v for k, v in now.items() if k not in torchs_own})
        for put in puts:
            put(tensor)

    if attributes or puts:
        follow(fsdp_param, registered)
        registered(param)


def cannot_carry(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Say what sharding would silently lose, each reason once with all its parameters. Local, pure."""
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
        yield message(listing(early, 6), problem, rule, "Remove the hook, and read param.grad after backward")
    # Views and detached parameters follow an optimizer's steps in a plain model; after sharding they would not.
    params = {fqn: param for fqn, param in tree.params.items() if fqn not in plan.unsharded}
    others = [each for each in references(tree.modules[0]) if id(each.tensor) not in tree.names and _is_view(each)]
    owners = {p.untyped_storage().data_ptr(): f for f, p in params.items() if others and type(p) is nn.Parameter}
    for each in others:
        owner = owners.get(each.tensor.untyped_storage().data_ptr()) if not each.tensor.is_meta else None
        if owner is not None:
            rule = "Sharding gives parameters new memory, so this tensor would keep the old values"
            fix = "Compute it where it is used, or clone it if it is meant to keep them"
            yield message(each.name, f"shares the memory of the parameter {owner}", rule, fix)


def _is_view(each: Reference) -> bool:
    """Whether it may be a view of a parameter; not what ``torch.nn.utils.spectral_norm`` computes in each forward."""
    name = each.name.rpartition(".")[2]
    plain = type(each.tensor) in (Tensor, nn.Parameter) and each.tensor.layout is torch.strided
    return plain and f"{name}_orig" not in each.module._parameters
