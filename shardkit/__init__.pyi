# Every public name and where it is defined. `__init__.py` reads this file, so a new name is added here only.
# fmt: off
# isort: off
__version__: str

from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy, FSDPModule as FSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy, OffloadPolicy as OffloadPolicy
from torch.distributed.fsdp import fully_shard as fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as register_fsdp_forward_method

from shardkit.api import plan_model as plan_model, shard_model as shard_model
from shardkit.apply.mesh import training_mesh as training_mesh
from shardkit.apply.shard import apply_plan as apply_plan
from shardkit.checkpoint import convert_checkpoint as convert_checkpoint, latest_checkpoint as latest_checkpoint
from shardkit.checkpoint import load_checkpoint as load_checkpoint, load_pretrained as load_pretrained
from shardkit.checkpoint import save_checkpoint as save_checkpoint, save_pretrained as save_pretrained
from shardkit.errors import CheckpointError as CheckpointError, PlanError as PlanError, ShardkitError as ShardkitError
from shardkit.errors import TranslationError as TranslationError
from shardkit.fsdp1 import Translation as Translation, shard_like_fsdp1 as shard_like_fsdp1
from shardkit.fsdp1 import translate_fsdp1 as translate_fsdp1
from shardkit.grads import GradScaler as GradScaler, clip_grad_norm_ as clip_grad_norm_
from shardkit.grads import global_token_count as global_token_count, no_sync as no_sync
from shardkit.grads import reset_after_error as reset_after_error, scale_grads_ as scale_grads_
from shardkit.grads import scale_loss as scale_loss, set_gradient_reduction as set_gradient_reduction
from shardkit.grads import set_reduce_precision as set_reduce_precision
from shardkit.grads import zero_grad as zero_grad
from shardkit.grads.accumulate import accumulate as accumulate
from shardkit.meta import init_on_meta as init_on_meta, materialize as materialize
from shardkit.optim import check_optimizer as check_optimizer, optimizer_in_backward as optimizer_in_backward
from shardkit.optim import step_on_local_shards as step_on_local_shards
from shardkit.optim import step_on_whole_matrices as step_on_whole_matrices
from shardkit.plan import MeshSpec as MeshSpec, ShardUnit as ShardUnit, ShardingPlan as ShardingPlan
from shardkit.planning.rules import by_class as by_class, by_name as by_name, by_size as by_size, group as group
from shardkit.runtime.skipped import take_part as take_part
from shardkit.runtime.double_backward import double_backward as double_backward
from shardkit.state import full_optimizer_state_dict as full_optimizer_state_dict, full_state_dict as full_state_dict
from shardkit.state import load_full_optimizer_state_dict as load_full_optimizer_state_dict
from shardkit.state import load_full_state_dict as load_full_state_dict
from shardkit.state import load_sharded_optimizer_state_dict as load_sharded_optimizer_state_dict
from shardkit.state import named_full_tensors as named_full_tensors
from shardkit.state import sharded_average as sharded_average
from shardkit.state import sharded_optimizer_state_dict as sharded_optimizer_state_dict
from shardkit.state import sharded_state_dict as sharded_state_dict
from shardkit.state.full_params import full_params as full_params
from shardkit.watching.compare import compare_runs as compare_runs
from shardkit.watching.digests import compare_ranks as compare_ranks, record_run as record_run
from shardkit.watching.watch import watch as watch
