"""shardkit.testing in tests: fake_world, comm_counts, @distributed, assert_same_on_all_ranks."""

import re
import unittest

import forks
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardkit.errors import ShardkitError
from shardkit.plan import Collectives
from shardkit.testing import (
    RankFailure,
    assert_same_on_all_ranks,
    comm_counts,
    distributed,
    fake_world,
)

# --- fake_world and comm_counts -------------------------------------------------------------------


def shard_blocks_and_root(mesh_shape, reshard_after_forward, frozen=0):
    mesh = init_device_mesh(
        "cpu", mesh_shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(mesh_shape) :]
    )
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)], nn.Linear(6, 5))
    for block in model[:3]:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    for block in model[:frozen]:
        block.requires_grad_(False)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def count_steps(mesh_shape, reshard_after_forward, steps=1, frozen=0):
    model = shard_blocks_and_root(mesh_shape, reshard_after_forward, frozen)
    with comm_counts() as counts:
        for _ in range(steps):
            model(torch.ones(2, 6)).sum().backward()
    return counts


# By hand: 3 blocks and the root are 4 units. Each is gathered in forward, and again in backward if
# it resharded; each trainable unit reduces once a backward; a replicating axis adds an all-reduce
# to each reduction; one shard needs no gathering and no scattering.
HAND_COUNTS = [
    ((8,), True, 1, 0, Collectives(7, 4, 0)),
    ((8,), False, 1, 0, Collectives(4, 4, 0)),
    ((2, 4), True, 1, 0, Collectives(7, 4, 4)),
    ((8, 1), True, 1, 0, Collectives(0, 0, 4)),
    # the root reshards in backward, so every step gathers it anew
    ((8,), True, 3, 0, Collectives(21, 12, 0)),
    # the first two need no gradient: no backward for the first
    ((8,), True, 1, 2, Collectives(6, 2, 0)),
]


@pytest.mark.parametrize(("mesh_shape", "reshard", "steps", "frozen", "expected"), HAND_COUNTS)
def test_counts_in_a_fake_world_are_the_hand_counts(mesh_shape, reshard, steps, frozen, expected):
    with fake_world(8):
        assert count_steps(mesh_shape, reshard, steps, frozen) == expected


def test_other_collectives_are_named_and_do_not_count():
    with fake_world(2), comm_counts() as counts:
        dist.broadcast(torch.ones(2), 0)
        dist.broadcast(torch.ones(2), 0)
        dist.barrier()
    assert counts == Collectives()
    assert Collectives() == counts
    assert counts != Collectives(1, 0, 0)
    assert counts.other == {"broadcast_": 2, "barrier": 1}


def test_a_fake_world_has_the_rank_asked_for_and_ends_with_the_block():
    with fake_world(8, rank=5):
        assert (dist.get_world_size(), dist.get_rank()) == (8, 5)
        assert fully_shard(nn.Linear(4, 6)).weight.to_local().shape == (1, 4)
    assert not dist.is_initialized()


def test_fake_worlds_cannot_be_nested():
    with fake_world(4):
        with pytest.raises(ValueError, match="twice"), fake_world(2):
            pass
        assert dist.get_world_size() == 4
    assert not dist.is_initialized()


def test_a_fake_world_does_not_inherit_the_meshes_of_the_last():
    for extra_groups in (0, 2):  # so that the second world's groups have other names
        with fake_world(8):
            for _ in range(extra_groups):
                dist.new_group([0, 1])
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
            result = distribute_tensor(torch.ones(8, 8), mesh, [Replicate(), Shard(0)]) * 2
            assert result.device_mesh.get_group("b").group_name == mesh.get_group("b").group_name
            assert result.full_tensor().shape == (8, 8)


# --- @distributed ---------------------------------------------------------------------------------


@pytest.fixture
def greeting(tmp_path):
    (tmp_path / "greeting").write_text("hello")
    return tmp_path / "greeting"


@distributed(world_size=4)
@pytest.mark.parametrize("number", [1, 2])
def test_a_decorated_test_takes_parameters_and_fixtures(number, greeting):
    assert dist.get_world_size() == 4
    total = torch.tensor(number)
    dist.all_reduce(total)
    assert total.item() == 4 * number
    assert greeting.read_text() == "hello"


class TestInAClass:
    @distributed(world_size=2)
    def test_a_method_can_be_decorated(self):
        assert type(self).__name__ == "TestInAClass"
        assert dist.get_world_size() == 2


@given(number=st.integers(-(2**40), 2**40))
@settings(max_examples=5)
@distributed(world_size=2)
def test_all_ranks_see_the_same_example_with_given_above(number):
    assert_same_on_all_ranks(torch.tensor([number, dist.get_world_size()]))


@distributed(world_size=2)
@given(number=st.integers(-(2**40), 2**40))
@settings(max_examples=5)
def test_all_ranks_see_the_same_example_with_given_below(number):
    assert_same_on_all_ranks(torch.tensor([number, dist.get_world_size()]))


@distributed(world_size=2)
def fails_on_rank_1():
    value = {"answer": 42}
    if dist.get_rank() == 1:
        assert value["answer"] == 43


@distributed(world_size=2)
def skips():
    pytest.skip("not today")


@distributed(world_size=2)
def decorated_in_a_rank():
    fails_on_rank_1()


