"""Test a sharded model in one process, or on several ranks of one machine.

``fake_world`` and ``comm_counts`` show structure in this process; ``distributed`` and ``RankPool``
run real collectives. ``docs/testing-your-model.md`` says what each of them can and cannot show.
"""

from shardkit.testing.counts import CommCounts as CommCounts
from shardkit.testing.counts import assert_same_on_all_ranks as assert_same_on_all_ranks
from shardkit.testing.counts import comm_counts as comm_counts
from shardkit.testing.counts import fake_world as fake_world
from shardkit.testing.pool import RankFailure as RankFailure
from shardkit.testing.pool import RankPool as RankPool
from shardkit.testing.pool import distributed as distributed
