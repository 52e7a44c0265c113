"""clip_grad_norm_ over meshes of some of the ranks, such as those of experts: one norm, also where numbers differ."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from grads_net import assert_scaled, bound, exact_norm, full_grads, give_grads, sharded_net
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from shardkit.errors import ShardkitError
from shardkit.grads import clip_grad_norm_
from shardkit.testing import assert_same_on_all_ranks, distributed, fake_world


def expert(mesh: DeviceMesh, seed: int, placements) -> nn.ParameterList:
    """Parameters of one expert with gradients: of a number of rows that no mesh here divides."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 2), (1,), (5,)][: 1 + seed % 3]
    params = nn.ParameterList()
    for shape in shapes:
        param = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None))
        full = torch.randn(shape, generator=generator) * 3
        param.grad = distribute_tensor(full, mesh, placements, src_data_rank=None)
        params.append(param)
    return params


def everything(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients that any rank has, by name; a name stands for one parameter."""
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, parts)
    return {name: grad for each in gathered for name, grad in each.items()}


def check(model: nn.Module, names: dict[str, str], p: float, reduces: int) -> None:
    """The norm of all ranks' parameters; ``names`` maps prefixes to what tells different experts apart."""
    before = {name: grad.clone() for name, grad in full_grads(model).items()}
    own = {names.get(name.split(".")[0], "") + name: grad for name, grad in before.items()}
    whole = everything(own)
    with CommDebugMode() as comms:
        norm = clip_grad_norm_(model, 1.0, p)
    assert comms.get_total_counts() == reduces
    assert_same_on_all_ranks(norm)
    exact = exact_norm(whole, p)
    assert exact > max(1.0, exact_norm(own, p) if p != math.inf and len(whole) > len(own) else 0), "nothing elsewhere"
    assert abs(norm.item() - exact) <= bound(whole, p) * exact
    assert_scaled(model, before, norm, 1.0)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("p", [2.0, 0.5, math.inf])
@distributed(world_size=4, backend="gloo")
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
@distributed(world_size=4, backend="gloo")
def test_ranks_without_any_expert_take_part_in_its_norm(p):
    pair = DeviceMesh("cpu", [0, 1])
    net = sharded_net((4,))
    give_grads(net)
    model = nn.ModuleDict({"net": net})
    if dist.get_rank() < 2:
        model["expert"] = expert(pair, 2, [Shard(0)])
    norm = clip_grad_norm_(model, math.inf, p)
    check(model, {}, p, 1)
    model["expert"] = expert(pair, 2, [Shard(0)])  # also as DTensors on a mesh that this rank is not in
    give_grads(net)
    again = clip_grad_norm_(model, math.inf, p)
    assert torch.equal(norm, again)
    assert_same_on_all_ranks(again)


@pytest.mark.parametrize("p", [2.0, math.inf])
@distributed(world_size=4, backend="gloo")
def test_experts_and_replicas(p):
    """HSDP beside experts in one shard group, across shard groups, and kept twice."""
    rank = dist.get_rank()
    cross = init_device_mesh("cpu", (2, 2), mesh_dim_names=("up", "down"))["up"]  # ranks {0, 2} and {1, 3}
    wide = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    cases = [
        (expert(cross, 1 + rank % 2, [Shard(0)]), f"{rank % 2}.", 2),  # its ranks are in both shard groups
        (expert(wide, 2, [Replicate(), Shard(0)]), "", 2),
    ]
    for experts, name, reduces in cases:
        net = sharded_net((2, 2))
        give_grads(net)
        check(nn.ModuleDict({"net": net, "expert": experts}), {"expert": name}, p, reduces)


@fake_world(4)
def test_meshes_of_which_none_holds_all_ranks_are_refused():
    params = [*expert(DeviceMesh("cpu", [0, 1]), 2, [Shard(0)]), *expert(DeviceMesh("cpu", [0, 2]), 2, [Shard(0)])]
    with pytest.raises(ShardkitError, match=r"on a mesh of ranks \[0, 2\] and on one of ranks \[0, 1\]"):
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
