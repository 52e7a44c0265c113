"""The plan as data: what it prints, compares, writes and reads."""

import copy
import dataclasses
import json
import warnings

import pytest
import small_models
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Block, Decoder, step
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from shardkit import (
    CPUOffloadPolicy,
    MeshSpec,
    MixedPrecisionPolicy,
    PlanError,
    ShardingPlan,
    apply_plan,
    by_class,
    by_name,
    group,
    plan_model,
)
from shardkit._fsdp import fsdp_units
from shardkit._torch import torch_version, units_of
from shardkit.plan import is_world_size
from shardkit.testing import comm_counts, fake_world

EIGHT = MeshSpec.sharded(8)
EVERYTHING = {
    "units": [
        by_name("layers.1", reshard_after_forward=2, compile=True),
        by_class(
            Block, checkpoint_activations=True, offload_policy=CPUOffloadPolicy(pin_memory=False)
        ),
        group("norm", "head", reshard_after_forward=False),
    ],
    "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32),
    "ignored_params": ["embed.weight"],
    "prefetch": 2,
}


def test_a_decoder_as_a_table_and_as_a_loop():
    plan = plan_model(Decoder(layers=12, dim=64, vocabulary=1000), mesh=MeshSpec.hybrid(2, 4))
    assert str(plan) == (
        "ShardingPlan: 328.6 k parameters in 15 units on mesh dp_replicate=2 x dp_shard=4, "
        "320.9 KiB of 1.3 MiB on each rank\n"
        "\n"
        "unit                    parameters          bytes  dtype    reshards\n"
        "embed                         64 k      250.0 KiB  float32  after forward\n"
        "layers.0 .. layers.11  12 x 16.7 k  12 x 65.2 KiB  float32  after forward\n"
        "[norm, head]               64.13 k      250.5 KiB  float32  after backward\n"
        "(root)                           -              -           after backward\n"
        "\n"
        "one forward and backward: 27 all-gathers, 14 reduce-scatters, 14 all-reduces"
    )
    assert plan.to_python().count("fully_shard(") == 2
    assert plan.to_python().count("['layers.") == 12


def test_the_table_shows_what_differs():
    model = Decoder(tied=True)
    model.layers[0].norm.requires_grad_(False)
    text = str(plan_model(model, mesh=EIGHT, **EVERYTHING | {"units": EVERYTHING["units"][:2]}))
    for part in (
        "to 2 ranks",
        "bfloat16, reduces in float32",
        "checkpointed",
        "compiled",
        "lives on",
        "CPU",
        "float32, float32 frozen",
        "tied: embed.weight = head.weight",
        "the root keeps: norm.weight, norm.bias",
        "ignored: embed.weight",
        "prefetch: 2 units ahead",
        "note: embed.weight: ignored but trained",
    ):
        assert part in text


def test_json_round_trip():
    plan = plan_model(Decoder(tied=True), mesh=EIGHT, **EVERYTHING)
    again = ShardingPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.notes == plan.notes
    units = {unit.name: unit for unit in again.units}
    assert units["layers.1"].reshard_after_forward == 2
    assert units["layers.0"].offloads


@pytest.mark.parametrize(
    "edit",
    [
        {"version": 99},
        {"mesh": {"shape": [8, 8, 8], "axis_names": ["a", "b"]}},
        {"mesh": {"shape": [8, 8], "axis_names": ["a", "a"]}},
        {"surplus": 1},
        {"params": [["embed.weight", [1], "float33", True, [], False]]},
        {"units": [{"modules": [""]}]},
    ],
)
def test_json_that_is_no_plan(edit):
    with pytest.raises(PlanError):
        ShardingPlan.from_dict({**plan_model(Decoder(), mesh=EIGHT).to_dict(), **edit})


def test_diff_names_each_difference():
    plan = plan_model(Decoder(), mesh=EIGHT)
    assert plan.diff(plan) == ""
    other = plan_model(Decoder(layers=4), mesh=MeshSpec.hybrid(2, 4), prefetch=1)
    lines = plan.diff(other).splitlines()
    assert "- mesh: dp_shard=8" in lines
    assert "+ mesh: dp_replicate=2 x dp_shard=4" in lines
    assert "+ unit layers.3: 6 parameters" in lines
    assert not any(line.startswith(("- unit layers.0", "+ unit layers.0")) for line in lines)
    assert any(line.startswith("+ parameter layers.3.up.bias: ") for line in lines)
    assert "- prefetch: 0" in lines


