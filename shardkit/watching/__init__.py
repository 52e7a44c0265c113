"""Find where ranks differ while they run."""

from shardkit.watching.watch import watch as watch
