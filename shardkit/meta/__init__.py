"""Exact meta init: build without memory, shard, then compute the values that ordinary construction gives."""

from shardkit.meta.context import init_on_meta as init_on_meta
from shardkit.meta.context import is_recorded as is_recorded
from shardkit.meta.materialize import materialize as materialize
