"""What a rank holds after a step is what was predicted."""

import pytest
import torch
from memory_count import held, predicted_held
from test_memory import CASES as PLANS
from test_memory import TOKENS, decoder, mean

from shardkit import (
    MeshSpec,
    PlanError,
    apply_plan,
    optimizer_in_backward,
    plan_model,
)
from shardkit.memory import estimate
from shardkit.testing import fake_world

HELD = ("parameters", "gradients", "optimizer", "unsharded")
BATCH = TOKENS[:1]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), foreach=False)


def after_a_step(model):
    optimizer = adamw(model)
    mean(model(BATCH)).backward()
    optimizer.step()
    return held(model, optimizer)


def row_of(model, plan, **arguments):
    """Of the plan itself; ``estimate`` makes this row from a plan that shards over all ranks."""
    return estimate(model, plan=plan, batch=BATCH, loss=mean, **arguments)["ZeRO-3"]


def steps_bytes(model):
    """AdamW's step counters, a float32 on the CPU for each trained parameter, which are not
    predicted.
    """
    return 4 * sum(param.requires_grad for param in model.parameters())


NAMES = ("default", "tied, half precision", "kept unsharded", "on fewer ranks", "one unit")
CASES = {name: PLANS[name] for name in NAMES}
CASES["ignored"] = {"ignored_params": ["norm.weight", "norm.bias", "layers.1.up.weight"]}


@pytest.mark.parametrize("case", CASES)
def test_what_is_held_after_a_step_is_what_was_predicted(case):
    model = decoder("tied" in case)
    model.layers[0].up.weight.requires_grad_(False)
    plan = plan_model(model, mesh=MeshSpec.sharded(8), **CASES[case])
    row = row_of(model, plan)
    with fake_world(8):
        apply_plan(model, plan)
        found = after_a_step(model)
        expected = predicted_held(row) | {"on the CPU": 0}
        expected["optimizer"] += steps_bytes(model)
    assert found == expected
    assert min(expected[name] for name in HELD[:3]) > 0
    assert row.peak.total > sum(expected.values())


def test_between_forward_and_backward_units_are_held_unsharded():
    model = decoder()
    plan = plan_model(model, mesh=MeshSpec.sharded(8), reshard_after_forward=False)
    with fake_world(8):
        apply_plan(model, plan)
        before = held(model)
        model(BATCH)
        during = held(model)
        with pytest.raises(PlanError, match="model is sharded already"):
            estimate(model, plan=plan, batch=BATCH, loss=mean)
    assert before["unsharded"] == 0
    assert during["unsharded"] == 8 * before["parameters"]  # with the padding


def test_the_optimizer_in_backward_leaves_no_gradients():
    model = decoder()
    plan = plan_model(model, mesh=MeshSpec.sharded(8))
    row = estimate(model, plan=plan, batch=BATCH, loss=mean)["ZeRO-3, optimizer in backward"]
    with fake_world(8):
        apply_plan(model, plan)
        optimizer = optimizer_in_backward(
            model, lambda params: torch.optim.AdamW(params, foreach=False)
        )
        mean(model(BATCH)).backward()
        optimizer.step()
        found = held(model, optimizer)
    assert found["gradients"] == predicted_held(row)["gradients"] == 0
    assert found["optimizer"] == predicted_held(row)["optimizer"] + steps_bytes(model)
