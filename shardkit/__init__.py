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
from shardkit.apply import apply_plan as apply_plan
from shardkit.errors import PlanError as PlanError
from shardkit.errors import ShardkitError as ShardkitError
from shardkit.grads import clip_grad_norm_ as clip_grad_norm_
from shardkit.meta import init_on_meta as init_on_meta
from shardkit.meta import materialize as materialize
from shardkit.optim import check_optimizer as check_optimizer
from shardkit.plan import MeshSpec as MeshSpec
from shardkit.plan import ShardingPlan as ShardingPlan
from shardkit.plan import ShardUnit as ShardUnit
from shardkit.units import by_class as by_class
from shardkit.units import by_name as by_name
from shardkit.units import by_size as by_size
from shardkit.units import group as group
