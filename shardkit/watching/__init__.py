"""Find where ranks differ while they run."""

from shardkit.watching.watcher import watch as watch
