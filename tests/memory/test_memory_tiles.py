"""Tiles in the prediction of memory, and in the search for a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from memory_count import counted_peak
from test_memory import mean, predicted_peak
from torch import Tensor, nn

from shardkit import MeshSpec, MixedPrecisionPolicy, PlanError, ShardingPlan, by_class, by_name, plan_model
from shardkit.memory import estimate, plan_for_budget
from shardkit.memory.estimate import Measured, with_checkpoints
from shardkit.planning.default import find_mlps
from shardkit.planning.tree import ModelTree
from shardkit.sequence import tiled_loss


class MLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(dim), nn.Linear(dim, dim), MLP(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x).cumsum(1)
        return x + self.mlp(self.norm(x))


def model(layers: int = 3, dim: int = 16) -> nn.Module:
    return nn.Sequential(nn.Embedding(31, dim), *[Block(dim) for _ in range(layers)], nn.Linear(dim, 31))


TOKENS = torch.randint(31, (2, 150))
TILES = by_name("*.mlp", tiles=5)
CASES: dict[str, dict[str, Any]] = {
    "whole": {"units": [by_name("1", "2", "3")]},
    "tiles": {"units": [TILES, by_name("1", "2", "3")]},
    "checkpointed": {"units": [by_name("1", "2", "3", checkpoint_activations=True)]},
    "checkpointed, tiles": {"units": [TILES, by_name("1", "2", "3", checkpoint_activations=True)]},
    "half precision": {"units": [TILES, "1", "2", "3"], "mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    "a unit": {"units": [TILES, "*.mlp", "1"]},
}


def predicted(plan: ShardingPlan) -> int:
    return predicted_peak(model(), plan, TOKENS)


def test_predicted_is_counted_and_tiles_save() -> None:
    peaks = {}
    for name, arguments in CASES.items():
        sharded = model()
        plan = plan_model(sharded, mesh=MeshSpec.sharded(8), **arguments)
        peaks[name] = counted_peak(sharded, plan, lambda m: mean(m(TOKENS)).backward())
        assert peaks[name] == pytest.approx(predicted(plan), rel=0.001), name
    assert peaks["tiles"] < 0.4 * peaks["whole"]  # the activations of one tile, not of three MLPs
    assert peaks["checkpointed, tiles"] < 0.6 * peaks["checkpointed"]  # not of the MLP of one block


@pytest.mark.parametrize("tiles", [False, True])
def test_predicted_is_counted_in_a_model_of_transformers(tiles: bool) -> None:
    """Without positions in the batch its attention has no mask, which fake tensors must not hide."""

    class Llama(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor) -> Tensor:
            hidden = self.model(input_ids, use_cache=False).last_hidden_state
            return tiled_loss(self.lm_head, hidden, input_ids, tiles=8 if tiles else 1)

    sizes = {"hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    sharded, tokens = Llama(transformers.LlamaConfig(vocab_size=500, **sizes)), torch.randint(500, (1, 150))
    units = by_name("model.layers.*.mlp", tiles=5 if tiles else 1)
    plan = plan_model(sharded, mesh=MeshSpec.sharded(8), units=units)
    row = estimate(sharded, plan=plan, batch=tokens, optimizer="none", loss=lambda loss: loss)["ZeRO-3"]
    counted = counted_peak(sharded, plan, lambda m: m(tokens).backward())
    assert row.peak is not None
    assert row.peak.total - tokens.nbytes == pytest.approx(counted, rel=0.001)


def test_a_budget_that_only_tiles_meet() -> None:
    plan = plan_model(model(), mesh=MeshSpec.sharded(8), units=by_class(Block))
    search: dict[str, Any] = {"batch": TOKENS, "plan": plan, "loss": mean, "optimizer": "none", "reserve": 0}
    frugal = predicted(with_checkpoints(plan, ["1", "2", "3"])) + TOKENS.nbytes
    found = [plan_for_budget(model(), int(share * frugal), **search) for share in (1, 0.99, 0.6)]
    assert [sorted(set(dict(each.plan.tiles).values())) for each in found] == [[], [2], [4]]
    assert found[1].plan.notes[-1].startswith("1.mlp, 2.mlp and 1 more: in 2 tiles, as MLPs by their class")
    for each in found:
        assert each.peak.total == predicted(each.plan) + TOKENS.nbytes <= each.budget
    with pytest.raises(PlanError, match=r"is too little: on the CPU, MLPs in .* tiles, 3 of 3 blocks checkpointed"):
        plan_for_budget(model(), frugal // 2, **search)


def test_what_cannot_be_tiled_despite_its_name_is_left_whole() -> None:
    class PairMlp(nn.Linear):
        """Returns two values."""

        def forward(self, x: Tensor) -> Any:
            return super().forward(x), None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = PairMlp(16, 256)

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x)[0].square()  # type: ignore[no-any-return]

    search: dict[str, Any] = {"batch": torch.ones(1, 4, 16), "world_size": 2, "optimizer": "adamw", "reserve": 0}
    peak = plan_for_budget(Net(), "1GB", **search).weighed[0].peak.total
    assert "on the CPU" in plan_for_budget(Net(), peak - 1, **search).name


def test_which_modules_are_mlps() -> None:
    class ConvMlp(nn.Conv2d):
        """Mixes neighbors."""

    class FeedForward(MLP):
        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.inner = MLP(dim)

    class SparseMLP(nn.ModuleDict):
        """Routes tokens to experts."""

    sparse = SparseMLP({"experts": nn.ModuleList([MLP(4)])})
    found = nn.ModuleDict({"mlp": MLP(4), "conv": ConvMlp(2, 2, 1), "sparse": sparse, "feed": FeedForward(4)})
    assert find_mlps(ModelTree(found)) == ["mlp", "feed"]
    tiled = model()
    plan = plan_model(tiled, mesh=MeshSpec.sharded(8), units=[TILES, by_class(Block)])
    assert Measured(tiled, plan, TOKENS, mean).mlps == []
    plan = plan_model(tiled, mesh=MeshSpec.sharded(8), units=[by_name("1", compile=True), by_name("2.mlp.up"), Block])
    assert Measured(tiled, plan, TOKENS, mean).mlps == ["3.mlp"]
