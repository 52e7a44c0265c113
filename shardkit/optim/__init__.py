"""Optimizers of sharded models: steps on local shards, steps in backward, and a check."""

from shardkit.optim.check import check_optimizer as check_optimizer
from shardkit.optim.in_backward import optimizer_in_backward as optimizer_in_backward
from shardkit.optim.local import step_on_local_shards as step_on_local_shards
from shardkit.optim.whole import step_on_whole_matrices as step_on_whole_matrices
