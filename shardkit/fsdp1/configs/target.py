"""What a configuration asks of FSDP2, and the plan of that for a model, by public rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.distributed import fsdp

from shardkit.api import plan_model
from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.translate import translate_fsdp1
from shardkit.fsdp1.translate.notes import Note
from shardkit.fsdp1.translate.shard import Translation
from shardkit.plan import MeshSpec
from shardkit.planning.rules import by_class, by_name
from shardkit.planning.selection import Overrides, Rule
from shardkit.ranks import accelerator


@dataclass(frozen=True)
class Ranks:
    """The number of ranks in all and per node; None is unknown."""

    world_size: int | None = None
    per_node: int | None = None


@dataclass(frozen=True)
class Wrap:
    """Which modules become units, besides the root."""

    # "classes" that are named, those that the model has "declared", or none but the "root".
    by: Literal["classes", "declared", "root"]
    classes: tuple[str, ...] = ()  # names, also beside the declared ones
    embeddings: bool = False  # whether input embeddings are units too
    head: bool = False  # whether the output head is one too
    skipped: tuple[str, ...] = ()  # names of classes that ranks may skip, such as experts


@dataclass(frozen=True)
class Precision:
    """The dtypes of mixed precision; None keeps the parameters' dtype."""

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffer: torch.dtype | None = None

    @classmethod
    def of(cls, dtype: torch.dtype | None, version: int) -> Precision:
        """As accelerate: one dtype, to which it casts outputs (version 2) or
        buffers (version 1).
        """
        return cls(dtype, dtype, dtype if version == 2 else None, dtype if version == 1 else None)


@dataclass(frozen=True)
class Target:
    """All of a plan that does not depend on the model."""

    mesh: MeshSpec | None  # in ranks; None where nothing says how many ranks there are
    strategy: fsdp.ShardingStrategy | None = None  # where the configuration is one of FSDP1
    reshard_after_forward: bool = True  # of all units but the root
    root_reshards: bool = False
    wrap: Wrap = Wrap("root")
    precision: Precision = Precision()
    vision_casts: bool = True  # whether blocks of a vision encoder cast their inputs
    offload: bool = False  # to the CPU
    pin_memory: bool = True  # where there is an accelerator
    checkpoint_activations: bool = False  # of blocks
    tiles: int = 1  # of tokens, of each MLP
    prefetch: int = 0  # units ahead to gather explicitly
    sync_module_states: bool = False  # whether the first rank's values are broadcast
    axes: Mapping[str, int] = field(default_factory=dict)  # of tp, cp, sp and ep: the user's


def build(target: Target, model: nn.Module, notes: tuple[Note, ...], ranks: Ranks) -> Translation:
    """Return the translation of a configuration for the whole model; pure and local."""
    if target.mesh is None:
        problem = "is given neither by the configuration nor by an argument"
        raise TranslationError(message("the number of ranks", problem, "", "Pass world_size=8"))
    if target.strategy is None:
        return Translation(_plan(target, model), notes)
    # Through FSDP1's own arguments, so that units, dtypes and buffers are as in FSDP1.
    precision = target.precision
    mixed = fsdp.MixedPrecision(precision.param, precision.reduce, precision.buffer)
    translation = translate_fsdp1(
        model,
        sharding_strategy=target.strategy,
        auto_wrap_policy=set(_classes(target.wrap, model)) or None,
        cpu_offload=fsdp.CPUOffload(offload_params=target.offload),
        mixed_precision=mixed if precision != Precision() else None,
        sync_module_states=target.sync_module_states,
        forward_prefetch=target.prefetch > 0,
        use_orig_params=True,
        ranks_per_node=target.mesh.shard_size,
        world_size=target.mesh.size,
    )
    plan = translation.plan
    if target.checkpoint_activations:  # which is no argument of FSDP1
        units = []
        for unit in plan.units:
            is_block = any([*model.get_submodule(fqn).children()] for fqn in unit.modules if fqn)
            units.append(replace(unit, checkpoint_activations=is_block))
        plan = replace(plan, units=tuple(units))
    return replace(translation, plan=plan, notes=notes)


