"""Shard a whole model with PyTorch FSDP2 in one call, and read the plan before it runs."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

# At once, since it refuses a torch that is too old with one sentence, and quiets one that misses numpy.
from shardkit import _torch as _torch

# fmt: off
# isort: off
if TYPE_CHECKING:  # for editors and type checkers; a program imports a name's module when it first asks for the name
    from torch.distributed.fsdp import (
        CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method,
    )
    from shardkit.api import plan_model, shard_model
    from shardkit.apply.shard import apply_plan
    from shardkit.checkpoint import (
        convert_checkpoint, latest_checkpoint, load_checkpoint, load_pretrained, save_checkpoint, save_pretrained,
    )
    from shardkit.errors import CheckpointError, PlanError, ShardkitError, TranslationError
    from shardkit.fsdp1 import Translation, shard_like_fsdp1, translate_fsdp1
    from shardkit.grads.accumulate import accumulate  # as full_params below
    from shardkit.grads import (
        GradScaler, clip_grad_norm_, global_token_count, no_sync, reset_after_error, scale_grads_,
        scale_loss, set_gradient_reduction, set_reduce_precision, set_reduce_scatter_unused_params, zero_grad,
    )
    from shardkit.meta.context import init_on_meta
    from shardkit.meta.materialize import materialize
    from shardkit.optim import check_optimizer, optimizer_in_backward, step_on_local_shards
    from shardkit.plan import MeshSpec, ShardUnit, ShardingPlan
    from shardkit.planning.rules import by_class, by_name, by_size, group
    from shardkit.state import (
        full_optimizer_state_dict, full_state_dict, load_full_optimizer_state_dict, load_full_state_dict,
        load_sharded_optimizer_state_dict, named_full_tensors, sharded_optimizer_state_dict, sharded_state_dict,
    )
    from shardkit.state.full_params import full_params  # mypy takes the package's for the module of this name

__all__ = [
    "CPUOffloadPolicy", "CheckpointError", "FSDPModule", "GradScaler", "MeshSpec", "MixedPrecisionPolicy",
    "OffloadPolicy", "PlanError", "ShardUnit", "ShardingPlan", "ShardkitError", "Translation", "TranslationError",
    "accumulate", "apply_plan", "by_class", "by_name", "by_size", "check_optimizer", "clip_grad_norm_",
    "convert_checkpoint", "full_optimizer_state_dict", "full_params", "full_state_dict", "fully_shard",
    "global_token_count", "group", "init_on_meta", "latest_checkpoint", "load_checkpoint",
    "load_full_optimizer_state_dict", "load_full_state_dict", "load_pretrained", "load_sharded_optimizer_state_dict",
    "materialize", "named_full_tensors", "no_sync", "optimizer_in_backward", "plan_model",
    "register_fsdp_forward_method", "reset_after_error", "save_checkpoint", "save_pretrained", "scale_grads_",
    "scale_loss", "set_gradient_reduction", "set_reduce_precision", "set_reduce_scatter_unused_params",
    "shard_like_fsdp1", "shard_model", "sharded_optimizer_state_dict", "sharded_state_dict", "step_on_local_shards",
    "translate_fsdp1", "zero_grad",
]
# isort: on
# fmt: on

_NAMES = {  # by the module that has them
    "torch.distributed.fsdp": "CPUOffloadPolicy FSDPModule MixedPrecisionPolicy OffloadPolicy fully_shard "
    "register_fsdp_forward_method",
    "shardkit.api": "plan_model shard_model",
    "shardkit.apply.shard": "apply_plan",
    "shardkit.checkpoint": "convert_checkpoint latest_checkpoint load_checkpoint load_pretrained save_checkpoint "
    "save_pretrained",
    "shardkit.errors": "CheckpointError PlanError ShardkitError TranslationError",
    "shardkit.fsdp1": "Translation shard_like_fsdp1 translate_fsdp1",
    "shardkit.grads": "GradScaler accumulate clip_grad_norm_ global_token_count no_sync reset_after_error scale_grads_ "
    "scale_loss set_gradient_reduction set_reduce_precision set_reduce_scatter_unused_params zero_grad",
    "shardkit.meta": "init_on_meta materialize",
    "shardkit.optim": "check_optimizer optimizer_in_backward step_on_local_shards",
    "shardkit.plan": "MeshSpec ShardUnit ShardingPlan",
    "shardkit.planning.rules": "by_class by_name by_size group",
    "shardkit.state": "full_optimizer_state_dict full_params full_state_dict load_full_optimizer_state_dict "
    "load_full_state_dict load_sharded_optimizer_state_dict named_full_tensors sharded_optimizer_state_dict "
    "sharded_state_dict",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:  # else type checkers would take every misspelt name for an Any

    def __getattr__(name: str) -> Any:
        """A public name or a submodule, imported when it is first asked for (PEP 562)."""
        if name in _MODULES:
            globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
            return globals()[name]
        is_public = name.isidentifier() and not name.startswith("_")
        if is_public and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
