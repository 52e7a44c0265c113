"""What a configuration asks of FSDP2, and the plan that follows for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from shardkit.api import plan_model
from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.translate.arguments import Note
from shardkit.fsdp1.translate.shard import Translation
from shardkit.fsdp1.translate.translate import translate_fsdp1
from shardkit.plan import MeshSpec, ShardingPlan, ShardUnit
from shardkit.planning.default import find_mlps
from shardkit.planning.rules import Overrides, Rule, by_class, by_name
from shardkit.planning.tree import ModelTree
from shardkit.ranks import accelerator

_TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder")  # names in transformers' models, and in others


@dataclass(frozen=True)
class Wrap:
    """Which modules become units, besides the root."""

    # "classes" that are named, those that the model has "declared" (_no_split_modules), or none but the "root".
    by: Literal["classes", "declared", "root"]
    classes: tuple[str, ...] = ()  # names, also beside the declared ones
    embeddings: bool = False  # whether input embeddings are units too
    head: bool = False  # whether the output head is one too
    experts: str | None = None  # the axis of the mesh that experts in one parameter are sharded on
    skipped: tuple[str, ...] = ()  # names of classes that ranks may skip, such as experts


@dataclass(frozen=True)
class Precision:
    """The dtypes of mixed precision; None keeps the parameters' dtype, or reduces in the dtype of the computation."""

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffer: torch.dtype | None = None

    @classmethod
    def of(cls, dtype: torch.dtype | None, version: int) -> Precision:
        """accelerate computes and reduces in one dtype, and casts outputs (version 2) or buffers (version 1) to it."""
        return cls(dtype, dtype, dtype if version == 2 else None, dtype if version == 1 else None)


@dataclass(frozen=True)
class Target:
    """An FSDP2 configuration: all of a plan that does not depend on the model."""

    mesh: MeshSpec | None  # in ranks; None where nothing says how many ranks there are
    reshard_after_forward: bool = True  # of all units but the root
    root_reshards: bool = False
    wrap: Wrap = Wrap("root")
    precision: Precision = Precision()
    vision_casts: bool = True  # whether the blocks of a vision encoder cast their inputs, as other units do
    offload: bool = False  # CPUOffloadPolicy
    pin_memory: bool | None = None  # None pins where there is an accelerator
    checkpoint_activations: bool = False  # of blocks
    tiles: int = 1  # of tokens, of each MLP
    prefetch: int = 0  # units ahead to gather explicitly
    sync_module_states: bool = False  # whether the first rank's parameters and buffers are broadcast before sharding
    rank0_loads: bool = False  # whether only the first rank loads the weights, and the others start from meta
    state_dict_type: str | None = None  # "full" or "sharded"
    # Sizes of further mesh axes, which the user applies: tensor, context, sequence or expert parallel.
    axes: Mapping[str, int] = field(default_factory=dict)
    strategy: ShardingStrategy | None = None  # where the configuration is one of FSDP1


@dataclass(frozen=True)
class Ranks:
    """The number of ranks in all and per node; None is unknown."""

    world_size: int | None = None
    per_node: int | None = None


def note_on_ranks(what: str, found: int | None, asked: int | None) -> str:
    """Return the answer for a key that gives a number of ranks, which an argument may override."""
    if asked is not None and asked != found:
        return f"noted: Overridden by the argument: {asked} {what}."
    return f"mapped: {found} {what}." if found is not None else f"mapped: Unknown {what}."


@dataclass(frozen=True)
class Reading:
    """A configuration that was read: its format, the keys that show the format, its target, and notes on its keys."""

    format: str
    saw: tuple[str, ...]
    target: Target
    notes: tuple[Note, ...]

    @property
    def refused(self) -> tuple[Note, ...]:
        """Return the notes on what FSDP2 cannot do."""
        return tuple(note for note in self.notes if note.support == "refused")


