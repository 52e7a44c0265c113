"""The dim on which each parameter is sharded, where it is not dim 0: as data, as text, as torch
code.
"""

import json

import pytest
import torch
from small_models import Block
from small_moe import MoE, dims_of, on_dims
from test_plan import sharded_by_its_code
from torch import nn
from torch.distributed.tensor import Shard

from shardkit import (
    MeshSpec,
    PlanError,
    ShardingPlan,
    apply_plan,
    by_class,
    by_name,
    plan_model,
)
from shardkit.planning.dims import on_mesh
from shardkit.testing import fake_world

EIGHT = MeshSpec.sharded(8)
UP, DOWN = "layers.0.experts.up", "layers.0.experts.down"


def test_the_text_forms():
    plan = plan_model(MoE(experts=8), mesh=EIGHT)
    experts = [f"layers.{layer}.experts.up" for layer in range(3)]
    on_1 = on_dims(plan, dict.fromkeys(experts, 1))
    assert ShardingPlan.from_dict(json.loads(json.dumps(on_1.to_dict()))) == on_1 != plan
    assert plan.diff(on_1).splitlines()[:2] == [
        "- unit layers.0: shard_dims: []",
        f"+ unit layers.0: shard_dims: [['{UP}', 1]]",
    ]
    rows = str(on_1).splitlines()
    assert rows[2].endswith("not on dim 0")
    assert any(row.startswith("layers.0 .. layers.2") and row.endswith("on dim 1") for row in rows)


def test_what_cannot_be():
    fewer_ranks = plan_model(MoE(), mesh=EIGHT, reshard_after_forward=2)
    with pytest.raises(PlanError, match=f"{UP} is not sharded on dim 0, with reshard_after_for"):
        on_dims(fewer_ranks, {UP: 1}).check()
    plan = plan_model(MoE(dim=6, layers=1), mesh=EIGHT, units=by_class("MoEBlock"))
    for dim, error in ((1, "uneven sharding on dim 1"), (3, "dim 3")):  # torch's own
        with fake_world(8), pytest.raises(PlanError, match=error):
            apply_plan(MoE(dim=6, layers=1), on_dims(plan, {UP: dim}))


@pytest.mark.parametrize("mesh", [EIGHT, MeshSpec.hybrid(2, 4)])
def test_torch_shards_as_the_plan_says(mesh):
    """By apply_plan, and by the torch code."""
    model = MoE(experts=8)
    plan = plan_model(model, mesh=mesh)
    plan = on_dims(plan, {fqn: 1 for fqn in plan.specs if fqn.endswith(("up", "down"))})
    assert "model.get_parameter('layers.0.experts.up'): Shard(1),\n" in plan.to_python()
    by_hand = sharded_by_its_code(model, plan)
    dims = {fqn: param.placements[-1] for fqn, param in by_hand.named_parameters()}
    assert dims == {fqn: Shard(dims_of(plan).get(fqn, 0)) for fqn in plan.specs}
    assert torch.Size((8, 8 // mesh.shard_size, 32)) == by_hand.get_parameter(UP).to_local().shape


# Which dim the default chooses: dim 0, unless some ranks would hold too much.


def planned(*shapes, mesh, **options):
    """Of a model with one parameter of each shape, named by its place."""
    with torch.device("meta"):
        model = nn.Identity()
        for place, shape in enumerate(shapes):
            model.register_parameter(f"p{place}", nn.Parameter(torch.empty(shape)))
    return plan_model(model, mesh=mesh, units=[], **options)


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((8, 4096, 14336), 8, 0),
        ((8, 4096, 14336), 64, 1),
        ((8, 1000, 14336), 64, 2),  # 1000 is no multiple of 64
        ((32, 2880, 5760), 256, 0),  # neither is any dim
        ((1024, 8192), 2048, 1),
        ((11008, 4096), 1024, 1),  # 10.75 rows a rank, so the first rank holds 2.3 % more
        ((128256, 4096), 1024, 0),  # 0.6 % more
        ((53248, 16384), 16384, 0),  # 23 % more, on so many ranks that another dim costs more
        ((9,), 8, 0),
    ],
)
def test_one_parameter(shape, ranks, dim):
    plan = planned(shape, mesh=MeshSpec.sharded(ranks))
    assert dims_of(plan) == ({"p0": dim} if dim else {})
    hybrid = planned(shape, mesh=MeshSpec.hybrid(16, ranks))  # only the shard axis counts
    assert dims_of(hybrid) == dims_of(plan)


def test_no_more_than_needed():
    """Shapes that waste most are taken first, all of a shape or none, and none under 1 % of a
    rank's.
    """
    experts_biases_router = (8, 2048, 4096), (8, 4096), (8, 2048)
    assert dims_of(planned(*experts_biases_router, mesh=MeshSpec.sharded(64))) == {"p0": 1}
    mesh = MeshSpec.sharded(1024)
    plan = planned((11008, 4096), (11008, 4096), (32000, 4096), *[(4096, 11008)] * 9, mesh=mesh)
    assert dims_of(plan) == {}
    plan = planned(*[(11008, 4096)] * 9, (32000, 4096), *[(4096, 11008)] * 4, mesh=mesh)
    assert dims_of(plan) == {f"p{place}": 1 for place in range(9)}


def test_notes_say_which_and_why():
    assert planned((8, 64, 64), (256, 64), mesh=MeshSpec.sharded(64)).notes == (
        "p0: sharded on dim 1, because the 8 rows of dim 0 do not spread over 64 ranks; "
        "the fullest rank holds 3.0 KiB, not 17.0 KiB",
    )
    assert planned((8, 60, 60), mesh=MeshSpec.sharded(64)).notes == ()  # no dim divides
    assert planned((8, 64, 64), mesh=MeshSpec.sharded(64), reshard_after_forward=8).notes == ()


def test_on_another_mesh_other_dims_are_chosen_anew():
    here, there = (plan_model(MoE(experts=4), mesh=MeshSpec.sharded(ranks)) for ranks in (8, 4))
    assert dims_of(here) != dims_of(there)
    for one, other in ((here, there), (there, here)):
        moved = on_mesh(one, other.mesh)
        assert (moved, moved.notes) == (other, other.notes)
    first, second = (MeshSpec(shape, ("efsdp", "ep")) for shape in ((2, 2), (4, 2)))
    rules = [by_name("layers.*.experts", mesh="efsdp"), by_class(Block)]
    experts = plan_model(MoE(), mesh=first, units=rules)
    assert on_mesh(experts, second) == plan_model(MoE(), mesh=second, units=rules)
    assert (on_mesh(here, here.mesh), on_mesh(experts, first)) == (here, experts)
    with pytest.raises(PlanError, match=r"first two axes of dp_shard=8, got 'efsdp'.*Pass mesh="):
        on_mesh(experts, MeshSpec.sharded(8))
