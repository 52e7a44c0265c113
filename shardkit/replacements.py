"""The table of FSDP1's arguments, names and attributes, with the replacement of each.

The notes of translations, error messages, the audit and ``docs/migrating-from-fsdp1.md`` are generated from it.
``python -m shardkit.replacements`` prints the tables of the page.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

Support: TypeAlias = Literal["mapped", "implied", "noted", "decision", "refused", "elsewhere", "unknown"]

SUPPORT: dict[Support, str] = {
    "mapped": "FSDP2 does the same, and the plan or the translation says so",
    "implied": "FSDP2 always does the same",
    "noted": "FSDP2 differs in memory, time or format, not in what is trained",
    "decision": "you must decide",
    "refused": "FSDP2 does not support it",
    # Only for keys of a configuration:
    "elsewhere": "not about sharding",
    "unknown": "a key that shardkit does not know and ignores",
}
"""What each kind of support means, for reports of translations; best first."""


class Row(NamedTuple):
    """The replacement of an argument, a name or an attribute.

    Attributes:
        support: the support of an ordinary use; some values of an argument have a worse one.
        sentence: an explanation without a full stop; empty if ``use`` suffices.
        use: a template for one line of code: ``{receiver}`` is the model that a method is called on, ``{model}`` the
            first argument, ``{args}`` all arguments as written, ``{member}`` what follows the name, and other fields
            are arguments by torch's names. For constructor arguments: the one of ``shard_model``. Empty: remove it.
    """

    support: Support
    sentence: str
    use: str = ""

    def line(self, **fields: str) -> str:
        """Return ``use`` filled in with ``fields``; the model is ``model`` by default, and unknown fields ``...``."""
        known = {"receiver": "model", "model": "model", "optim": "optimizer"}
        return self.use.format_map(collections.defaultdict(lambda: "...", known | fields))

    def fix(self) -> str:
        """Return the fix for an error message."""
        text = ": ".join(filter(None, (self.use and f"Use {self.line()}", self.sentence)))
        return text[:1].upper() + text[1:]


# In the order of FullyShardedDataParallel.__init__; a test compares the names with its signature.
ARGUMENTS: dict[str, Row] = {
    "module": Row(
        "mapped",
        "Sharded in place and returned, so FQNs do not change; unused parameters are reduced as zeros, as in FSDP1",
        "model",
    ),
    "process_group": Row("mapped", "The mesh's axis; the pair (shard, replicate): its two axes", "mesh="),
    "sharding_strategy": Row(
        "mapped",
        "The mesh and reshard_after_forward; the root is not resharded after forward, as in FSDP1",
        "reshard_after_forward=False for SHARD_GRAD_OP, MeshSpec.hybrid(...) for HYBRID_SHARD",
    ),
    "cpu_offload": Row(
        "mapped",
        "CPUOffloadPolicy for every unit; memory is pinned if there is an accelerator",
        "offload_policy=CPUOffloadPolicy()",
    ),
    "auto_wrap_policy": Row(
        "mapped",
        "The policy is called as in FSDP1; each module it chooses is a unit, and so is the root",
        "units=by_class(Block) or by_size(...), or nothing: the default rule finds the blocks",
    ),
    "backward_prefetch": Row(
        "implied",
        "FSDP2 always all-gathers the next unit before a unit's backward, like BACKWARD_PRE; other values are noted",
        "prefetch=",
    ),
    "mixed_precision": Row("mapped", "MixedPrecisionPolicy, field by field", "mp_policy=MixedPrecisionPolicy(...)"),
    "ignored_modules": Row(
        "mapped",
        "Their parameters become ignored_params, and no unit is made of them; FSDP2 moves their buffers to the device",
        "ignored_params=[*module.parameters()]",
    ),
    "param_init_fn": Row(
        "mapped",
        "Called with each module of a unit on meta, right before the unit is sharded, as in FSDP1",
        "init_on_meta() and materialize(model)",
    ),
    "device_id": Row(
        "mapped",
        "The mesh's device, selected before sharding; FSDP2 moves each unit to it",
        "nothing: the model is moved to the mesh's device",
    ),
    "sync_module_states": Row(
        "mapped",
        "Parameters and buffers are broadcast from the first rank, before a unit is sharded",
        "sync_module_states=",
    ),
    "forward_prefetch": Row("mapped", "prefetch=1: each unit all-gathers the next one early", "prefetch="),
    "limit_all_gathers": Row(
        "implied",
        "FSDP2 always limits all-gathers, without blocking the CPU; False is noted",
        "nothing: FSDP2 always does this",
    ),
    "use_orig_params": Row(
        "implied",
        "Always on: parameters keep their names, and become DTensors. False, FSDP1's default, is noted",
        "nothing: FSDP2 always does this",
    ),
    "ignored_states": Row("mapped", "As ignored_modules; parameters: ignored_params", "ignored_params="),
    "device_mesh": Row("mapped", "The mesh itself, or a named mesh of its groups", "mesh="),
}

# The fields of MixedPrecision and CPUOffload, in their order.
FIELDS: dict[str, Row] = {
    "mixed_precision.param_dtype": Row("mapped", "param_dtype of the policy; outputs stay in it"),
    "mixed_precision.reduce_dtype": Row("mapped", "reduce_dtype of the policy; if None, param_dtype"),
    "mixed_precision.buffer_dtype": Row(
        "mapped",
        "Buffers are cast once, after sharding. FSDP1 cast them at the first forward, and back in state_dict()",
    ),
    "mixed_precision.keep_low_precision_grads": Row("noted", "FSDP2's gradients have the parameters' dtype"),
    "mixed_precision.cast_forward_inputs": Row(
        "mapped", "cast_forward_inputs of every unit that has parameters; False is FSDP1's default, and True is FSDP2's"
    ),
    "mixed_precision.cast_root_forward_inputs": Row("mapped", "cast_forward_inputs of the root"),
    "mixed_precision._module_classes_to_ignore": Row(
        "mapped",
        "With an auto_wrap_policy each module of these classes is a unit in float32, and casts its outputs back",
    ),
    "cpu_offload.offload_params": Row(
        "mapped", "CPUOffloadPolicy; gradients may accumulate outside of no_sync, which FSDP1 did not support"
    ),
}

# New arguments for values that FSDP1 read from the machine.
OURS: dict[str, Row] = {
    "ranks_per_node": Row(
        "mapped",
        "Ranks that shard together in a hybrid strategy; None is torchrun's LOCAL_WORLD_SIZE, not a count of devices",
    ),
    "world_size": Row("mapped", "The number of ranks to plan for without a process group"),
}

STRATEGIES: dict[str, Row] = {
    "FULL_SHARD": Row("mapped", "mesh (world,), reshard_after_forward=True"),
    "SHARD_GRAD_OP": Row("mapped", "mesh (world,), reshard_after_forward=False"),
    "NO_SHARD": Row("mapped", "mesh (world, 1): gradients are all-reduced, and each rank holds the whole model"),
    "HYBRID_SHARD": Row("mapped", "mesh (nodes, ranks_per_node), reshard_after_forward=True"),
    "_HYBRID_SHARD_ZERO2": Row("mapped", "mesh (nodes, ranks_per_node), reshard_after_forward=False"),
}

ROWS = {**ARGUMENTS, **FIELDS, **OURS}

# Names of torch.distributed.fsdp and its public modules

FSDP = "FullyShardedDataParallel"

_TAKEN = "shard_like_fsdp1 accepts it"
_OURS = "from shardkit.state"
_RANKS = f"{_OURS}; pass rank0_only=False where every rank uses it"
_LOADS = f"it also loads, so remove the optimizer.load_state_dict that follows; {_OURS}"
_EACH_CALL = "remove it: pass its settings to each call"
NO_FLAT = "FSDP2 has no flat parameters: save_checkpoint writes shards, and load_checkpoint reads local state dicts"
_NO_SETTING = "FSDP2 keeps no setting on the model; use full_state_dict(model) or sharded_state_dict(model)"

NAMES: dict[str, Row] = {
    FSDP: Row("mapped", "", "FSDPModule"),  # without a call; the audit judges a call by its arguments
    "FlatParameter": Row("refused", "FSDP2 shards each parameter separately", "DTensor"),
    "ShardedGradScaler": Row("mapped", "from shardkit: its device is the accelerator by default", "GradScaler({args})"),
    # Settings
    "ShardingStrategy": Row("mapped", "", '"{member}"'),
    "BackwardPrefetch": Row("noted", "FSDP2 always prefetches in backward, like BACKWARD_PRE"),
    "MixedPrecision": Row("mapped", f"{_TAKEN}; shard_model takes MixedPrecisionPolicy, without buffer_dtype"),
    "CPUOffload": Row("mapped", f"{_TAKEN}; shard_model takes CPUOffloadPolicy()"),
    # Policies
    "always_wrap_policy": Row("mapped", _TAKEN, "units=lambda fqn, module: True"),
    "lambda_auto_wrap_policy": Row("mapped", _TAKEN, "units=lambda fqn, module: ..."),
    "transformer_auto_wrap_policy": Row("mapped", _TAKEN, "units=by_class(...)"),
    "size_based_auto_wrap_policy": Row("noted", f"{_TAKEN}; by_size counts differently", "units=by_size(...)"),
    "ModuleWrapPolicy": Row("mapped", _TAKEN, "units=by_class(...)"),
    "CustomPolicy": Row("noted", f"{_TAKEN}, with the dicts it returns", "units=lambda fqn, module: ..."),
    "enable_wrap": Row(
        "decision",
        "shard the whole model in one call, and name the wrapped modules by class or FQN",
        "shard_model(model, units=[...])",
    ),
    "wrap": Row("decision", "do not wrap the module; name it in units of shard_model", "{model}"),
    # State dict types
    "StateDictType": Row("noted", f"{_EACH_CALL}, full_state_dict or sharded_state_dict"),
    "StateDictSettings": Row("decision", _NO_SETTING),
    "FullStateDictConfig": Row("noted", f"{_EACH_CALL}: full_state_dict(model, rank0_only=...), on the CPU"),
    **dict.fromkeys(("StateDictConfig", "OptimStateDictConfig"), Row("noted", _EACH_CALL)),
    "FullOptimStateDictConfig": Row(
        "noted", f"{_EACH_CALL}: full_optimizer_state_dict(model, optimizer, rank0_only=...), on the CPU"
    ),
    **dict.fromkeys(("ShardedStateDictConfig", "ShardedOptimStateDictConfig"), Row("mapped", _EACH_CALL)),
    **dict.fromkeys(("LocalStateDictConfig", "LocalOptimStateDictConfig"), Row("refused", NO_FLAT)),
    "OptimStateKeyType": Row("noted", "keys are always FQNs"),
}

# Methods and attributes of a wrapped model

MEMBERS: dict[str, Row] = {
    # Called on the class, with a model
    "summon_full_params": Row("mapped", _OURS, "full_params({model}, writeback=True)"),
    **dict.fromkeys(("state_dict_type", "set_state_dict_type"), Row("noted", f"remove it: {_NO_SETTING}")),
    "get_state_dict_type": Row("decision", _NO_SETTING),
    "optim_state_dict": Row("noted", _RANKS, "full_optimizer_state_dict({model}, {optim})"),
    "optim_state_dict_to_load": Row(
        "noted", _LOADS, "load_full_optimizer_state_dict({model}, {optim}, {optim_state_dict})"
    ),
    "full_optim_state_dict": Row("noted", _RANKS, "full_optimizer_state_dict({model}, {optim})"),
    "sharded_optim_state_dict": Row("noted", _OURS, "sharded_optimizer_state_dict({model}, {optim})"),
    "shard_full_optim_state_dict": Row(
        "noted", _LOADS, 'load_full_optimizer_state_dict({model}, {optim}, {full_optim_state_dict}, src="all")'
    ),
    "scatter_full_optim_state_dict": Row(
        "noted", _LOADS, "load_full_optimizer_state_dict({model}, {optim}, {full_optim_state_dict})"
    ),
    "flatten_sharded_optim_state_dict": Row(
        "noted", _LOADS, "load_sharded_optimizer_state_dict({model}, {optim}, {sharded_optim_state_dict})"
    ),
    "rekey_optim_state_dict": Row("decision", "keys are always FQNs"),
    "fsdp_modules": Row("mapped", "", "[m for m in {model}.modules() if isinstance(m, FSDPModule)]"),
    # Called on a wrapped model
    "clip_grad_norm_": Row("mapped", "from shardkit", "clip_grad_norm_({receiver}, {args})"),
    "no_sync": Row("mapped", "or accumulate(model, last=...)", "no_sync({receiver})"),
    "module": Row("mapped", "FSDP2 does not wrap the model", "{receiver}"),
    "forward": Row("noted", "a direct call of forward skips the all-gather hooks", "{receiver}({args})"),
    "apply": Row(
        "decision",
        "call it before sharding: afterwards the function sees this rank's shards, not full parameters",
        "{receiver}.apply({args})",
    ),
    "check_is_root": Row("decision", "remove it: FSDP2's root is the module that was sharded last"),
    "register_comm_hook": Row(
        "decision",
        "for each unit; set_all_reduce_hook for replicas",
        "{receiver}.set_custom_reduce_scatter(...)",
    ),
    "named_parameters": Row(
        "noted", "names have no prefixes, and parameters are DTensors", "{receiver}.named_parameters({args})"
    ),
    "named_buffers": Row("mapped", "", "{receiver}.named_buffers({args})"),
    # Methods of nn.Module that FSDP1 overrides
    "state_dict": Row("noted", f"{_RANKS}; unchanged for SHARDED_STATE_DICT", "full_state_dict({receiver})"),
    "load_state_dict": Row("noted", "unchanged for SHARDED_STATE_DICT", "load_full_state_dict({receiver}, {args})"),
}

_GONE = "FSDP2 has no flat parameters and no handles: each parameter is a DTensor"
_ARGUMENT_NOW = "use the argument that the model was sharded with, or its mesh"
_LOCAL = "each is a DTensor, and param.to_local() is this rank's shard"
_LAZY = "remove it: FSDP2 does so at the first forward"

INTERNAL = Row("refused", "FSDP2 has no counterpart; use a public method of FSDPModule")

# Attributes that programs read off a wrapped model.
ATTRIBUTES: dict[str, Row] = {
    "_fsdp_wrapped_module": MEMBERS["module"],
    "process_group": Row("noted", _ARGUMENT_NOW, "mesh.get_group()"),
    "rank": Row("mapped", "", "dist.get_rank()"),
    "world_size": Row("mapped", "", "dist.get_world_size()"),
    **dict.fromkeys(("sharding_strategy", "mixed_precision", "cpu_offload"), Row("decision", _ARGUMENT_NOW)),
    "compute_device": Row("noted", _ARGUMENT_NOW, "mesh.device_type"),
    "training_state": Row("refused", _GONE),
    "params": Row("refused", _LOCAL, "{receiver}.parameters()"),
    "_is_root": MEMBERS["check_is_root"],
    "_lazy_init": Row("decision", _LAZY),
}

_MODULES = Row("refused", MEMBERS["fsdp_modules"].sentence, MEMBERS["fsdp_modules"].use)
_HOOK = MEMBERS["register_comm_hook"]._replace(support="refused")
_HANDLE = Row("refused", "it frees what a forward left gathered; full_params(model) gathers", "module.reshard()")

_UNSHARD = Row("refused", "FSDP2 does so automatically", "FSDPModule.unshard and FSDPModule.reshard")
_STREAMS = ("_all_reduce_stream", "_default_stream", "_post_backward_stream", "_pre_unshard_stream", "_unshard_stream")
ATTRIBUTES |= {
    **dict.fromkeys(("_flat_param", "flat_param"), ATTRIBUTES["params"]),
    **dict.fromkeys(("_handle", "_handles", "_all_handles"), _HANDLE),
    **dict.fromkeys(("_all_fsdp_states", "_fully_sharded_module_to_handle"), _MODULES),
    **dict.fromkeys(("_comm_hook", "_comm_hook_state"), _HOOK),
    "_exec_order_data": Row("refused", "it sets the order of all-gathers", "set_modules_to_forward_prefetch"),
    "_sync_gradients": Row("refused", "or FSDPModule.set_requires_gradient_sync", "no_sync({receiver})"),
    "_unshard": _UNSHARD,
    "_reset_lazy_init": ATTRIBUTES["_lazy_init"],
    **dict.fromkeys(_STREAMS, Row("refused", "FSDP2 does not expose its streams", "FSDPModule.unshard")),
}

# Private names of torch's modules

_NO_PREFIX = Row("mapped", "FSDP2 adds no prefix to names", '""')
_SUMMONED = Row("refused", f"{_OURS}, or FSDP.summon_full_params", "full_params(model, writeback=True)")
_OPTIM = Row("refused", "or FSDP.optim_state_dict", "full_optimizer_state_dict(model, optimizer)")

# By the name of a function, constant or module; the last part of a dotted path that is in this table decides.
PRIVATE: dict[str, Row] = {
    "_or_policy": Row("mapped", _TAKEN, "units=[..., ...]"),
    "_module_wrap_policy": Row("mapped", _TAKEN, "units=by_class(...)"),
    "_wrap_utils": Row("decision", "planning chooses the units", "shard_model(model, units=[...])"),
    "_unshard_param_utils": Row("decision", "or FSDPModule.unshard of each unit", "p.full_tensor()"),
    "_lazy_init": ATTRIBUTES["_lazy_init"],
    "_get_fsdp_states": _MODULES._replace(support="decision"),
    "_get_fsdp_root_states": _MODULES,
    "_get_fsdp_handles": ATTRIBUTES["params"],
    "FSDP_WRAPPED_MODULE": _NO_PREFIX,
    "FSDP_PREFIX": _NO_PREFIX,
    "clean_tensor_name": _NO_PREFIX._replace(use="name"),
    "_replace_with_full_state_dict_type": Row("refused", _OURS, "full_state_dict(model)"),
    **dict.fromkeys(("_unshard", "_reshard"), _UNSHARD),
    **dict.fromkeys(("_unshard_params", "_unshard_params_for_summon", "_unshard_fsdp_state_params"), _SUMMONED),
    **dict.fromkeys(("_enter_unshard_params_ctx", "_exit_unshard_params_ctx"), _SUMMONED),
    **dict.fromkeys(("_optim_state_dict", "_flatten_optim_state_dict", "_rekey_sharded_optim_state_dict"), _OPTIM),
}


def private(path: str) -> Row:
    """Return the row of a private name, by its dotted path below ``torch.distributed.fsdp``."""
    return next((PRIVATE[part] for part in reversed(path.split(".")) if part in PRIVATE), INTERNAL)


# The page


def tables() -> Iterator[str]:
    """Yield the tables of the docs page in Markdown, in order."""
    yield _table("Argument | Support | In FSDP2", {name: row[:2] for name, row in ROWS.items()})
    yield _table("Strategy | Support | In FSDP2", {name: row[:2] for name, row in STRATEGIES.items()})
    uses = {name: ": ".join(filter(None, (row.use and f"`{row.line()}`", row[1]))) for name, row in MEMBERS.items()}
    yield _table(
        "Of a wrapped model | Support | Instead", {name: (row.support, uses[name]) for name, row in MEMBERS.items()}
    )


def _table(header: str, rows: Mapping[str, tuple[str, str]]) -> str:
    """Return a table with one line for names that have the same row."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, row in rows.items():
        names.setdefault(row, []).append(f"`{name}`")
    lines = [f"| {', '.join(alike)} | {support} | {text} |" for (support, text), alike in names.items()]
    return "\n".join([f"| {header} |", "| --- | --- | --- |", *lines])


if __name__ == "__main__":
    print("\n\n".join(tables()))
