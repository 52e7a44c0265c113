"""What becomes of FSDP1: one table of its arguments, names and attributes, with what to use instead of each.

Notes of translations, errors, the audit and ``docs/migrating-from-fsdp1.md`` are written from it;
``python -m shardkit.fsdp1.instead`` prints the tables of the page.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

Fate: TypeAlias = Literal["mapped", "implied", "noted", "decision", "refused", "elsewhere", "unknown"]
Topic: TypeAlias = Literal["optimizer", "internals", "state", "wrapping", "loop", "config", "names"]

FATES: dict[Fate, str] = {  # from good to bad
    "mapped": "FSDP2 does the same, and the plan or the translation says so",
    "implied": "FSDP2 does so unasked",
    "noted": "FSDP2 differs in memory, time or form, not in what is trained",
    "decision": "a person must choose",
    "refused": "FSDP2 cannot do so, and a near thing would be another program",
    # Of keys of a configuration only.
    "elsewhere": "not about sharding, so it is left to what reads it now",
    "unknown": "not a key that shardkit knows, so nothing was done with it",
}


class Row(NamedTuple):
    """What becomes of an argument, a name or an attribute.

    Attributes:
        fate: of plain use; the value of an argument can make it worse.
        sentence: what a reader must know, without a full stop; empty where ``use`` says it all.
        use: a template for one line of code: ``{receiver}`` is the model that a method was called on, ``{model}`` the
            first argument, ``{args}`` all arguments as written, ``{member}`` what followed the name, others are
            arguments by torch's names. Of the constructor's arguments, what ``shard_model`` takes. Empty: leave it out.
        topic: where the audit lists it among what to change first.
    """

    fate: Fate
    sentence: str
    use: str = ""
    topic: Topic = "config"

    def line(self, **fields: str) -> str:
        """``use`` for a model that is called ``model``, unless ``fields`` say otherwise; ``...`` for what is open."""
        known = {"receiver": "model", "model": "model", "optim": "optimizer", "rank0_only": "", "src": ""}
        return self.use.format_map(collections.defaultdict(lambda: "...", known | fields))

    def fix(self) -> str:
        """Return what to do, as the last part of an error's message."""
        text = ": ".join(filter(None, (self.use and f"Use {self.line()}", self.sentence)))
        return text[:1].upper() + text[1:]


_State, _Internal = functools.partial(Row, topic="state"), functools.partial(Row, topic="internals")

# In the order of FullyShardedDataParallel.__init__; a test pins the names to its signature.
ARGUMENTS: dict[str, Row] = {
    "module": Row(
        "mapped",
        "Sharded in place and returned, not wrapped, so every name stays; parameters that a rank does not use are "
        "reduced as zeros, as FSDP1 did (torch >= 2.13)",
        "model",
    ),
    "process_group": Row(
        "mapped",
        "One group is the mesh's only axis; the pair (shard, replicate) is its two axes, replicate first",
        "mesh=",
    ),
    "sharding_strategy": Row(
        "mapped",
        "The mesh and reshard_after_forward; the root stays gathered after forward, as FSDP1's did",
        "reshard_after_forward=False for SHARD_GRAD_OP, MeshSpec.hybrid(...) for HYBRID_SHARD",
    ),
    "cpu_offload": Row(
        "mapped",
        "CPUOffloadPolicy for every unit; memory is pinned where there is an accelerator",
        "offload_policy=CPUOffloadPolicy()",
    ),
    "auto_wrap_policy": Row(
        "mapped",
        "The policy is asked as FSDP1 asks it; each module it chooses is a unit, and so is the root",
        "units=by_class(Block) or by_size(...), or nothing: the default rule finds the blocks",
    ),
    "backward_prefetch": Row(
        "implied",
        "FSDP2 always gathers the next unit before a unit's backward, which is BACKWARD_PRE; BACKWARD_POST and None, "
        "which gather later and hold less, are noted",
        "prefetch=",
    ),
    "mixed_precision": Row(
        "mapped", "MixedPrecisionPolicy for every unit, field by field as below", "mp_policy=MixedPrecisionPolicy(...)"
    ),
    "ignored_modules": Row(
        "mapped",
        "Their parameters are ignored_params, and none of them is a unit; FSDP2 moves their buffers to the device",
        "ignored_params=[*module.parameters()]",
    ),
    "param_init_fn": Row(
        "mapped",
        "Called with each module of a unit that is on meta, right before the unit is sharded, as FSDP1 called it",
        "init_on_meta() and materialize(model, init=...)",
    ),
    "device_id": Row(
        "mapped",
        "The mesh's device, selected before sharding; FSDP2 moves each unit to it",
        "nothing: the model goes to the mesh's device",
    ),
    "sync_module_states": Row(
        "mapped",
        "Parameters and buffers are broadcast from the first rank, unit by unit, before a unit is sharded",
        "sync_module_states=",
    ),
    "forward_prefetch": Row(
        "mapped", "prefetch=1 in the plan: each unit gathers the next one before its forward", "prefetch="
    ),
    "limit_all_gathers": Row(
        "implied",
        "FSDP2 bounds what is gathered at a time without blocking the CPU; False is noted",
        "nothing: it is always so",
    ),
    "use_orig_params": Row(
        "implied",
        "FSDP2 always does what True means; with False, FSDP1's default, it is noted that parameters are DTensors, one "
        "for each of the module's own, where FSDP1 had a FlatParameter for each unit",
        "nothing: it is always so",
    ),
    "ignored_states": Row(
        "mapped", "As ignored_modules for modules, and ignored_params for parameters", "ignored_params="
    ),
    "device_mesh": Row(
        "mapped",
        "The mesh, as it is if it has one axis, or two with names; else its groups in a mesh with names",
        "mesh=",
    ),
}

