"""Strategies side by side, and the plan that a budget allows."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from memory_count import counted_peak
from small_models import Block, Decoder
from test_memory import TOKENS, decoder, mean
from torch import Tensor, nn

from shardkit import (
    MeshSpec,
    MixedPrecisionPolicy,
    PlanError,
    ShardingPlan,
    api,
    by_name,
    group,
    init_on_meta,
    plan_model,
    shard_model,
)
from shardkit.memory import HARDWARE, estimate, plan_for_budget, scaling_table
from shardkit.memory.budget import Search, parse_bytes, parse_reserve
from shardkit.memory.estimate import Measured, changed, fused, recompute, resharded
from shardkit.memory.speed import Traffic
from shardkit.memory.timeline import OptimizerBytes, timeline
from shardkit.memory.trace import trace
from shardkit.testing import distributed, fake_world

MIB = 2**20


def seven_billion() -> nn.Module:
    with init_on_meta():
        return nn.Linear(700_000, 10_000, bias=False)


def test_the_textbook_to_the_byte():
    """7 B parameters in float32 with AdamW on 4 ranks; ZeRO, arXiv 1910.02054."""
    found = estimate(seven_billion(), world_size=4)
    states = {name: sum(found[name].states.values()) for name in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")}
    assert states == {"DDP": 112 * 10**9, "ZeRO-1": 70 * 10**9, "ZeRO-2": 49 * 10**9, "ZeRO-3": 28 * 10**9}


def test_a_plan_alone_is_enough_for_states():
    plan = plan_model(decoder(), mesh=MeshSpec.sharded(8))
    of_plan, of_model = estimate(plan), estimate(decoder(), world_size=8)
    assert [row.peak for row in of_plan] == [row.peak for row in of_model]
    assert "no batch given" in str(of_plan)


def test_what_each_strategy_saves():
    rows = estimate(decoder(), world_size=16, batch=TOKENS, loss=mean, ranks_per_node=4)
    peak = {row.name: row.peak.total for row in rows if row.peak}
    order = ["replicated (DDP)", "kept gathered (ZeRO-2)", "sharded (ZeRO-3)", "ZeRO-3, blocks recomputed"]
    assert [peak[name] for name in order] == sorted((peak[name] for name in order), reverse=True)
    assert len({peak[name] for name in order}) == len(order)
    assert peak["sharded (ZeRO-3)"] < peak["sharded in a node (HSDP)"] < peak["replicated (DDP)"]
    assert peak["ZeRO-3, recomputed and offloaded"] < peak["ZeRO-3, blocks recomputed"]
    assert rows["ZeRO-3, offloaded to the CPU"].peak.optimizer == 0
    assert "ZeRO-1" in str(rows)


def test_a_step_with_the_optimizer_in_backward_never_holds_all_gradients():
    rows = estimate(decoder(), world_size=2, batch=TOKENS, loss=mean)
    assert max(point.gradients for point in rows["ZeRO-3, optimizer in backward"].timeline) == 0
    assert max(point.gradients for point in rows["ZeRO-3"].timeline) > 0


def test_bytes_of_an_optimizer_by_number():
    rows = estimate(decoder(), world_size=1, optimizer=8)
    assert rows["ZeRO-3"].states == estimate(decoder(), world_size=1, optimizer="adamw")["ZeRO-3"].states


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "world_size: not given, and no mesh either."),
        ({"world_size": 4, "mesh": MeshSpec.sharded(4)}, "mesh: given together with world_size."),
        ({"world_size": 4, "optimizer": -8}, "optimizer: is -8 bytes."),
        ({"world_size": 4, "ranks_per_node": 0}, "ranks_per_node: is 0."),
        ({"plan": plan_model(decoder(), mesh=MeshSpec.sharded(4)), "batch": TOKENS}, "plan: names modules or"),
        ({"world_size": 4, "optimizer": "adamax2"}, "optimizer: is 'adamax2'. It must be one of adamw,"),
        ({"world_size": 4, "batch": {"nothing": TOKENS}}, "batch: forward or backward fails on fake tensors"),
    ],
)
def test_bad_arguments_of_an_estimate(arguments, text):
    with pytest.raises(PlanError, match=re.escape(text)):
        estimate(Decoder(), **arguments)


def test_a_hybrid_plan_keeps_its_own_groups():
    plan = plan_model(decoder(), mesh=MeshSpec.hybrid(2, 4))
    assert estimate(plan)["HSDP"].strategy.plan == plan


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_step_is_traced_wherever_it_is_asked_for(without):
    model = decoder()
    with without():
        row = estimate(model, world_size=4, batch=TOKENS, loss=mean)["ZeRO-3"]
    assert row == estimate(model, world_size=4, batch=TOKENS, loss=mean)["ZeRO-3"]


def test_more_kept_is_more_alive():
    """What the search for a budget relies on."""
    model = decoder(layers=6)
    plan = resharded(plan_model(model, mesh=MeshSpec.sharded(16), prefetch=2))
    measured = Measured(model, plan, TOKENS, mean)
    search = Search(measured, OptimizerBytes.of("adamw"), HARDWARE["h100"], limit=1)
    names = [unit.name for unit in plan.execution_order() if unit.reshard_after_forward is not False]

    def peaks(change: Callable[[int], ShardingPlan], highest: int) -> list[int]:
        return [search.weigh("", change(number)).peak.total for number in range(highest + 1)]

    gathered = peaks(lambda n: changed(plan, names[len(names) - n :], reshard_after_forward=False), len(names))
    spared = peaks(lambda n: recompute(plan, measured.blocks[: len(measured.blocks) - n]), len(measured.blocks))
    assert gathered == sorted(gathered)
    assert spared == sorted(spared)
    assert min(len(set(gathered)), len(set(spared))) > 3


CACHE: dict[int, Tensor] = {}


@functools.cache
def arange(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32)


class Record:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.best = None


class Remembering(nn.Module):
    """Whatever a forward may leave behind: the values of a second forward depend on the first's."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.model = decoder(layers=2)
        self.count, self.table, self.recent, self.record = 0, {"last": None}, deque(maxlen=3), Record()
        self.order: OrderedDict[str, int] = OrderedDict(a=1, b=2)
        self.register_buffer("running", torch.zeros(()))
        self.total = torch.zeros(())
        total = 0

        def grow() -> int:
            nonlocal total
            total += 1
            return total

        self.grow = grow

    def forward(self, tokens: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = torch.full((), 2.0)
            self.register_buffer("lazy", torch.ones(()))
            self.extra = nn.Identity()
            self.register_forward_hook(lambda *_: None)
        out = self.model(tokens) * self.scale * self.lazy
        self.count += 1
        type(self).calls += 1
        self.running += 1
        self.total += 1
        self.table = {**self.table, "last": out}
        self.table["mask"] = CACHE.setdefault(0, torch.ones(out.shape[-1]))
        self.recent.append(out)
        self.record.seen.append(out)
        self.record.best = out
        self.order.move_to_end("a")
        return out * self.table["mask"] + arange(out.shape[-1]) * self.grow() + self.running + self.total


def held(value: object) -> object:
    """All that can be reached, as plain values and names of the types of what cannot be compared."""
    if isinstance(value, Tensor):
        return id(value), type(value).__name__, value.tolist(), held(value.grad) if value.is_leaf else None
    if isinstance(value, (dict, OrderedDict)):
        return [(key, held(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple, deque, set)):
        return type(value).__name__, [held(each) for each in value]
    if isinstance(value, (nn.Module, Record)):
        return type(value).__name__, held(vars(value))
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


@pytest.mark.parametrize("fails", [False, True])
def test_a_trace_leaves_all_that_is_reachable_from_the_model_as_it_is(fails: bool):
    model, twin = Remembering(), Remembering()
    twin.load_state_dict(model.state_dict())

    def bad(_: Tensor) -> Tensor:
        raise ValueError

    def state() -> object:
        return held(model), [id(module) for module in model.modules()], Remembering.calls, held(CACHE)

    for _ in range(2):  # before the model has run, and after
        before = state()
        with pytest.raises(PlanError, match="ValueError") if fails else contextlib.nullcontext():
            trace(model, plan_model(model, mesh=MeshSpec.sharded(2)), TOKENS, loss=bad if fails else None)
        assert state() == before
        found, expected = model(TOKENS), twin(TOKENS)
        assert type(found) is Tensor
        assert torch.equal(found, expected)
        found.mean().backward()
        expected.mean().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_blocks_count_alike_and_recomputing_costs_a_forward():
    model = decoder(layers=6)
    plan = plan_model(model, mesh=MeshSpec.sharded(8), checkpoint_activations=True)
    kept, again = (trace(model, plan, TOKENS, loss=mean, checkpointed=names) for names in (set(), None))
    for step in (kept, again):
        blocks = [i for i in step.intervals if i.unit in ("layers.2", "layers.3", "layers.4")]
        alike = [
            {(i.delta, i.peak, i.flops) for i in blocks if i.moment == moment} for moment in ("forward", "backward")
        ]
        assert [len(each) for each in alike] == [1, 1]
    assert 0 < kept.flops < again.flops


def test_blocks_with_units_inside_are_recomputed_too():
    """Recomputing such a block runs its inner units again, in another order than without."""
    model = decoder()
    plan = plan_model(model, mesh=MeshSpec.sharded(8), units=["layers.*.up", "layers.*"])
    found = estimate(model, plan=plan, batch=TOKENS, loss=mean)
    again = trace(model, plan, TOKENS, loss=mean, checkpointed=set(Measured(model, plan, TOKENS, mean).blocks))
    points = timeline(changed(plan, checkpoint_activations=True), again, OptimizerBytes.of("adamw"))
    assert found["ZeRO-3, blocks recomputed"].peak.activations == max(points, key=lambda p: p.total).activations


# Budgets.


def peak_of(model: nn.Module, plan: object) -> int:
    return counted_peak(model, plan, lambda m: mean(m(TOKENS)).backward())


@pytest.mark.parametrize("share", [0.999, 0.9, 0.75, 0.6])
def test_a_plan_for_a_budget_never_exceeds_it_when_it_runs(share: float):
    model = decoder(layers=6)
    most = estimate(model, world_size=8, batch=TOKENS, loss=mean, optimizer="none")["ZeRO-2"].peak.total
    budget = int(most * share)
    choice = plan_for_budget(model, budget, world_size=8, batch=TOKENS, loss=mean, optimizer="none", reserve=0)
    assert choice.chosen.peak.total <= budget
    if not any(unit.offloads for unit in choice.plan.units):
        assert peak_of(model, choice.plan) + TOKENS.nbytes <= budget * 1.001


def test_the_ladder_of_a_budget():
    model = decoder(layers=6)

    def chosen(share: float) -> str:
        budget = int(sharded * share)
        choice = plan_for_budget(model, budget, world_size=16, batch=TOKENS, loss=mean, reserve=0, keep_units=True)
        return choice.chosen.what

    sharded = estimate(model, world_size=16, batch=TOKENS, loss=mean)["ZeRO-3"].peak.total
    assert "of 7 units kept gathered" in chosen(1.5)
    assert re.match(r"[1-6] of 6 blocks recomputed", chosen(0.9))
    with pytest.raises(
        PlanError, match=r"budget: .* is too little: .* still peaks at .*, .* over it, .* would be enough|batch"
    ):
        chosen(0.05)


def test_small_blocks_are_fused_where_hooks_take_longer_than_the_device():
    model = decoder(layers=6)
    budget = partial(plan_for_budget, model, "1MiB", world_size=16, batch=TOKENS, loss=mean)
    rules = [by_name("layers.*", together=8), "embed", group("norm", "head", reshard_after_forward=False)]
    by_rules = plan_model(model, units=rules, mesh=MeshSpec.sharded(16))
    choice, kept = budget(), budget(keep_units=True)
    assert choice.chosen.what == "8 blocks in a unit, 2 of 2 units kept gathered"
    assert {unit.params: unit.modules for unit in choice.plan.units} == {u.params: u.modules for u in by_rules.units}
    assert "up to 8 blocks in a unit: with one block each, FSDP2's hooks take" in choice.plan.notes[-1]
    assert choice.chosen.time.total <= 0.8 * kept.chosen.time.total
    quick = replace(HARDWARE["h100"], hook_time=5e-5)  # no longer than the device
    assert kept.plan == budget(hardware=quick).plan == budget(plan=kept.plan).plan != choice.plan
    counted = budget(optimizer="none")
    assert counted.plan == choice.plan
    assert counted.peak.total == pytest.approx(peak_of(model, choice.plan) + TOKENS.nbytes, rel=0.001)


def test_fused_blocks_are_siblings_with_the_same_settings():
    model = nn.ModuleDict({"a": decoder(layers=3), "b": decoder(layers=3)})
    plan = plan_model(model, units="*.layers.*", mesh=MeshSpec.sharded(2))
    plan = changed(plan, {"a.layers.1"}, reshard_after_forward=False)
    names = {unit.name for unit in plan.units if unit.name != "b.layers.2"}  # which is not called
    found = [unit.modules for unit in fused(plan, 8, names).units if "layers" in unit.name]
    alone = [(f"a.layers.{number}",) for number in range(3)]
    assert found == [*alone, ("b.layers.0", "b.layers.1"), ("b.layers.2",)]


def test_what_a_rank_sends_in_a_step():
    model = nn.Sequential(nn.Linear(64, 64, bias=False))  # 16,384 bytes, in a unit that is gathered twice
    plan = plan_model(model, units="0", mesh=MeshSpec.sharded(8), reshard_after_forward=True)
    hardware = replace(HARDWARE["h100"], ranks_per_node=2)
    table = scaling_table(model, plan, torch.zeros(1, 64), hardware, worlds=(2, 8))
    assert [(row.strategy, row.time.traffic) for row in table.rows] == [
        ("FSDP", Traffic(3, 3 * 8192, 0, 0)),
        ("FSDP", Traffic(3, 3 * (14336 - 6144), 9, 3 * 6144)),  # 7/8 of all bytes; a node shares 3/4 of them
        ("HSDP", Traffic(3, 3 * 8192, 2 * 2, 2 * 6144)),  # the half of a rank all-reduced over 4 nodes, as a tree
        ("hpZ", Traffic(3, 2 * (14336 - 6144) + 8192, 6, 2 * 6144)),  # backward's all-gather stays in the node
    ]
    assert [row.mesh.shard_size for row in table.of("HSDP")] == [2]
    assert all(row.time.total == row.time.hooks > row.time.device > 0 for row in table.of("FSDP")[:1])


def test_more_ranks_are_named_when_they_would_do():
    model = decoder()
    least = estimate(model, world_size=2)["ZeRO-3, recomputed and offloaded"].peak.total
    batch = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(PlanError, match=r"(\d+ ranks would be enough|No number of ranks)"):
        plan_for_budget(model, least // 2, world_size=2, batch=batch, loss=mean)


def test_a_budget_is_the_same_every_time():
    model = decoder(layers=6)
    first, again = (plan_for_budget(model, "0.45MiB", world_size=16, batch=TOKENS, loss=mean) for _ in range(2))
    assert first == again
    assert "not measurements" in str(first)


def test_secondary_shards_spend_what_is_left_where_a_node_is_smaller():
    model, hardware = decoder(layers=6), HARDWARE["h100"]
    sharded = estimate(model, world_size=16, batch=TOKENS, loss=mean)["ZeRO-3"].peak.total
    choice = plan_for_budget(
        model, sharded + 6000, world_size=16, batch=TOKENS, loss=mean, hardware=hardware, reserve=0
    )
    assert any("resharded within the node" in each.what for each in choice.weighed)
    assert {unit.reshard_after_forward for unit in choice.plan.units} == {False, True, 8}


@pytest.mark.parametrize(("text", "size"), [("70GiB", 70 * 2**30), ("80 GB", 80 * 10**9), ("1.5kB", 1500), (7, 7)])
def test_budgets_as_text(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "70 apples", "0 apples", "-3GiB", 0, None, True])
def test_budgets_that_are_none(text):
    with pytest.raises(PlanError, match="budget: is"):
        parse_bytes(text)
    with pytest.raises(PlanError, match=r'reserve: is .*, or a percentage such as "10%", or 0'):
        parse_reserve(text or None, 100_000)


@pytest.mark.parametrize(
    ("reserve", "size"), [("10%", 10_000), ("2.5 %", 2500), ("6kB", 6000), (7, 7), (0, 0), ("0", 0), ("0GiB", 0)]
)
def test_reserves(reserve, size):
    assert parse_reserve(reserve, 100_000) == size


def test_what_is_reserved_is_not_used():
    model, batch = decoder(layers=6), {"world_size": 16, "batch": TOKENS, "loss": mean}
    choice, whole = (plan_for_budget(model, 500_000, reserve=reserve, **batch) for reserve in ("20%", 0))
    assert (choice.budget, choice.reserved) == (500_000, 100_000)
    assert choice.plan == plan_for_budget(model, 400_000, reserve=0, **batch).plan
    assert choice.peak.total <= 400_000 < whole.peak.total
    assert str(choice).startswith("fits 488.3 KiB less 97.7 KiB reserved: ")
    assert str(whole).startswith("fits 488.3 KiB: ")


@distributed(world_size=4)
def test_shard_model_within_a_budget():
    torch.manual_seed(0)
    model = decoder()
    with mock.patch.object(api.logger, "info") as info, contextlib.redirect_stdout(io.StringIO()) as printed:
        shard_model(model, memory_budget="262KiB", example_batch=TOKENS, mp_policy=MixedPrecisionPolicy())
    assert printed.getvalue() == ""
    assert info.call_count == (dist.get_rank() == 0)
    assert all("fits" in str(call.args[1]) for call in info.call_args_list)
    loss = mean(model(TOKENS))
    loss.backward()
    assert loss.item() > 0
    assert any("forward" in vars(module) for module in model.modules() if isinstance(module, Block))  # recomputed


def test_a_budget_needs_a_batch():
    with fake_world(2), pytest.raises(PlanError, match="memory_budget: given without example_batch"):
        shard_model(decoder(), memory_budget="1GiB")
