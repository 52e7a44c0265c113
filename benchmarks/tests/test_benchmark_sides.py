"""The sides of the training benchmark: the same model, the same losses, and nothing asked for that
is ignored.
"""

import importlib.util
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models import (
    SHAPES,
    Llama,
    attend,
    chunk_loss,
    fusible_chunk_loss,
    llama,
    rope_table,
)
from benchmarks.train import disk, outside
from benchmarks.train.case import Case
from benchmarks.train.sides import SIDES, ours
from benchmarks.train.sides.side import asked
from benchmarks.train.training import CHUNK
from benchmarks.train.world import world
from shardkit.testing import CommCounts, comm_counts

CPU = torch.device("cpu")
BASE = Case("case", "shardkit", "tiny", sequence=16, micro_batch=2, bf16=False)
SHARDED = ("fsdp1", "naive", "expert", "shardkit", "shardkit-budget")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    # a budget's choice is printed
    monkeypatch.setattr("shardkit.api.print", lambda choice: None, raising=False)


def ids():
    return torch.randint(1000, (2, 16), generator=torch.Generator().manual_seed(1))


def losses(side, case, steps=2):
    budget = 1.0 if "budget" in side else None
    training = SIDES[side].build(replace(case, side=side, budget_gib=budget), CPU)
    return [training.step(ids()).item() for _ in range(steps)]


# --- Models ---------------------------------------------------------------------------------------


def test_shapes_are_the_published_ones():
    counts = {
        name: sum(param.numel() for param in llama(name).parameters())
        for name in ("1B", "7B", "8B")
    }
    assert counts == {"1B": 1_235_814_400, "7B": 6_738_415_616, "8B": 8_030_261_248}


def test_the_loss_in_chunks_is_the_loss():
    torch.manual_seed(0)
    whole = Llama(SHAPES["tiny"])
    torch.manual_seed(0)
    chunked = Llama(SHAPES["tiny"], chunk=24)  # the last one is shorter
    losses = [model(ids()) for model in (whole, chunked)]
    assert abs(losses[0].item() - math.log(1000)) < 0.25
    # float32, summed in another order
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    for loss in losses:
        (2 * loss).backward()  # a gradient that is not 1
    for param, other in zip(whole.parameters(), chunked.parameters(), strict=True):
        assert param.grad.norm() > 0
        assert (param.grad - other.grad).norm() < 1e-5 * param.grad.norm()


def test_blocks_and_loss_compile_without_graph_breaks():
    model = Llama(SHAPES["tiny"])
    x = torch.randn(1, 8, 64)
    targets, scale = torch.randint(1000, (8,)), torch.tensor(0.1)
    for function, args in (
        (model.layers[0].forward, (x, *rope_table(8, 16, x))),
        (fusible_chunk_loss, (x[0], model.head.weight.detach(), targets, scale)),
    ):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        for mine, other in zip(compiled(*args), function(*args), strict=True):
            assert torch.equal(mine, other)
    torch.compiler.reset()
    for mine, other in zip(fusible_chunk_loss(*args), chunk_loss(*args), strict=True):
        # float32: divided before or after
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-8)


def test_repeated_heads_are_grouped_heads():
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    torch.testing.assert_close(attend(q, k, v, grouped=False), attend(q, k, v, grouped=True))


# --- The same training on every side --------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny", "tiny-tied"])
def test_in_float32_every_side_has_the_same_losses_to_the_bit(model):
    with world(0, CPU, "float32"):
        found = {
            side: losses(side, replace(BASE, model=model)) for side in (*SHARDED, "bare", "ddp")
        }
        pairs = ours.make(replace(BASE, model=model), CPU, together=2)
        found["pairs of blocks"] = [pairs.step(ids()).item() for _ in range(2)]
    first, last = found["bare"]
    assert last < first - 0.1  # it trains
    assert set(map(tuple, found.values())) == {tuple(found["bare"])}