# The fields of MixedPrecision and CPUOffload, in their order.
FIELDS: dict[str, Row] = {
    "mixed_precision.param_dtype": Row("mapped", "param_dtype of the policy; outputs stay in it, in both"),
    "mixed_precision.reduce_dtype": Row("mapped", "reduce_dtype of the policy; where it is None, param_dtype"),
    "mixed_precision.buffer_dtype": Row(
        "mapped",
        "Floating-point buffers are cast once, after sharding, where FSDP1 cast them at the first forward; it cast "
        "persistent ones back in state_dict(), where they now stay as they are",
    ),
    "mixed_precision.keep_low_precision_grads": Row(
        "noted", "FSDP2 always hands gradients to the optimizer in the parameters' dtype: same values, more memory"
    ),
    "mixed_precision.cast_forward_inputs": Row(
        "mapped", "cast_forward_inputs of every unit that has parameters; False is FSDP1's default, and True is FSDP2's"
    ),
    "mixed_precision.cast_root_forward_inputs": Row("mapped", "cast_forward_inputs of the root"),
    "mixed_precision._module_classes_to_ignore": Row(
        "mapped",
        "With an auto_wrap_policy each module of these classes is a unit that computes in float32, and returns what is "
        "around it computes in",
    ),
    "cpu_offload.offload_params": Row(
        "mapped", "CPUOffloadPolicy; gradients may accumulate without no_sync, which FSDP1 forbade"
    ),
}

# What FSDP1 took from the machine it ran on.
OURS: dict[str, Row] = {
    "ranks_per_node": Row(
        "mapped",
        "The ranks that shard together in a hybrid strategy; None is torchrun's LOCAL_WORLD_SIZE. FSDP1 counted the "
        "node's devices",
    ),
    "world_size": Row("mapped", "The ranks to plan for, so that a plan for a cluster can be made on a laptop"),
}

STRATEGIES: dict[str, Row] = {
    "FULL_SHARD": Row("mapped", "mesh (world,), reshard_after_forward=True"),
    "SHARD_GRAD_OP": Row("mapped", "mesh (world,), reshard_after_forward=False"),
    "NO_SHARD": Row("mapped", "mesh (world, 1), which replicates: only all-reduces, and each rank holds all"),
    "HYBRID_SHARD": Row("mapped", "mesh (nodes, ranks_per_node), reshard_after_forward=True"),
    "_HYBRID_SHARD_ZERO2": Row("mapped", "mesh (nodes, ranks_per_node), reshard_after_forward=False"),
}

ROWS = {**ARGUMENTS, **FIELDS, **OURS}

# Names of torch.distributed.fsdp and its public modules

FSDP = "FullyShardedDataParallel"

_TAKEN = "shard_like_fsdp1 takes it as it is"
_OURS = "of shardkit.state"
_LOADS = f"it loads too, so leave out the optimizer's load_state_dict that follows; {_OURS}"
_EACH_CALL = "leave it out: each call says it"
_NO_FLAT = "FSDP2 has no flat local parameters: save_checkpoint writes shards, and load_checkpoint reads old local ones"
_NO_SETTING = "FSDP2 keeps no setting on the model; use full_state_dict(model) or sharded_state_dict(model)"

