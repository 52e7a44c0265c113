"""ShardingPlan: the exact list of ``fully_shard`` calls you would have written by hand, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Collectives:
    """How many collectives one forward and backward runs, on each rank.

    ``plan.collectives()`` predicts one of these, ``shardkit.testing.comm_counts()`` counts one.
    """

    all_gathers: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0
