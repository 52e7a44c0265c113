"""clip_grad_norm_: the norm of the unsharded gradients, one plain number on every
rank, one factor.
"""

import math

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from grads_net import (
    MESHES,
    ORDERS,
    Net,
    assert_scaled,
    bound,
    exact_norm,
    full_grads,
    give_grads,
    mesh_of,
    sharded_net,
)
from safetensors_kinds import tp_and_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from shardkit.errors import ShardkitError
from shardkit.grads import clip_grad_norm_
from shardkit.testing import assert_same_on_all_ranks, fake_world


def assert_norm(norm, full, p):
    """It is that of the full gradients, above a limit of 1, on every rank."""
    exact = exact_norm(full, p)
    assert exact > 1.0, "nothing to clip"
    assert abs(norm.item() - exact) <= bound(full, p) * exact
    assert_same_on_all_ranks(norm)


# Equal to the unsharded norm.


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("mesh", MESHES)
@on_ranks(4)
def test_norm_and_gradients_equal_the_unsharded_ones(mesh, p, offload):
    net = sharded_net(MESHES[mesh], offload=offload)
    full = give_grads(net)
    norm = clip_grad_norm_(net, 1.0, p)
    assert type(norm) is torch.Tensor
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    assert_norm(norm, full, p)
    assert_scaled(net, full, norm, 1.0)
    again = clip_grad_norm_(list(net.parameters()), math.inf, p).item()
    # Scaling rounds each element once more, by half a unit in the last place, and so does the new
    # norm.
    assert again == pytest.approx(1.0, rel=2 * bound(full, p) + 2**-22)


# Which collectives run.


@pytest.mark.parametrize(
    ("shape", "ignored", "expected"),
    [
        ((4,), (), 1),
        ((2, 2), (), 1),  # the shard axis alone: replicas are equal already
        ((4, 1), (), 0),
        ((4,), ("gain",), 1),
        ((2, 2), ("gain",), 2),  # plain gradients may differ between replicas
        ((4, 1), ("gain",), 1),
    ],
)
@on_ranks(4)
def test_one_all_reduce_for_each_axis_that_must(shape, ignored, expected):
    net = sharded_net(shape, ignored=ignored)
    give_grads(net)
    with CommDebugMode() as comms:
        clip_grad_norm_(net, 1.0)
    assert comms.get_total_counts() == expected, comms.get_comm_counts()


# Several meshes.


@pytest.mark.parametrize("p", [2.0, math.inf])
@on_ranks(4)
def test_tensor_parallel_and_fsdp_shards_together(p):
    block = tp_and_fsdp()
    generator = torch.Generator().manual_seed(2)
    full = {}
    for name, param in block.named_parameters():
        full[name] = torch.randn(param.shape, generator=generator)
        param.grad = placed_like(full[name], param)
    meshes = {param.device_mesh.mesh_dim_names for param in block.parameters()}
    assert meshes == {("dp",), ("dp", "tp")}, "one mesh only"
    with CommDebugMode() as comms:
        norm = clip_grad_norm_(block, 1.0, p)
    assert comms.get_total_counts() == 2  # dp for all, tp for what is sharded on it
    assert_norm(norm, full, p)
    assert_scaled(block, full, norm, 1.0)


def placed_like(value, param):
    """As distribute_tensor, also for the strided shards of TP under FSDP."""
    replicated = DTensor.from_local(
        value, param.device_mesh, [Replicate()] * param.device_mesh.ndim
    )
    grad = torch.zeros_like(param)
    strided = replicated.redistribute(placements=param.placements)
    grad.to_local().copy_(strided.to_local())
    return grad


@on_ranks(4)
def test_partial_gradients_are_summed_before_their_norm():
    mesh = mesh_of((4,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Replicate()]))
    part = torch.full((3, 2), float(dist.get_rank() + 1))
    weight.grad = DTensor.from_local(part.clone(), mesh, [Partial()])
    norm = clip_grad_norm_(weight, 5.0, math.inf)
    assert norm.item() == 1 + 2 + 3 + 4  # not the largest part
    factor = torch.clamp(5.0 / (norm + 1e-6), max=1.0)
    assert torch.equal(weight.grad.to_local(), part * factor)
    assert weight.grad.placements == (Partial(),)


# Plain gradients beside sharded ones.

PLAIN = ("gain", "narrow.weight", "narrow.bias")