NAMES: dict[str, Row] = {
    FSDP: Row("mapped", "", "FSDPModule", "names"),  # a mention; a call of it is judged by its arguments
    "FlatParameter": _Internal("refused", "FSDP2 shards each parameter on its own", "DTensor"),
    "ShardedGradScaler": Row(
        "mapped",
        "of shardkit: its device is the accelerator, and arguments besides the device are passed by keyword",
        "GradScaler({args})",
        "loop",
    ),
    # Settings
    "ShardingStrategy": Row("mapped", "", '"{member}"'),
    "BackwardPrefetch": Row("noted", "FSDP2 prefetches in backward unasked, as BACKWARD_PRE did"),
    "MixedPrecision": Row("mapped", _TAKEN, "MixedPrecisionPolicy({args})"),
    "CPUOffload": Row("mapped", _TAKEN, "CPUOffloadPolicy()"),
    # Policies
    "always_wrap_policy": Row("mapped", _TAKEN, "units=lambda fqn, module: True"),
    "lambda_auto_wrap_policy": Row("mapped", _TAKEN, "units=lambda fqn, module: ..."),
    "transformer_auto_wrap_policy": Row("mapped", _TAKEN, "units=by_class(...)"),
    "size_based_auto_wrap_policy": Row("noted", f"{_TAKEN}; by_size counts in its own way", "units=by_size(...)"),
    "ModuleWrapPolicy": Row("mapped", _TAKEN, "units=by_class(...)"),
    "CustomPolicy": Row(
        "noted", f"{_TAKEN}; the dict it returns holds FSDP1's arguments", "units=lambda fqn, module: ..."
    ),
    "enable_wrap": Row(
        "decision",
        "name what was wrapped, by class or by FQN, in one call on the whole model",
        "shard_model(model, units=[...])",
        "wrapping",
    ),
    "wrap": Row("decision", "leave the module as it is, and name it in units of shard_model", "{model}", "wrapping"),
    # State dict types
    "StateDictType": _State("noted", f"{_EACH_CALL}, full_state_dict or sharded_state_dict"),
    "StateDictSettings": _State("decision", _NO_SETTING),
    "FullStateDictConfig": _State("noted", f"{_EACH_CALL}: full_state_dict(model, rank0_only=...), on the CPU"),
    **dict.fromkeys(("StateDictConfig", "OptimStateDictConfig"), _State("noted", _EACH_CALL)),
    "FullOptimStateDictConfig": _State(
        "noted", f"{_EACH_CALL}: full_optimizer_state_dict(model, optimizer, rank0_only=...), on the CPU"
    ),
    **dict.fromkeys(("ShardedStateDictConfig", "ShardedOptimStateDictConfig"), _State("mapped", _EACH_CALL)),
    **dict.fromkeys(("LocalStateDictConfig", "LocalOptimStateDictConfig"), _State("refused", _NO_FLAT)),
    "OptimStateKeyType": _State("noted", "keys are always FQNs"),
}

# Methods and attributes of a wrapped model

