"""shardkit.testing: what it reports when ranks misbehave, and that the next test is fine."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.testing import RankPool, assert_same_on_all_ranks, comm_counts, distributed, fake_world


@distributed(world_size=4)
@pytest.mark.parametrize("number", [1, 2])
def test_a_decorated_test_runs_on_every_rank_with_its_parameters(number, tmp_path):
    assert dist.get_world_size() == 4
    total = torch.tensor(number)
    dist.all_reduce(total)
    assert total.item() == 4 * number
    assert tmp_path.is_dir()


@given(st.integers())
@settings(max_examples=5)
@distributed(world_size=2)
def test_given_above(number):
    assert_same_on_all_ranks(torch.tensor([number % 2**31]))


@distributed(world_size=2)
@given(st.integers())
@settings(max_examples=5)
def test_given_below(number):
    assert_same_on_all_ranks(torch.tensor([number % 2**31]))


@distributed(world_size=2)
def test_skip():
    pytest.skip("no reason")


@distributed(world_size=2, backend="nccl")
def test_skip2():
    pytest.skip("no reason")


def test_fake():
    from torch.distributed.fsdp import fully_shard

    with fake_world(8):
        m = fully_shard(torch.nn.Linear(8, 8))
        with comm_counts() as c:
            m(torch.ones(2, 8)).sum().backward()
        print(c)
        assert (c.all_gathers, c.reduce_scatters) == (1, 1)
