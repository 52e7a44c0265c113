"""Strategies side by side, and the plan that a budget allows."""

import functools
import re
import threading
from collections import deque
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from memory_count import counted_peak
from small_models import Block, Decoder
from test_memory import TOKENS, decoder, mean
from torch import Tensor, nn
from transformers import masking_utils

from shardkit import (
    MeshSpec,
    MixedPrecisionPolicy,
    PlanError,
    api,
    apply_plan,
    plan_model,
    shard_model,
)
from shardkit.memory import estimate, plan_for_budget
from shardkit.memory.budget import limit_of
from shardkit.memory.tracing import trace
from shardkit.testing import distributed, fake_world


def test_an_optimizer_by_name_or_by_its_bytes():
    plan = plan_model(decoder(), mesh=MeshSpec.hybrid(2, 4))
    options = {"batch": TOKENS, "loss": mean}
    by_name, by_bytes = (
        estimate(decoder(), plan, optimizer=optimizer, **options) for optimizer in ("adamw", 8)
    )
    assert [row.peak for row in by_name] == [row.peak for row in by_bytes]
    assert by_name["HSDP"].plan == plan
    assert str(by_name).startswith("bytes on each of 8 ranks at the peak")


def on(ranks, model):
    return plan_model(model, mesh=MeshSpec.sharded(ranks))


def test_what_each_strategy_saves():
    model = decoder()
    rows = estimate(model, on(16, model), batch=TOKENS, loss=mean, ranks_per_node=4)
    peak = {row.name: row.peak.total for row in rows}
    order = [
        "replicated (DDP)",
        "kept unsharded (ZeRO-2)",
        "sharded (ZeRO-3)",
        "ZeRO-3, blocks checkpointed",
    ]
    order += ["ZeRO-3, checkpointed and offloaded"]
    assert [peak[name] for name in order] == sorted({peak[name] for name in order}, reverse=True)
    assert peak["sharded (ZeRO-3)"] < peak["sharded in a node (HSDP)"] < peak["replicated (DDP)"]
    offloaded, states = rows["ZeRO-3, offloaded to the CPU"], rows["ZeRO-3"].timeline[0]
    assert offloaded.peak.optimizer == rows["ZeRO-3"].host == 0
    # and gradients, as large as parameters
    assert offloaded.host == 2 * states.parameters + states.optimizer
    assert max(point.gradients for point in rows["ZeRO-3, optimizer in backward"].timeline) == 0
    assert max(point.gradients for point in rows["ZeRO-3"].timeline) > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"optimizer": -8}, "optimizer must be one of adamw,"),
        ({"optimizer": "adamax2"}, "or bytes of state per element, got 'adamax2'."),
        ({"batch": {"nothing": TOKENS}}, "batch fails in the model on fake tensors"),
    ],
)
def test_bad_arguments_of_an_estimate(arguments, text):
    model = Decoder()
    with pytest.raises(PlanError, match=re.escape(text)):
        estimate(model, on(4, model), **{"batch": TOKENS} | arguments)


def test_a_step_is_traced_in_inference_mode_too():
    model = decoder()
    with torch.inference_mode():
        row = estimate(model, on(4, model), batch=TOKENS, loss=mean)["ZeRO-3"]
    assert row == estimate(model, on(4, model), batch=TOKENS, loss=mean)["ZeRO-3"]


class Remembering(nn.Module):
    """Whatever a forward may leave behind: the values of a second forward depend on the first's."""

    def __init__(self):
        super().__init__()
        self.model = decoder(layers=2)
        self.count, self.table, self.recent = 0, {"last": None}, deque(maxlen=3)
        self.register_buffer("running", torch.zeros(()))
        self.total = torch.zeros(())
        self.helper = SimpleNamespace(count=0, seen=[])  # an object that is no module
        # not to be copied
        self.lock, self.later = threading.Lock(), self.total + torch.ones((), requires_grad=True)
        self.register_forward_hook(functools.partial(lambda lock, *_: None, threading.Lock()))
        inner = self.model.forward
        self.model.forward = lambda tokens: inner(tokens) * 2

    def forward(self, tokens):
        if not hasattr(self, "scale"):
            self.scale = torch.full((), 2.0)
            self.register_buffer("lazy", torch.ones(()))
            self.extra = nn.Identity()
            self.register_forward_hook(lambda *_: None)
        out = self.model(tokens) * self.scale * self.lazy
        self.count += 1
        self.running += 1
        self.total += 1
        self.table = {**self.table, "last": out}
        self.recent.append(out)
        self.helper.count += 1
        self.helper.seen.append(out)
        self.helper.last = out
        return out + self.running + self.total + self.later


