"""What a configuration asks of FSDP2, as a plan of a model and as accelerate's file of FSDP version 2."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.distributed import fsdp

from shardkit.api import plan_model
from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.translate import translate_fsdp1
from shardkit.fsdp1.translate.arguments import Note
from shardkit.fsdp1.translate.shard import Translation
from shardkit.plan import MeshSpec, ShardingPlan, ShardUnit, ancestors
from shardkit.planning.rules import Overrides, Rule, by_class, by_name
from shardkit.planning.tree import ModelTree
from shardkit.ranks import accelerator
from shardkit.replacements import Support

_MLP = re.compile(r"(MLP|Mlp|FeedForward)$")  # of a class
_TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder")  # names in transformers' models, and in others
_BROADCAST = """import torch
import torch.distributed as dist

for tensor in (*model.parameters(), *model.buffers()):
    value = tensor.detach().to("cuda" if torch.cuda.is_available() else "cpu")
    dist.broadcast(value, 0)
    tensor.data.copy_(value)

"""
_DTYPES = {None: "no", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Wrap:
    """Which modules become units, besides the root."""

    # "classes" that are named, those that the model has "declared" (_no_split_modules), or none but the "root".
    by: Literal["classes", "declared", "root"]
    classes: tuple[str, ...] = ()  # names, also beside the declared ones
    embeddings: bool = False  # whether input embeddings are units too
    head: bool = False  # whether the output head is one too
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
    offload: bool = False  # to the CPU
    pin_memory: bool = True  # where there is an accelerator
    checkpoint_activations: bool = False  # of blocks
    tiles: int = 1  # of tokens, of each MLP
    prefetch: int = 0  # units ahead to gather explicitly
    sync_module_states: bool = False  # whether the first rank's parameters and buffers are broadcast before sharding
    rank0_loads: bool = False  # whether only the first rank loads the weights, and the others start from meta
    state_dict_type: str | None = None  # "full" or "sharded"
    axes: Mapping[str, int] = field(default_factory=dict)  # sizes of tp, cp, sp and ep, which the user applies
    strategy: fsdp.ShardingStrategy | None = None  # where the configuration is one of FSDP1

    @property
    def is_ddp(self) -> bool:
        """Whether nothing is sharded."""
        return self.mesh is not None and self.mesh.replicates and self.mesh.shard_size == 1


@dataclass(frozen=True)
class Ranks:
    """The number of ranks in all and per node; None is unknown."""

    world_size: int | None = None
    per_node: int | None = None


def note_on_ranks(what: str, found: int | None, asked: int | None) -> str:
    """Return the answer for a key that gives a number of ranks, which an argument may override."""
    overridden = asked is not None and asked != found
    return f"noted: Overridden by the argument: {asked} {what}." if overridden else f"mapped: {found} {what}."


@dataclass(frozen=True)
class Reading:
    """A configuration that was read: its format, its target, and notes on its keys."""

    format: str
    target: Target
    notes: tuple[Note, ...]

    @property
    def refused(self) -> tuple[Note, ...]:
        """Return the notes on what FSDP2 cannot do."""
        return tuple(note for note in self.notes if note.support == "refused")


def build(target: Target, model: nn.Module, notes: tuple[Note, ...], ranks: Ranks) -> Translation:
    """Return the translation of a configuration for the whole model, with the notes on its keys; pure and local."""
    if target.mesh is None:
        problem = "is given neither by the configuration nor by an argument"
        raise TranslationError(message("the number of ranks", problem, "", "Pass world_size=8"))
    if target.strategy is None:
        return Translation(_plan(target, model), notes)
    # Through FSDP1's own arguments, so that units, dtypes and buffers are as in FSDP1.
    precision = target.precision
    mixed = fsdp.MixedPrecision(precision.param, precision.reduce, precision.buffer)
    arguments: dict[str, Any] = {
        "sharding_strategy": target.strategy,
        "auto_wrap_policy": None if target.wrap.by == "root" else set(_classes_of(target.wrap, model)),
        "cpu_offload": fsdp.CPUOffload(offload_params=True) if target.offload else None,
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
        return replace(unit, checkpoint_activations=block and target.checkpoint_activations)

    plan = replace(made.plan, units=tuple(map(settled, made.plan.units)))
    return replace(made, plan=plan, notes=(*notes, *more))


def _plan(target: Target, model: nn.Module) -> ShardingPlan:
    precision, pins = target.precision, target.pin_memory and accelerator() != "cpu"
    plan = plan_model(
        model,
        units=_rules(target, model),
        mesh=target.mesh,
        reshard_after_forward=target.reshard_after_forward,
        mp_policy=fsdp.MixedPrecisionPolicy(precision.param, precision.reduce or precision.param, precision.output),
        offload_policy=fsdp.CPUOffloadPolicy(pin_memory=pins) if target.offload else fsdp.OffloadPolicy(),
        checkpoint_activations=target.checkpoint_activations,
    )
    if target.vision_casts:
        return plan
    towers = tuple(_towers_of(model))
    units = (
        replace(unit, mp_policy=replace(unit.mp_policy, cast_forward_inputs=False))
        if all(fqn.startswith(towers) for fqn in unit.modules)
        else unit
        for unit in plan.units
    )
    return replace(plan, units=tuple(units))


def _towers_of(model: nn.Module) -> Iterator[str]:
    return (f"{fqn}." for fqn, _ in model.named_modules() if fqn.rpartition(".")[2] in _TOWERS)


def _rules(target: Target, model: nn.Module) -> list[Rule]:
    wrap, fix = target.wrap, "Turn it off"
    splits_experts = target.mesh is not None and "ep" in target.mesh.axis_names
    rules: list[Rule] = [_experts_in_one_parameter] if splits_experts else []
    if target.tiles > 1:
        mlps = find_mlps(ModelTree(model))
        if not mlps:
            raise TranslationError(message("tiles", "needs a class of the model that is named as an MLP", "", fix))
        rules.append(by_name(*mlps, tiles=target.tiles))
    ends = {"wrap_embeddings": "input"} if wrap.embeddings else {}
    ends |= {"wrap_lm_output": "output"} if wrap.head else {}
    for key, which in ends.items():
        module = getattr(model, f"get_{which}_embeddings", lambda: None)()
        found = [fqn for fqn, each in model.named_modules() if each is module]
        if not found:
            raise TranslationError(message(key, f"needs a model with get_{which}_embeddings()", "", fix))
        rules.append(by_name(found[0]))
    if wrap.skipped:
        rules.append(by_class(*_classes_of(Wrap("classes", wrap.skipped), model), may_skip=True))
    if wrap.by != "root":
        rules.append(by_class(*_classes_of(wrap, model)))
    return [*rules, by_name("", reshard_after_forward=target.root_reshards)]


def find_mlps(tree: ModelTree) -> list[str]:
    """Return the modules that are MLPs by the name of their class, without convolutions, and no experts."""
    found: dict[str, None] = {}
    for node in tree.nodes:
        fqn, names = node.fqn, [below.fqn.lower() for below in node.subtree()]
        is_mlp = _MLP.search(type(node.module).__name__) and found.keys().isdisjoint(ancestors(fqn))
        dims = [tree.params[param].dim() for below in node.subtree() for param in below.params]
        if is_mlp and dims and max(dims) < 3 and not any("expert" in name for name in names):
            found[fqn] = None
    return list(found)


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


# --- Writing ----------------------------------------------------------------------------------------------------------


def comments(reading: Reading, notes: Sequence[Note]) -> list[str]:
    """Return the format and the notes as comment lines of YAML and Python."""
    width = max((len(note.argument) for note in notes), default=0)
    lines = [f"# {note.support:<9} {note.argument:<{width}}  {note.value}: {note.sentence}" for note in notes]
    return [f"# {reading.format}", *(line.replace("\n", " ") for line in lines)]


def torch_code(made: Translation) -> str:
    """Return the plan as torch code, with the broadcast of rank 0's values before it and the casts of buffers after."""
    before = _BROADCAST if made.sync_module_states else ""
    casts = (
        f'model.get_buffer("{name}").data = model.get_buffer("{name}").data.to({dtype})\n'
        for name, dtype in made.buffer_dtypes.items()
    )
    return before + made.plan.to_python() + "".join(casts)


