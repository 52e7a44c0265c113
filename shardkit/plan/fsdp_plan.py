"""A plan as the ``fsdp_plan`` of transformers' ``DistributedConfig``: module names, ``*`` for numbers, and styles."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit.errors import listing, message, refuse
from shardkit.plan.data import PlanData
from shardkit.plan.types import ShardUnit, ancestors, is_world_size

logger = logging.getLogger("shardkit")

_OF_FLAG = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_OF_PLAN = ("ignored", "replicated", "tiles")
_OF_UNIT = ("checkpoint_activations", "compile", "mesh", "may_skip")


def fsdp_plan(plan: PlanData) -> dict[str, str]:
    """Return the style of each unit's modules; ``ShardingPlan.to_fsdp_plan`` says what is refused and noted."""
    named = {fqn: unit for unit in plan.units for fqn in (*unit.modules, *_tied_inside(plan, unit)) if fqn}
    refuse((*_unsaid(plan), *_misplaced(plan, named)))
    for done, names in _done_otherwise(plan).items():
        if names:
            logger.warning("to_fsdp_plan: %s: %s", done, listing(names, 6))
    return {_with_wildcards(fqn): _style(unit) for fqn, unit in named.items()}


def _style(unit: ShardUnit) -> str:
    return "free_full_weight" if unit.reshard_after_forward else "keep_full_weight"


def _with_wildcards(fqn: str) -> str:
    """Return a name as transformers compares it (``replace_layer_number_by_wildcard``)."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", fqn)


def _tied_inside(plan: PlanData, unit: ShardUnit) -> list[str]:
    """Return the owners of tied parameters inside of modules that stay gathered; transformers looks for the head."""
    names = (name for spec in plan.specs_of(unit) if spec.aliases for name in (spec.fqn, *spec.aliases))
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    return [each for each in owners if not unit.reshard_after_forward and set(ancestors(each)[:-1]) & set(unit.modules)]


def _unsaid(plan: PlanData) -> Iterator[str]:
    """Yield an error for each setting that transformers has no word for."""
    found = {name: [str(each) for each in getattr(plan, name)] for name in _OF_PLAN}
    found["forward_methods"] = [each for each in plan.forward_methods if each != "generate"]  # transformers does that
    found |= {name: [unit.name for unit in plan.units if getattr(unit, name)] for name in _OF_UNIT}
    policy, offloads = plan.units[-1].mp_policy, plan.units[-1].offloads
    known = policy in (MixedPrecisionPolicy(), _OF_FLAG)
    found["mp_policy"] = [unit.name for unit in plan.units if unit.mp_policy != policy or not known]
    found["offload_policy"] = [unit.name for unit in plan.units if unit.offloads != offloads]
    for name, names in found.items():
        if names:
            problem = f"cannot be said in transformers' fsdp_plan: {listing(names, 6)}"
            yield message(name, problem, "", "Leave it out of the plan, or shard with shard_model")


def _misplaced(plan: PlanData, named: dict[str, ShardUnit]) -> Iterator[str]:
    """Yield an error for each unit that a rule with ``*`` would not select alone, or shard too late."""
    tensors = (name for spec in plan.params for name in (spec.fqn, *spec.aliases))
    modules = dict.fromkeys(fqn for name in tensors for fqn in ancestors(name) if fqn)
    styles = {_with_wildcards(fqn): _style(unit) for fqn, unit in named.items()}
    for fqn in modules:
        rule, own = _with_wildcards(fqn), _style(named[fqn]) if fqn in named else "no unit"
        if styles.get(rule, own) != own:
            problem = f"is {own}, where others of {rule} are {styles[rule]}"
            yield message(fqn, problem, "A rule of transformers holds for every number", "Give all of them one rule")
        outer = [each for each in ancestors(fqn) if each in named and named[each].reshard_after_forward]
        if own == "keep_full_weight" and outer:
            rule = "transformers shards what stays gathered last, after the modules around it"
            yield message(fqn, f"stays gathered inside of {outer[0]}", rule, "Let it reshard after forward")


def _done_otherwise(plan: PlanData) -> dict[str, list[str]]:
    """Return what transformers does in another way, with the same values, or by a flag; and for which names."""
    root = plan.units[-1]

    def joined(unit: ShardUnit) -> bool:  # transformers' own pair of norm and head
        return any(fqn.rpartition(".")[2] == "norm" for fqn in unit.modules)

    return {
        "sharded module by module": [unit.name for unit in plan.units if len(unit.modules) > 1 and not joined(unit)],
        "sharded on dim 0": [fqn for unit in plan.units for fqn, _ in unit.shard_dims],
        "resharded to all ranks": [unit.name for unit in plan.units if is_world_size(unit.reshard_after_forward)],
        "gathered until backward": [root.name] * bool(root.params and root.reshard_after_forward),
        "left to torch": ["prefetch"] * bool(plan.prefetch),
        "pass DistributedConfig(fsdp_mixed_precision=True)": ["mp_policy"] * (root.mp_policy == _OF_FLAG),
        "pass DistributedConfig(fsdp_cpu_offload=True)": ["offload_policy"] * root.offloads,
    }
