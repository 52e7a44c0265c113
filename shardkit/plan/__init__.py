"""ShardingPlan: the exact list of ``fully_shard`` calls you would have written by hand, as plain data.

``types`` defines its parts, ``data`` and ``plan`` the whole; ``check`` validates it; ``table`` and ``python`` write it.
"""

from shardkit.plan.plan import ShardingPlan as ShardingPlan
from shardkit.plan.types import Collectives as Collectives
from shardkit.plan.types import MeshSpec as MeshSpec
from shardkit.plan.types import ParamSpec as ParamSpec
from shardkit.plan.types import ShardUnit as ShardUnit
from shardkit.plan.types import ancestors as ancestors
from shardkit.plan.types import is_world_size as is_world_size