@pytest.mark.parametrize("p", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("mesh", MESHES)
@on_ranks(4)
def test_plain_gradients_count_once(mesh, p):
    net = sharded_net(MESHES[mesh], ignored=PLAIN)
    full = give_grads(net)
    assert [n for n, q in net.named_parameters() if not isinstance(q, DTensor)] == [
        "gain",
        *PLAIN[1:],
    ]
    norm = clip_grad_norm_(net, 1.0, p)
    assert_norm(norm, full, p)
    assert_scaled(net, full, norm, 1.0)

    full = give_grads(net)
    # which differs, and gives every rank one norm
    net.gain.grad = torch.tensor([float(dist.get_rank() + 1)])
    each = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    full["gain"] = each.max() if p == math.inf else each.pow(p).mean().pow(1 / p)
    assert_norm(clip_grad_norm_(net, 1.0, p), full, p)


# Ranks with different gradients.


@pytest.mark.parametrize("p", [2.0, math.inf])
@on_ranks(4)
def test_a_rank_without_gradients_joins(p):
    net = sharded_net((4,), ignored=("gain",))
    full = give_grads(net)
    if dist.get_rank() == 2:
        net.zero_grad()
    norm = clip_grad_norm_(net, 1.0, p)
    assert_same_on_all_ranks(norm)
    assert 1.0 < norm.item() <= exact_norm(full, p) * (1 + bound(full, p))


@pytest.mark.parametrize("p", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@on_ranks(4)
def test_nonfinite_on_one_rank_is_seen_and_raised_on_all(value, p):
    net = sharded_net((4,))
    full = give_grads(net)
    local = net.blocks[0].weight.grad.to_local()
    if dist.get_rank() == 2:
        local[0, 0] = value
    before = {name: g.clone() for name, g in full_grads(net).items()}
    with pytest.raises(ShardkitError, match=f"^gradients have the norm {value:g} of order {p:g}"):
        clip_grad_norm_(net, 1.0, p, error_if_nonfinite=True)
    for name, grad in full_grads(net).items():
        torch.testing.assert_close(grad, before[name], rtol=0, atol=0, equal_nan=True)
    norm = clip_grad_norm_(net, 1.0, p)
    assert norm.isnan() if math.isnan(value) else norm.item() == value
    assert full["gain"].isfinite()
    other = net.gain.grad.full_tensor()
    assert other.isnan() if math.isnan(value) else other.item() == 0.0  # as torch's: x * (1 / inf)


# Dtypes.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(4)
def test_half_precision_gradients_have_a_float32_norm(dtype):
    net = sharded_net((4,), dtype=dtype)
    full = give_grads(net)
    for param in net.parameters():
        if param.grad is not None:
            param.grad.mul_(1000.0)
    full = {name: g.clone() for name, g in full_grads(net).items()}
    norm = clip_grad_norm_(net, 1.0)
    assert norm.dtype == torch.float32
    overflow = torch.finfo(torch.float16).max
    assert exact_norm(full, 2.0) ** 2 > overflow, "a float16 norm would not overflow"
    assert_norm(norm, full, 2.0)
    assert_scaled(net, full, norm, 1.0)


# Units left unsharded.


@on_ranks(4)
def test_gradients_behind_unsharded_parameters_are_found():
    net = sharded_net((4,))
    net.set_reshard_after_backward(False)
    net(torch.zeros(2, 5, dtype=torch.long)).square().sum().backward()
    assert not isinstance(net.blocks[0].weight, DTensor), "not left unsharded"
    norm = clip_grad_norm_(net, 1.0)
    for module in [net, *net.blocks]:
        module.reshard()
    assert norm.item() > 1.0, "nothing to clip"
    assert clip_grad_norm_(net.parameters(), math.inf).item() == pytest.approx(1.0, rel=1e-5)


# One process, no process group.


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_model_gets_torchs_norm_to_the_bit(p, dtype):
    torch.manual_seed(0)
    ours, theirs = Net().to(dtype), Net().to(dtype)
    give_grads(ours)
    give_grads(theirs)
    assert torch.equal(
        clip_grad_norm_(ours, 1.0, p), nn.utils.clip_grad_norm_(theirs.parameters(), 1.0, p)
    )
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((nn.Linear(2, 2), 1.0, 0), "norm_type must be > 0 or inf, got 0. Use 2.0"),
        ((nn.Linear(2, 2), 1.0, math.nan), "norm_type must be > 0 or inf, got nan."),
        ((nn.Linear(2, 2), -1.0), "max_norm must be at least 0, got -1.0."),
        ((nn.Linear(2, 2), math.nan), "max_norm must be at least 0, got nan."),
        ((iter([]), 1.0), "parameters is a generator that was read before."),
    ],
)
def test_bad_arguments(arguments, text):
    with pytest.raises(ShardkitError) as caught:
        clip_grad_norm_(*arguments)
    assert str(caught.value).startswith(text)


