"""A plan as the ``fsdp_plan`` of transformers' ``DistributedConfig``: module names, ``*`` for
numbers, and styles.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit.errors import listing, refuse
from shardkit.plan.data import PlanData
from shardkit.plan.types import ShardUnit, ancestors, is_world_size

logger = logging.getLogger("shardkit")

_OF_FLAG = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_OF_PLAN = ("ignored", "replicated", "tiles")
_OF_UNIT = ("checkpoint_activations", "compile", "mesh", "may_skip")


def fsdp_plan(plan: PlanData) -> dict[str, str]:
    """Return the style of each unit's modules; ``ShardingPlan.to_fsdp_plan`` says
    what is refused.
    """
    unit_of: dict[str, ShardUnit] = {}
    for unit in plan.units:
        for fqn in (*unit.modules, *_tied_inside(plan, unit)):
            if fqn:
                unit_of[fqn] = unit
    refuse([*_unsaid(plan), *_misplaced(plan, unit_of)])
    for done, names in _done_otherwise(plan).items():
        if names:
            logger.warning("to_fsdp_plan: %s: %s", done, listing(names, 6))
    return {_with_wildcards(fqn): _style(unit) for fqn, unit in unit_of.items()}


def _style(unit: ShardUnit) -> str:
    return "free_full_weight" if unit.reshard_after_forward else "keep_full_weight"


def _with_wildcards(fqn: str) -> str:
    """Return a name as transformers compares it (``replace_layer_number_by_wildcard``)."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", fqn)


def _tied_inside(plan: PlanData, unit: ShardUnit) -> list[str]:
    """Return the owners of tied parameters inside of modules that stay gathered.

    transformers looks for the head among them.
    """
    if unit.reshard_after_forward:
        return []
    owners: dict[str, None] = {}
    for spec in plan.specs_of(unit):
        for name in (spec.fqn, *spec.aliases) if spec.aliases else ():
            owner = name.rpartition(".")[0]
            if not set(unit.modules).isdisjoint(ancestors(owner)[:-1]):
                owners[owner] = None
    return list(owners)


def _unsaid(plan: PlanData) -> Iterator[str]:
    """Yield an error for each setting that transformers has no word for."""
    root = plan.units[-1]
    found: dict[str, list[str]] = {}
    for name in _OF_PLAN:
        found[name] = [str(each) for each in getattr(plan, name)]
    # transformers lets generate() gather.
    found["forward_methods"] = [each for each in plan.forward_methods if each != "generate"]
    for name in _OF_UNIT:
        found[name] = [unit.name for unit in plan.units if getattr(unit, name)]
    is_known = root.mp_policy in (MixedPrecisionPolicy(), _OF_FLAG)
    found["mp_policy"] = [
        u.name for u in plan.units if u.mp_policy != root.mp_policy or not is_known
    ]
    found["offload_policy"] = [u.name for u in plan.units if u.offloads != root.offloads]
    for name, names in found.items():
        if names:
            yield (
                f"{name} cannot be said in transformers' fsdp_plan: {listing(names, 6)}. Leave it "
                "out of the plan, or shard with shard_model."
            )


def _misplaced(plan: PlanData, unit_of: dict[str, ShardUnit]) -> Iterator[str]:
    """Yield an error for each unit that a rule with ``*`` would not select alone, or too late."""
    modules: dict[str, None] = {}
    for spec in plan.params:
        for name in (spec.fqn, *spec.aliases):
            modules.update(dict.fromkeys(ancestors(name)[:-1]))
    styles = {_with_wildcards(fqn): _style(unit) for fqn, unit in unit_of.items()}
    for fqn in modules:
        rule = _with_wildcards(fqn)
        own = _style(unit_of[fqn]) if fqn in unit_of else "no unit"
        if styles.get(rule, own) != own:
            yield (
                f"{fqn} is {own}, where others of {rule} are {styles[rule]}. A rule of "
                "transformers holds for every number. Give all of them one rule."
            )
        if own == "keep_full_weight":
            for outer in ancestors(fqn):
                if outer in unit_of and unit_of[outer].reshard_after_forward:
                    yield (
                        f"{fqn} stays gathered inside of {outer}. transformers shards what stays "
                        "gathered last, after the modules around it. Let it reshard after forward."
                    )
                    break


def _done_otherwise(plan: PlanData) -> dict[str, list[str]]:
    """Return what transformers does in another way, or by a flag; and for which names."""
    root = plan.units[-1]
    found: dict[str, list[str]] = defaultdict(list)
    for unit in plan.units:
        # its own [norm, head]
        is_pair = any(fqn.rpartition(".")[2] == "norm" for fqn in unit.modules)
        if len(unit.modules) > 1 and not is_pair:
            found["sharded module by module"].append(unit.name)
        found["sharded on dim 0"] += [fqn for fqn, _ in unit.shard_dims]
        if is_world_size(unit.reshard_after_forward):
            found["resharded to all ranks"].append(unit.name)
    if root.params and root.reshard_after_forward:
        found["gathered until backward"].append(root.name)
    if plan.prefetch:
        found["left to torch"].append("prefetch")
    if root.mp_policy == _OF_FLAG:
        found["pass DistributedConfig(fsdp_mixed_precision=True)"].append("mp_policy")
    if root.offloads:
        found["pass DistributedConfig(fsdp_cpu_offload=True)"].append("offload_policy")
    return found