def test_in_bf16_sharded_sides_agree_to_the_bit_and_others_start_alike():
    half = replace(BASE, bf16=True)
    with world(0, CPU, "bf16"):
        found = {side: losses(side, half) for side in (*SHARDED, "bare", "ddp")}
        masterless = {
            tuple(losses(side, replace(half, masters=False)))
            for side in ("shardkit", "expert", "naive")
        }
        training = SIDES["shardkit"].build(replace(half, masters=False), CPU)
        training.step(ids())
    assert {param.dtype for param in training.model.parameters()} == {torch.bfloat16}
    assert masterless == {tuple(found["bare"])}
    assert len({tuple(found[side]) for side in SHARDED}) == 1
    # The bare model has the same weights in the first step, and then rounds its updates to 8 bits.
    # Autocast adds up the residual stream in float32.
    assert found["bare"][0] == found["shardkit"][0]
    assert found["bare"][1] != found["shardkit"][1]
    assert 0 < abs(found["ddp"][0] - found["shardkit"][0]) < 2**-8 * found["shardkit"][0]


def test_transformers_llama_and_settings_change_no_loss():
    half = replace(BASE, bf16=True)
    with world(0, CPU, "settings"):
        plain = losses("expert", half)
        for changes in (
            {"checkpointing": "unit"},
            {"checkpointing": "selective"},
            {"reshard": False},
            {"stepping": "local"},
            {"offload": True},
        ):
            assert losses("shardkit", replace(half, **changes)) == plain
        assert losses("expert", replace(half, checkpointing="selective")) == plain
        assert losses("shardkit", replace(half, model="hf-tiny")) == losses(
            "naive", replace(half, model="hf-tiny")
        )
        # Without clipping, which no optimizer in backward can have.
        unclipped = [
            losses(side, replace(half, stepping="in_backward")) for side in ("shardkit", "naive")
        ]
    assert unclipped[0] == unclipped[1] != plain


def test_recomputing_costs_what_it_says():
    def flops(checkpointing):
        training = SIDES["expert"].build(replace(BASE, checkpointing=checkpointing), CPU)
        with FlopCounterMode(display=False) as counter:
            training.step(ids())
        return counter.get_total_flops()

    with world(0, CPU, "flops"):
        none, selective, unit = (
            flops(checkpointing) for checkpointing in ("none", "selective", "unit")
        )
    # k and v have 2 heads of 16; of q, k, v, out, gate, up, down every other one is saved
    shape = SHAPES["tiny"]
    recomputed = shape.width * (32 + shape.width + shape.mlp)  # weights of k, out and up
    assert selective - none == 2 * 2 * 16 * shape.layers * recomputed
    assert unit - none > selective - none > 0


# --- Pretended worlds -----------------------------------------------------------------------------


def test_a_pretended_rank_holds_its_shards_and_trains():
    total = sum(param.numel() for param in llama("tiny").parameters())
    changes = [{}, {"reshard": 2}, {"replicas": 2}, {"offload": True}, {"model": "hf-tiny-tied"}]
    with world(8, CPU, "pretended"):
        for side, change in [
            ("naive", {}),
            ("expert", {"reshard": 2}),
            *(("shardkit", change) for change in changes),
        ]:
            case = replace(BASE, side=side, fake_ranks=8, **change)
            training = SIDES[side].build(case, CPU)
            first, second = training.step(ids()).item(), training.step(ids()).item()
            assert second < first
            if case.model == "tiny":
                held = sum(param.to_local().numel() for param in training.model.parameters())
                assert held == total * case.replicas // 8
        for strategy in (
            "FULL_SHARD",
            "SHARD_GRAD_OP",
            "NO_SHARD",
            "HYBRID_SHARD",
            "_HYBRID_SHARD_ZERO2",
        ):
            replicas = 2 if "HYBRID" in strategy else 1
            first, second = losses(
                "fsdp1", replace(BASE, fake_ranks=8, strategy=strategy, replicas=replicas)
            )
            assert second < first
        first, second = losses("ddp", replace(BASE, fake_ranks=8))
        assert second < first


def test_shardkit_and_the_expert_communicate_alike():
    counts = {}
    with world(8, CPU, "counts"):
        for side, model in itertools.product(
            ("shardkit", "expert", "naive"), ("tiny", "tiny-tied")
        ):
            # no clip, no all-reduce
            case = replace(BASE, side=side, model=model, fake_ranks=8, stepping="in_backward")
            training = SIDES[side].build(case, CPU)
            with comm_counts() as counts[side, model]:
                training.step(ids())
    # 4 blocks, once more each
    assert counts["shardkit", "tiny"] == counts["expert", "tiny"] == CommCounts(11, 6, 0)
    assert counts["shardkit", "tiny-tied"] == counts["expert", "tiny-tied"] == CommCounts(9, 5, 0)
    assert counts["naive", "tiny"] == CommCounts(9, 5, 0)


