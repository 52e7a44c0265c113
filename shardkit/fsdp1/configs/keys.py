"""The keys of an ``fsdp_config`` section, which accelerate, transformers and axolotl share.

Facts from accelerate 1.x (``FullyShardedDataParallelPlugin``, ``commands/launch.py``), transformers 4 and 5
(``TrainingArguments.fsdp_config``) and axolotl 0.x (``utils/schemas/fsdp.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from shardkit.errors import TranslationError, message
from shardkit.fsdp1.configs.reader import Reader
from shardkit.fsdp1.configs.target import Precision, Ranks, Target, Wrap
from shardkit.fsdp1.configs.values import ANYTHING, BOOLEAN, NAMES, NUMBER, choice
from shardkit.fsdp1.translate.strategy import parse_strategy, resolve_strategy
from shardkit.plan import MeshSpec

POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")

VERSION = choice("1", "2")
VERSION_ANSWER: tuple[Literal["mapped"], str] = ("mapped", "The version of FSDP that the other keys are read for.")


@dataclass(frozen=True)
class Given:
    """What a format says outside of its ``fsdp_config``.

    Attributes:
        version: 1 or 2, of FSDP.
        ranks: world size and ranks of a node, as far as they are known.
        precision: of mixed precision.
        strategy: where it is said elsewhere, as in transformers' ``fsdp="full_shard"``.
        offload: likewise.
        mesh: the data-parallel mesh, where sizes of axes are given; None is all ranks.
        axes: the other axes.
        root: whether the root reshards when blocks do, in version 2.
        policy: the wrap policy where none is named.
        compile: whether blocks are compiled.
        wrap: the units, where the format has its own way to say what they are, whether they offload and recompute;
            None asks the section.
    """

    version: Literal[1, 2]
    ranks: Ranks
    precision: Precision = field(default_factory=Precision)
    strategy: ShardingStrategy | None = None
    offload: bool = False
    mesh: MeshSpec | None = None
    axes: tuple[tuple[str, int], ...] = ()
    root: bool = False
    policy: str = "NO_WRAP"
    compile: bool = False
    wrap: Wrap | None = None


def read_fsdp(section: Reader, given: Given) -> Target:
    """The target of an ``fsdp_config`` section; every key that it knows is answered for."""
    strategy = _strategy(section, given)
    own = given.wrap is not None
    offload = given.offload if own else _offload(section, given)
    mesh = _mesh(section, given, strategy)
    arguments = _fsdp1_arguments(section, given, strategy)
    _only_told(section)
    return Target(
        mesh=mesh,
        reshard_after_forward=strategy.name in ("FULL_SHARD", "HYBRID_SHARD"),
        root_reshards=given.root and given.version == 2 and strategy is ShardingStrategy.FULL_SHARD,
        wrap=given.wrap or _wrap(section, given),
        precision=given.precision,
        casts="all" if given.version == 2 else "root",
        offload=offload,
        pin_memory=_pin_memory(section, given, offload),
        checkpoint_activations=not own and _checkpointing(section),
        compile=given.compile,
        prefetch=1 if arguments["forward_prefetch"] else 0,
        sync_module_states=bool(arguments["sync_module_states"]),
        rank0_loads=_rank0_loads(section),
        state_dict_type=_state_dict_type(section),
        axes=dict(given.axes),
        fsdp1=arguments if given.version == 1 else None,
    )


def _strategy(section: Reader, given: Given) -> ShardingStrategy:
    """From ``sharding_strategy``, or from ``reshard_after_forward``, which in version 1 takes its names too."""
    if given.version == 2:
        return _strategy_of_version_2(section, given)
    written = [key for key in ("sharding_strategy", "reshard_after_forward") if section.raw(key) is not None]
    for key in ("sharding_strategy", "reshard_after_forward"):
        if key not in written:
            section.note(key, "implied", "null is no choice.")
    if not written:
        return given.strategy or ShardingStrategy.FULL_SHARD
    found = [_parsed(section, key) for key in written]
    _note_strategy(section, given, written[0], found[0])
    if len(written) == 2:
        differs = found[0] is not found[1]
        other = "says otherwise" if differs else "says the same"
        fate: Literal["noted", "implied"] = "noted" if differs else "implied"
        section.note(written[1], fate, f"It {other}, and in version 1 sharding_strategy goes before it.")
    return found[0]


def _parsed(section: Reader, key: str) -> ShardingStrategy:
    value = section.raw(key)
    if isinstance(value, bool) or str(value).lower() in ("true", "false"):  # accelerate's default is the text "true"
        return ShardingStrategy.FULL_SHARD if str(value).lower() == "true" else ShardingStrategy.SHARD_GRAD_OP
    try:
        return parse_strategy(value)
    except TranslationError:
        names = ", ".join(strategy.name.lstrip("_") for strategy in ShardingStrategy)
        section.problem(key, repr(value), f"It is one of {names}, or their number from 1", "Use FULL_SHARD")
        return ShardingStrategy.FULL_SHARD


def _note_strategy(section: Reader, given: Given, key: str, strategy: ShardingStrategy) -> None:
    if given.strategy not in (None, strategy):
        assert given.strategy is not None
        section.problem(
            key,
            f"{strategy.name}, and elsewhere {given.strategy.name}",
            "A configuration has one sharding strategy",
            "Leave one of them out",
        )
    section.note(key, "mapped", STRATEGIES[strategy.name.lstrip("_")])


STRATEGIES = {  # by torch's names without the underscore
    "FULL_SHARD": "One axis of all ranks, and reshard_after_forward=True.",
    "SHARD_GRAD_OP": "One axis of all ranks, and reshard_after_forward=False.",
    "NO_SHARD": "A mesh of (ranks, 1): gradients are all-reduced and nothing is sharded, as FSDP1 does.",
    "HYBRID_SHARD": "Replicates across nodes and shards inside, and reshard_after_forward=True.",
    "HYBRID_SHARD_ZERO2": "Replicates across nodes and shards inside, and reshard_after_forward=False.",
}


def _strategy_of_version_2(section: Reader, given: Given) -> ShardingStrategy:
    default = given.strategy is not ShardingStrategy.SHARD_GRAD_OP
    reshard = section.get("reshard_after_forward", BOOLEAN, default)
    where = "True frees gathered parameters after forward" if reshard else "False keeps them until backward"
    section.note("reshard_after_forward", "mapped", f"{where}, in all units but the root.")
    _unread_strategy(section, reshard)
    return ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP


def _unread_strategy(section: Reader, reshard: bool) -> None:
    if section.raw("sharding_strategy") is None:
        section.note("sharding_strategy", "implied", "It is null.")
    elif _parsed(section, "sharding_strategy").name == ("FULL_SHARD" if reshard else "SHARD_GRAD_OP"):
        section.note("sharding_strategy", "implied", "Version 2 does not read it; reshard_after_forward says the same.")
    else:
        section.note(
            "sharding_strategy",
            "refused",
            "Version 2 does not read it, and reshard_after_forward says otherwise. Say fsdp_version: 1, or leave it "
            "out and give a hybrid one the sizes of a mesh.",
        )


def _mesh(section: Reader, given: Given, strategy: ShardingStrategy) -> MeshSpec | None:
    if given.mesh is not None or given.ranks.world_size is None:
        if given.mesh is None and strategy.name not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            section.trouble(_unknown_world(strategy))
        return given.mesh
    try:
        return resolve_strategy(strategy, given.ranks.world_size, given.ranks.per_node).mesh
    except TranslationError as error:
        section.trouble(error)
        return None


def _unknown_world(strategy: ShardingStrategy) -> TranslationError:
    return TranslationError(
        message(
            "world_size",
            f"{strategy.name.lstrip('_')}, and nothing says how many ranks there are",
            "Its mesh has two axes, whose sizes multiply to the ranks",
            "Pass world_size=16, or --world 16",
        )
    )


def _wrap(section: Reader, given: Given) -> Wrap:
    policy = section.get("auto_wrap_policy", choice(*POLICIES, numbered=True), given.policy)
    classes = section.get("transformer_layer_cls_to_wrap", NAMES, ())
    least = section.get("min_num_params", NUMBER, 0)
    by_class, by_size = policy == POLICIES[0], policy == POLICIES[1] and least > 0
    unread = f"auto_wrap_policy {policy} does not read it."
    section.note(
        "transformer_layer_cls_to_wrap",
        "mapped" if by_class else "noted",
        f"A unit of each {' and '.join(classes) or 'block that the model declares'}." if by_class else unread,
    )
    section.note("min_num_params", *_size_answer(policy, least, unread))
    section.note("auto_wrap_policy", *_policy_answer(policy, classes, least))
    if by_class:
        return Wrap("classes", classes) if classes else Wrap("declared")
    return Wrap("size", min_num_params=least) if by_size else Wrap("root")


def _size_answer(policy: str, least: int, unread: str) -> tuple[Literal["mapped", "noted"], str]:
    if policy != POLICIES[1]:
        return "noted", unread
    if least == 0:
        return "mapped", "With 0 there are no units but the root, which is what SIZE_BASED_WRAP makes of it."
    return "mapped", f"A unit of each module that holds {least} elements beside those of inner units."


def _policy_answer(policy: str, classes: tuple[str, ...], least: int) -> tuple[Literal["mapped", "noted"], str]:
    if policy == POLICIES[0]:
        which = ", ".join(classes) if classes else "that the model declares in _no_split_modules"
        return "mapped", f"Units by class: {which}."
    if policy == POLICIES[1] and least > 0:
        return "mapped", f"Units by size, from {least} elements."
    return "noted", "No units but the root, so the whole model is gathered at once: as before, and rarely meant."


def _offload(section: Reader, given: Given) -> bool:
    found = given.offload
    for key in ("offload_params", "cpu_offload"):  # accelerate's and axolotl's, and transformers' since 5
        asked = section.get(key, BOOLEAN, False)
        sentence = "CPUOffloadPolicy for every unit." if asked else "Shards stay on the device, which is the default."
        section.note(key, "mapped", sentence)
        found = found or asked
    return found


def _pin_memory(section: Reader, given: Given, offload: bool) -> bool | None:
    pin = section.find("cpu_offload_pin_memory", BOOLEAN)
    if pin is False and given.version == 1:
        sentence = "FSDP1 always pins offloaded parameters. Say fsdp_version: 2 to turn it off."
        section.note("cpu_offload_pin_memory", "refused", sentence)
    elif pin is False and not offload:
        section.note("cpu_offload_pin_memory", "refused", "There is nothing to pin without offload_params: true.")
    elif pin is False:
        section.note("cpu_offload_pin_memory", "mapped", "CPUOffloadPolicy(pin_memory=False).")
    else:
        section.note("cpu_offload_pin_memory", "implied", "Offloaded shards are pinned where there is an accelerator.")
    return pin if offload else None


def _checkpointing(section: Reader) -> bool:
    asked = section.get("activation_checkpointing", BOOLEAN, False)
    sentence = (
        "checkpoint_activations=True for the units that are blocks; do not turn on the model's own "
        "gradient_checkpointing too."
        if asked
        else "Activations are kept, which is the default."
    )
    section.note("activation_checkpointing", "mapped", sentence)
    return asked


def _rank0_loads(section: Reader) -> bool:
    asked = section.get("cpu_ram_efficient_loading", BOOLEAN, False)
    section.note(
        "cpu_ram_efficient_loading",
        "noted" if asked else "implied",
        "Only rank 0 was to read the weights. Build the model on meta, shard it, and load each rank's rows: "
        "init_on_meta, then load_checkpoint or load_full_state_dict."
        if asked
        else "Every rank loads the weights.",
    )
    return asked


def _state_dict_type(section: Reader) -> str | None:
    kind = section.find("state_dict_type", choice(*STATE_DICTS, "full", "sharded", numbered=True))
    if kind == "LOCAL_STATE_DICT":
        sentence = "FSDP2 has no local state dict. Use SHARDED_STATE_DICT, which any number of ranks can load."
        section.note("state_dict_type", "refused", sentence)
        return None
    sharded = kind in ("SHARDED_STATE_DICT", "sharded")
    sentence = (
        "model.state_dict() is sharded: save it with save_checkpoint or torch.distributed.checkpoint."
        if sharded
        else "model.state_dict() is sharded in FSDP2; full_state_dict(model) gives the whole one."
    )
    section.note("state_dict_type", "noted", sentence)
    return None if kind is None else "sharded" if sharded else "full"


def _fsdp1_arguments(section: Reader, given: Given, strategy: ShardingStrategy) -> dict[str, Any]:
    """FSDP1's arguments that have keys of their own; version 2 has none of these."""
    if given.version == 2:
        return _left_over_from_version_1(section)
    sync = section.get("sync_module_states", BOOLEAN, True)
    section.note(
        "sync_module_states", "mapped", "Rank 0's values are broadcast before sharding." if sync else "Not broadcast."
    )
    forward = section.get("forward_prefetch", BOOLEAN, False)
    sentence = "prefetch=1: each unit gathers the next one explicitly." if forward else "torch gathers one unit ahead."
    section.note("forward_prefetch", "mapped" if forward else "implied", sentence)
    limit = section.get("limit_all_gathers", BOOLEAN, True)
    section.note(
        "limit_all_gathers",
        "implied" if limit else "noted",
        "FSDP2 never gathers more than two units at once." if limit else "FSDP2 always limits them.",
    )
    original = section.get("use_orig_params", BOOLEAN, True)
    sentence = "FSDP2 keeps the parameters apart, each under its own name."
    section.note("use_orig_params", "implied" if original else "noted", sentence)
    return {
        "sharding_strategy": strategy,
        "sync_module_states": sync,
        "forward_prefetch": forward,
        "limit_all_gathers": limit,
        "use_orig_params": original,
        "backward_prefetch": _backward_prefetch(section),
    }


