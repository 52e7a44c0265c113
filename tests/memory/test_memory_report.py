"""What a rank holds after a step, beside the prediction."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from small_models import Decoder
from test_memory import CASES as PLANS
from test_memory import TOKENS, decoder, mean
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardkit import MeshSpec, PlanError, ShardingPlan, apply_plan, optimizer_in_backward, plan_model
from shardkit.memory import MemoryReport, estimate, memory_report, plan_for_budget
from shardkit.memory.timeline import Prediction
from shardkit.testing import fake_world

HELD = ("parameters", "gradients", "optimizer", "unsharded")
BATCH = TOKENS[:1]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False)


def after_a_step(model: nn.Module, predicted: Any = None) -> MemoryReport:
    optimizer = adamw(model)
    mean(model(BATCH)).backward()
    optimizer.step()
    return memory_report(model, optimizer, predicted=predicted)


def row_of(model: nn.Module, plan: ShardingPlan, **arguments: Any) -> Prediction:
    """Of the plan itself; ``estimate`` makes this row from a plan that shards over all ranks."""
    return estimate(model, plan=plan, batch=BATCH, loss=mean, **arguments)["ZeRO-3"]


def steps_bytes(model: nn.Module) -> int:
    """AdamW's step counters, a float32 on the CPU for each trained parameter, which are not predicted."""
    return 4 * sum(param.requires_grad for param in model.parameters())


NAMES = ("default", "tied, half precision", "kept gathered", "on fewer ranks", "one unit")
CASES = {name: PLANS[name] for name in NAMES}
CASES["ignored"] = {"ignored_params": ["norm.weight", "norm.bias", "layers.1.up.weight"]}


@pytest.mark.parametrize("case", CASES)
def test_what_is_held_after_a_step_is_what_was_predicted(case: str) -> None:
    model = decoder("tied" in case)
    model.layers[0].up.weight.requires_grad_(False)
    plan = plan_model(model, mesh=MeshSpec.sharded(8), **CASES[case])
    row = row_of(model, plan)
    with fake_world(8):
        apply_plan(model, plan)
        report = after_a_step(model, row)
        expected = {name: report.predicted[name] for name in HELD}
        expected["optimizer"] += steps_bytes(model)
    assert {name: report.measured[name] for name in HELD} == expected
    assert min(expected[name] for name in HELD[:3]) > 0
    assert report.predicted["peak"] == row.peak.total > sum(expected.values())
    assert report.measured["on the CPU"] == 0


def test_between_forward_and_backward_units_are_held_gathered():
    model = decoder()
    plan = plan_model(model, mesh=MeshSpec.sharded(8), reshard_after_forward=False)
    with fake_world(8):
        apply_plan(model, plan)
        before = memory_report(model).measured
        model(BATCH)
        during = memory_report(model).measured
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
        optimizer = optimizer_in_backward(model, lambda params: torch.optim.AdamW(params, foreach=False))
        mean(model(BATCH)).backward()
        optimizer.step()
        report = memory_report(model, optimizer, predicted=row)
    assert report.measured["gradients"] == report.predicted["gradients"] == 0
    assert report.measured["optimizer"] == report.predicted["optimizer"] + steps_bytes(model)


def test_a_model_that_is_not_sharded_and_one_sharded_by_hand():
    model = decoder()
    plain = after_a_step(model).measured
    assert plain["parameters"] == plain["gradients"] == sum(param.nbytes for param in model.parameters())
    with fake_world(2):
        by_hand = fully_shard(Decoder(dim=8, vocabulary=102))
        held = after_a_step(by_hand).measured
    assert 2 * held["parameters"] == sum(param.nbytes for param in by_hand.parameters())  # even, so no padding
    assert memory_report(nn.ReLU()).measured["parameters"] == 0


def test_a_report_reads():
    model = decoder()
    choice = plan_for_budget(model, "1MiB", world_size=8, batch=BATCH, loss=mean)
    assert memory_report(model).predicted == {}
    with fake_world(8):
        apply_plan(model, choice.plan)
        shown = str(after_a_step(model, choice)).splitlines()
    assert shown[0].split() == ["bytes", "on", "this", "rank", "predicted", "measured", "off", "by"]
    assert re.fullmatch(r"gradients +(\S+ KiB) +\1 +\+0\.0%", shown[2])
    assert re.fullmatch(r"reserved +- +- +-", shown[7])  # a CPU has no allocator to ask
    assert shown[-1] == f"predicted peak: {choice.peak.where}"
