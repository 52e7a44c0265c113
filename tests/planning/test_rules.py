"""The user's rules: what each selects, how they combine, and what they may set."""

import pytest
import torch.nn as nn
from small_models import Block, Decoder

from shardkit import (
    MeshSpec,
    MixedPrecisionPolicy,
    ShardingPlan,
    by_class,
    by_name,
    by_size,
    group,
    plan_model,
)

EIGHT = MeshSpec.sharded(8)


def names(model, units):
    return [unit.name for unit in plan_model(model, units=units, mesh=EIGHT).units]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Block, ["layers.0", "layers.1", "layers.2"]),
        (by_class(Block, nn.Embedding), ["embed", "layers.0", "layers.1", "layers.2"]),
        (by_class("Block"), ["layers.0", "layers.1", "layers.2"]),
        ("layers.*", ["layers.0", "layers.1", "layers.2"]),
        ("layers.[02]", ["layers.0", "layers.2"]),
        ("layers.[!02]", ["layers.1"]),
        ("layers.?.up", ["layers.0.up", "layers.1.up", "layers.2.up"]),
        ("**.norm", ["layers.0.norm", "layers.1.norm", "layers.2.norm"]),
        ("l**0", ["layers.0"]),
        ("layers.0", ["layers.0"]),
        (by_name("norm", "head"), ["norm", "head"]),
        (group("norm", "head"), ["[norm, head]"]),
        (group("layers.*"), ["[layers.0, layers.1, layers.2]"]),
        (lambda fqn, module: fqn.endswith("up"), ["layers.0.up", "layers.1.up", "layers.2.up"]),
        # an empty dict of settings still selects
        (lambda fqn, module: {} if fqn == "norm" else False, ["norm"]),
        (by_size(280), ["layers.0", "layers.1", "layers.2"]),
        (by_size(144), [f"layers.{layer}{part}" for part in (".up", "") for layer in range(3)]),
    ],
)
def test_what_rules_select(rule, expected):
    assert names(Decoder(), rule) == [*expected, "(root)"]


class Stack(nn.Module):
    """Blocks below a module with a forward of its own."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Sequential(Block(), Block(), Block())
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self):
        """Never called."""


def test_by_size_counts_what_no_inner_unit_holds():
    model = Stack()
    assert names(model, by_size(880)) == ["stack", "(root)"]
    assert names(model, by_size(280)) == ["stack.0", "stack.1", "stack.2", "attention", "(root)"]
    # 296 elements a block: the first rule takes two, and what is left of the stack is too small
    assert names(model, [by_name("stack.[01]"), by_size(290)]) == [
        "stack.0",
        "stack.1",
        "stack.2",
        "(root)",
    ]
    halves = [f"stack.{number}.{half}" for number in range(3) for half in ("up", "down")]
    # whole: its out_proj is never called
    assert names(model, by_size(64)) == [*halves, "attention", "(root)"]
    model.stack[2] = model.stack[0]
    assert names(model, by_size(280)) == ["stack.0", "stack.1", "attention", "(root)"]


def test_the_first_rule_that_matches_wins():
    rules = [
        by_name("layers.1", reshard_after_forward=False),
        by_class(Block, reshard_after_forward=4),
    ]
    plan = plan_model(Decoder(), units=rules, mesh=EIGHT, reshard_after_forward=True)
    assert [unit.reshard_after_forward for unit in plan.units] == [4, False, 4, True]
    root = plan_model(
        Decoder(), units=[Block, by_name("", reshard_after_forward=True)], mesh=EIGHT
    ).units[-1]
    assert (root.modules, root.reshard_after_forward) == (("",), True)


def test_replicated_modules_leave_the_default_units_or_those_of_other_rules():
    default = plan_model(Decoder(layers=1), mesh=EIGHT)
    plan = plan_model(Decoder(layers=1), mesh=EIGHT, replicate=nn.LayerNorm)
    assert [unit.name for unit in default.units] == ["embed", "layers.0", "[norm, head]", "(root)"]
    assert [unit.name for unit in plan.units] == ["embed", "layers.0", "head", "(root)"]
    assert plan.replicated == (
        "layers.0.norm.weight",
        "layers.0.norm.bias",
        "norm.weight",
        "norm.bias",
    )
    assert plan.held_bytes() == default.held_bytes() + 4 * 8 * 4 * 7 // 8
    assert ShardingPlan.from_dict(plan.to_dict()) == plan
    assert "+ replicated: ['layers.0.norm.weight', " in default.diff(plan)
    units = ["layers.0", "layers.0.norm", "norm", "embed"]
    sharded = plan_model(Decoder(layers=1), mesh=EIGHT, units=units)
    plan = plan_model(Decoder(layers=1), mesh=EIGHT, units=units[:2], replicate=[nn.LayerNorm])
    assert [unit.name for unit in plan.units] == ["layers.0", "(root)"]
    assert plan.units[0] in sharded.units
    counts, others = plan.collectives(3), sharded.collectives(3)
    assert (counts.all_gathers, others.all_gathers) == (7, 25)
    assert (counts.all_reduces, others.all_reduces) == (1, 0)


def test_inner_units_come_before_outer_ones():
    rules = [by_class(Block), by_name("layers.*.up"), group("layers.0.norm", "layers.0.down")]
    inner = ["[layers.0.norm, layers.0.down]", "layers.0.up", "layers.1.up"]
    assert names(Decoder(layers=2), rules) == [*inner, "layers.0", "layers.1", "(root)"]


def test_a_callable_may_return_settings():
    half = MixedPrecisionPolicy(param_dtype=None)

    def rule(fqn, module):
        if isinstance(module, Block):
            return {"mp_policy": half, "checkpoint_activations": fqn == "layers.1"}
        return fqn == "norm"

    plan = plan_model(Decoder(), units=rule, mesh=EIGHT)
    assert [unit.name for unit in plan.units] == [
        "layers.0",
        "layers.1",
        "layers.2",
        "norm",
        "(root)",
    ]
    assert [unit.checkpoint_activations for unit in plan.units] == [
        False,
        True,
        False,
        False,
        False,
    ]
    assert plan.units[0].mp_policy is half


def test_blocks_are_recomputed_and_compiled_but_not_leaves_or_the_root():
    plan = plan_model(Decoder(), mesh=EIGHT, checkpoint_activations=True, compile=True)
    for unit in plan.units:
        assert unit.checkpoint_activations is unit.compile is unit.name.startswith("layers.")


def test_resharding_by_default_and_when_asked():
    for asked, expected in (
        (None, [True, True, True, True, False, False]),
        (True, [True] * 6),
        (False, [False] * 6),
        (4, [4] * 6),
    ):
        plan = plan_model(Decoder(), mesh=EIGHT, reshard_after_forward=asked)
        assert [unit.reshard_after_forward for unit in plan.units] == expected
