"""Resolve dotted paths: public and private names of FSDP1, names of FSDP2 and other packages, and their rows."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping

from torch.distributed.fsdp import FullyShardedDataParallel, fully_sharded_data_parallel, sharded_grad_scaler, wrap

from shardkit import replacements
from shardkit.replacements import FSDP, MEMBERS, NAMES, Row

PACKAGE = "torch.distributed.fsdp"
MODULES = ("wrap", "api", "fully_sharded_data_parallel", "sharded_grad_scaler")
FSDP2_NAMES = {
    *("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "UnshardHandle"),
    *("register_fsdp_forward_method", "DataParallelMeshDims", "share_comm_ctx", "_fully_shard"),
    "GradientReductionHandle",  # since torch 2.15
}

# Public names of shardkit in the suggested lines; a test compares them with the tables.
PUBLIC = {
    *("shard_model", "shard_like_fsdp1", "FSDPModule", "MeshSpec", "by_class", "by_size", "GradScaler"),
    *("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "clip_grad_norm_", "no_sync", "materialize"),
    *("full_state_dict", "load_full_state_dict", "sharded_state_dict", "full_params", "save_checkpoint"),
    *("full_optimizer_state_dict", "load_full_optimizer_state_dict"),
    *("sharded_optimizer_state_dict", "load_sharded_optimizer_state_dict", "load_checkpoint", "accumulate"),
}

STATICS = {name for name in MEMBERS if isinstance(vars(FullyShardedDataParallel).get(name), staticmethod)}
# Attributes and methods that only FSDP1 has; they are reported on any receiver.
UNIQUE_ATTRIBUTES = ("_all_fsdp_states", "_all_handles", "_flat_param", "_fsdp_wrapped_module", "flat_param")
PARTIAL = ("functools.partial", "functools.partialmethod")
UNIQUE_CALLS = STATICS | {"clip_grad_norm_", "check_is_root"}
# Imported from an unknown package these are likely FSDP1's, but not from the packages in NOT_TORCH.
GUESSED = {"FSDP", FSDP, "FullStateDictConfig", "FullOptimStateDictConfig", "ShardedGradScaler"}
NOT_TORCH = ("fairscale", "megatron", "apex", "torch_xla", "deepspeed", "paddle", "vescale", "tensorflow", "jax")

_FAIRSCALE = Row("decision", "fairscale's, not torch's: other arguments and state", "shard_model(...)", "wrapping")
_LOADER = Row(
    "decision",
    "fill it with torch.distributed.checkpoint.load, then load_sharded_optimizer_state_dict from shardkit.state",
    "sharded_optimizer_state_dict(model, optimizer)",
    "state",
)
CONFIGURED = Row("noted", "a configuration: translate it", "python -m shardkit translate FILE")
OTHERS: dict[str, Row] = {  # by the path's first name and any later one
    **dict.fromkeys(
        ("fairscale FullyShardedDataParallel", "fairscale wrap", "fairscale auto_wrap", "fairscale enable_wrap"),
        _FAIRSCALE,
    ),
    "fairscale data_parallel": _FAIRSCALE,
    "accelerate FullyShardedDataParallelPlugin": CONFIGURED,
    "lightning FSDPStrategy": CONFIGURED,
    "pytorch_lightning FSDPStrategy": CONFIGURED,
    "pytorch_lightning DDPFullyShardedNativeStrategy": CONFIGURED,
    "lightning_fabric FSDPStrategy": CONFIGURED,
    "peft fsdp_auto_wrap_policy": Row("mapped", "shard_like_fsdp1 accepts it as it is", "by_class(...)"),
    "torch load_sharded_optimizer_state_dict": _LOADER,
}


def local_path(dotted: str) -> str | None:
    """Return the path below ``torch.distributed.fsdp``, ``""`` for the package itself, None for any other path."""
    return dotted[len(PACKAGE) + 1 :] if f"{dotted}.".startswith(f"{PACKAGE}.") else None


@functools.lru_cache(4096)
def public_name(dotted: str) -> tuple[str, str] | None:
    """Return the name in ``NAMES`` that a dotted path is or goes through, and the rest of the path."""
    parts = (local_path(dotted) or "").split(".")
    name, _, member = ".".join(parts[parts[0] in MODULES :]).partition(".")
    return (name, member) if name in NAMES else None


def wraps_otherwise(dotted: str) -> bool:
    """Return whether it is a class that wraps models, and is not FSDP's: DDP's, or another package's."""
    package = dotted.partition(".")[0]
    return dotted.endswith(".DistributedDataParallel") or (package in NOT_TORCH and package != "fairscale")


def is_fsdp2(dotted: str) -> bool:
    """Return whether it is a name of FSDP2."""
    local = local_path(dotted)
    is_older = dotted.startswith("torch.distributed._composable.fsdp")
    return is_older if local is None else local.split(".")[0] in FSDP2_NAMES


@functools.lru_cache(4096)
def other_row(dotted: str) -> Row | None:
    """Return the row of a private name of FSDP1, or of another package's name for FSDP1; None for any other path."""
    local = local_path(dotted)
    if local is None:
        package, *names = dotted.split(".")
        return next((OTHERS[key] for name in names if (key := f"{package} {name}") in OTHERS), None)
    is_known = local in ("", *MODULES) or is_fsdp2(dotted) or public_name(dotted) is not None
    return None if is_known or local.endswith("__") else replacements.private(local)


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str, bool]]:
    """Yield the names that a statement binds, each with its dotted path, and whether only its name suggests FSDP1."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            yield alias.asname or first, alias.name if alias.asname else first, False
        return
    module = "." * node.level + (node.module or "")
    for alias in node.names:
        path = f"{module}.{alias.name}"
        if alias.name == "*":
            is_fsdp1 = module in (PACKAGE, *(f"{PACKAGE}.{each}" for each in MODULES))
            yield from ((name, f"{module}.{name}", False) for name in (NAMES if is_fsdp1 else ()))
        elif alias.name in GUESSED and module.partition(".")[0] not in (*NOT_TORCH, "torch") and not other_row(path):
            yield alias.asname or alias.name, f"{PACKAGE}.{FSDP if alias.name == 'FSDP' else alias.name}", True
        else:
            yield alias.asname or alias.name, path, False


@functools.cache
def parameters(name: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a name in ``NAMES``, or of ``FullyShardedDataParallel.method`` without self."""
    name, _, method = name.partition(".")
    owners = (wrap, fully_sharded_data_parallel, sharded_grad_scaler)
    found = next(getattr(owner, name) for owner in owners if hasattr(owner, name))
    signature = inspect.signature(getattr(found, method) if method else found)
    return {name: each for name, each in signature.parameters.items() if name != "self"}


def bound(name: str, call: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of a call by their parameter names in torch."""
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    known = itertools.takewhile(lambda each: not isinstance(each, ast.Starred), call.args)
    return dict(zip(parameters(name), known, strict=False)) | named