def test_a_failing_body_is_reported_with_its_rank_and_the_values_of_its_assert():
    with pytest.raises(
        RankFailure, match="fails_on_rank_1: rank 1 raised AssertionError"
    ) as failure:
        fails_on_rank_1()
    assert 'assert value["answer"] == 43' in str(failure.value)
    assert "assert 42 == 43" in str(failure.value)  # pytest's rewriting, on the rank
    assert set(failure.value.failures) == {1}


def test_a_body_that_skips_on_every_rank_skips_the_test():
    with pytest.raises(unittest.SkipTest, match="not today"):
        skips()


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="there are GPUs")
def test_nccl_without_gpus_is_skipped_with_a_reason():
    with pytest.raises(unittest.SkipTest, match="NCCL with 2 ranks needs 2 GPUs, and there are 0"):
        distributed(world_size=2, backend="nccl")(
            test_a_body_that_skips_on_every_rank_skips_the_test
        )()


def test_a_rank_may_have_ranks():
    with pytest.raises(RankFailure, match=r"(?s)ranks 0, 1 raised RankFailure.*assert 42 == 43"):
        decorated_in_a_rank()


def test_only_functions_that_a_rank_can_find_are_decorated():
    def inner():
        raise NotImplementedError

    with pytest.raises(
        ShardkitError, match=r"inner cannot be found by other processes\. .* Move it there"
    ):
        distributed(world_size=2)(inner)


# --- assert_same_on_all_ranks ---------------------------------------------------------------------


@distributed(world_size=4)
def test_equal_values_are_the_same():
    for value in (torch.tensor([1.0, float("nan")]), torch.tensor(3), torch.zeros(0, 2)):
        assert_same_on_all_ranks(value)
    assert_same_on_all_ranks(torch.ones(4, 6, dtype=torch.bfloat16)[:, ::2])
    assert_same_on_all_ranks(torch.tensor(True))
    assert_same_on_all_ranks(torch.ones(3).to(torch.float8_e4m3fn))


@distributed(world_size=4)
def test_ranks_that_differ_are_named_on_every_rank():
    value = torch.arange(6.0).reshape(2, 3)
    value[1, 1] += 0.5 * (dist.get_rank() in (1, 3))
    text = r"rank 1 differs in 1 of its elements, the first at 4: 4\.5 against 4\.0, rank 3 differs"
    with pytest.raises(AssertionError, match=text):
        assert_same_on_all_ranks(value)
    assert_same_on_all_ranks(torch.tensor(0.0))  # no rank was left behind in a collective


@distributed(world_size=2)
def test_zeros_of_other_signs_dtypes_and_shapes_differ():
    rank = dist.get_rank()
    with pytest.raises(AssertionError, match=r"rank 1 differs in 1 .* at 0: -0\.0 against 0\.0"):
        assert_same_on_all_ranks(torch.tensor(-0.0 if rank else 0.0))
    with pytest.raises(
        AssertionError, match=r"rank 1 has a tensor of torch.float64 and shape \(2,\)\. .*float32"
    ):
        assert_same_on_all_ranks(torch.ones(2, dtype=torch.float64 if rank else torch.float32))
    with pytest.raises(AssertionError, match=r"rank 1 has a tensor .* and shape \(2,\)\."):
        assert_same_on_all_ranks(torch.ones(rank + 1))


@distributed(world_size=4)
def test_a_group_of_some_ranks_compares_only_its_own():
    even_and_odd = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = even_and_odd[dist.get_rank() % 2]
    assert_same_on_all_ranks(torch.tensor(dist.get_rank() % 2), group=group)
    with pytest.raises(AssertionError, match=f"rank {dist.get_rank() % 2 + 2} differs in 1 of"):
        assert_same_on_all_ranks(torch.tensor(dist.get_rank()), group=group)


def test_what_cannot_be_compared_is_refused():
    with fake_world(2):
        sharded = fully_shard(nn.Linear(2, 2)).weight
        for value, kind in ((sharded, "DTensor"), ([1], "list")):
            with pytest.raises(ShardkitError, match=f"got {kind}"):
                assert_same_on_all_ranks(value)


# --- In a user's project --------------------------------------------------------------------------

USERS_TEST = """
from shardkit.testing import distributed
import torch.distributed as dist

@distributed(world_size=2)
def test_passes(tmp_path):
    assert dist.get_world_size() == 2

@distributed(world_size=2)
def test_fails():
    expected = 3
    assert dist.get_world_size() == expected
"""


def test_a_project_needs_nothing_but_the_import(tmp_path):
    for folder in ("here", "there"):  # two modules of one name, neither on sys.path
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_users_model.py").write_text(USERS_TEST)
    (tmp_path / "elsewhere").mkdir()
    # the only one that a plain import finds
    (tmp_path / "elsewhere" / "test_users_model.py").touch()
    options = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    run = forks.python(
        "-m", "pytest", *options, tmp_path / "here", tmp_path / "there", cwd=tmp_path / "elsewhere"
    )
    assert "2 failed, 2 passed" in run.stdout, run.stdout + run.stderr
    assert len(re.findall("^E +AssertionError: assert 2 == 3$", run.stdout, re.MULTILINE)) == 2, (
        run.stdout
    )
