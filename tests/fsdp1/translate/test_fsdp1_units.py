"""The units of a translation are the modules that real FSDP1 wraps, with the same parameters and dtypes."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from fsdp1_models import fsdp1, quiet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import Block, Decoder
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from zoo import ZOO

from shardkit.errors import TranslationError
from shardkit.fsdp1 import translate_fsdp1
from shardkit.planning.tree import has_forward

BF16 = MixedPrecision(torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def owners_in_fsdp1(model, **arguments):
    """Each parameter's unit and what it is computed in, as FSDP1 wraps the model; which changes the model.

    What a module without forward holds, and FSDP1 never gathers, goes to the unit around.
    """
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    wrapped = {
        names[id(each._fsdp_wrapped_module)]: each
        for each in FullyShardedDataParallel.fsdp_modules(fsdp1(model, use_orig_params=True, **arguments))
    }
    found = {}
    for name, each in wrapped.items():
        unit = name
        while unit and not (unit in wrapped and has_forward(wrapped[unit]._fsdp_wrapped_module)):
            unit = unit.rpartition(".")[0]
        for param in each._handle.flat_param._fqns if each._handle is not None else ():
            found[f"{name}.{param}".lstrip(".")] = unit, wrapped[unit].mixed_precision.param_dtype
    return found


def owners_in_plan(plan):
    """The same of a plan, in which float32 stands for what FSDP1 leaves as it is."""
    return {
        param: (unit.modules[0], None if unit.mp_policy.output_dtype else unit.mp_policy.param_dtype)
        for unit in plan.units
        for param in unit.params
    }


def assert_same_units(build, **arguments):
    """FSDP1's units and ours, apart from those that share a parameter; returns how many there are of ours."""
    model = build()
    plan = translate_fsdp1(model, **arguments).plan
    theirs, ours = owners_in_fsdp1(model, **arguments), owners_in_plan(plan)
    tied = {name for spec in plan.params if spec.aliases for name in (spec.fqn, *spec.aliases)}
    touched = tied.union(*(unit.params for unit in plan.units if tied & set(unit.params)))
    assert {param: unit for param, unit in ours.items() if param not in touched} == {
        param: unit for param, unit in theirs.items() if param not in touched
    }
    return len(plan.units)


# Real models.

CLASSES = {nn.Linear, nn.LayerNorm, nn.Embedding, nn.Conv2d}
POLICIES = [
    always_wrap_policy,
    functools.partial(size_based_auto_wrap_policy, min_num_params=300),
    ModuleWrapPolicy(CLASSES),
    functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: len(list(module.children())) == 2),
]
# FSDP1 takes neither scalars nor several dtypes in a unit; MobileBERT's empty parameter is not cast.
WRAPPABLE = [name for name in ZOO if name not in ("scalar", "clip", "complex", "lora", "mixed_dtypes")]


@pytest.mark.parametrize("name", WRAPPABLE)
def test_on_a_model_of_the_zoo(name):
    turn = WRAPPABLE.index(name)
    policy, precision = POLICIES[turn % len(POLICIES)], BF16 if turn % 3 else None
    assert assert_same_units(ZOO[name].build, auto_wrap_policy=policy, mixed_precision=precision)


def test_on_blocks_of_transformers():
    for name, block in (("llama", "LlamaDecoderLayer"), ("gpt2", "GPT2Block"), ("t5", "T5Block")):
        model = ZOO[name].build()
        classes = {type(module) for module in model.modules() if type(module).__name__ == block}
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        assert assert_same_units(ZOO[name].build, auto_wrap_policy=policy, mixed_precision=BF16) > 3


# Generated models.

LEAVES = st.sampled_from(
    [
        lambda: nn.Linear(3, 5),
        lambda: nn.Linear(7, 2, bias=False),
        lambda: nn.Embedding(11, 3),
        lambda: nn.LayerNorm(6),
        lambda: nn.BatchNorm1d(4),
        lambda: nn.BatchNorm2d(3, affine=False),
        nn.ReLU,
        lambda: nn.MultiheadAttention(4, 2),
        lambda: Block(4),
    ]
)


class Holder(nn.Module):
    """Children and a parameter of its own."""

    def __init__(self, children):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        for index, child in enumerate(children):
            self.add_module(f"part{index}", child)

    def forward(self, x):
        return x


CONTAINERS = st.sampled_from(
    [
        Holder,
        nn.ModuleList,
        lambda parts: nn.Sequential(*parts),
        lambda parts: nn.ModuleDict({f"key{index}": part for index, part in enumerate(parts)}),
    ]
)
RECIPES = st.recursive(
    LEAVES, lambda inner: st.tuples(CONTAINERS, st.lists(inner, min_size=1, max_size=3)), max_leaves=9
)


