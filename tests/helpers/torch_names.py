"""The private names of torch that shardkit uses; run with ``PYTHONPATH=.`` it prints those that are missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import fsdp as fsdp1
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit._fsdp import states_of
from shardkit._torch import torch_version, units_of
from shardkit.api import shard_model
from shardkit.testing import fake_world


class Name(NamedTuple):
    """One private name of torch."""

    path: str  # from ``torch``, or from one of the objects of ``_owners``
    purpose: str
    needed_by: str  # the public functions that do not work without it
    public: str = ""  # torch's public replacement, and since which version
    until: tuple[int, int] = (99, 0)  # the first torch that lacks it, or for which shardkit does not need it
    since: tuple[int, int] = (2, 13)  # the first torch that has it

    def expected(self, version: tuple[int, int]) -> bool:
        """Return whether this version of torch should have it."""
        return self.since <= version < self.until


_ENGINE = "accumulate, no_sync, zero_grad, clip_grad_norm_, set_gradient_reduction, set_reduce_precision, the drop-in"
_RESET = "reset_after_error"
_LOCAL = "step_on_local_shards, clip_grad_norm_, full_state_dict, save_checkpoint"
_META = "init_on_meta, materialize"
_DROP_IN = "shardkit.fsdp1.FullyShardedDataParallel"
_MEMORY = "shardkit.memory"


def _names(owner: str, names: str, purpose: str, needed_by: str, **versions: Any) -> Iterator[Name]:
    """Return several names of one owner that serve one purpose."""
    return (Name(f"{owner}.{name}", purpose, needed_by, **versions) for name in names.split())


_STATE, _GROUP, _PARAM = "FSDPState", "FSDPParamGroup", "FSDPParam"
_HOOKS = "_forward_hooks _forward_pre_hooks"
NAMES = (
    Name("FSDPModule._get_fsdp_state", "the FSDP state of a module", _ENGINE),
    Name(f"{_STATE}._fsdp_param_groups", "the parameter groups of a module", _ENGINE),
    Name(f"{_STATE}._modules", "the modules of an FSDP state", _ENGINE),
    Name(f"{_PARAM}._param_fqn", "the name of a parameter, for errors of an optimizer's step", "shard_model"),
    Name(f"{_STATE}._is_root", "whether the first forward made this module the root", f"{_RESET}, accumulate"),
    Name(f"{_STATE}._auto_reshard_after_forward", "reshard_after_forward=None", "accumulate(keep_unsharded=)"),
    Name(f"{_STATE}._training_state", "whether a forward or backward is running", _RESET),
    *_names(_STATE, "_lazy_init _mp_policy _state_ctx", "initialize the root, and cast its inputs", _DROP_IN),
    *_names(_STATE, "_pre_forward _post_forward", "forwards without an all-gather, or without the rest", _DROP_IN),
    Name(f"{_STATE}._device", "where a skipped unit is gathered", "may_skip"),
    *_names(_GROUP, "modules fsdp_params device mesh_info", "the modules, parameters and meshes of a unit", _ENGINE),
    Name(f"{_GROUP}.mp_policy", "the dtype of gradient reduction", "set_reduce_precision", until=(2, 15)),
    Name(f"{_PARAM}.mp_policy", "the dtype of gradient reduction", "set_reduce_precision", since=(2, 15)),
    Name(f"{_GROUP}.post_forward_mesh_info", "read reshard_after_forward back", "accumulate(keep_unsharded=)"),
    *_names(_GROUP, "reshard_after_backward reduce_grads all_reduce_grads", "read the flags", "accumulate"),
    Name(f"{_GROUP}.gradient_divide_factor", "read the divide factor", "set_gradient_reduction"),
    Name(f"{_GROUP}.post_backward", "zero gradients for unused parameters", "shard_model"),
    Name(f"{_GROUP}.finalize_backward", "reduce scalar parameters' gradients", "shard_model with scalar parameters"),
    Name(f"{_GROUP}._partial_reduce_output", "gradients before their all-reduce", "zero_grad, accumulate"),
    Name(
        f"{_GROUP}._partial_reduce_output_layout", "layout for the all-reduce", "zero_grad, accumulate", since=(2, 15)
    ),
    *_names(_GROUP, "_all_gather_comm _reduce_scatter_comm", "note the collectives of a unit", "watch"),
    Name(f"{_GROUP}._training_state", "whether a unit is running", _RESET),
    *_names(_PARAM, "sharded_param _module_info", "the optimizer's parameter", _LOCAL),
    Name(f"{_PARAM}._unsharded_param", "gradients that are not reduced yet", "zero_grad, accumulate"),
    Name(f"{_PARAM}.reset_sharded_param", "register replaced shards", "materialize, the drop-in"),
    *_names(_PARAM, "all_gather_outputs _sharded_post_forward_param_data", "memory of gathered parameters", _MEMORY),
    Name("DTensor._local_tensor", "the shard without an autograd node", _LOCAL, "to_local(), 300 times slower"),
    Name("DTensor._spec", "the layout without a property", _LOCAL, "device_mesh, placements: 3 times slower"),
    Name("Optimizer._init_group", "the tensors that a step reads and writes", "step_on_local_shards"),
    Name("Parameter._post_accumulate_grad_hooks", "find gradient hooks", "optimizer_in_backward, accumulate"),
    Name("Parameter._backward_hooks", "find gradient hooks", _META),
    Name("Parameter._version", "count in-place writes", _META),
    *_names("Module", _HOOKS, "copy a model, skip all-gathers", _DROP_IN),
    Name("Module._parameters", "the parameters without their names", "clip_grad_norm_", "named_parameters(): slower"),
    Name("GradScaler._unscale_grads_", "unscale gradients on any meshes", "GradScaler"),
    Name("OpOverload._schema", "which arguments an operator has and writes", f"{_META}, step_on_whole_matrices"),
    Name("state_dict._metadata", "versions of modules", "full_state_dict, load_full_state_dict"),
    Name("MixedPrecision._module_classes_to_ignore", "which modules stay in float32", f"translate_fsdp1, {_DROP_IN}"),
    Name("ModuleWrapPolicy._run_policy", "call a wrapping policy", "translate_fsdp1, shard_like_fsdp1"),
    *_names("torch", "_foreach_norm _foreach_mul_", "one kernel for many tensors", "clip_grad_norm_, scale_grads_"),
    Name("torch._amp_foreach_non_finite_check_and_unscale_", "the kernel of GradScaler", "GradScaler"),
    Name("torch._neg_view", "replay a lazy negation", _META),
    Name("torch._C._disabled_torch_dispatch_impl", "whether a class wraps tensors", _META),
    Name("torch._C.DisableTorchFunction", "suspend torch function modes", _META),
    Name("torch._C.DisableTorchFunctionSubclass", "read DTensor attributes without dispatch", _LOCAL),
    Name("torch._subclasses.fake_tensor.FakeTensorMode", "shapes without memory", _MEMORY),
    Name("torch._subclasses.fake_tensor.unset_fake_temporarily", "suspend FakeTensorMode", "shard_model"),
    Name("torch._compile._disable_dynamo", "hooks that are not compiled", "shard_model, the drop-in"),
    Name("torch._C._current_graph_task_id", "whether a forward is recomputed", "may_skip"),
    Name("torch.nn.utils.clip_grad._get_total_norm", "torch's clipping under the drop-in", _DROP_IN),
    Name("torch.utils._python_dispatch.TorchDispatchMode", "intercept aten operators", f"{_META}, shardkit.testing"),
    Name("torch.utils._python_dispatch._disable_current_modes", "suspend dispatch modes", _META),
    *_names("torch.utils._pytree", "tree_map tree_leaves", "map over arguments as FSDP2 does", _MEMORY),
    Name("torch._C._distributed_c10d.Backend.Options._timeout", "the timeout of a group", "shard_model"),
    Name("torch.distributed.ProcessGroup._get_backend", "the timeout of a group", "shard_model"),
    Name("torch.distributed.distributed_c10d._set_pg_timeout", "the timeout of a group", "shard_model"),
    Name("torch.ops.aten._to_copy", "casts, counted as in autocast", _MEMORY),
    Name("torch.nn.init._no_grad_trunc_normal_", "record it as one operation", f"speed of {_META}"),
    Name("torch.distributed.distributed_c10d._get_default_store", "what ranks tell each other", "watch"),
    *_names("DeviceMesh", "_flatten _concatenate", "the mesh of all ranks beside one of experts", "mesh= of a rule"),
    Name("torch.distributed.fsdp.wrap._Policy", "FSDP1's policies", "translate_fsdp1, shard_like_fsdp1"),
    Name("torch.distributed._state_dict_utils._all_gather_sharded_tensor", "FSDP1's sharded checkpoints", _DROP_IN),
)


def missing(names: Iterable[Name] = NAMES) -> list[Name]:
    """Return the names that the imported torch should have and does not. Local, pure."""
    version = torch_version()
    with fake_world(4):
        owners = dict(_owners())
        return [name for name in names if name.expected(version) and not _has(owners, name.path)]


def _has(owners: dict[str, Any], path: str) -> bool:
    owner, *names = path.split(".")
    try:
        reduce(getattr, names, owners[owner])
    except AttributeError:
        return False
    return True


def _owners() -> Iterator[tuple[str, Any]]:
    """Yield one object of each class with private names, from a small model after one backward."""
    model = shard_model(nn.Linear(4, 4), reshard_after_forward=2)
    model(torch.ones(2, 4)).sum().backward()
    state = states_of([model])[0]
    unit = units_of(state)[0]
    yield from {
        "FSDPModule": model,
        "FSDPState": state,
        "FSDPParamGroup": unit,
        "FSDPParam": unit.fsdp_params[0],
    }.items()
    yield from {
        "torch": torch,
        "DTensor": next(each for each in model.parameters() if isinstance(each, DTensor)),
        "DeviceMesh": DeviceMesh,
        "Parameter": nn.Parameter(torch.ones(1)),
        "Module": nn.Module(),
        "Optimizer": torch.optim.Adam,
        "GradScaler": torch.amp.GradScaler,
        "OpOverload": torch.ops.aten.add.Tensor,
        "state_dict": nn.Linear(1, 1).state_dict(),
        "MixedPrecision": fsdp1.MixedPrecision(),
        "ShardedStateDictConfig": fsdp1.ShardedStateDictConfig(),
        "ModuleWrapPolicy": fsdp1.wrap.ModuleWrapPolicy({nn.Linear}),
    }.items()


def main(write: Callable[[str], object] = print) -> int:
    """Print every name, and return 1 if one is missing, else 0."""
    gone = missing()
    write(f"torch {torch.__version__}: {len(gone)} of {len(NAMES)} private names are missing")
    for name in gone:
        write(f"MISSING {name.path}: {name.purpose}. These do not work without it: {name.needed_by}")
    for name in NAMES:
        instead = f" (public: {name.public})" if name.public else ""
        write(f"{name.path}: {name.purpose}{instead}. Needed by {name.needed_by}")
    return bool(gone)


if __name__ == "__main__":
    sys.exit(main())