def sharding(model):
    """What ``fully_shard`` calls left behind: placements, groups, policies, resharding and
    prefetching.
    """
    step(model)  # torch decides the rest when the model first runs
    facts = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            ahead = [
                len(states)
                for states in (
                    state._states_to_forward_prefetch,
                    state._states_to_backward_prefetch,
                )
            ]
            facts.append((name, len(state._modules), ahead, state._mp_policy))
            facts += [
                (
                    [p._param_fqn for p in each.fsdp_params],
                    repr(each.offload_policy),
                    mesh_shape(each),
                )
                for each in units_of(state)
            ]
        if name:  # the root's is shardkit's own entry, which the torch code does without
            facts.append(getattr(vars(module).get("forward"), "__name__", None))
    for name, param in model.named_parameters():
        local = param.to_local().shape if isinstance(param, DTensor) else None
        facts.append((name, type(param), getattr(param, "placements", None), local))
    return facts


def sharded_by_its_code(model, plan):
    """A copy of ``model`` that the torch code sharded, just as ``apply_plan`` does."""
    by_hand = copy.deepcopy(model)
    with fake_world(plan.mesh.size):
        expected = sharding(apply_plan(model, plan))
    with fake_world(plan.mesh.size):
        exec(plan.to_python(), {"model": by_hand})
        assert sharding(by_hand) == expected
    return by_hand


def mesh_shape(param_group):
    info = param_group.post_forward_mesh_info
    return None if info is None else tuple(info.mesh.shape)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"mesh": MeshSpec.hybrid(2, 4), "reshard_after_forward": True},
        {"reshard_after_forward": 4, "checkpoint_activations": True, "prefetch": 1},
        {"checkpoint_activations": "selective"},
        {"float32": ["**norm", "head"], "mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
        {"units": by_class(Block, checkpoint_activations=small_models.keep_all)},
        {
            "units": [group("layers.0", "layers.1"), by_name("layers.*.up")],
            "ignored_params": ["norm.bias"],
        },
        {**EVERYTHING, "units": EVERYTHING["units"][1:]},
    ],
)
def test_the_torch_code_gives_the_same_sharding(arguments):
    model = Decoder(layers=4)
    plan = plan_model(model, **{"mesh": EIGHT, **arguments})
    assert "shardkit" not in plan.to_python()
    by_hand = sharded_by_its_code(model, plan)
    assert any(isinstance(param, DTensor) for param in by_hand.parameters())


def test_the_torch_code_says_that_it_lacks_may_skip():
    plan = plan_model(
        Decoder(), mesh=EIGHT, units=[by_name("layers.1", may_skip=True), by_name("layers.0")]
    )
    said = (
        "# Not in this code: may_skip, which torch lacks; each rank must call layers.1 in every "
        "step"
    )
    assert said in plan.to_python()
    assert "may_skip" not in plan_model(Decoder(), mesh=EIGHT).to_python()


NAMES = [
    'a"b',
    "it's",
    "q{z}",
    "back\\slash",
    "new\nline",
    "two, three",
    "#",
    "{i}",
    "007",
    "\u0663",
    "\U0001f600",
    "1",
    "2",
]


@pytest.mark.parametrize(
    "arguments", [{}, {"units": [group("blocks.it's", "blocks.q{z}"), by_name("blocks.*.up")]}]
)
def test_the_torch_code_takes_any_name(arguments):
    model = Decoder(layers=0)
    model.blocks = nn.ModuleDict({name: Block() for name in NAMES})
    model.blocks["it's"].register_parameter("{}'\"", nn.Parameter(torch.ones(3)))
    plan = plan_model(model, mesh=EIGHT, ignored_params=["blocks.it's.{}'\""], **arguments)
    assert len(plan.units) > len(NAMES)
    sharded_by_its_code(model, plan)


def test_an_int_to_reshard_to_is_what_torch_takes_it_for():
    assert [is_world_size(value) for value in (True, False, 1, 2)] == [False, False, True, True]
    for mesh in (EIGHT, MeshSpec.hybrid(2, 4), MeshSpec.sharded(1)):
        for value, meant in ((mesh.shard_size, mesh.shard_size > 1), (1, False)):
            plan = plan_model(Decoder(), mesh=mesh, reshard_after_forward=value)
            assert plan == plan_model(Decoder(), mesh=mesh, reshard_after_forward=meant)
            assert plan.units[0].reshard_after_forward is meant
            data = plan.to_dict()
            data["units"][0]["reshard_after_forward"] = value
            assert ShardingPlan.from_dict(data) == plan
    gathers = []
    for value in (8, 1, True, False):  # and torch runs this many
        model = Decoder()
        plan = plan_model(model, mesh=EIGHT, units=by_name("layers.0", reshard_after_forward=value))
        with fake_world(8), warnings.catch_warnings():
            fully_shard(model.layers[0], reshard_after_forward=value)
            fully_shard(model, reshard_after_forward=False)
            with comm_counts() as counted:
                step(model)
        assert counted.all_gathers == plan.collectives().all_gathers
        gathers.append(counted.all_gathers)
    assert gathers == [3, 2, 3, 2]


