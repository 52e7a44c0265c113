"""What a configuration asks of FSDP2, and the plan of that for a model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn as nn
from torch.distributed import fsdp

from shardkit.api import plan_model
from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.translate import translate_fsdp1
from shardkit.fsdp1.translate.notes import Note
from shardkit.fsdp1.translate.shard import Translation
from shardkit.plan import MeshSpec, ShardingPlan, ShardUnit
from shardkit.planning.rules import by_class, by_name
from shardkit.planning.selection import Rule
from shardkit.ranks import accelerator


@dataclass(frozen=True)
class Ranks:
    """The number of ranks in all and per node; None is unknown."""

    world_size: int | None = None
    per_node: int | None = None


@dataclass(frozen=True)
class Target:
    """All of a plan that does not depend on the model."""

    mesh: MeshSpec | None  # in ranks; None where nothing says how many ranks there are
    strategy: fsdp.ShardingStrategy | None = None  # of FSDP version 1; None for version 2
    reshard_after_forward: bool = True  # of all units but the root
    root_reshards: bool = False
    wraps: bool = False  # whether blocks are units, besides the root
    classes: tuple[str, ...] = ()  # names of their classes; () are those that the model declares
    dtype: torch.dtype | None = None  # of mixed precision
    offload: bool = False  # to the CPU
    pin_memory: bool = True  # where there is an accelerator
    checkpoint_activations: bool = False  # of blocks
    forward_prefetch: bool = False
    sync_module_states: bool = False


def build(target: Target, model: nn.Module, notes: tuple[Note, ...]) -> Translation:
    """Return the translation of a configuration for the whole model; pure and local."""
    if target.mesh is None:
        raise TranslationError(
            "The number of ranks is given neither by the configuration nor by an argument. Pass "
            "world_size=8, or --world 8."
        )
    if target.strategy is None:
        return Translation(_plan_of_version_2(target, model), notes)

    # Through FSDP1's own arguments, so that units, dtypes and buffers are as in FSDP1.
    dtype = target.dtype
    translation = translate_fsdp1(
        model,
        sharding_strategy=target.strategy,
        auto_wrap_policy=set(_classes_of(target, model)) or None,
        cpu_offload=fsdp.CPUOffload(offload_params=target.offload),
        mixed_precision=None if dtype is None else fsdp.MixedPrecision(dtype, dtype, dtype),
        sync_module_states=target.sync_module_states,
        forward_prefetch=target.forward_prefetch,
        use_orig_params=True,
        ranks_per_node=target.mesh.shard_size,
        world_size=target.mesh.size,
    )
    plan = translation.plan
    if target.checkpoint_activations:  # FSDP1 has no such argument
        units = []
        for unit in plan.units:
            units.append(replace(unit, checkpoint_activations=_has_block(model, unit)))
        plan = replace(plan, units=tuple(units))
    return replace(translation, plan=plan, notes=notes)


def _has_block(model: nn.Module, unit: ShardUnit) -> bool:
    """Return whether a unit, but not the root, has a module that is more than one layer."""
    return any(fqn and list(model.get_submodule(fqn).children()) for fqn in unit.modules)


def _plan_of_version_2(target: Target, model: nn.Module) -> ShardingPlan:
    offload = fsdp.OffloadPolicy()
    if target.offload:
        offload = fsdp.CPUOffloadPolicy(target.pin_memory and accelerator() != "cpu")
    units: list[Rule] = [by_name("", reshard_after_forward=target.root_reshards)]
    classes = _classes_of(target, model)
    if classes:
        units.append(by_class(*classes))
    dtype = target.dtype
    return plan_model(
        model,
        units=units,
        mesh=target.mesh,
        reshard_after_forward=target.reshard_after_forward,
        mp_policy=fsdp.MixedPrecisionPolicy(dtype, dtype, output_dtype=dtype),
        offload_policy=offload,
        checkpoint_activations=target.checkpoint_activations,
    )


def _classes_of(target: Target, model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes of blocks that the target names, or else that the model declares."""
    if not target.wraps:
        return ()
    by_class_name = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in target.classes if name not in by_class_name]
    names = target.classes or getattr(model, "_no_split_modules", None) or ()
    classes = [by_class_name[name] for name in dict.fromkeys(names) if name in by_class_name]
    if missing or not classes:
        problem = "is needed: the model declares no blocks"
        if missing:
            problem = f"names {listing(missing)}, not in the model"
        rule = f"Its classes are {listing(sorted(by_class_name))}"
        fix = "Name the class of the repeated blocks"
        raise TranslationError(message("transformer_layer_cls_to_wrap", problem, rule, fix))
    return tuple(classes)
