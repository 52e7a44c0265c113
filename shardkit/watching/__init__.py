"""Find where ranks or runs differ: ``watch`` while they run, ``compare_ranks`` and ``compare_runs`` afterwards."""

from shardkit.watching.runs import compare_ranks as compare_ranks
from shardkit.watching.runs import compare_runs as compare_runs
from shardkit.watching.runs import record_run as record_run
from shardkit.watching.watch import watch as watch