def accelerate2(target: Target) -> str:
    """Return accelerate's YAML with ``fsdp_version: 2``; ``notes_on_accelerate`` lists what is not in it."""
    precision = f"mixed_precision: '{_DTYPES.get(target.precision.param, 'no')}'"  # quoted: YAML reads no as false
    kind = f"distributed_type: {'MULTI_GPU' if target.is_ddp else 'FSDP'}"
    lines = ["compute_environment: LOCAL_MACHINE", kind, precision]
    if not target.is_ddp:
        lines += ["fsdp_config:"]
        for key, value in _fsdp(target):
            lines.append(f"  fsdp_{key}: {str(value).lower() if isinstance(value, bool) else value}")
    if target.mesh is not None:
        beside = target.axes.get("tp", 1) * target.axes.get("ep", 1)  # whose ranks are not among those of the mesh
        lines.append(f"num_processes: {target.mesh.size * beside}")
    if not target.is_ddp and target.mesh is not None and (target.mesh.replicates or target.axes):
        lines += ["parallelism_config:", *(f"  parallelism_config_{axis}_size: {size}" for axis, size in _axes(target))]
    return "\n".join(lines) + "\n"


def notes_on_accelerate(target: Target, model: nn.Module | None = None) -> tuple[Note, ...]:
    """Return notes on what accelerate's file with version 2 says differently or cannot say; None is any model."""
    differences = _differences(target, model)
    return tuple(Note("--to accelerate2", what, support, said) for holds, support, what, said in differences if holds)


