"""Exact meta init: build without memory, shard, then compute the values that ordinary construction
gives.
"""

from shardkit.meta.record import init_on_meta as init_on_meta
from shardkit.meta.record import is_recorded as is_recorded
from shardkit.meta.targets import materialize as materialize
