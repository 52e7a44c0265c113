"""Bad input: one clear error that names what, the rule and the fix; on every rank; nothing of the model changed."""

import dataclasses

import pytest
import torch
import torch.nn as nn
from refusals import refused
from small_models import Block, Decoder, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardkit import (
    CPUOffloadPolicy,
    MeshSpec,
    MixedPrecisionPolicy,
    PlanError,
    ShardkitError,
    ShardUnit,
    apply_plan,
    by_class,
    by_name,
    by_size,
    check_optimizer,
    fully_shard,
    group,
    plan_model,
    shard_model,
)
from shardkit.testing import fake_world

EIGHT = MeshSpec.sharded(8)


def test_no_policy_is_the_default() -> None:
    plan = plan_model(Decoder(), mesh=EIGHT, mp_policy=None, offload_policy=None)  # type: ignore[arg-type]
    assert plan == plan_model(Decoder(), mesh=EIGHT)


def test_not_a_module() -> None:
    with pytest.raises(PlanError, match=r"model must be a torch\.nn\.Module, got dict"):
        plan_model({}, mesh=EIGHT)  # type: ignore[arg-type]


def test_no_parameters() -> None:
    with pytest.raises(PlanError, match=r"model .*no parameters"):
        plan_model(nn.ReLU(), mesh=EIGHT)


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        (by_class("Missing"), ["by_class('Missing')", "Decoder, Embedding, ModuleList, Block", "layers.0"]),
        (by_class(nn.ReLU), ["by_class(ReLU)", "no module that has parameters"]),
        (by_name("layer.*"), ["by_name('layer.*')", "embed, layers, layers.0"]),
        (group("norm", "tail"), ["group('norm', 'tail')", "'tail' matches no module"]),
        (by_size(10**9), ["by_size(1000000000)"]),
        (lambda fqn, module: False, ["<lambda>"]),
        (by_name("layers"), ["layers is a ModuleList without forward, and by_name('layers') matches it", "layers.*"]),
        (by_class(Block, reshard=True), ["by_class(Block) has an unknown setting, reshard", "reshard_after_forward"]),
        (
            by_class(Block, reshard_after_forward="yes"),
            ["reshard_after_forward of by_class(Block) must be True, False or a number of ranks, got 'yes'"],
        ),
        (42, ["units must be by_class", "got 42"]),
    ],
)
def test_a_rule_that_cannot_be_followed(rule: object, parts: list[str]) -> None:
    model = Decoder()
    with refused(model, *parts):
        plan_model(model, units=rule, mesh=EIGHT)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rules", "parts"),
    [
        (
            [group("layers.0", "layers.1"), group("layers.1", "layers.2")],
            ["layers.1 (by group('layers.0', 'layers.1'))"],
        ),
        ([by_class(Block), group("layers.1", "norm")], ["group('layers.1', 'norm')", "layers.1 (by by_class(Block))"]),
        ([by_class(Block), by_name("layers.*")], ["by_name('layers.*')", "put the narrower one first"]),
    ],
)
def test_two_rules_that_claim_one_module(rules: list[object], parts: list[str]) -> None:
    model = Decoder()
    with refused(model, *parts):
        plan_model(model, units=rules, mesh=EIGHT)  # type: ignore[arg-type]


def test_a_group_with_a_module_inside_another() -> None:
    model = Decoder()
    with refused(model, "group('layers.0', 'layers.0.norm')", "inside another one of the same unit"):
        plan_model(model, units=group("layers.0", "layers.0.norm"), mesh=EIGHT)


def test_parent_before_child() -> None:
    model = Decoder()
    plan = plan_model(model, mesh=EIGHT)
    upside_down = dataclasses.replace(plan, units=plan.units[::-1])
    with fake_world(8), refused(model, "layers.0 comes after (root), its parent", "units must end with the root"):
        apply_plan(model, upside_down)


def test_tied_parameters_in_two_units() -> None:
    model = Decoder(tied=True)
    with refused(model, "embed.weight is shared by embed, head", "group('embed', 'head')"):
        plan_model(model, units=by_name("embed", "head"), mesh=EIGHT)
    plan = plan_model(Decoder(), units=by_name("embed", "head"), mesh=EIGHT)
    untied = dataclasses.replace(plan, params=plan_model(model, mesh=EIGHT).params)
    with fake_world(8), refused(model):
        apply_plan(model, untied)


def test_mixed_dtypes_that_train() -> None:
    model = Decoder()
    model.layers[1].norm.to(torch.bfloat16)
    with refused(
        model, "layers.1 trains parameters of 2 dtypes", "bfloat16: layers.1.norm.weight", "unit of their own"
    ):
        plan_model(model, units=by_class(Block), mesh=EIGHT)
    model.layers[1].norm.requires_grad_(False)
    plan_model(model, units=by_class(Block), mesh=EIGHT)  # frozen ones may be mixed


