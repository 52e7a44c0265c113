"""scale_loss, scale_grads_ and global_token_count: the mean over all tokens, whatever each rank has
of them.
"""

import pytest
import torch
import torch.distributed as dist
from accumulate_net import WEIGHTS, batches, integer_net, shard
from cpu_ranks import on_ranks
from grads_net import MESHES, assert_grads, full_grads
from meshes import mesh_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardkit.errors import ShardkitError
from shardkit.grads import (
    accumulate,
    global_token_count,
    scale_grads_,
    scale_loss,
    set_gradient_reduction,
)
from shardkit.testing import assert_same_on_all_ranks, comm_counts

# of each rank in each of two micro-batches: 32
TOKENS = torch.tensor([[5, 1, 10, 0], [3, 7, 2, 4]])
OPTIONS = [{}, {"keep_unsharded": True}, {"shard_gradients": True}]


def loss_sum(model, ids, tokens):
    """The loss of the first ``tokens`` of the ids; the others are padding."""
    return (model(ids) * WEIGHTS).sum(-1).flatten()[:tokens].sum()


def token_mean(plain, ids):
    """Gradients of the mean over all tokens, by one process."""
    plain.zero_grad()
    losses = [
        loss_sum(plain, ids[i, rank], int(TOKENS[i, rank])) for i in range(2) for rank in range(4)
    ]
    (sum(losses) / TOKENS.sum()).backward()
    return full_grads(plain)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mesh", MESHES)
@on_ranks(4)
def test_ragged_batches_give_the_mean_over_tokens_bit_for_bit(mesh, reduction):
    """32 tokens and 4 ranks: every factor is a power of two, and all else are integers."""
    net, ids, rank = shard(integer_net(), MESHES[mesh]), batches(1, 2), dist.get_rank()
    set_gradient_reduction(net, reduction)
    expected = token_mean(integer_net(), ids)
    tokens = global_token_count(TOKENS[:, rank].sum(), net)
    assert tokens == 32
    assert_same_on_all_ranks(tokens)
    for options in OPTIONS:
        for afterwards in (False, True):
            for i in range(2):
                with accumulate(net, last=i == 1, **options):
                    loss = loss_sum(net, ids[i, rank], int(TOKENS[i, rank]))
                    (loss if afterwards else scale_loss(loss, tokens, net)).backward()
            if afterwards:
                scale_grads_(tokens, net)
            assert_grads(net, expected)
            net.zero_grad()


@pytest.mark.parametrize("mesh", MESHES)
@on_ranks(4)
def test_one_all_reduce_counts(mesh):
    net = shard(integer_net(), MESHES[mesh])
    with comm_counts() as counted:
        tokens = global_token_count(dist.get_rank(), net)
        weights = global_token_count(torch.tensor(0.5, dtype=torch.bfloat16), net)
    assert counted.all_reduces == 2
    assert (tokens.item(), tokens.dtype, tokens.ndim) == (6, torch.int64, 0)
    assert (weights.item(), weights.dtype) == (2.0, torch.float64)


@on_ranks(4)
def test_only_the_ranks_of_the_mesh_count_and_tensor_parallel_ones_once():
    mesh = mesh_of((2, 2), "dp", "tp")
    net = fully_shard(integer_net(), mesh=mesh["dp"])
    rank = dist.get_rank()
    own = torch.tensor(10 * (rank // 2))  # ranks 0 and 1 hold the same tokens
    assert global_token_count(own, net).item() == 10
    assert own.item() == 10 * (rank // 2), "changed in place"


@on_ranks(4)
def test_units_on_meshes_of_different_sizes():
    """A block on two of the ranks, as an expert: its gradient is the sum over those alone."""
    net, ids, rank = integer_net(), batches(1, 2), dist.get_rank()
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "expert_dp"))
    fully_shard(net.blocks[0], mesh=pairs["expert_dp"])
    fully_shard(net, mesh=mesh_of((4,)))
    tokens = global_token_count(TOKENS[0, rank], net)
    assert tokens == 16
    with pytest.raises(
        ShardkitError, match=r"different numbers: \(root\) by 4, blocks\.0 by 2\. .*\"sum\"\) once"
    ):
        scale_loss(torch.zeros(()), tokens, net)
    set_gradient_reduction(net, "sum")
    scale_loss(loss_sum(net, ids[0, rank], int(TOKENS[0, rank])), tokens, net).backward()
    plain, of_rank = integer_net(), []
    for other in range(4):
        plain.zero_grad()
        (loss_sum(plain, ids[0, other], int(TOKENS[0, other])) / 16).backward()
        of_rank.append(full_grads(plain))
    pair = (0, 1) if rank < 2 else (2, 3)
    for name, grad in full_grads(net).items():
        ranks = pair if name.startswith("blocks.0") else range(4)
        assert torch.equal(grad, sum(of_rank[other][name] for other in ranks)), name


@on_ranks(4)
def test_no_token_anywhere_gives_zeros_and_a_setter_on_one_unit_is_noticed():
    net = shard(integer_net())
    tokens = global_token_count(0, net)
    scale_loss(loss_sum(net, batches(1, 1)[0, 0], 0), tokens, net).backward()
    assert all(not grad.any() for grad in full_grads(net).values())
    net.set_gradient_divide_factor(1.0)  # torch's, of the root alone
    with pytest.raises(ShardkitError, match=r"\(root\) by 1, blocks\.0 by 4, blocks\.1 by 4\."):
        scale_loss(torch.zeros(()), tokens, net)
    set_gradient_reduction(net, "mean")
    assert scale_loss(torch.ones(()), tokens, net).item() == 4.0
    for given, count in ((8, 8), (8.0, 8), (0, 1), (torch.tensor(8), 8)):
        assert scale_loss(torch.ones(()), given, net).item() == 4.0 / count
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        scale_grads_(given, net)
        assert all((grad == 4.0 / count).all() for grad in full_grads(net).values())


def test_a_plain_model_needs_no_process_group_and_nothing_waits_for_the_device():
    model = nn.Linear(2, 2)
    tokens = global_token_count(torch.ones((), device="meta", dtype=torch.int32), model)
    assert (tokens.device.type, tokens.dtype) == ("meta", torch.int64)
    # .item() would raise
    loss = scale_loss(torch.ones((), device="meta", dtype=torch.bfloat16), tokens, model)
    assert (loss.device.type, loss.dtype) == ("meta", torch.float32)
    model(torch.ones(1, 2)).sum().backward()
    scale_grads_(torch.tensor(4), model)
    assert torch.equal(model.weight.grad, torch.full((2, 2), 0.25))


def test_bad_arguments():
    with pytest.raises(
        ShardkitError, match=r"^num_tokens must be one number.* got shape \(3,\)\. Pass its sum"
    ):
        global_token_count(torch.ones(3), nn.Linear(1, 1))
    with pytest.raises(ShardkitError, match=r"^reduction must be .*got 'avg'"):
        set_gradient_reduction(nn.Linear(1, 1), "avg")