# --- What cannot be had ---------------------------------------------------------------------------

WISHES = {
    "fake": {"fake_ranks": 8},
    "reshard": {"reshard": False},
    "reshard_int": {"reshard": 2},
    "strategy": {"strategy": "FULL_SHARD"},
    "replicas": {"replicas": 2},
    "unit": {"checkpointing": "unit"},
    "selective": {"checkpointing": "selective"},
    "compile": {"compile": True},
    "offload": {"offload": True},
    "masterless": {"masters": False},
    "local": {"stepping": "local"},
    "in_backward": {"stepping": "in_backward"},
    "budget": {"budget_gib": 1.0},
}


def test_every_field_of_a_case_is_a_wish_or_has_no_side():
    for name, change in WISHES.items():
        assert name in dict(asked(replace(BASE, **change)))
    everywhere = {"name", "side", "model", "sequence", "micro_batch", "bf16"}
    assert {field for change in WISHES.values() for field in change} | everywhere == set(
        vars(BASE)
    ), "a new field"


@pytest.mark.parametrize("side", sorted(set(SIDES) - {"accelerate", "lightning"}))
def test_a_side_refuses_what_it_does_not_have(side):
    for name, change in WISHES.items():
        reason = SIDES[side].unavailable(replace(BASE, side=side, **change))
        if name not in SIDES[side].options:
            assert dict(asked(replace(BASE, **change)))[name] in reason
    with pytest.raises(ValueError, match="case: "):
        SIDES[side].build(replace(BASE, model="9B"), CPU)


def test_what_no_side_could_do_is_said():
    said = [
        (replace(BASE, model="9B"), "no shape is called 9B"),
        (
            replace(BASE, reshard=2),
            "reshard_after_forward=2 must divide 1 ranks and lie between them and 1",
        ),
        (replace(BASE, fake_ranks=8, reshard=3), "reshard_after_forward=3 must divide 8 ranks"),
        (replace(BASE, fake_ranks=8, replicas=3), "8 ranks are not 3 replicas"),
    ]
    for case, reason in said:
        assert reason in SIDES["shardkit"].unavailable(case)
    assert "needs budget_gib" in SIDES["shardkit-budget"].unavailable(BASE)
    hybrid = replace(BASE, fake_ranks=8, strategy="HYBRID_SHARD")
    assert "do not go together" in SIDES["fsdp1"].unavailable(hybrid)


@pytest.mark.parametrize(
    ("side", "package"), [("accelerate", "accelerate"), ("lightning", "lightning_fabric")]
)
def test_packages_that_are_missing_are_named(side, package):
    reason = SIDES[side].unavailable(BASE)
    assert (reason == f"{package} is not installed") == (importlib.util.find_spec(package) is None)


# --- Figures of their own -------------------------------------------------------------------------


def test_time_outside_of_the_model_comes_in_pairs(monkeypatch):
    monkeypatch.setattr(outside, "CALLS", 1)
    monkeypatch.setattr(outside, "WARM_UP", 1)
    with world(8, CPU, "outside"):
        pairs = outside.measure(replace(BASE, fake_ranks=8), CPU, rounds=2)
    assert len(pairs) == 2
    # differences of times, so not quite positive
    assert all(theirs > 0 and mine > -theirs for mine, theirs in pairs)


def test_a_disk_is_measured_and_left_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "TIMES", 1)
    with world(0, CPU, "disk"):
        speeds = disk.measure("tiny", CPU, tmp_path)
    assert set(speeds) == {"write", "save", "read", "load", "from_gpu", "to_gpu"}
    assert all(speed > 0 for speed in speeds.values())
    assert list(tmp_path.iterdir()) == []


def test_the_logits_of_a_chunk_are_a_gibibyte():
    assert CHUNK * SHAPES["8B"].vocabulary * 4 == pytest.approx(2**30, rel=0.05)
