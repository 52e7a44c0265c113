"""A target and a model make a Translation."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from shardkit.api import plan_model
from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.configs.target import Precision, Ranks, Target, Wrap
from shardkit.fsdp1.translate.notes import Note
from shardkit.fsdp1.translate.shard import Translation
from shardkit.fsdp1.translate.translate import translate_fsdp1
from shardkit.plan import ShardingPlan, ShardUnit
from shardkit.planning.rules import Rule, by_class, by_name, by_size
from shardkit.ranks import accelerator


def build(target: Target, model: nn.Module, notes: tuple[Note, ...], ranks: Ranks) -> Translation:
    """The translation of a configuration for a model; pure and local.

    Args:
        target: what the configuration asks for.
        model: the whole model.
        notes: what became of each of its keys.
        ranks: what FSDP1's hybrid strategies need to know; the mesh is the target's.

    Raises:
        TranslationError: the model has no such classes, or nothing says how many ranks there are.
        PlanError: the model cannot be sharded so.
    """
    if target.mesh is None:
        problem = "neither the configuration nor an argument says how many ranks there are"
        rule = "A plan is made for a number of ranks"
        raise TranslationError(message("world_size", problem, rule, "Pass world_size=8, or --world 8"))
    if target.fsdp1 is None:
        return _of_fsdp2(target, model, notes)
    # By FSDP1's own arguments, so that units, dtypes and buffers are as FSDP1 has them.
    precision = target.precision
    mixed = MixedPrecision(precision.param, precision.reduce, precision.buffer) if precision != Precision() else None
    arguments: dict[str, Any] = {
        "auto_wrap_policy": _policy(target.wrap, model),
        "cpu_offload": CPUOffload(offload_params=True) if target.offload else None,
        "mixed_precision": mixed,
        **target.fsdp1,
    }
    per_node = target.mesh.shard_size if target.mesh.replicates and target.mesh.shard_size > 1 else ranks.per_node
    made = translate_fsdp1(model, **arguments, world_size=target.mesh.size, ranks_per_node=per_node)
    more = tuple(note for note in made.notes if note.fate == "noted" and note.argument not in arguments)
    return replace(made, plan=_with_blocks(made.plan, model, target), notes=(*notes, *more))


def _of_fsdp2(target: Target, model: nn.Module, notes: tuple[Note, ...]) -> Translation:
    reshard = target.reshard_after_forward
    plan = plan_model(
        model,
        units=_rules(target, model),
        mesh=target.mesh,
        # None lets the default rule keep what backward needs at once.
        reshard_after_forward=None if target.wrap.by == "default" and reshard is True else reshard,
        mp_policy=mp_policy(target),
        offload_policy=_offload_policy(target),
        checkpoint_activations=target.checkpoint_activations,
        compile=target.compile,
        prefetch=target.prefetch,
    )
    plan = _without_vision_casts(plan, model) if target.casts == "text" else plan
    dtype = target.precision.buffer
    buffers = {fqn: dtype for fqn, buffer in model.named_buffers() if buffer.is_floating_point()} if dtype else {}
    return Translation(plan, notes, sync_module_states=target.sync_module_states, buffer_dtypes=buffers)


def mp_policy(target: Target) -> MixedPrecisionPolicy:
    """torch's policy for the root of a target; ``output_dtype`` is for the root only."""
    precision = target.precision
    return MixedPrecisionPolicy(precision.param, precision.reduce or precision.param, precision.output)


def _offload_policy(target: Target) -> OffloadPolicy:
    """torch's policy, which pins where there is an accelerator unless it is told not to."""
    pin = target.pin_memory is not False and accelerator() != "cpu"
    return CPUOffloadPolicy(pin_memory=pin) if target.offload else OffloadPolicy()


def _rules(target: Target, model: nn.Module) -> list[Rule] | None:
    wrap = target.wrap
    if wrap.by == "default":
        return None
    rules: list[Rule] = [by_name(_embedding(model))] if wrap.embeddings else []
    rules += [by_name(_head(model))] if wrap.head else []
    if wrap.by == "size":
        rules.append(by_size(wrap.min_num_params))
    elif wrap.by != "root":
        rules.append(by_class(*_classes_of(wrap, model)))
    return [*rules, by_name("", reshard_after_forward=target.root_reshards)]


def _classes_of(wrap: Wrap, model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes of a model that a wrap names or the model declares."""
    there = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in wrap.classes if name not in there]
    declared = tuple(getattr(model, "_no_split_modules", None) or ()) if wrap.by == "declared" else ()
    found = dict.fromkeys(there[name] for name in (*declared, *wrap.classes) if name in there)
    if missing or not found:
        what = f"{listing(missing)} not in the model" if missing else "the model declares no blocks that it has"
        rule, fix = f"Its classes are {listing(sorted(there))}", "Name those of the repeated blocks"
        raise TranslationError(message("transformer_layer_cls_to_wrap", what, rule, fix))
    return tuple(found)


def _policy(wrap: Wrap, model: nn.Module) -> Any:
    """FSDP1's auto_wrap_policy."""
    if wrap.policy is not None:
        return wrap.policy
    if wrap.by in ("classes", "declared"):
        return set(_classes_of(wrap, model))
    if wrap.by == "size":
        return functools.partial(size_based_auto_wrap_policy, min_num_params=wrap.min_num_params)
    return None


def _with_blocks(plan: ShardingPlan, model: nn.Module, target: Target) -> ShardingPlan:
    """The plan with the settings of blocks and of the whole that FSDP1's arguments do not have."""

    def settled(unit: ShardUnit) -> ShardUnit:
        block = unit.modules != ("",) and any([*model.get_submodule(fqn).children()] for fqn in unit.modules)
        return replace(
            unit,
            checkpoint_activations=block and target.checkpoint_activations,
            compile=block and target.compile,
            offload_policy=_offload_policy(target) if unit.offloads else unit.offload_policy,
        )

    return replace(plan, units=tuple(map(settled, plan.units)))


def _without_vision_casts(plan: ShardingPlan, model: nn.Module) -> ShardingPlan:
    """The plan in which the units of a vision encoder take their inputs as they are."""
    names = ("visual", "vision_tower", "vision_model", "vision_encoder")  # of transformers' models, and of others
    towers = tuple(f"{fqn}." for fqn, _ in model.named_modules() if fqn.rpartition(".")[2] in names)

    def settled(unit: ShardUnit) -> ShardUnit:
        inside = all(fqn.startswith(towers) for fqn in unit.modules)
        return replace(unit, mp_policy=replace(unit.mp_policy, cast_forward_inputs=False)) if inside else unit

    return replace(plan, units=tuple(map(settled, plan.units)))


def _embedding(model: nn.Module) -> str:
    named = getattr(model, "get_input_embeddings", lambda: None)()
    own = [fqn for fqn, module in model.named_modules() if module is named]
    found = own or [fqn for fqn, module in model.named_modules() if isinstance(module, nn.Embedding)]
    return found[0] if found else _none(model, "wrap_embeddings", "nn.Embedding")


def _head(model: nn.Module) -> str:
    names = [fqn for fqn, _ in model.named_modules()]
    found = [fqn for head in ("lm_head", "head") for fqn in names if fqn.rpartition(".")[2] == head]
    return found[0] if found else _none(model, "wrap_lm_output", "lm_head")


def _none(model: nn.Module, key: str, what: str) -> str:
    rule = f"Its children are {listing(name for name, _ in model.named_children())}"
    raise TranslationError(message(key, f"the model has no {what}", rule, f"Leave {key} out"))