def build(target: Target, model: nn.Module, notes: tuple[Note, ...], ranks: Ranks) -> Translation:
    """Return the translation of a configuration for the whole model, with the notes on its keys; pure and local.

    Raises:
        TranslationError: the model lacks a named class, or the number of ranks is unknown.
        PlanError: the model cannot be sharded as the target says.
    """
    if target.mesh is None:
        problem = "is given neither by the configuration nor by an argument"
        raise TranslationError(message("the number of ranks", problem, "", "Pass --world 8, or world_size=8"))
    if target.strategy is None:
        return Translation(_plan(target, model), notes)
    # Through FSDP1's own arguments, so that units, dtypes and buffers are as in FSDP1.
    precision = target.precision
    mixed = MixedPrecision(precision.param, precision.reduce, precision.buffer)
    arguments: dict[str, Any] = {
        "sharding_strategy": target.strategy,
        "auto_wrap_policy": None if target.wrap.by == "root" else set(_classes_of(target.wrap, model)),
        "cpu_offload": CPUOffload(offload_params=True) if target.offload else None,
        "mixed_precision": mixed if precision != Precision() else None,
        "sync_module_states": target.sync_module_states,
        "forward_prefetch": target.prefetch > 0,
        "use_orig_params": True,
    }
    per_node = target.mesh.shard_size if target.mesh.replicates and target.mesh.shard_size > 1 else ranks.per_node
    made = translate_fsdp1(model, **arguments, world_size=target.mesh.size, ranks_per_node=per_node)
    more = tuple(note for note in made.notes if note.support == "noted" and note.argument not in arguments)

    def settled(unit: ShardUnit) -> ShardUnit:  # with what FSDP1 has no argument for
        block = unit.modules != ("",) and any([*model.get_submodule(fqn).children()] for fqn in unit.modules)
        policy = _offload_policy(target) if unit.offloads else unit.offload_policy
        return replace(unit, checkpoint_activations=block and target.checkpoint_activations, offload_policy=policy)

    plan = replace(made.plan, units=tuple(map(settled, made.plan.units)))
    return replace(made, plan=plan, notes=(*notes, *more))


def has_vision_encoder(model: nn.Module) -> bool:
    """Return whether a module of the model is named as transformers names vision encoders."""
    return any(fqn.rpartition(".")[2] in _TOWERS for fqn, _ in model.named_modules())


def _plan(target: Target, model: nn.Module) -> ShardingPlan:
    precision = target.precision
    plan = plan_model(
        model,
        units=_rules(target, model),
        mesh=target.mesh,
        reshard_after_forward=target.reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(precision.param, precision.reduce or precision.param, precision.output),
        offload_policy=_offload_policy(target),
        checkpoint_activations=target.checkpoint_activations,
    )
    if target.vision_casts:
        return plan
    towers = tuple(f"{fqn}." for fqn, _ in model.named_modules() if fqn.rpartition(".")[2] in _TOWERS)

    def settled(unit: ShardUnit) -> ShardUnit:
        inside = all(fqn.startswith(towers) for fqn in unit.modules)
        return replace(unit, mp_policy=replace(unit.mp_policy, cast_forward_inputs=False)) if inside else unit

    return replace(plan, units=tuple(map(settled, plan.units)))


def _offload_policy(target: Target) -> OffloadPolicy:
    pin = target.pin_memory is not False and accelerator() != "cpu"
    return CPUOffloadPolicy(pin_memory=pin) if target.offload else OffloadPolicy()


def _rules(target: Target, model: nn.Module) -> list[Rule]:
    wrap = target.wrap
    rules: list[Rule] = [] if wrap.experts is None else [_experts_in_one_parameter]
    if target.tiles > 1:
        mlps = find_mlps(ModelTree(model))
        if not mlps:
            raise TranslationError(
                message("tiles", "needs a class of the model that is named as an MLP", "", "Turn it off")
            )
        rules.append(by_name(*mlps, tiles=target.tiles))
    modules = dict(model.named_modules())
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    embeddings = [fqn for fqn, module in modules.items() if module is embedding]
    embeddings += [fqn for fqn, module in modules.items() if isinstance(module, nn.Embedding)]
    heads = [fqn for head in ("lm_head", "head") for fqn in modules if fqn.rpartition(".")[2] == head]
    for is_unit, key, found in ((wrap.embeddings, "wrap_embeddings", embeddings), (wrap.head, "wrap_lm_output", heads)):
        if is_unit and not found:
            raise TranslationError(message(key, "finds no such module in the model", "", f"Leave {key} out"))
        rules += [by_name(found[0])] if is_unit else []
    if wrap.skipped:
        rules.append(by_class(*_classes_of(Wrap("classes", wrap.skipped), model), may_skip=True))
    if wrap.by != "root":
        rules.append(by_class(*_classes_of(wrap, model)))
    return [*rules, by_name("", reshard_after_forward=target.root_reshards)]


def _experts_in_one_parameter(fqn: str, module: nn.Module) -> bool | Overrides:
    """The rule for a layer's experts, which the model splits over the axis after ``efsdp``."""
    found = fqn.rpartition(".")[2] == "experts" and any(True for _ in module.parameters(recurse=False))
    return Overrides(mesh="efsdp") if found else False


def _classes_of(wrap: Wrap, model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes of the model that the target names or the model declares."""
    there = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in wrap.classes if name not in there]
    declared = tuple(getattr(model, "_no_split_modules", None) or ()) if wrap.by == "declared" else ()
    found = dict.fromkeys(there[name] for name in (*declared, *wrap.classes) if name in there)
    if missing or not found:
        problem = (
            f"names {listing(missing)}, not in the model" if missing else "is needed: the model declares no blocks"
        )
        rule, fix = f"Its classes are {listing(sorted(there))}", "Name the class of the repeated blocks"
        raise TranslationError(message("transformer_layer_cls_to_wrap", problem, rule, fix))
    return tuple(found)