@pytest.mark.parametrize("reshard", [3, 16, 0, -2])
def test_a_number_of_ranks_that_does_not_divide(reshard: int) -> None:
    model = Decoder()
    with refused(
        model, f"has reshard_after_forward={reshard}", "Use 1, 2, 4, 8, True or False", "8 ranks of axis dp_shard"
    ):
        plan_model(model, reshard_after_forward=reshard, mesh=EIGHT)


def test_what_cannot_be_sharded_in_a_unit_or_alone_or_cast() -> None:
    model = Decoder()
    model.scale, model.none = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 4))
    plan = plan_model(model, mesh=EIGHT)
    assert plan.replicated == ("scale", "none")
    root = dataclasses.replace(plan.units[-1], params=("scale", "none"))
    edited = dataclasses.replace(plan, units=(*plan.units[:-1], root), replicated=())
    with refused(model, "scale is a scalar, shape ()", "none is empty, shape (0, 4)", "in replicated"):
        edited.check()
    with refused(model, "none is empty, shape (0, 4)", "torch.bfloat16", ".to(torch.bfloat16)"):
        plan_model(model, mesh=EIGHT, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    alone = nn.ParameterList([nn.Parameter(torch.tensor(1.0))])
    with refused(alone, "model has no parameter that can be sharded: 0"):
        plan_model(alone, mesh=EIGHT)


def test_ignored_parameter_of_another_model() -> None:
    model = Decoder()
    with refused(model, "ignored_params has a Parameter, nothing, not in the model"):
        plan_model(model, mesh=EIGHT, ignored_params=[Decoder().embed.weight, "nothing"])


def test_settings_of_the_wrong_type() -> None:
    model = Decoder()
    for setting in ("mp_policy", "offload_policy", "checkpoint_activations", "compile"):
        with refused(model, f"{setting} must be a ", "got 'yes'"):
            plan_model(model, mesh=EIGHT, **{setting: "yes"})
    with refused(model, "prefetch must be a number of units, 0 or more, got -1"):
        plan_model(model, mesh=EIGHT, prefetch=-1)
    with fake_world(8), refused(model, "mesh must be a DeviceMesh, a MeshSpec or None, got list"):
        shard_model(model, mesh=[8])  # type: ignore[arg-type]


def test_two_dimensional_mesh_without_names() -> None:
    model = Decoder()
    with fake_world(8), refused(model, "mesh must have axis names, got a DeviceMesh of shape (2, 4)", "mesh_dim_names"):
        shard_model(model, mesh=init_device_mesh("cpu", (2, 4)))
    with fake_world(8), refused(model, "mesh must have axis names, got a DeviceMesh of shape (2, 2, 2)"):
        shard_model(model, mesh=init_device_mesh("cpu", (2, 2, 2)))


def test_mesh_on_another_device() -> None:
    model = Decoder()
    with fake_world(8):
        mesh = init_device_mesh("xpu", (8,), mesh_dim_names=("dp",))
        with refused(model, "mesh is on 'xpu'", "this process has"):
            shard_model(model, mesh=mesh)


def test_mesh_of_another_size() -> None:
    model = Decoder()
    with fake_world(8), refused(model, "mesh dp_shard=4 needs 4 ranks, and there are 8", "MeshSpec.sharded(8)"):
        shard_model(model, mesh=MeshSpec.sharded(4))
    with fake_world(8), refused(model, "mesh is dp=8, and the plan was made for dp_shard=8"):
        apply_plan(model, plan_model(model, mesh=EIGHT), init_device_mesh("cpu", (8,), mesh_dim_names=("dp",)))
    with pytest.raises(PlanError, match="mesh has the shape"):
        MeshSpec((2, 2, 2), ("a", "b", "c"), shard_axes=1)


def test_offload_that_pins_memory_without_an_accelerator() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    model = Decoder()
    with fake_world(8), refused(model, "offload_policy is CPUOff", "pin_memory=False"):
        shard_model(model, offload_policy=CPUOffloadPolicy())


def test_sharded_already() -> None:
    model = Decoder()
    with fake_world(8):
        shard_model(model)
        with refused(model, "(root), embed, layers.0, layers.1, layers.2, norm and 1 more is sharded already"):
            shard_model(model)
        inner = Decoder()
        fully_shard(inner.layers[1], mesh=init_device_mesh("cpu", (8,)))
        with refused(inner, "layers.1 is sharded already", "layers.1.up.weight"):
            shard_model(inner)


def test_parameter_sharded_already() -> None:
    model = Decoder()
    with fake_world(8):
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(0)]))
        with refused(model, "head.weight is a DTensor already", 'mesh=world_mesh["dp"]'):
            shard_model(model)
        with refused(model, "head.weight is a DTensor already"):
            shard_model(model, mesh=mesh)


