"""The state of models and optimizers in memory: full and sharded, gathered and scattered."""

from shardkit.state.asleep import sleep as sleep
from shardkit.state.asleep import wake as wake
from shardkit.state.average import sharded_average as sharded_average
from shardkit.state.load import load_full_state_dict as load_full_state_dict
from shardkit.state.model import full_state_dict as full_state_dict
from shardkit.state.model import sharded_state_dict as sharded_state_dict
from shardkit.state.optimizer import full_optimizer_state_dict as full_optimizer_state_dict
from shardkit.state.optimizer import sharded_optimizer_state_dict as sharded_optimizer_state_dict
from shardkit.state.optimizer_load import (
    load_full_optimizer_state_dict as load_full_optimizer_state_dict,
)
from shardkit.state.unsharded import full_params as full_params
