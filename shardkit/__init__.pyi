# Every public name of the top level and where it is defined; headings are those of the site's API reference.
# `__init__.py` reads this file, so a new name is added here only.
# fmt: off
# isort: off
__version__: str

# ## Sharding
from shardkit.api import shard_model as shard_model, plan_model as plan_model
from shardkit.apply.shard import apply_plan as apply_plan
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy, CPUOffloadPolicy as CPUOffloadPolicy

# ## The plan and its rules
from shardkit.plan import MeshSpec as MeshSpec, ShardUnit as ShardUnit, ShardingPlan as ShardingPlan
from shardkit.planning.rules import by_class as by_class, by_name as by_name, by_size as by_size, group as group

# ## Meta init
from shardkit.meta import init_on_meta as init_on_meta, materialize as materialize

# ## Gradients
from shardkit.grads.accumulate import accumulate as accumulate
from shardkit.grads import zero_grad as zero_grad, reset_after_error as reset_after_error
from shardkit.grads import clip_grad_norm_ as clip_grad_norm_, GradScaler as GradScaler
from shardkit.grads import scale_loss as scale_loss, scale_grads_ as scale_grads_
from shardkit.grads import global_token_count as global_token_count, set_gradient_reduction as set_gradient_reduction
from shardkit.runtime.second_order import double_backward as double_backward

# ## Optimizers
from shardkit.optim import step_on_local_shards as step_on_local_shards
from shardkit.optim import step_on_whole_matrices as step_on_whole_matrices
from shardkit.optim import optimizer_in_backward as optimizer_in_backward, check_optimizer as check_optimizer
from shardkit.state import sharded_average as sharded_average

# ## State in memory
from shardkit.state import full_state_dict as full_state_dict, load_full_state_dict as load_full_state_dict
from shardkit.state import full_optimizer_state_dict as full_optimizer_state_dict
from shardkit.state import load_full_optimizer_state_dict as load_full_optimizer_state_dict
from shardkit.state.unsharded import full_params as full_params

# ## Errors
from shardkit.errors import ShardkitError as ShardkitError, PlanError as PlanError
from shardkit.errors import CheckpointError as CheckpointError, TranslationError as TranslationError