def _backward_prefetch(section: Reader) -> BackwardPrefetch | None:
    names = []
    for key in ("backward_prefetch", "backward_prefetch_policy"):  # the second until accelerate 0.30
        name = section.get(key, choice(*PREFETCHES, numbered=True), "BACKWARD_PRE")
        names += [name] if section.raw(key) is not None else []
        before = name == "BACKWARD_PRE"
        sentence = (
            "FSDP2 gathers the next unit of backward before the current one's gradients."
            if before
            else "FSDP2 prefetches as BACKWARD_PRE does: more overlap, one more gathered unit in memory."
        )
        section.note(key, "implied" if before else "noted", sentence)
    known: dict[str, BackwardPrefetch | None] = {each.name: each for each in BackwardPrefetch}
    return known.get(names[0]) if names else BackwardPrefetch.BACKWARD_PRE


def _left_over_from_version_1(section: Reader) -> dict[str, Any]:
    for key in ("backward_prefetch", "backward_prefetch_policy", "limit_all_gathers", "use_orig_params"):
        section.note(key, "noted", "Version 2 has no such key and does not read it.")
    section.note("sync_module_states", "noted", "Version 2 does not read it; rank 0's values are not broadcast.")
    forward = section.get("forward_prefetch", BOOLEAN, False)
    fate: Literal["refused", "implied"] = "refused" if forward else "implied"
    asked = "Version 2 refuses it. Leave it out, or give shardkit prefetch=1." if forward else "It is off."
    section.note("forward_prefetch", fate, asked)
    return {"sync_module_states": False, "forward_prefetch": False}


def _only_told(section: Reader) -> None:
    """Keys that change nothing about the plan, and those that shardkit cannot follow."""
    ignored = section.find("ignored_modules", ANYTHING)
    fate: Literal["refused", "implied"] = "refused" if ignored else "implied"
    sentence = "Which parameters these are is for the model to say: pass ignored_params to plan_model."
    section.note("ignored_modules", fate, sentence if ignored else "None.")
    section.note("mixed_precision_policy", "noted", "accelerate takes it from mixed_precision, and so was it here.")
