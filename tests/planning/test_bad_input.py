"""Bad input: one clear error that names what, the rule and the fix; on every rank; nothing of the
model changed.
"""

import dataclasses

import pytest
import torch
import torch.nn as nn
from refusals import refused
from small_models import Block, Decoder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardkit import (
    MeshSpec,
    PlanError,
    ShardUnit,
    apply_plan,
    by_class,
    by_name,
    by_size,
    group,
    plan_model,
    shard_model,
)
from shardkit.testing import fake_world

EIGHT = MeshSpec.sharded(8)


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        (
            by_class("Missing"),
            ["by_class('Missing')", "Decoder, Embedding, ModuleList, Block", "layers.0"],
        ),
        (by_class(nn.ReLU), ["by_class(ReLU)", "no module that has parameters"]),
        (by_name("layer.*"), ["by_name('layer.*')", "embed, layers, layers.0"]),
        ("Block", ["by_name('Block') matches no module", "Use by_class for a class"]),
        (group("norm", "tail"), ["group('norm', 'tail')", "'tail' matches no module"]),
        (by_size(10**9), ["by_size(1000000000)"]),
        (lambda fqn, module: False, ["<lambda>"]),
        (
            by_name("layers"),
            [
                "layers is a ModuleList without forward, and by_name('layers') matches it",
                "layers.*",
            ],
        ),
        (
            by_class(Block, reshard=True),
            ["by_class(Block) has an unknown setting, reshard", "reshard_after_forward"],
        ),
        (
            by_class(Block, reshard_after_forward="yes"),
            ["reshard_after_forward of by_class(Block) must be bool | int, got 'yes'"],
        ),
        (42, ["units must be by_class", "got 42"]),
        (
            group("layers.0", "layers.0.norm"),
            ["group('layers.0', 'layers.0.norm')", "inside another one of the same"],
        ),
        (
            lambda fqn, module: {"tiles": 4} if fqn == "head" else fqn == "norm",
            ["<lambda> has an unknown", "tiles"],
        ),
        (by_name("norm", replicate=True), ["by_name('norm') has an unknown setting, replicate"]),
        # Two rules that claim one module.
        (
            [nn.LayerNorm, by_name("norm")],
            ["by_name('norm') matches no module", "that no earlier rule"],
        ),
        (
            [group("layers.0", "layers.1"), group("layers.1", "layers.2")],
            ["group('layers.1', 'layers.2') matches no module", "earlier rule"],
        ),
        (
            [by_class(Block), by_name("layers.*")],
            ["by_name('layers.*')", "put the narrower rule first"],
        ),
    ],
)
def test_rules_that_cannot_be_followed(rule, parts):
    model = Decoder()
    with refused(model, *parts):
        plan_model(model, units=rule, mesh=EIGHT)


def test_tied_parameters_in_two_units():
    model = Decoder(tied=True)
    with refused(model, "embed.weight is shared by embed, head", "group('embed', 'head')"):
        plan_model(model, units=by_name("embed", "head"), mesh=EIGHT)
    plan = plan_model(Decoder(), units=by_name("embed", "head"), mesh=EIGHT)
    untied = dataclasses.replace(plan, params=plan_model(model, mesh=EIGHT).params)
    with fake_world(8), refused(model):
        apply_plan(model, untied)


def test_mixed_dtypes_that_train():
    model = Decoder()
    model.layers[1].norm.to(torch.bfloat16)
    with refused(
        model,
        "layers.1 trains parameters of 2 dtypes",
        "bfloat16: layers.1.norm.weight",
        "unit of their own",
    ):
        plan_model(model, units=by_class(Block), mesh=EIGHT)
    model.layers[1].norm.requires_grad_(False)
    plan_model(model, units=by_class(Block), mesh=EIGHT)  # frozen ones may be mixed


def test_what_cannot_be_sharded_is_replicated_but_not_alone():
    model = Decoder()
    model.scale, model.none = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 4))
    plan = plan_model(model, mesh=EIGHT)
    assert plan.replicated == ("scale", "none")
    alone = nn.ParameterList([nn.Parameter(torch.tensor(1.0))])
    with refused(alone, "model has no parameter that can be sharded: 0"):
        plan_model(alone, mesh=EIGHT)


def test_settings_that_do_not_fit():
    model = Decoder()
    for setting in ("mp_policy", "offload_policy", "checkpoint_activations", "compile"):
        with refused(model, f"{setting} must be ", "got 'yes'"):
            plan_model(model, mesh=EIGHT, **{setting: "yes"})
    for ranks in (3, 16, 0, -2):
        asked = f"has reshard_after_forward={ranks}"
        with refused(model, asked, "Use a divisor, True or False", "8 ranks of axis dp_shard"):
            plan_model(model, reshard_after_forward=ranks, mesh=EIGHT)
    with pytest.raises(
        PlanError, match=r"^1\.weight is not initialized\. A lazy module has no shapes before"
    ):
        plan_model(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)), mesh=EIGHT)
    with refused(model, "ignored_params has a Parameter, nothing, not in the model"):
        plan_model(model, mesh=EIGHT, ignored_params=[Decoder().embed.weight, "nothing"])