def test_resharding_tensor_parallel_parameters_to_fewer_ranks() -> None:
    model = Decoder()
    with fake_world(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh["tp"], [Shard(0)]))
        with refused(model, "[norm, head] has reshard_after_forward=2 with tensor-parallel parameters"):
            shard_model(model, mesh=mesh["dp"], reshard_after_forward=2)


def test_plan_of_another_model() -> None:
    plan = plan_model(Decoder(layers=3), mesh=EIGHT)
    cases: list[tuple[nn.Module, list[str]]] = [
        (Decoder(layers=4), ["the plan has no parameter layers.3.down.bias"]),
        (Decoder(layers=2), ["the model has no parameter layers.2.down.bias"]),
        (
            Decoder(layers=3, vocabulary=12),
            ["embed.weight has shape (12, 8) in the model and shape (11, 8) in the plan"],
        ),
        (Decoder(layers=3).double(), ["embed.weight has dtype torch.float64 in the model"]),
        (Decoder(layers=3, tied=True), ["embed.weight has aliases ('head.weight',) in the model"]),
    ]
    for model, parts in cases:
        with fake_world(8), refused(model, *parts, "Make the plan from this model"):
            apply_plan(model, plan)


def test_no_plan_and_no_mesh() -> None:
    model = Decoder()
    plan = plan_model(model, mesh=EIGHT)
    with fake_world(8):
        for call in (apply_plan, lambda model, plan: shard_model(model, plan=plan)):
            with refused(model, "plan must be a ShardingPlan, got dict", "ShardingPlan.from_dict"):
                call(model, plan.to_dict())
        with refused(model, "mesh must be a DeviceMesh or None, got MeshSpec", "Leave it out"):
            apply_plan(model, plan, EIGHT)  # type: ignore[arg-type]


def test_plan_edited_by_hand() -> None:
    model = Decoder()
    plan = plan_model(model, mesh=EIGHT)
    missing = dataclasses.replace(plan, units=plan.units[1:])
    doubled = dataclasses.replace(
        plan, units=(*plan.units[:-1], dataclasses.replace(plan.units[-1], params=("norm.bias",)))
    )
    stranger = dataclasses.replace(plan, units=(ShardUnit(("elsewhere",), ()), *plan.units))
    moved = dataclasses.replace(plan, units=(dataclasses.replace(plan.units[0], modules=("norm",)), *plan.units[1:]))
    with fake_world(8):
        for edited, part in (
            (missing, "is in no unit"),
            (doubled, "norm.bias is in [norm, head], (root)"),
            (stranger, "the model has no module elsewhere"),
            (moved, "norm appears in two units"),
        ):
            with refused(model, part):
                apply_plan(model, edited)
        with refused(model, "plan was given together with compile"):
            shard_model(model, plan=plan, compile=True)


def test_parameters_in_the_same_memory() -> None:
    model = Decoder()
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    with fake_world(8), refused(model, "head.weight is in the same memory as embed.weight", "one Parameter"):
        shard_model(model)
    flat = torch.zeros(2, 3, 4)
    beside = nn.Module()
    beside.first, beside.second = nn.Parameter(flat[0]), nn.Parameter(flat[1])
    with fake_world(2):
        shard_model(beside)


def test_a_module_by_two_names() -> None:
    model = Decoder()
    model.layers[1] = model.layers[0]
    plan = plan_model(model, mesh=EIGHT)
    doubled = dataclasses.replace(plan.units[0], modules=("layers.1",), params=(), shard_dims=())
    with fake_world(8), refused(model, "layers.0 is another name of the module layers.1"):
        apply_plan(model, dataclasses.replace(plan, units=(doubled, *plan.units)))

    assert [unit.name for unit in plan.units] == ["embed", "layers.0", "layers.2", "[norm, head]", "(root)"]


def test_integer_parameters() -> None:
    model = Decoder()
    model.layers[1].codes = nn.Parameter(torch.zeros(9, 4, dtype=torch.int8), requires_grad=False)
    with fake_world(8):
        shard_model(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        step(model)
    assert model.layers[1].codes.to_local().dtype is torch.int8


def test_optimizer_built_before_sharding() -> None:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fake_world(8):
        shard_model(model)
        with pytest.raises(ShardkitError, match="optimizer holds 22"):
            check_optimizer(optimizer, model)
        check_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
