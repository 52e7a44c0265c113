"""Units on one axis of the mesh: experts that the model has split, beside dense units
on all ranks.
"""

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from expert_net import EXPERTS, RULES, ExpertNet, batch, expert_plan, train_both
from layouts import full
from meshes import mesh_of
from small_moe import on_dims
from torch import nn

from shardkit import (
    MeshSpec,
    PlanError,
    apply_plan,
    by_name,
    full_state_dict,
    plan_model,
    set_gradient_reduction,
    shard_model,
)
from shardkit.testing import assert_same_on_all_ranks, comm_counts

AXES = ("dp_replicate", "efsdp", "ep")


def spec(*shape):
    return MeshSpec(shape, AXES[-len(shape) :])


def test_a_plan_made_on_a_laptop_says_which_mesh_each_unit_is_on():
    plan = expert_plan(ExpertNet(), spec(2, 4, 8))
    assert (
        str(plan)
        .splitlines()[0]
        .startswith(
            "ShardingPlan: 758 parameters in 5 units on mesh dp_replicate=2 x efsdp=4 x ep=8, "
        )
    )
    rows = {line.split("  ")[0]: line for line in str(plan).splitlines()}
    assert rows["layers.0.experts .. layers.1.experts"].endswith("dp_replicate=2 x efsdp=4")
    assert rows["layers.0 .. layers.1"].endswith("dp_replicate=2 x efsdp_ep=32")
    experts, dense = (
        next(each for each in plan.units if each.name == name)
        for name in ("layers.0.experts", "layers.0")
    )
    assert (plan.mesh_of(experts).shard_size, plan.mesh_of(dense).shard_size) == (4, 32)
    assert {each.fqn for each in plan.params if each.tensor_parallel} == {
        f"layers.{layer}.experts.{name}" for layer in range(2) for name in ("weight", "bias")
    }
    counts = plan.collectives()
    assert (counts.all_gathers, counts.reduce_scatters, counts.all_reduces) == (8, 4, 4 + 2)
    # each rank has its experts whole
    alone = expert_plan(ExpertNet(), spec(2, 1, 32)).collectives()
    assert (alone.all_gathers, alone.reduce_scatters, alone.all_reduces) == (4, 2, 4 + 2)


@pytest.mark.parametrize(
    ("mesh", "axes", "found"),
    [
        (
            spec(2, 2, 2),
            ["ep"],
            "must be one of the first two axes of dp_replicate=2 x efsdp=2 x ep=2",
        ),
        (spec(2, 2), ["fsdp"], "must be one of the first two axes of efsdp=2 x ep=2"),
        (spec(2, 2), [1], "must be <class 'str'>, got 1"),
        (spec(2, 2), ["efsdp", "ep"], "'ep' of efsdp=2 x ep=2, got 'efsdp'."),
    ],
)
def test_an_axis_that_units_cannot_be_on_is_refused(mesh, axes, found):
    rules = [by_name(f"layers.{number}.experts", mesh=axis) for number, axis in enumerate(axes)]
    with pytest.raises(PlanError) as error:
        plan_model(ExpertNet(), mesh=mesh, units=rules)
    assert found in str(error.value)


@pytest.mark.parametrize(
    ("shape", "reduction", "dim"),
    [((2, 2), "mean", None), ((1, 4), "sum", None), ((2, 1, 2), "mean", None), ((2, 2), "mean", 1)],
)
@on_ranks(4)
def test_training_is_that_of_one_process(shape, reduction, dim):
    """Gradients, the norm, and three steps of AdamW; one rank has no token, the others have
    different numbers.
    """
    mesh = mesh_of(shape, *AXES[-len(shape) :])
    model = ExpertNet().split(mesh["ep"])
    plan = expert_plan(model, mesh)
    if dim is not None:
        experts = [fqn for fqn in plan.specs if ".experts." in fqn]
        plan = on_dims(plan, dict.fromkeys(experts, dim))
    apply_plan(model, plan, mesh)
    set_gradient_reduction(model, reduction)
    with comm_counts() as counts:
        x, expert = torch.ones(1, 6, dtype=torch.double), torch.zeros(1, dtype=torch.long)
        model(x, expert).sum().backward()
    predicted = plan.collectives()
    assert (counts.all_gathers, counts.reduce_scatters) == (
        predicted.all_gathers,
        predicted.reduce_scatters,
    )
    model.zero_grad()
    assert model.layers[0].experts.weight.placements[-2].dim == (dim or 0)
    assert train_both(model, ExpertNet()) <= 1e-15


@on_ranks(4)
def test_the_written_code_shards_alike():
    mesh = mesh_of((2, 2), "efsdp", "ep")
    model, by_hand = (ExpertNet().split(mesh["ep"]) for _ in range(2))
    plan = expert_plan(model, mesh)
    apply_plan(model, plan, mesh)
    scope = {"model": by_hand}
    exec(plan.to_python(), scope)
    for each in (model, by_hand):
        each(*batch(dist.get_rank(), 0)).square().sum().backward()
    scope["reduce_replicated"]()
    for a, b in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert a.grad.count_nonzero() > 0
        assert torch.equal(full(a.grad), full(b.grad))


@on_ranks(4)
def test_what_cannot_work_is_refused_on_every_rank():
    mesh = mesh_of((2, 2), "efsdp", "ep")
    split = ExpertNet().split(mesh["ep"])
    mixed = ExpertNet().split(mesh["ep"])
    mixed.layers[1].experts.bias = nn.Parameter(torch.zeros(EXPERTS, 6, dtype=torch.double))
    made = expert_plan(split, mesh)
    cases = [
        (
            ExpertNet(),
            {"mesh": mesh, "units": RULES},
            "not split over ep, in the unit layers.0.experts on efsdp=2",
        ),
        (mixed, {"mesh": mesh, "units": RULES}, "layers.1.experts.bias is not split over ep"),
        (ExpertNet(), {"mesh": mesh, "plan": made}, "not split over ep"),
        (split, {"mesh": mesh}, "is a DTensor over ep already"),
        (split, {"units": RULES}, "is a DTensor already"),
        (split, {"plan": made}, "is a DTensor already"),
    ]
    for model, arguments, found in cases:
        shard = apply_plan if "plan" in arguments else shard_model
        with pytest.raises(PlanError) as error:
            shard(model, **arguments)
        assert found in str(error.value), str(error.value)
        assert_same_on_all_ranks(torch.tensor(len(str(error.value))))
        assert not any(hasattr(module, "unshard") for module in model.modules())


@on_ranks(4)
def test_experts_start_from_the_first_copy_of_each_or_must_be_equal():
    mesh = mesh_of((2, 2), "efsdp", "ep")
    same = dist.get_rank() < 2  # of axis efsdp, the first
    model = ExpertNet(0 if same else 1).split(mesh["ep"])
    with pytest.raises(PlanError, match=r"layers\.0\.\S+ has different values on rank"):
        shard_model(model, mesh=mesh, units=RULES)
    shard_model(model, mesh=mesh, units=RULES, sync_module_states=True)
    whole, expected = full_state_dict(model), ExpertNet(0).state_dict()
    if dist.get_rank() == 0:
        assert all(torch.equal(whole[name], expected[name]) for name in expected)
