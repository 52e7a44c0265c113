"""Shard a whole model with PyTorch FSDP2 in one call, and read the plan before it runs."""

# First, since it refuses a torch that is too old with one sentence, and quiets one that misses numpy.
from shardkit import _torch as _torch  # isort: skip

from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as FSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy
from torch.distributed.fsdp import fully_shard as fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as register_fsdp_forward_method

from shardkit.api import plan_model as plan_model
from shardkit.api import shard_model as shard_model
from shardkit.apply.shard import apply_plan as apply_plan
from shardkit.checkpoint import convert_checkpoint as convert_checkpoint
from shardkit.checkpoint import latest_checkpoint as latest_checkpoint
from shardkit.checkpoint import load_checkpoint as load_checkpoint
from shardkit.checkpoint import load_pretrained as load_pretrained
from shardkit.checkpoint import save_checkpoint as save_checkpoint
from shardkit.checkpoint import save_pretrained as save_pretrained
from shardkit.errors import CheckpointError as CheckpointError
from shardkit.errors import PlanError as PlanError
from shardkit.errors import ShardkitError as ShardkitError
from shardkit.errors import TranslationError as TranslationError
from shardkit.fsdp1 import Translation as Translation
from shardkit.fsdp1 import shard_like_fsdp1 as shard_like_fsdp1
from shardkit.fsdp1 import translate_fsdp1 as translate_fsdp1
from shardkit.grads import GradScaler as GradScaler
from shardkit.grads import accumulate as accumulate
from shardkit.grads import clip_grad_norm_ as clip_grad_norm_
from shardkit.grads import global_token_count as global_token_count
from shardkit.grads import no_sync as no_sync
from shardkit.grads import reset_after_error as reset_after_error
from shardkit.grads import scale_grads_ as scale_grads_
from shardkit.grads import scale_loss as scale_loss
from shardkit.grads import set_gradient_reduction as set_gradient_reduction
from shardkit.grads import set_reduce_precision as set_reduce_precision
from shardkit.grads import set_reduce_scatter_unused_params as set_reduce_scatter_unused_params
from shardkit.grads import zero_grad as zero_grad
from shardkit.meta import init_on_meta as init_on_meta
from shardkit.meta import materialize as materialize
from shardkit.optim import check_optimizer as check_optimizer
from shardkit.optim import optimizer_in_backward as optimizer_in_backward
from shardkit.optim import step_on_local_shards as step_on_local_shards
from shardkit.plan import MeshSpec as MeshSpec
from shardkit.plan import ShardingPlan as ShardingPlan
from shardkit.plan import ShardUnit as ShardUnit
from shardkit.planning.rules import by_class as by_class
from shardkit.planning.rules import by_name as by_name
from shardkit.planning.rules import by_size as by_size
from shardkit.planning.rules import group as group
from shardkit.state import full_optimizer_state_dict as full_optimizer_state_dict
from shardkit.state import full_params as full_params
from shardkit.state import full_state_dict as full_state_dict
from shardkit.state import load_full_optimizer_state_dict as load_full_optimizer_state_dict
from shardkit.state import load_full_state_dict as load_full_state_dict
from shardkit.state import load_sharded_optimizer_state_dict as load_sharded_optimizer_state_dict
from shardkit.state import named_full_tensors as named_full_tensors
from shardkit.state import sharded_optimizer_state_dict as sharded_optimizer_state_dict
from shardkit.state import sharded_state_dict as sharded_state_dict

__all__ = [
    "CPUOffloadPolicy",
    "CheckpointError",
    "FSDPModule",
    "GradScaler",
    "MeshSpec",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PlanError",
    "ShardUnit",
    "ShardingPlan",
    "ShardkitError",
    "Translation",
    "TranslationError",
    "accumulate",
    "apply_plan",
    "by_class",
    "by_name",
    "by_size",
    "check_optimizer",
    "clip_grad_norm_",
    "convert_checkpoint",
    "full_optimizer_state_dict",
    "full_params",
    "full_state_dict",
    "fully_shard",
    "global_token_count",
    "group",
    "init_on_meta",
    "latest_checkpoint",
    "load_checkpoint",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_pretrained",
    "load_sharded_optimizer_state_dict",
    "materialize",
    "named_full_tensors",
    "no_sync",
    "optimizer_in_backward",
    "plan_model",
    "register_fsdp_forward_method",
    "reset_after_error",
    "save_checkpoint",
    "save_pretrained",
    "scale_grads_",
    "scale_loss",
    "set_gradient_reduction",
    "set_reduce_precision",
    "set_reduce_scatter_unused_params",
    "shard_like_fsdp1",
    "shard_model",
    "sharded_optimizer_state_dict",
    "sharded_state_dict",
    "step_on_local_shards",
    "translate_fsdp1",
    "zero_grad",
]