def _differences(target: Target, model: nn.Module | None) -> Iterator[tuple[bool, Support, str, str]]:
    """Yield each possible difference, and whether it holds. Noted ones do not change what is trained."""
    precision, wrap = target.precision, target.wrap
    if target.is_ddp:
        same = "Version 2 has no such strategy; DistributedDataParallel trains the same."
        yield True, "noted", "replicates only", same
        cast = f"parameters in {precision.param}"
        yield precision.param is not None, "refused", cast, "With MULTI_GPU accelerate autocasts instead."
        return
    no_prefetch = "accelerate refuses fsdp_forward_prefetch in version 2."
    yield target.prefetch > 0, "noted", f"prefetch={target.prefetch}", no_prefetch
    yield target.root_reshards, "noted", "the root reshards after forward", "accelerate keeps it gathered."
    unpinned = target.offload and not target.pin_memory
    yield unpinned, "noted", "pin_memory=False", "accelerate pins what it offloads."
    ends = "Name their classes beside those of the blocks."
    yield wrap.embeddings or wrap.head, "noted", "embedding and head are units", ends
    yield target.tiles > 1, "noted", f"MLPs in {target.tiles} tiles", "accelerate computes them whole."
    alike = "accelerate broadcasts only with fsdp_cpu_ram_efficient_loading: set it, or seed all ranks alike."
    yield target.sync_module_states and not target.rank0_loads, "noted", "sync_module_states", alike
    dtypes = f"parameters in {precision.param}, gradients in {precision.reduce}"
    mixed = precision.reduce not in (precision.param, None) or precision.param not in _DTYPES
    policy = f"MixedPrecisionPolicy({precision.param}, {precision.reduce or precision.param}, {precision.output})"
    one = "accelerate's file has one mixed_precision for both. After Accelerator(...) the program sets "
    yield mixed, "noted", dtypes, f"{one}accelerator.state.fsdp_plugin.mixed_precision_policy = {policy}."
    inputs, casts = "vision blocks take inputs as they are", "accelerate casts the inputs of every unit."
    matters = model is not None and any(_towers_of(model))
    yield not target.vision_casts and (model is None or matters), "refused" if matters else "noted", inputs, casts
    experts = "ep" in target.axes or (target.mesh is not None and "ep" in target.mesh.axis_names)
    yield experts, "refused", "experts on an axis of their own", "accelerate has the axes tp, cp and sp."
    skips = "Ranks that skip an expert hang there: keep the patch that calls all experts."
    yield bool(wrap.skipped), "noted", f"may_skip for {listing(wrap.skipped)}", skips


def _fsdp(target: Target) -> Iterator[tuple[str, object]]:
    yield "version", 2
    yield "reshard_after_forward", target.reshard_after_forward
    yield "auto_wrap_policy", "NO_WRAP" if target.wrap.by == "root" else "TRANSFORMER_BASED_WRAP"
    if target.wrap.classes:
        yield "transformer_layer_cls_to_wrap", ",".join(target.wrap.classes)
    yield "offload_params", target.offload
    yield "cpu_ram_efficient_loading", target.rank0_loads
    yield "activation_checkpointing", target.checkpoint_activations
    yield "state_dict_type", "FULL_STATE_DICT" if target.state_dict_type == "full" else "SHARDED_STATE_DICT"


def _axes(target: Target) -> Iterator[tuple[str, int]]:
    assert target.mesh is not None
    context = target.axes.get("cp", 1) * target.axes.get("sp", 1)  # their ranks shard the parameters too
    yield "dp_replicate", target.mesh.shape[0] if target.mesh.replicates else 1
    yield "dp_shard", target.mesh.shard_size // context
    for axis in ("tp", "cp", "sp"):
        if axis != "sp" or "sp" in target.axes:
            yield axis, target.axes.get(axis, 1)
