"""The benchmark of the drop-in: each side accumulates as its users do."""

import warnings

import torch

from benchmarks.dropin import Program, sides
from shardkit.fsdp1 import FullyShardedDataParallel as DropIn
from shardkit.fsdp1.dropin import guards
from shardkit.testing import comm_counts, fake_world


def test_fsdp1_and_the_drop_in_gather_once_for_two_micro_batches_and_fully_shard_twice():
    found = {}
    with fake_world(2), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says of each use of FSDP1 that it is deprecated
        for name, side in sides(Program(8, 2, 4, gathered=True, micro_batches=2)).items():
            if name == "drop-in":
                guards.install(DropIn)
            with comm_counts() as counts:
                side.step(torch.zeros(2, 4, dtype=torch.long))
            guards.uninstall()
            found[name] = counts.all_gathers
    assert found == {"FSDP1": 3, "fully_shard": 6, "drop-in": 3}
