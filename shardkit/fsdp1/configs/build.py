"""A target and a model make a Translation."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from shardkit.api import plan_model
from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.configs.target import Ranks, Target, Wrap
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
        raise TranslationError(
            message(
                "world_size",
                "neither the configuration nor an argument says how many ranks there are",
                "A plan is made for a number of ranks",
                "Pass world_size=8, or --world 8",
            )
        )
    if target.fsdp1 is None:
        return _of_fsdp2(target, model, notes)
    return _of_fsdp1(target, model, notes, ranks)


def _of_fsdp1(target: Target, model: nn.Module, notes: tuple[Note, ...], ranks: Ranks) -> Translation:
    """By FSDP1's own arguments, so that units, dtypes and buffers are as FSDP1 has them."""
    assert target.fsdp1 is not None
    assert target.mesh is not None
    precision = target.precision
    arguments: dict[str, Any] = {
        "auto_wrap_policy": _policy(target.wrap, model),
        "cpu_offload": CPUOffload(offload_params=True) if target.offload else None,
        "mixed_precision": None
        if precision.param is precision.reduce is precision.buffer is None
        else MixedPrecision(precision.param, precision.reduce, precision.buffer),
        **target.fsdp1,
    }
    per_node = target.mesh.shard_size if target.mesh.replicates and target.mesh.shard_size > 1 else ranks.per_node
    made = translate_fsdp1(model, **arguments, world_size=target.mesh.size, ranks_per_node=per_node)
    more = tuple(note for note in made.notes if note.fate == "noted" and note.argument not in arguments)
    plan = _with_blocks(made.plan, model, target)
    return replace(made, plan=plan, notes=(*notes, *more))


def _of_fsdp2(target: Target, model: nn.Module, notes: tuple[Note, ...]) -> Translation:
    plan = plan_model(
        model,
        units=_rules(target, model),
        mesh=target.mesh,
        reshard_after_forward=_reshard(target),
        mp_policy=mp_policy(target),
        offload_policy=offload_policy(target),
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


def offload_policy(target: Target) -> OffloadPolicy:
    """torch's policy for a target, which pins where there is an accelerator unless it is told not to."""
    if not target.offload:
        return OffloadPolicy()
    there = accelerator() != "cpu"
    return CPUOffloadPolicy(pin_memory=there if target.pin_memory is None else target.pin_memory and there)


def _reshard(target: Target) -> bool | int | None:
    """None lets the default rule keep what backward needs at once; named units have the one that was asked for."""
    return (
        None if target.wrap.by == "default" and target.reshard_after_forward is True else target.reshard_after_forward
    )


def _rules(target: Target, model: nn.Module) -> list[Rule] | None:
    wrap = target.wrap
    if wrap.by == "default":
        return None
    rules: list[Rule] = []
    if wrap.embeddings:
        rules.append(by_name(_embedding(model)))
    if wrap.head:
        rules.append(by_name(_head(model)))
    if wrap.by in ("classes", "declared"):
        rules.append(by_class(*classes_of(wrap, model)))
    elif wrap.by == "size":
        rules.append(by_size(wrap.min_num_params))
    return [*rules, by_name("", reshard_after_forward=target.root_reshards)]


def classes_of(wrap: Wrap, model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes of a model that a wrap names or the model declares.

    Raises:
        TranslationError: the model has no module of a class that is named, or of any that it declares.
    """
    there = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in wrap.classes if name not in there]
    declared = tuple(getattr(model, "_no_split_modules", None) or ()) if wrap.by == "declared" else ()
    found = dict.fromkeys(there[name] for name in (*declared, *wrap.classes) if name in there)
    if missing or not found:
        what = f"{listing(missing)} not in the model" if missing else "the model declares no blocks that it has"
        raise TranslationError(
            message(
                "transformer_layer_cls_to_wrap",
                what,
                f"Its classes are {listing(sorted(there))}",
                "Name those of the repeated blocks",
            )
        )
    return tuple(found)


def _policy(wrap: Wrap, model: nn.Module) -> Any:
    """FSDP1's auto_wrap_policy."""
    if wrap.by in ("classes", "declared"):
        return set(classes_of(wrap, model))
    if wrap.by == "size":
        return functools.partial(size_based_auto_wrap_policy, min_num_params=wrap.min_num_params)
    return None


def _with_blocks(plan: ShardingPlan, model: nn.Module, target: Target) -> ShardingPlan:
    """The plan with the settings of blocks and of the whole that FSDP1's arguments do not have."""
    modules = dict(model.named_modules())

    def settled(unit: ShardUnit) -> ShardUnit:
        block = unit.modules != ("",) and any(True for fqn in unit.modules for _ in modules[fqn].children())
        return replace(
            unit,
            checkpoint_activations=block and target.checkpoint_activations,
            compile=block and target.compile,
            offload_policy=offload_policy(target) if unit.offloads else unit.offload_policy,
        )

    return replace(plan, units=tuple(map(settled, plan.units)))


def _without_vision_casts(plan: ShardingPlan, model: nn.Module) -> ShardingPlan:
    """The plan in which the units of a vision encoder take their inputs as they are."""
    towers = tuple(_vision(model))

    def settled(unit: ShardUnit) -> ShardUnit:
        inside = all(fqn.startswith(towers) for fqn in unit.modules) if towers else False
        return replace(unit, mp_policy=replace(unit.mp_policy, cast_forward_inputs=False)) if inside else unit

    return replace(plan, units=tuple(map(settled, plan.units)))


def _vision(model: nn.Module) -> Iterable[str]:
    """The FQNs of what transformers calls vision towers, and other models visual encoders."""
    for fqn, _ in model.named_modules():
        if fqn.rpartition(".")[2] in ("visual", "vision_tower", "vision_model", "vision_encoder"):
            yield f"{fqn}."


def _embedding(model: nn.Module) -> str:
    found = getattr(model, "get_input_embeddings", lambda: None)()
    names = [fqn for fqn, module in model.named_modules() if module is found] if found is not None else []
    names = names or [fqn for fqn, module in model.named_modules() if isinstance(module, nn.Embedding)]
    return names[0] if names else _none(model, "wrap_embeddings", "nn.Embedding")


def _head(model: nn.Module) -> str:
    names = [fqn for fqn, _ in model.named_modules()]
    named = [fqn for head in ("lm_head", "head") for fqn in names if fqn.rpartition(".")[2] == head]
    return named[0] if named else _none(model, "wrap_lm_output", "lm_head")


def _none(model: nn.Module, key: str, what: str) -> str:
    names = [name for name, _ in model.named_children()]
    raise TranslationError(
        message(key, f"the model has no {what}", f"Its children are {listing(names)}", f"Leave {key} out")
    )