def _plan(target: Target, model: nn.Module) -> Any:
    precision, offload = target.precision, fsdp.OffloadPolicy()
    if target.offload:
        offload = fsdp.CPUOffloadPolicy(target.pin_memory and accelerator() != "cpu")
    mp_policy = fsdp.MixedPrecisionPolicy(
        precision.param, precision.reduce or precision.param, precision.output
    )
    tiles = dict.fromkeys(_mlps(model), target.tiles) if target.tiles > 1 else None
    return plan_model(
        model,
        units=[*_rules(target, model, mp_policy), by_name("", **_root(target))],
        mesh=target.mesh,
        reshard_after_forward=target.reshard_after_forward,
        mp_policy=mp_policy,
        offload_policy=offload,
        checkpoint_activations=target.checkpoint_activations,
        tiles=tiles,
    )


def _root(target: Target) -> Overrides:
    return Overrides(reshard_after_forward=target.root_reshards)


def _rules(
    target: Target, model: nn.Module, mp_policy: fsdp.MixedPrecisionPolicy
) -> Iterator[Rule]:
    """Yield the rules for units, the narrower ones first."""
    wrap = target.wrap
    if target.mesh is not None and "ep" in target.mesh.axis_names:
        yield _experts_in_one_parameter
    if wrap.embeddings:
        yield by_name(_end(model, "input"))
    if wrap.head:
        yield by_name(_end(model, "output"))
    if wrap.skipped:
        yield by_class(*_classes(Wrap("classes", wrap.skipped), model), may_skip=True)
    classes = _classes(wrap, model)
    if not target.vision_casts:
        raw = replace(mp_policy, cast_forward_inputs=False, output_dtype=None)
        towers = [fqn for fqn, module in model.named_modules() if _in_tower(fqn, module, classes)]
        if towers:
            yield by_name(*towers, mp_policy=raw)
    if classes:
        yield by_class(*classes)


_TOWERS = {"visual", "vision_tower", "vision_model", "vision_encoder"}  # names of modules


def _in_tower(fqn: str, module: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    return isinstance(module, classes) and not _TOWERS.isdisjoint(fqn.split(".")[:-1])


def _mlps(model: nn.Module) -> list[str]:
    """Return the modules that are MLPs by the name of their class, and no experts."""
    found: list[str] = []
    for fqn, module in model.named_modules():
        is_mlp = re.search(r"(MLP|Mlp|FeedForward)$", type(module).__name__)
        names = [name.lower() for name, _ in module.named_modules(prefix=fqn)]
        dims = [param.dim() for param in module.parameters()]
        inside = fqn.startswith(tuple(f"{outer}." for outer in found))
        if is_mlp and dims and max(dims) < 3 and not inside and "expert" not in " ".join(names):
            found.append(fqn)
    if not found:
        problem = "needs a class of the model that is named as an MLP"
        raise TranslationError(message("tiles", problem, "", "Turn it off"))
    return found


def _end(model: nn.Module, which: str) -> str:
    """Return the FQN of the input embedding or the output head, as transformers names them."""
    module = getattr(model, f"get_{which}_embeddings", lambda: None)()
    for fqn, each in model.named_modules():
        if each is module:
            return str(fqn)
    problem = f"needs a model with get_{which}_embeddings()"
    raise TranslationError(message("wrap_policy", problem, "", "Turn it off"))


def _experts_in_one_parameter(fqn: str, module: nn.Module) -> bool | Overrides:
    """The rule for a layer's experts, which the model splits over the axis after ``efsdp``."""
    is_experts = fqn.rpartition(".")[2] == "experts" and bool(module._parameters)
    return Overrides(mesh="efsdp") if is_experts else False


def _classes(wrap: Wrap, model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes of the model that the target names or the model declares."""
    there = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in wrap.classes if name not in there]
    declared = getattr(model, "_no_split_modules", None) or ()
    names = (*(declared if wrap.by == "declared" else ()), *wrap.classes)
    found = tuple(there[name] for name in dict.fromkeys(names) if name in there)
    if missing or (wrap.by != "root" and not found):
        problem = "is needed: the model declares no blocks"
        if missing:
            problem = f"names {listing(missing)}, not in the model"
        rule = f"Its classes are {listing(sorted(there))}"
        fix = "Name the class of the repeated blocks"
        raise TranslationError(message("transformer_layer_cls_to_wrap", problem, rule, fix))
    return found