def random_module(draw, depth):
    """A tree of containers, blocks and layers, some of them frozen or of another dtype."""
    kind = draw(
        st.sampled_from(
            ["linear", "norm", "block", "list", "sequential", "dict"] if depth else ["linear"]
        )
    )
    if kind in ("linear", "norm", "block"):
        module = {
            "linear": lambda: nn.Linear(3, 5),
            "norm": lambda: nn.LayerNorm(3),
            "block": lambda: Block(4),
        }[kind]()
        return module.to(draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])))
    children = [random_module(draw, depth - 1) for _ in range(draw(st.integers(0, 4)))]
    if kind == "dict":
        return nn.ModuleDict({f"child{index}": child for index, child in enumerate(children)})
    return nn.ModuleList(children) if kind == "list" else nn.Sequential(*children)


@st.composite
def random_models(draw):
    class Model(nn.Module):
        def forward(self):
            """Never called."""

    model = Model()
    for index in range(draw(st.integers(1, 4))):
        model.add_module(f"part{index}", random_module(draw, 3))
    if draw(st.booleans()):
        model.bare = nn.Parameter(torch.zeros(3))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for _ in range(draw(st.integers(0, 2)) if linears else 0):
        first, second = draw(st.sampled_from(linears)), draw(st.sampled_from(linears))
        if first.weight.shape == second.weight.shape and first.weight.dtype == second.weight.dtype:
            second.weight = first.weight
    for parameter in model.parameters():
        parameter.requires_grad_(draw(st.booleans()))
    return model


@settings(max_examples=80)
@given(
    random_models(),
    st.sampled_from([EIGHT, MeshSpec.hybrid(2, 4), MeshSpec.sharded(1)]),
    st.booleans(),
)
def test_the_default_rule_plans_any_model(model, mesh, checkpoint):
    if not list(model.parameters()):
        return
    has_blocks = any(unit.blocks for unit in plan_model(model, mesh=mesh).units)
    plan = plan_model(model, mesh=mesh, checkpoint_activations=checkpoint and has_blocks)
    owned = [fqn for unit in plan.units for fqn in unit.params]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())
    assert ShardingPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert str(plan).startswith("ShardingPlan: ")
    with fake_world(mesh.size):
        apply_plan(model, plan)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    in_torch = sorted(len(unit.fsdp_params) for unit in fsdp_units(model))
    assert in_torch == sorted(len(unit.params) for unit in plan.units if unit.params)


def test_the_reduce_dtype_is_resolved():
    """torch 2.11 to 2.14 would reduce in bfloat16 and torch 2.15 in float32; a plan means one thing
    on every torch.
    """
    computes = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = Decoder()
    model.layers[0].requires_grad_(False)
    plan = plan_model(model, mesh=EIGHT, mp_policy=computes)
    frozen = next(unit for unit in plan.units if unit.name == "layers.0")
    assert frozen.mp_policy.reduce_dtype == torch.float32  # it may train later
    trained = [unit for unit in plan.units if plan.trains(unit)]
    assert {unit.mp_policy.reduce_dtype for unit in trained} == {torch.float32}
    assert "bfloat16, reduces in float32" in str(plan)
    assert "param_dtype=torch.bfloat16, reduce_dtype=torch.float32" in plan.to_python()
    edited = dataclasses.replace(
        plan, units=tuple(dataclasses.replace(unit, mp_policy=computes) for unit in plan.units)
    )
    assert edited == plan == ShardingPlan.from_dict(plan.to_dict())
    given = plan_model(
        model, mesh=EIGHT, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    )
    assert {unit.mp_policy.reduce_dtype for unit in given.units} == {torch.bfloat16}


@pytest.mark.skipif(
    torch_version() < (2, 15),
    reason="MixedPrecisionPolicy has no param_dtype_override_fn before 2.15",
)
def test_a_function_in_a_policy_is_refused():
    policy = MixedPrecisionPolicy(param_dtype_override_fn=lambda param: None)
    with pytest.raises(
        PlanError, match=r"^mp_policy has a param_dtype_override_fn for .* plain data"
    ):
        plan_model(Decoder(), mesh=EIGHT, mp_policy=policy)