def test_meshes_that_do_not_fit():
    model = Decoder()
    with fake_world(8):
        for shape in ((2, 4), (2, 2, 2)):
            with refused(model, f"mesh has the shape {shape} with axis names ('dp_shard',)"):
                shard_model(model, mesh=init_device_mesh("cpu", shape))
        with refused(model, "mesh must be a DeviceMesh, a MeshSpec or None, got list"):
            shard_model(model, mesh=[8])
        with refused(
            model, "mesh dp_shard=4 needs 4 ranks, and there are 8", "MeshSpec.sharded(8)"
        ):
            shard_model(model, mesh=MeshSpec.sharded(4))
        with refused(model, "mesh is dp=8, and the plan was made for dp_shard=8"):
            apply_plan(
                model,
                plan_model(model, mesh=EIGHT),
                init_device_mesh("cpu", (8,), mesh_dim_names=("dp",)),
            )
    with pytest.raises(PlanError, match="mesh has the shape"):
        MeshSpec((2, 2, 2), ("a", "b", "c"), shard_axes=1)


def test_sharded_already():
    model = Decoder()
    with fake_world(8):
        shard_model(model)
        with refused(
            model, "(root), embed, layers.0, layers.1, layers.2, norm and 1 more is sharded already"
        ):
            shard_model(model)
        inner = Decoder()
        fully_shard(inner.layers[1], mesh=init_device_mesh("cpu", (8,)))
        with refused(inner, "layers.1 is sharded already", "layers.1.up.weight"):
            shard_model(inner)


def test_parameters_that_are_dtensors_already():
    model = Decoder()
    with fake_world(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        model.head.weight = nn.Parameter(
            distribute_tensor(model.head.weight.detach(), mesh["tp"], [Shard(0)])
        )
        with refused(model, "replicate has head.weight, a DTensor."):
            shard_model(model, mesh=mesh["dp"], replicate="head")
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
        model.head.weight = nn.Parameter(
            distribute_tensor(Decoder().head.weight.detach(), mesh, [Shard(0)])
        )
        with refused(model, "head.weight is a DTensor already", 'mesh=world_mesh["dp"]'):
            shard_model(model)
        with refused(model, "head.weight is a DTensor over dp already"):
            shard_model(model, mesh=mesh)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Decoder(layers=4), "the plan has no parameter layers.3.down.bias"),
        (lambda: Decoder(layers=2), "the model has no parameter layers.2.down.bias"),
        (
            lambda: Decoder(vocabulary=12),
            "embed.weight is ParamSpec(fqn='embed.weight', shape=(12, 8)",
        ),
        (lambda: Decoder(tied=True), "aliases=('head.weight',)"),
    ],
)
def test_plan_of_another_model(make, part):
    model = make()
    with fake_world(8), refused(model, part, "Make the plan from this model"):
        apply_plan(model, plan_model(Decoder(layers=3), mesh=EIGHT))


def test_a_spec_is_no_mesh_to_apply_a_plan_on():
    model = Decoder()
    plan = plan_model(model, mesh=EIGHT)
    with (
        fake_world(8),
        refused(model, "mesh must be a DeviceMesh or None, got MeshSpec", "Leave it out"),
    ):
        apply_plan(model, plan, EIGHT)


def test_plan_edited_by_hand():
    model = Decoder()
    plan = plan_model(model, mesh=EIGHT)
    first, last = plan.units[0], plan.units[-1]
    with fake_world(8):
        for units, parts in (
            (plan.units[1:], ["(root) would own "]),
            (
                (*plan.units[:-1], dataclasses.replace(last, params=("norm.bias",))),
                ["(root) would own [], not [norm.bias]"],
            ),
            ((ShardUnit(("elsewhere",), ()), *plan.units), ["the model has no module elsewhere"]),
            (
                (dataclasses.replace(first, modules=("norm",)), *plan.units[1:]),
                ["norm appears in two units"],
            ),
            (
                plan.units[::-1],
                [
                    "layers.0 appears in two units, or comes after a module around it",
                    "units must end with the root",
                ],
            ),
        ):
            with refused(model, *parts):
                apply_plan(model, dataclasses.replace(plan, units=units))


def test_parameters_in_the_same_memory():
    model = Decoder()
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    with (
        fake_world(8),
        refused(model, "head.weight is in the same memory as embed.weight", "one Parameter"),
    ):
        shard_model(model)
    flat = torch.zeros(2, 3, 4)
    beside = nn.Module()
    beside.first, beside.second = nn.Parameter(flat[0]), nn.Parameter(flat[1])
    with fake_world(2):
        shard_model(beside)


class Factorized(nn.Linear):
    """As tltorch's FactorizedTensor, in every FNO of neuraloperator."""

    def __init_subclass__(cls, name: str): ...


class Tucker(Factorized, name="tucker"): ...


def test_a_class_that_takes_arguments_for_its_subclasses():
    with fake_world(2):
        assert isinstance(shard_model(Tucker(4, 4)).weight, DTensor)


def test_a_module_by_two_names():
    model = Decoder()
    model.layers[1] = model.layers[0]
    plan = plan_model(model, mesh=EIGHT)
    doubled = dataclasses.replace(plan.units[0], modules=("layers.1",), params=(), shard_dims=())
    with fake_world(8), pytest.raises(PlanError, match="could not be sharded by torch"):
        apply_plan(model, dataclasses.replace(plan, units=(doubled, *plan.units)))
    assert [unit.name for unit in plan.units] == [
        "embed",
        "layers.0",
        "layers.2",
        "[norm, head]",
        "(root)",
    ]
