"""Find where ranks differ: ``watch`` while they run, ``compare_ranks`` afterwards."""

from shardkit.watching.ranks import compare_ranks as compare_ranks
from shardkit.watching.watch import watch as watch
