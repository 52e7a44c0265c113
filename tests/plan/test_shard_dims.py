"""The dim on which each parameter is sharded, where it is not dim 0: as data, as text, as torch code."""

import json
from dataclasses import replace

import pytest
import torch
from small_moe import MoE, dims_of
from test_plan import sharded_by_its_code
from torch.distributed.tensor import Shard

from shardkit import MeshSpec, PlanError, ShardingPlan, by_class, by_name, group, plan_model

EIGHT = MeshSpec.sharded(8)
COLUMNS = by_class("MoEBlock", shard_dim=1)
UP, DOWN = "layers.0.experts.up", "layers.0.experts.down"


def on_dims(plan: ShardingPlan, dims: dict[str, int], **changes: object) -> ShardingPlan:
    """The plan with these dims in its first unit."""
    return replace(plan, units=(replace(plan.units[0], shard_dims=dims, **changes), *plan.units[1:]))


def test_the_text_forms() -> None:
    plan = plan_model(MoE(experts=8), mesh=EIGHT)
    on_1 = on_dims(plan, {UP: 1})
    assert ShardingPlan.from_dict(json.loads(json.dumps(on_1.to_dict()))) == on_1 != plan
    assert plan.diff(on_1) == f"- unit embed: shard_dims: []\n+ unit embed: shard_dims: [['{UP}', 1]]"
    rows = str(plan_model(MoE(experts=8), mesh=EIGHT, units=by_name("layers.*.experts", shard_dim=1))).splitlines()
    assert rows[2].endswith("not on dim 0")
    assert rows[3].startswith("layers.0.experts .. layers.2.experts")
    assert rows[3].endswith("3 on dim 1")


def test_a_rule_sets_the_dim_of_what_has_one() -> None:
    plan = plan_model(MoE(experts=8), mesh=EIGHT, units=[by_name("layers.*.experts", shard_dim=2), COLUMNS])
    assert {fqn.partition(".experts.")[2]: dim for fqn, dim in dims_of(plan).items() if "experts" in fqn} == {
        "up": 2,
        "down": 2,  # the bias has no dim 2
    }
    assert {fqn for fqn, dim in dims_of(plan).items() if dim == 1} == {
        f"layers.{index}.{name}.weight" for index in range(3) for name in ("up", "down", "router")
    }


@pytest.mark.parametrize(
    ("dims", "changes", "text"),
    [
        ({UP: 3}, {}, "is sharded on dim 3 in layers.0, where its shape is (2, 8, 32). A dim counts"),
        ({UP: -1}, {}, "is sharded on dim -1 in layers.0"),
        ({UP: 1}, {"reshard_after_forward": 2}, "is sharded on dim 1, with reshard_after_forward=2. torch reshards"),
    ],
)
def test_what_cannot_be(dims: dict[str, int], changes: dict[str, object], text: str) -> None:
    plan = plan_model(MoE(), mesh=EIGHT, units=by_class("MoEBlock"))
    with pytest.raises(PlanError) as caught:
        on_dims(plan, dims, **changes).check()
    assert text in str(caught.value)


def test_a_rule_whose_dim_does_not_divide_names_each_parameter() -> None:
    with pytest.raises(PlanError) as caught:
        plan_model(MoE(dim=6, layers=1), mesh=EIGHT, units=by_class("MoEBlock", shard_dim=1))
    lines = str(caught.value).splitlines()
    assert f"{UP} is sharded on dim 1, whose size 6 the 8 ranks of dp_shard do not divide." in lines[-1]
    assert not any(DOWN in line or "norm" in line for line in lines)  # 24 rows divide; a norm has no dim 1
    with pytest.raises(PlanError, match=r"by_name\('embed'\) has shard_dim=2, but no parameter .* more than 2 dims"):
        plan_model(MoE(experts=8), mesh=EIGHT, units=[by_name("embed", shard_dim=2)])
    with pytest.raises(PlanError, match=r"shard_dim of by_class\('MoEBlock'\) must be a int, got 'rows'"):
        plan_model(MoE(), mesh=EIGHT, units=by_class("MoEBlock", shard_dim="rows"))  # type: ignore[arg-type]


@pytest.mark.parametrize("mesh", [EIGHT, MeshSpec.hybrid(2, 4)])
def test_torch_shards_as_the_plan_says(mesh: MeshSpec) -> None:
    """By apply_plan, and by the torch code."""
    rules = [by_name("layers.*.experts", shard_dim=1), group("layers.1", "layers.2", shard_dim=1), "layers.*"]
    model = MoE(experts=8)
    plan = plan_model(model, mesh=mesh, units=rules)
    assert '    "layers.0.experts.up": 1,\n' in plan.to_python()
    by_hand = sharded_by_its_code(model, plan)
    dims = {fqn: param.placements[-1] for fqn, param in by_hand.named_parameters()}
    assert dims == {fqn: Shard(dims_of(plan).get(fqn, 0)) for fqn in plan.specs}
    assert torch.Size((8, 8 // mesh.shard_size, 32)) == by_hand.get_parameter(UP).to_local().shape