def held(value):
    """All that can be reached, as plain values and names of the types of what
    cannot be compared.
    """
    if isinstance(value, Tensor):
        return (
            id(value),
            type(value).__name__,
            value.tolist(),
            held(value.grad) if value.is_leaf else None,
        )
    if isinstance(value, dict):
        return [(key, held(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple, deque, set)):
        return type(value).__name__, [held(each) for each in value]
    if isinstance(value, (nn.Module, SimpleNamespace)):
        return type(value).__name__, held(vars(value))
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def test_a_trace_leaves_all_that_is_reachable_from_the_model_as_it_is():
    model, twin = Remembering(), Remembering()
    twin.load_state_dict(model.state_dict())

    def bad(_):
        raise ValueError

    def state():
        return held(model), [id(module) for module in model.modules()]

    for _ in range(2):  # before the model has run, and after
        before, plan = state(), plan_model(model, mesh=MeshSpec.sharded(2))
        trace(model, plan, TOKENS)
        with pytest.raises(PlanError, match="ValueError"):
            trace(model, plan, TOKENS, loss=bad)
        assert state() == before
        found, expected = model(TOKENS), twin(TOKENS)
        assert type(found) is Tensor
        assert torch.equal(found, expected)
        found.mean().backward()
        expected.mean().backward()
        assert all(
            torch.equal(a.grad, b.grad)
            for a, b in zip(model.parameters(), twin.parameters(), strict=True)
        )


def test_a_trace_leaves_transformers_masks_of_real_positions_as_they_are():
    """Another thread may build a model's masks meanwhile."""
    packed, found = torch.tensor([[0, 1, 2, 0, 1]]), []

    def loss(output):
        found.append(masking_utils.find_packed_sequence_indices(packed))
        found.append(masking_utils.find_packed_sequence_indices(output.argmax(-1)))
        return output.mean()

    model = decoder()
    trace(model, on(2, model), TOKENS, loss=loss)
    assert found[0].shape == packed.shape
    assert found[1] is None


@pytest.mark.parametrize("share", [0.999, 0.75, 0.6])
def test_a_plan_for_a_budget_never_exceeds_it_when_it_runs(share):
    model = decoder(layers=6)
    most = estimate(model, on(8, model), batch=TOKENS, loss=mean, optimizer="none")[
        "ZeRO-2"
    ].peak.total
    budget = int(most * share)
    choice = plan_for_budget(
        model, budget, on(8, model), batch=TOKENS, loss=mean, optimizer="none", reserve=0
    )
    assert choice.peak.total <= budget
    if not any(unit.offloads for unit in choice.plan.units):
        peak = counted_peak(model, choice.plan, lambda m: mean(m(TOKENS)).backward())
        assert peak + TOKENS.nbytes <= budget * 1.001


def test_the_order_of_a_budget():
    model = decoder(layers=6)
    sharded = estimate(model, on(16, model), batch=TOKENS, loss=mean)["ZeRO-3"].peak.total

    def chosen(budget):
        return plan_for_budget(model, budget, on(16, model), batch=TOKENS, loss=mean, reserve=0)

    assert chosen(sharded).name == "everything sharded"
    assert re.fullmatch("[1-6] of 7 units kept unsharded", chosen(int(1.05 * sharded)).name)
    assert chosen(2 * sharded).name == "7 of 7 units kept unsharded"
    choice = chosen(int(0.95 * sharded))
    assert re.search(r"[1-6] of 6 blocks checkpointed selectively", choice.name)
    assert chosen(int(0.95 * sharded)) == choice
    full = r"[1-5] of 6 blocks checkpointed in full, the others selectively"
    assert re.match(full, chosen(int(0.75 * sharded)).name)
    kept = plan_model(model, mesh=MeshSpec.sharded(16), reshard_after_forward=False)
    start = plan_for_budget(model, "1GiB", kept, batch=TOKENS, loss=mean).weighed[0]
    assert start.name == "everything sharded"
    assert all(unit.reshard_after_forward for unit in start.plan.units if unit.blocks)
    with pytest.raises(
        PlanError, match=r"budget of .* is too little: .* still peaks at .*Use a smaller batch"
    ):
        chosen(int(0.05 * sharded))


def test_a_budget_where_selective_checkpointing_fails():
    """A ReLU in place changes the products that it would keep."""

    def block():
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Linear(32, 8))

    model = nn.Sequential(*(block() for _ in range(6)))
    batch = torch.randn(1024, 8)
    choice = plan_for_budget(model, "800KiB", on(2, model), batch=batch, reserve=0)
    assert "4 of 6 blocks checkpointed in full" in choice.name