MEMBERS: dict[str, Row] = {
    # Called on the class, with a model
    "summon_full_params": _State("mapped", _OURS, "full_params({model}, writeback=True)"),
    **dict.fromkeys(("state_dict_type", "set_state_dict_type"), _State("noted", f"leave it out: {_NO_SETTING}")),
    "get_state_dict_type": _State("decision", _NO_SETTING),
    "optim_state_dict": _State("noted", _OURS, "full_optimizer_state_dict({model}, {optim}{rank0_only})"),
    "optim_state_dict_to_load": _State(
        "noted", _LOADS, "load_full_optimizer_state_dict({model}, {optim}, {optim_state_dict}{src})"
    ),
    "full_optim_state_dict": _State("noted", _OURS, "full_optimizer_state_dict({model}, {optim})"),
    "sharded_optim_state_dict": _State("noted", _OURS, "sharded_optimizer_state_dict({model}, {optim})"),
    "shard_full_optim_state_dict": _State(
        "noted", _LOADS, 'load_full_optimizer_state_dict({model}, {optim}, {full_optim_state_dict}, src="all")'
    ),
    "scatter_full_optim_state_dict": _State(
        "noted", _LOADS, "load_full_optimizer_state_dict({model}, {optim}, {full_optim_state_dict})"
    ),
    "flatten_sharded_optim_state_dict": _State(
        "noted", _LOADS, "load_sharded_optimizer_state_dict({model}, {optim}, {sharded_optim_state_dict})"
    ),
    "rekey_optim_state_dict": _State("decision", "keys are always FQNs"),
    "fsdp_modules": Row("mapped", "", "[m for m in {model}.modules() if isinstance(m, FSDPModule)]", "names"),
    # Called on a wrapped model
    "clip_grad_norm_": Row("mapped", "of shardkit", "clip_grad_norm_({receiver}, {args})", "loop"),
    "no_sync": Row("mapped", "or accumulate(model, last=...)", "no_sync({receiver})", "loop"),
    "module": Row("mapped", "there is no wrapper: the model itself is sharded", "{receiver}", "names"),
    "forward": Row("noted", "a direct call of forward skips the hooks that all-gather", "{receiver}({args})", "loop"),
    "apply": Row(
        "decision",
        "FSDP1 gathered the parameters; in FSDP2 the function sees each rank's shards: call it before sharding",
        "{receiver}.apply({args})",
        "wrapping",
    ),
    "check_is_root": Row("decision", "FSDP2 has no such question: the root is what you sharded last", "", "names"),
    "register_comm_hook": Row(
        "decision",
        "FSDP2 takes another reduce-scatter, or set_all_reduce_hook over the replicas, for each unit; "
        "shardkit.set_reduce_precision sends gradients in 16 bits",
        "{receiver}.set_custom_reduce_scatter(...)",
        "loop",
    ),
    "named_parameters": Row(
        "noted", "names are clean, values DTensors", "{receiver}.named_parameters({args})", "names"
    ),
    "named_buffers": Row("mapped", "", "{receiver}.named_buffers({args})", "names"),
    # nn.Module's, which mean something else in FSDP1
    "state_dict": _State("noted", _OURS, "full_state_dict({receiver}{rank0_only})"),
    "load_state_dict": _State("noted", _OURS, "load_full_state_dict({receiver}, {args}{src})"),
}

_GONE = "FSDP2 has no flat parameters and no handles: each parameter is a DTensor of its own"
_ARGUMENT_NOW = "what the wrapper remembered is an argument of the plan, or of its mesh"
_LOCAL = "each is a DTensor of its own, and param.to_local() is this rank's part"
_LAZY = "leave it out: FSDP2 does so at the first forward"

INTERNAL = _Internal("refused", "FSDP2 has no counterpart; use a public method of FSDPModule")

# Attributes that programs read off a wrapped model.
ATTRIBUTES: dict[str, Row] = {
    "_fsdp_wrapped_module": MEMBERS["module"],
    "process_group": Row("noted", _ARGUMENT_NOW, "mesh.get_group()"),
    "rank": Row("mapped", "", "dist.get_rank()", "names"),
    "world_size": Row("mapped", "", "dist.get_world_size()", "names"),
    **dict.fromkeys(("sharding_strategy", "mixed_precision", "cpu_offload"), Row("decision", _ARGUMENT_NOW)),
    "compute_device": Row("noted", _ARGUMENT_NOW, "mesh.device_type"),
    "training_state": _Internal("refused", _GONE),
    "params": _Internal("refused", _LOCAL, "{receiver}.parameters()"),
    "_is_root": MEMBERS["check_is_root"],
    "_lazy_init": Row("decision", _LAZY, "", "internals"),
}

_MODULES = _Internal("refused", MEMBERS["fsdp_modules"].sentence, MEMBERS["fsdp_modules"].use)
_HOOK = MEMBERS["register_comm_hook"]._replace(fate="refused", topic="internals")
_HANDLE = _Internal("refused", _GONE, "full_params({receiver})")

# Those that the drop-in cannot answer either: it raises an AttributeError that says what to use.
INTERNALS: dict[str, Row] = {
    **dict.fromkeys(("_flat_param", "flat_param"), ATTRIBUTES["params"]),
    **dict.fromkeys(("_handle", "_handles", "_all_handles"), _HANDLE),
    **dict.fromkeys(("_all_fsdp_states", "_fully_sharded_module_to_handle"), _MODULES),
    **dict.fromkeys(("_comm_hook", "_comm_hook_state"), _HOOK),
    "_exec_order_data": _Internal("refused", "it sets the order of gathering", "set_modules_to_forward_prefetch"),
    "_sync_gradients": _Internal("refused", "or FSDPModule.set_requires_gradient_sync", "no_sync({receiver})"),
    "_unshard": _Internal("refused", "FSDP2 does so by itself", "FSDPModule.unshard and FSDPModule.reshard"),
    "_unshard_stream": _Internal("refused", "FSDP2 keeps its streams to itself", "FSDPModule.unshard"),
    "_reset_lazy_init": ATTRIBUTES["_lazy_init"],
    **dict.fromkeys(
        (
            *("_all_reduce_stream", "_default_stream", "_deregister_orig_params_ctx", "_device_handle"),
            *("_free_event_queue", "_fsdp_extension", "_gradient_postdivide_factor", "_gradient_predivide_factor"),
            *("_optim_state_dict_impl", "_optim_state_dict_to_load_impl", "_post_backward_stream"),
            *("_pre_unshard_stream", "_use_training_state", "_wait_unshard_streams_on_current_stream"),
        ),
        INTERNAL,
    ),
}
ATTRIBUTES |= INTERNALS

