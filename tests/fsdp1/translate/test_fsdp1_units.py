"""The units of a translation are the modules that real FSDP1 wraps, with the same parameters and
dtypes.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from fsdp1_models import fsdp1
from small_models import Block, Decoder
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
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
    """Each parameter's unit and what it is computed in, as FSDP1 wraps the model; which changes the
    model.

    What a module without forward holds, and FSDP1 never gathers, goes to the unit around.
    """
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    wrapped = {
        names[id(wrapper._fsdp_wrapped_module)]: wrapper
        for wrapper in FullyShardedDataParallel.fsdp_modules(
            fsdp1(model, use_orig_params=True, **arguments)
        )
    }
    owners = {}
    for name, wrapper in wrapped.items():
        unit = name
        while unit and not (unit in wrapped and has_forward(wrapped[unit]._fsdp_wrapped_module)):
            unit = unit.rpartition(".")[0]
        for param in wrapper._handle.flat_param._fqns if wrapper._handle is not None else ():
            owners[f"{name}.{param}".lstrip(".")] = unit, wrapped[unit].mixed_precision.param_dtype
    return owners


def owners_in_plan(plan):
    """The same of a plan, in which float32 stands for what FSDP1 leaves as it is."""
    return {
        param: (
            unit.modules[0],
            None if unit.mp_policy.output_dtype else unit.mp_policy.param_dtype,
        )
        for unit in plan.units
        for param in unit.params
    }


def assert_same_units(build, ignore=False, **arguments):
    """FSDP1's units and ours, apart from those that share a parameter; returns how many there are
    of ours.
    """
    model = build()
    arguments["ignored_states"] = list(model.parameters())[1::7] if ignore else None
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


def has_two(module):
    return len(list(module.children())) == 2


def is_big(module, recurse, nonwrapped_numel):
    """A policy that goes into no attention."""
    return "Attention" not in type(module).__name__ if recurse else nonwrapped_numel > 200


POLICIES = [
    always_wrap_policy,
    functools.partial(size_based_auto_wrap_policy, min_num_params=300),
    ModuleWrapPolicy(CLASSES),
    functools.partial(
        _or_policy, policies=[functools.partial(lambda_auto_wrap_policy, lambda_fn=has_two), is_big]
    ),
    CustomPolicy(
        lambda module: {"mixed_precision": None} if isinstance(module, nn.Linear) else False
    ),
]
# FSDP1 takes neither scalars nor several dtypes in a unit; MobileBERT's empty parameter is not
# cast.
WRAPPABLE = [
    name for name in ZOO if name not in ("scalar", "clip", "complex", "lora", "mixed_dtypes")
]


@pytest.mark.parametrize("name", WRAPPABLE)
def test_on_a_model_of_the_zoo(name):
    turn = WRAPPABLE.index(name)
    precision = [
        BF16,
        None,
        MixedPrecision(torch.bfloat16, _module_classes_to_ignore=[nn.LayerNorm]),
    ][turn % 3]
    policy, ignore = POLICIES[turn % len(POLICIES)], turn % 2
    assert assert_same_units(
        ZOO[name].build, ignore, auto_wrap_policy=policy, mixed_precision=precision
    )


# What a policy may be.


@pytest.mark.parametrize("policy", [Block, {Block}, [Block], (Block, nn.Embedding)], ids=str)
def test_classes_are_a_policy(policy):
    units = [unit.name for unit in translate_fsdp1(Decoder(), auto_wrap_policy=policy).plan.units]
    assert [name for name in units if "layers" in name] == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("policy", [3, [3], nn.Linear(2, 2), {"Block"}], ids=str)
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(
        TranslationError,
        match=r"auto_wrap_policy .* raised TypeError: .* It is called as FSDP1 calls it",
    ):
        translate_fsdp1(Decoder(), auto_wrap_policy=policy)


@pytest.mark.parametrize(
    "policy", [transformer_auto_wrap_policy, CustomPolicy(lambda module: "yes"), lambda: True]
)
def test_a_policy_that_fails_is_refused_with_its_error(policy):
    with pytest.raises(
        TranslationError, match=r"auto_wrap_policy .* raised (TypeError|ValueError)"
    ) as caught:
        translate_fsdp1(Decoder(), auto_wrap_policy=policy)
    assert caught.value.__cause__ is not None
