"""FSDP1's names, and what becomes of each: the table that ``python -m shardkit audit`` looks up.

A test holds its keys to everything public of ``torch.distributed.fsdp`` and its modules that is FSDP1's, and to all
public methods of ``FullyShardedDataParallel``, so that a name that torch adds is not forgotten.

A replacement is a template: ``{receiver}`` is the model that a method was called on, ``{model}`` the first argument,
``{args}`` all arguments as written, ``{rest}`` all but the first, ``{member}`` what followed the name.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Fate: TypeAlias = Literal["exact", "note", "decision", "impossible"]
Topic: TypeAlias = Literal["optimizer", "internals", "state", "wrapping", "loop", "config", "names"]

FATES: dict[Fate, str] = {  # from good to bad
    "exact": "exact",
    "note": "with a note",
    "decision": "needs a decision",
    "impossible": "not possible",
}

FSDP = "FullyShardedDataParallel"


class Row(NamedTuple):
    """What becomes of a name.

    Attributes:
        fate: of a plain use; arguments can make it worse.
        replacement: a template for one line of shardkit or FSDP2 code.
        why: what a reader must know; empty where there is nothing.
        topic: where it stands in the list of what to change first.
    """

    fate: Fate
    replacement: str
    why: str
    topic: Topic


_FOR_SHARD_LIKE = "shard_like_fsdp1 takes it as it is"
_OURS = "of shardkit.state"
_LOADS = f"it loads too, so the optimizer's load_state_dict that follows goes away; {_OURS}"
_SAID = "leave it out: each call says it"
_NO_FLAT = "FSDP2 has no flat local parameters; use the sharded state"
_NOTHING = "leave it out: it does nothing to an FSDP2 model, without an error, and each call says it"

# --- Names of torch.distributed.fsdp and its public modules -----------------------------------------------------------

NAMES: dict[str, Row] = {
    FSDP: Row("exact", "FSDPModule", "", "names"),  # a mention; a call of it is judged by its arguments
    "FlatParameter": Row("impossible", "DTensor", "FSDP2 shards each parameter on its own", "internals"),
    "ShardedGradScaler": Row(
        "exact", "torch.amp.GradScaler({args})", "it agrees on infinities across the ranks of DTensors", "loop"
    ),
    # Settings
    "ShardingStrategy": Row("exact", '"{member}"', "", "config"),
    "BackwardPrefetch": Row("note", "", "FSDP2 prefetches in backward unasked, as BACKWARD_PRE did", "config"),
    "MixedPrecision": Row("exact", "MixedPrecisionPolicy({args})", _FOR_SHARD_LIKE, "config"),
    "CPUOffload": Row("exact", "CPUOffloadPolicy()", _FOR_SHARD_LIKE, "config"),
    # Policies
    "always_wrap_policy": Row("exact", "units=lambda fqn, module: True", _FOR_SHARD_LIKE, "config"),
    "lambda_auto_wrap_policy": Row("exact", "units=lambda fqn, module: ...", _FOR_SHARD_LIKE, "config"),
    "transformer_auto_wrap_policy": Row("exact", "units=by_class(...)", _FOR_SHARD_LIKE, "config"),
    "size_based_auto_wrap_policy": Row(
        "note", "units=by_size(...)", "shard_like_fsdp1 takes it as it is; by_size counts in its own way", "config"
    ),
    "ModuleWrapPolicy": Row("exact", "units=by_class(...)", _FOR_SHARD_LIKE, "config"),
    "CustomPolicy": Row(
        "note",
        "units=lambda fqn, module: ...",
        "shard_like_fsdp1 takes it as it is; the dict it returns holds FSDP1's arguments",
        "config",
    ),
    "enable_wrap": Row(
        "decision",
        "shard_model(model, units=[...])",
        "name what was wrapped, by class or by FQN, in one call on the whole model",
        "wrapping",
    ),
    "wrap": Row("decision", "{model}", "leave the module as it is, and name it in units of shard_model", "wrapping"),
    # State dict types
    "StateDictType": Row("note", "", f"{_SAID}, full_state_dict or sharded_state_dict", "state"),
    "StateDictSettings": Row("decision", "", f"{_SAID}, and FSDP2 holds no setting on the model", "state"),
    "StateDictConfig": Row("note", "", _SAID, "state"),
    "FullStateDictConfig": Row("note", "", f"{_SAID}: full_state_dict(model, rank0_only=...), on the CPU", "state"),
    "ShardedStateDictConfig": Row("exact", "", _SAID, "state"),
    "LocalStateDictConfig": Row("impossible", "", _NO_FLAT, "state"),
    "OptimStateDictConfig": Row("note", "", _SAID, "state"),
    "FullOptimStateDictConfig": Row(
        "note", "", f"{_SAID}: full_optimizer_state_dict(model, optimizer, rank0_only=...), on the CPU", "state"
    ),
    "ShardedOptimStateDictConfig": Row("exact", "", _SAID, "state"),
    "LocalOptimStateDictConfig": Row("impossible", "", _NO_FLAT, "state"),
    "OptimStateKeyType": Row("note", "", "keys are always FQNs", "state"),
}

# --- Methods and attributes of FullyShardedDataParallel ---------------------------------------------------------------

MEMBERS: dict[str, Row] = {
    # Called on the class, with a model
    "summon_full_params": Row("exact", "full_params({model}, writeback=True)", _OURS, "state"),
    "state_dict_type": Row("note", "", _NOTHING, "state"),
    "set_state_dict_type": Row("note", "", _NOTHING, "state"),
    "get_state_dict_type": Row("decision", "", "FSDP2 holds no setting on the model", "state"),
    "optim_state_dict": Row("note", "full_optimizer_state_dict({model}, {optim}{rank0_only})", _OURS, "state"),
    "optim_state_dict_to_load": Row(
        "note", "load_full_optimizer_state_dict({model}, {optim}, {optim_state_dict}{src})", _LOADS, "state"
    ),
    "full_optim_state_dict": Row("note", "full_optimizer_state_dict({model}, {optim})", _OURS, "state"),
    "sharded_optim_state_dict": Row("note", "sharded_optimizer_state_dict({model}, {optim})", _OURS, "state"),
    "shard_full_optim_state_dict": Row(
        "note",
        'load_full_optimizer_state_dict({model}, {optim}, {full_optim_state_dict}, src="all")',
        _LOADS,
        "state",
    ),
    "scatter_full_optim_state_dict": Row(
        "note", "load_full_optimizer_state_dict({model}, {optim}, {full_optim_state_dict})", _LOADS, "state"
    ),
    "flatten_sharded_optim_state_dict": Row(
        "note", "load_sharded_optimizer_state_dict({model}, {optim}, {sharded_optim_state_dict})", _LOADS, "state"
    ),
    "rekey_optim_state_dict": Row("decision", "", "keys are always FQNs", "state"),
    "fsdp_modules": Row("exact", "[m for m in {model}.modules() if isinstance(m, FSDPModule)]", "", "names"),
    # Called on a wrapped model
    "clip_grad_norm_": Row("exact", "clip_grad_norm_({receiver}, {args})", "of shardkit", "loop"),
    "no_sync": Row("exact", "no_sync({receiver})", "of shardkit.grads", "loop"),
    "module": Row("exact", "{receiver}", "there is no wrapper: the model itself is sharded", "names"),
    "forward": Row("note", "{receiver}({args})", "a direct call of forward skips the hooks that all-gather", "loop"),
    "apply": Row(
        "decision",
        "{receiver}.apply({args})",
        "FSDP1 gathered the parameters; in FSDP2 the function sees each rank's shards. Call it before sharding",
        "wrapping",
    ),
    "check_is_root": Row("decision", "", "FSDP2 has no such question: the root is what you sharded last", "names"),
    "register_comm_hook": Row(
        "decision",
        "{receiver}.set_custom_reduce_scatter(...)",
        "FSDP2 takes another reduce-scatter, or set_all_reduce_hook over the replicas, for each unit",
        "loop",
    ),
    "named_parameters": Row("note", "{receiver}.named_parameters({args})", "names are clean, values DTensors", "names"),
    "named_buffers": Row("exact", "{receiver}.named_buffers({args})", "", "names"),
    # nn.Module's, which mean something else in FSDP1
    "state_dict": Row("note", "full_state_dict({receiver}{rank0_only})", _OURS, "state"),
    "load_state_dict": Row("note", "load_full_state_dict({receiver}, {args}{src})", _OURS, "state"),
}
CLASS_CALLS = {name for name in MEMBERS if name.endswith(("state_dict_type", "full_params", "fsdp_modules"))} | {
    name for name in MEMBERS if "optim_state_dict" in name
}
INHERITED = {"state_dict", "load_state_dict"}  # of nn.Module; every other member is FSDP1's own

_GONE = "FSDP2 has no flat parameters and no handles: each parameter is a DTensor of its own"
_SAY_IT = "what the wrapper remembered is an argument of the plan, or of its mesh"

# Attributes that programs read off a wrapped model.
ATTRIBUTES: dict[str, Row] = {
    "_fsdp_wrapped_module": Row("exact", "{receiver}", "there is no wrapper: the model itself is sharded", "names"),
    "process_group": Row("note", "mesh.get_group()", _SAY_IT, "config"),
    "rank": Row("exact", "dist.get_rank()", "", "names"),
    "world_size": Row("exact", "dist.get_world_size()", "", "names"),
    "sharding_strategy": Row("decision", "", _SAY_IT, "config"),
    "mixed_precision": Row("decision", "", _SAY_IT, "config"),
    "cpu_offload": Row("decision", "", _SAY_IT, "config"),
    "compute_device": Row("note", "mesh.device_type", _SAY_IT, "config"),
    "training_state": Row("impossible", "", _GONE, "internals"),
    "params": Row("impossible", "{receiver}.parameters()", _GONE, "internals"),
    "_flat_param": Row("impossible", "{receiver}.parameters()", _GONE, "internals"),
    "flat_param": Row("impossible", "{receiver}.parameters()", _GONE, "internals"),
    "_handle": Row("impossible", "{receiver}.unshard()", _GONE, "internals"),
    "_handles": Row("impossible", "{receiver}.unshard()", _GONE, "internals"),
    "_all_handles": Row("impossible", "{receiver}.unshard()", _GONE, "internals"),
    "_all_fsdp_states": Row("impossible", "", _GONE, "internals"),
    "_is_root": Row("decision", "", "FSDP2 has no such question: the root is what you sharded last", "names"),
    "_lazy_init": Row("decision", "", "FSDP2 does so at the first forward", "internals"),
    "_reset_lazy_init": Row("decision", "", "FSDP2 does so at the first forward", "internals"),
}
# Names that are FSDP1's alone, so that they are reported on any receiver: as attributes, and where they are called.
UNIQUE_ATTRIBUTES = {"_fsdp_wrapped_module", "_flat_param", "_all_handles", "_all_fsdp_states", "flat_param"}
UNIQUE_CALLS = CLASS_CALLS | {"clip_grad_norm_", "check_is_root"}

# --- Private names, and names outside of torch.distributed.fsdp -------------------------------------------------------

_INTERNAL = Row("impossible", "", "an internal of FSDP1, without a counterpart in FSDP2", "internals")
PRIVATE: dict[str, Row] = {  # by module, or module and name; the longest that fits
    "wrap._or_policy": Row("exact", "units=[..., ...]", _FOR_SHARD_LIKE, "config"),
    "wrap._module_wrap_policy": Row("exact", "units=by_class(...)", _FOR_SHARD_LIKE, "config"),
    "_wrap_utils": Row("decision", "shard_model(model, units=[...])", "planning chooses the units", "wrapping"),
    "_unshard_param_utils": Row("decision", "p.full_tensor()", "or FSDPModule.unshard of each unit", "internals"),
    "_runtime_utils._lazy_init": Row("decision", "", "FSDP2 does so at the first forward", "internals"),
    "_traversal_utils._get_fsdp_states": Row(
        "decision", "[m for m in model.modules() if isinstance(m, FSDPModule)]", "", "internals"
    ),
    "_common_utils.FSDP_WRAPPED_MODULE": Row("exact", '""', "FSDP2 adds nothing to names", "names"),
    "_common_utils.FSDP_PREFIX": Row("exact", '""', "FSDP2 adds nothing to names", "names"),
    "_common_utils.clean_tensor_name": Row("exact", "name", "FSDP2 adds nothing to names", "names"),
    "fully_sharded_data_parallel.FSDP_WRAPPED_MODULE": Row("exact", '""', "FSDP2 adds nothing to names", "names"),
    "fully_sharded_data_parallel.FSDP_PREFIX": Row("exact", '""', "FSDP2 adds nothing to names", "names"),
    "_shard_utils": Row("impossible", "DTensor", "FSDP2's sharded tensors are DTensors", "internals"),
    "": _INTERNAL,
}

_FAIRSCALE = Row(
    "decision", "shard_model(...)", "fairscale's, not torch's: its arguments and state are other ones", "wrapping"
)
CONFIGURED = Row("note", "python -m shardkit translate FILE", "a configuration, which translate reads", "config")
_OTHER_LOADER = Row(
    "decision",
    "sharded_optimizer_state_dict(model, optimizer)",
    f"fill it with torch.distributed.checkpoint.load, then load_sharded_optimizer_state_dict; both {_OURS}",
    "state",
)

OTHERS: dict[str, Row] = {  # by dotted path, or the start of one; * is any part
    "fairscale.nn.FullyShardedDataParallel": _FAIRSCALE,
    "fairscale.nn.data_parallel": _FAIRSCALE,
    "fairscale.nn.wrap": _FAIRSCALE,
    "fairscale.nn.auto_wrap": _FAIRSCALE,
    "fairscale.nn.enable_wrap": _FAIRSCALE,
    "accelerate.*FullyShardedDataParallelPlugin": CONFIGURED,
    "lightning.*FSDPStrategy": CONFIGURED,
    "pytorch_lightning.*FSDPStrategy": CONFIGURED,
    "pytorch_lightning.*DDPFullyShardedNativeStrategy": CONFIGURED,
    "lightning_fabric.*FSDPStrategy": CONFIGURED,
    "peft.*fsdp_auto_wrap_policy": Row("exact", "by_class(...)", "shard_like_fsdp1 takes it as it is", "config"),
    "torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict": _OTHER_LOADER,
    "torch.distributed.checkpoint.load_sharded_optimizer_state_dict": _OTHER_LOADER,
}
CONFIG_KEYWORDS = {"fsdp", "fsdp_config"}  # of transformers' TrainingArguments and of what is built on it

FSDP2_NAMES = {
    "fully_shard",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "CPUOffloadPolicy",
    "UnshardHandle",
    "register_fsdp_forward_method",
    "DataParallelMeshDims",
    "share_comm_ctx",
}