# Private names of torch's modules

_NO_PREFIX = Row("mapped", "FSDP2 adds nothing to names", '""', "names")
_SUMMONED = _Internal("refused", "of shardkit.state, or FSDP.summon_full_params", "full_params(model, writeback=True)")
_OPTIM = _Internal("refused", "or FSDP.optim_state_dict", "full_optimizer_state_dict(model, optimizer)")
_DTENSORS = _Internal("refused", "leave it out: state of FSDP2 is DTensors")

# By the name of a function, a constant, or a module; the last part of a dotted path that is here counts.
PRIVATE: dict[str, Row] = {
    "_or_policy": Row("mapped", _TAKEN, "units=[..., ...]"),
    "_module_wrap_policy": Row("mapped", _TAKEN, "units=by_class(...)"),
    "_wrap_utils": Row("decision", "planning chooses the units", "shard_model(model, units=[...])", "wrapping"),
    "_unshard_param_utils": Row("decision", "or FSDPModule.unshard of each unit", "p.full_tensor()", "internals"),
    "_lazy_init": ATTRIBUTES["_lazy_init"],
    "_get_fsdp_states": _MODULES._replace(fate="decision"),
    "FSDP_WRAPPED_MODULE": _NO_PREFIX,
    "FSDP_PREFIX": _NO_PREFIX,
    "clean_tensor_name": _NO_PREFIX._replace(use="name"),
    "_shard_utils": _Internal("refused", "FSDP2's sharded tensors are DTensors", "DTensor"),
    "_set_fsdp_extensions": _Internal(
        "refused", "FSDP2 shards what tensor parallelism sharded, without extensions", "a 2D device_mesh"
    ),
    "_replace_with_full_state_dict_type": _Internal("refused", _OURS, "full_state_dict(model)"),
    "_prefetch_handle": INTERNALS["_exec_order_data"],
    "_init_param_handle_from_module": _Internal("refused", "", "shard_model(model)"),
    **dict.fromkeys(("_unshard", "_reshard"), INTERNALS["_unshard"]),
    **dict.fromkeys(("_set_optim_use_dtensor", "_set_use_dtensor"), _DTENSORS),
    **dict.fromkeys(("_unshard_params", "_unshard_params_for_summon", "_unshard_fsdp_state_params"), _SUMMONED),
    **dict.fromkeys(("_enter_unshard_params_ctx", "_exit_unshard_params_ctx"), _SUMMONED),
    **dict.fromkeys(("_optim_state_dict", "_flatten_optim_state_dict", "_rekey_sharded_optim_state_dict"), _OPTIM),
    **dict.fromkeys(("_unflatten_optim_state", "_shard_orig_param_state"), _OPTIM),
}


def private(path: str) -> Row:
    """Return the row of a name that is not public, by its dotted path below ``torch.distributed.fsdp``."""
    return next((PRIVATE[part] for part in reversed(path.split(".")) if part in PRIVATE), INTERNAL)


# The page


def tables() -> Iterator[str]:
    """Yield the tables of the docs page in Markdown, in order."""
    for rows, title in ((ARGUMENTS, "Argument"), (STRATEGIES, "Strategy"), (FIELDS, "Field"), (OURS, "New argument")):
        yield _table(f"{title} | Fate | In FSDP2", {name: (row.fate, row.sentence) for name, row in rows.items()})
    for rows, title in ((MEMBERS, "Of a wrapped model"), (NAMES, "Name")):
        yield _table(f"{title} | Fate | Instead", {name: (row.fate, _instead(row)) for name, row in rows.items()})


def _instead(row: Row) -> str:
    return ": ".join(filter(None, (row.use and f"`{row.line()}`", row.sentence)))


def _table(header: str, rows: Mapping[str, tuple[str, str]]) -> str:
    lines = [f"| `{name}` | {fate} | {text} |" for name, (fate, text) in rows.items()]
    return "\n".join([f"| {header} |", "| --- | --- | --- |", *lines])


if __name__ == "__main__":
    print("\n\n".join(tables()))