# Meshes of some of the ranks, such as those of experts: one norm, also where numbers differ.


def expert(mesh, seed, placements):
    """Parameters of one expert with gradients: of a number of rows that no mesh here divides."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 2), (1,), (5,)][: 1 + seed % 3]
    params = nn.ParameterList()
    for shape in shapes:
        param = nn.Parameter(
            distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None)
        )
        full = torch.randn(shape, generator=generator) * 3
        param.grad = distribute_tensor(full, mesh, placements, src_data_rank=None)
        params.append(param)
    return params


def everything(parts):
    """The gradients that any rank has, by name; a name stands for one parameter."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, parts)
    return {name: grad for each in gathered for name, grad in each.items()}


def check(model, names, p, reduces):
    """The norm of all ranks' parameters; ``names`` maps prefixes to what tells different experts
    apart.
    """
    before = {name: grad.clone() for name, grad in full_grads(model).items()}
    own = {names.get(name.split(".")[0], "") + name: grad for name, grad in before.items()}
    whole = everything(own)
    with CommDebugMode() as comms:
        norm = clip_grad_norm_(model, 1.0, p)
    assert comms.get_total_counts() == reduces
    assert_norm(norm, whole, p)
    if p != math.inf and len(whole) > len(own):
        assert exact_norm(whole, p) > exact_norm(own, p), "nothing elsewhere"
    assert_scaled(model, before, norm, 1.0)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("p", [2.0, 0.5, math.inf])
@on_ranks(4)
def test_each_pair_of_ranks_has_an_expert_of_its_own(p, offload):
    """Different numbers of parameters on the ranks; plain and offloaded ones beside them."""
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "in_pair"))["in_pair"]
    which = dist.get_rank() // 2
    for ignored, reduces in (((), 1), (("gain",), 1)):
        net = sharded_net((4,), ignored=ignored, offload=offload)
        give_grads(net)
        model = nn.ModuleDict({"net": net, "expert": expert(pair, 1 + which, [Shard(0)])})
        assert len(model["expert"]) == 2 + which
        check(model, {"expert": f"{which}."}, p, reduces)


@pytest.mark.parametrize("p", [2.0, math.inf])
@on_ranks(4)
def test_ranks_without_any_expert_take_part_in_its_norm(p):
    pair = DeviceMesh("cpu", [0, 1])
    net = sharded_net((4,))
    give_grads(net)
    model = nn.ModuleDict({"net": net})
    if dist.get_rank() < 2:
        model["expert"] = expert(pair, 2, [Shard(0)])
    norm = clip_grad_norm_(model, math.inf, p)
    check(model, {}, p, 1)
    # also as DTensors on a mesh that this rank is not in
    model["expert"] = expert(pair, 2, [Shard(0)])
    give_grads(net)
    again = clip_grad_norm_(model, math.inf, p)
    assert torch.equal(norm, again)
    assert_same_on_all_ranks(again)


@pytest.mark.parametrize("p", [2.0, math.inf])
@on_ranks(4)
def test_experts_and_replicas(p):
    """HSDP beside experts in one shard group, across shard groups, and kept twice."""
    rank = dist.get_rank()
    # ranks {0, 2} and {1, 3}
    cross = init_device_mesh("cpu", (2, 2), mesh_dim_names=("up", "down"))["up"]
    wide = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    cases = [
        # its ranks are in both shard groups
        (expert(cross, 1 + rank % 2, [Shard(0)]), f"{rank % 2}.", 2),
        (expert(wide, 2, [Replicate(), Shard(0)]), "", 2),
    ]
    for experts, name, reduces in cases:
        net = sharded_net((2, 2))
        give_grads(net)
        check(nn.ModuleDict({"net": net, "expert": experts}), {"expert": name}, p, reduces)


@fake_world(4)
def test_meshes_of_which_none_holds_all_ranks_are_refused():
    params = [
        *expert(DeviceMesh("cpu", [0, 1]), 2, [Shard(0)]),
        *expert(DeviceMesh("cpu", [0, 2]), 2, [Shard(0)]),
    ]
    with pytest.raises(
        ShardkitError, match=r"on a mesh of ranks \[0, 2\] and on one of ranks \[0, 1\]"
    ):
        clip_grad_norm_(params, 1.0)


@fake_world(4)
def test_parameters_that_are_stepped_in_backward_are_refused():
    def hook(param):
        param.grad = None

    hook.steps_in_backward = True
    net = sharded_net((4,))
    net.gain.register_post_accumulate_grad_hook(hook)
    with pytest.raises(ShardkitError, match=r"^parameters are stepped in backward, after which"):
        clip_grad_norm_(net, 1.0)