def test_budgets_as_text():
    sizes = {"70GiB": 70 * 2**30, "80 GB": 80 * 10**9, "1.5kB": 1500, 7: 7}
    assert [limit_of(text, 0) for text in sizes] == list(sizes.values())
    assert limit_of("80 GB", 0.1) == 72 * 10**9
    for text in ("", "GiB", "70 apples", "-3GiB", 0, None, True):
        with pytest.raises(PlanError, match="budget must be bytes"):
            limit_of(text, 0)


def test_a_negative_reserve_would_plan_for_more_than_the_budget():
    with pytest.raises(PlanError, match=r"^reserve must be at least 0.* got -0.1"):
        plan_for_budget(decoder(), "1GiB", on(2, decoder()), batch=TOKENS, reserve=-0.1)


def test_what_is_reserved_is_not_used():
    model = decoder(layers=6)
    options = {"batch": TOKENS, "loss": mean}
    choice, whole = (
        plan_for_budget(model, 500_000, on(16, model), reserve=each, **options) for each in (0.2, 0)
    )
    assert choice.limit == 400_000
    assert choice.plan == plan_for_budget(model, 400_000, on(16, model), reserve=0, **options).plan
    assert choice.peak.total <= 400_000 < whole.peak.total
    assert str(choice).startswith("fits in 390.6 KiB: ")


@distributed(world_size=2)
def test_shard_model_within_a_budget():
    model = decoder()
    with mock.patch.object(api.logger, "info") as info:
        shard_model(
            model, memory_budget="362KiB", example_batch=TOKENS, mp_policy=MixedPrecisionPolicy()
        )
    assert info.call_count == (dist.get_rank() == 0)
    assert all("fits" in str(call.args[1]) for call in info.call_args_list)
    mean(model(TOKENS)).backward()
    # checkpointed
    assert any("forward" in vars(module) for module in model.modules() if isinstance(module, Block))


class PostNorm(nn.Module):
    """As in Gemma and OLMo 2: what is selected inside of a block comes after its tiles, too."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16))
        self.post = nn.LayerNorm(16)

    def forward(self, x):
        x = x + self.down(self.up(x).tanh())
        return x + self.post(self.mlp(x))


@distributed(world_size=2)
def test_a_budget_checkpoints_blocks_with_tiles():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(*(PostNorm() for _ in range(3))).double()

    batch, plain, seen = torch.rand(64, 8, 16, dtype=torch.float64), build(), set()
    plain(batch).sum().backward()
    tiles = {"*.mlp": 3}
    whole = estimate(plain, plan_model(build(), mesh=MeshSpec.sharded(2), tiles=tiles), batch=batch)
    for share in (0.95, 0.8):
        budget = int(whole["ZeRO-3"].peak.total * share / 0.9)  # a tenth is reserved
        model = build()
        options = {"memory_budget": budget, "example_batch": batch, "tiles": tiles}
        plan = plan_model(model, mesh=MeshSpec.sharded(2), **options)
        seen |= {unit.checkpoint_activations for unit in plan.units}
        apply_plan(model, plan)
        model(batch).sum().backward()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    assert {"selective", True} <= seen


def test_a_budget_needs_a_batch():
    with pytest.raises(PlanError, match="batch fails in the model"):
        plan_for_budget(decoder(), "1GiB", on(2, decoder()), batch=None)
    with fake_world(2), pytest.raises(PlanError, match="memory_budget"):
        shard_model(decoder(), memory_budget="1GiB")