def made(recipe):
    if not isinstance(recipe, tuple):
        return recipe()
    container, parts = recipe
    return container([made(part) for part in parts])


KINDS = st.sets(
    st.sampled_from([nn.Linear, nn.LayerNorm, nn.Embedding, Holder, Block, nn.Sequential, nn.ModuleList]), min_size=1
)


def one_of(kinds):
    return lambda module: isinstance(module, tuple(kinds))


@st.composite
def own_policies(draw):
    """A callable that stops at some classes, and wraps by size and class."""
    stops, wraps, size = draw(KINDS), draw(KINDS), draw(st.integers(0, 60))

    def policy(module, recurse, nonwrapped_numel):
        if recurse:
            return not isinstance(module, tuple(stops))
        return isinstance(module, tuple(wraps)) or nonwrapped_numel > size

    return policy


@st.composite
def sized(draw):
    bound = {name: draw(st.none() | KINDS) for name in ("force_leaf_modules", "exclude_wrap_modules")}
    return functools.partial(size_based_auto_wrap_policy, min_num_params=draw(st.integers(1, 80)), **bound)


CALLABLES = st.one_of(
    st.just(always_wrap_policy),
    sized(),
    own_policies(),
    KINDS.map(lambda kinds: functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds)),
    KINDS.map(
        lambda kinds: functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, tuple(kinds)))
    ),
)
ANY_POLICY = st.one_of(
    CALLABLES,
    st.lists(CALLABLES, min_size=1, max_size=2).map(lambda some: functools.partial(_or_policy, policies=some)),
    KINDS.map(ModuleWrapPolicy),
    KINDS.map(
        lambda kinds: CustomPolicy(lambda m: {"mixed_precision": None} if isinstance(m, tuple(kinds)) else False)
    ),
)
PRECISIONS = st.sampled_from([None, BF16, MixedPrecision(torch.bfloat16, _module_classes_to_ignore=[nn.LayerNorm])])


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    recipe=st.lists(RECIPES, min_size=1, max_size=4),
    policy=ANY_POLICY,
    precision=PRECISIONS,
    ignored=st.sampled_from([None, "module", "parameters"]),
)
def test_on_generated_models(recipe, policy, precision, ignored):
    def build():
        return Holder([nn.Linear(2, 2), *(made(part) for part in recipe)])

    def wrapped(model):
        chosen = {None: None, "module": [model.part1], "parameters": list(model.parameters())[1::3]}[ignored]
        return {"auto_wrap_policy": policy, "mixed_precision": precision, "ignored_states": chosen}

    model = build()
    arguments = wrapped(model)
    plan = translate_fsdp1(model, **arguments).plan
    assert owners_in_plan(plan) == owners_in_fsdp1(model, **arguments)


def test_a_custom_policy_may_give_the_root_what_it_likes():
    """The policy is asked for the root too, which takes its own arguments."""
    policy = CustomPolicy(lambda module: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP})
    plan = translate_fsdp1(Decoder(), auto_wrap_policy=policy).plan
    assert [unit.reshard_after_forward for unit in plan.units] == [False] * len(plan.units)


# What a policy may be.


@pytest.mark.parametrize("policy", [Block, {Block}, [Block], (Block, nn.Embedding)], ids=str)
def test_classes_are_a_policy(policy):
    units = [unit.name for unit in translate_fsdp1(Decoder(), auto_wrap_policy=policy).plan.units]
    assert [name for name in units if "layers" in name] == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("policy", [3, "Block", set(), [3], [[Block]], nn.Linear(2, 2), {"Block"}], ids=str)
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(TranslationError, match=r"auto_wrap_policy must be .* got .* ModuleWrapPolicy"):
        translate_fsdp1(Decoder(), auto_wrap_policy=policy)


@pytest.mark.parametrize("policy", [transformer_auto_wrap_policy, CustomPolicy(lambda module: "yes"), lambda: True])
def test_a_policy_that_fails_is_refused_with_its_error(policy):
    with pytest.raises(TranslationError, match=r"auto_wrap_policy .* raised (TypeError|ValueError)") as caught:
        translate_fsdp1(Decoder(), auto_wrap_policy=policy)
    assert caught.value.__cause__ is not None


def test_the_comparison_notices_another_unit():
    model = Decoder()
    ours = owners_in_plan(translate_fsdp1(model, auto_wrap_policy={Block}).plan)
    with quiet():
        theirs = owners_in_fsdp1(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert ours != theirs
