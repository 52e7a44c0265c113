"""Modules in tiles of tokens: gradients of the whole, collectives of the unit, and
what is refused.
"""

import copy
import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_moe import MoE
from split_training import difference
from torch import nn

from shardkit import (
    MeshSpec,
    PlanError,
    ShardingPlan,
    ShardkitError,
    accumulate,
    apply_plan,
    by_class,
    plan_model,
)
from shardkit.activations import checkpointed
from shardkit.testing import comm_counts, distributed, fake_world
from shardkit.tiles import tiled

TILES = {"**.mlp": 4}


class Mlp(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 20), nn.Linear(6, 20), nn.Linear(20, 6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, scale=None, residual=None):
        # view: tiles must be contiguous
        y = F.silu(self.gate(x.view(-1, 6))) * self.up(x.view(-1, 6))
        y = self.down(self.dropout(y)).view(x.shape)
        y = y if scale is None else y * scale[..., None]
        return y if residual is None else y + residual


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(6), nn.Linear(6, 6), Mlp(dropout)
        self.post = nn.LayerNorm(6)  # as in Gemma 2, whose backward needs what the tiles return

    def forward(self, x):
        scale = x.square().mean(-1) + 1 if x.ndim > 2 else None
        return self.post(self.mlp(self.norm(x + self.mix(x).cumsum(-2)), scale, residual=x))


class Model(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 17)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).clone()


def loss_of(model, tokens):
    return model(tokens).square().sum()


CASES = {
    "default units": {"tiles": TILES},
    "blocks recomputed": {"tiles": TILES, "checkpoint_activations": True},
    "blocks recomputed in part": {"tiles": TILES, "checkpoint_activations": "selective"},
    "a unit of its own": {"tiles": TILES, "units": ["layers.*", "layers.0.mlp"]},
    "kept gathered": {"tiles": TILES, "units": "layers.*", "reshard_after_forward": False},
}
# Of this rank's micro-batches: uneven, fewer tokens than tiles, one, none; and a batch without a
# dim of sequences.
BATCHES = [(2, 13), (3, 3), (1, 1), (2, 0), (11,)]


@distributed(world_size=2)
def test_gradients_and_collectives_are_those_of_the_whole():
    torch.manual_seed(0)
    plain = Model().double()
    sharded = {name: copy.deepcopy(plain) for name in CASES}
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(17, size, generator=generator) for size in BATCHES]
    # of the other rank, which has no others
    batches += [torch.randint(17, (2, 5), generator=generator)]
    mine = batches[:-1] if dist.get_rank() == 0 else batches[-1:]
    mine += [torch.empty(1, 0, dtype=torch.long)] * (len(BATCHES) - len(mine))
    sum(loss_of(plain, batch) for batch in batches).backward()
    for param in plain.parameters():
        assert param.grad is not None
        param.grad /= 2
    for name, model in sharded.items():
        plan = plan_model(model, mesh=MeshSpec.sharded(2), **CASES[name])
        assert [fqn for fqn, _ in plan.tiles] == [f"layers.{index}.mlp" for index in range(3)]
        apply_plan(model, plan)
        for place, batch in enumerate(mine):
            with accumulate(model, last=place == len(mine) - 1):
                loss_of(model, batch).backward()
        assert difference(model, plain) < 1e-15, name
        model.zero_grad()
        with comm_counts() as counts:
            loss_of(model, mine[0]).backward()
        assert counts == plan.collectives()


@pytest.mark.parametrize("policy", [True, "selective"])
@pytest.mark.parametrize(("tokens", "tiles"), [(3, 2), (7, 4), (8, 4), (10, 3), (16, 2)])
def test_a_checkpoint_around_tiles_does_not_see_their_check(tokens, tiles, policy):
    """A selective one counts products, and would take those of the check for the forward's."""
    torch.manual_seed(0)
    plain, x = Block().double(), torch.randn(2, tokens, 6, dtype=torch.double)
    model = copy.deepcopy(plain)
    model.mlp.forward = tiled(model.mlp, "mlp", tiles)
    model.forward = checkpointed(model, "block", policy)
    for block in (model, plain):
        for _ in range(2):
            block(x).sin().sum().backward()
    assert difference(model, plain) < 1e-13


class Mixing(nn.Module):
    """A module that does not work on each token alone, in one of many ways."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        y = self.linear(x)
        if self.how == "the last token":
            return y + 0.01 * F.pad(x, (0, 0, 1, -1))
        if self.how == "its place":
            return y + torch.arange(x.shape[-2])[:, None]
        if self.how == "noise":
            return y + torch.randn_like(y)
        if self.how == "a buffer in place":
            self.calls += 1
        if self.how == "a new buffer":
            self.calls = self.calls + 1
        if self.how == "two outputs":
            return y, y.mean()
        if self.how == "other rows":
            return y[:, ::2]
        return y


DIFFERS = "its computes a token differently, by .*, when other tokens are left out"
MIXING = {
    **dict.fromkeys(["the last token", "its place", "noise"], DIFFERS),
    **dict.fromkeys(["a buffer in place", "a new buffer"], "its changes its buffers"),
    "two outputs": "its returns tuple for",
    "other rows": re.escape("its returns (2, 3, 6) for (2, 6) tokens"),
}


@pytest.mark.parametrize("how", MIXING)
def test_what_mixes_tokens_is_refused(how):
    torch.manual_seed(0)
    module = Mixing(how)
    module.forward = tiled(module, "its", 3)
    with pytest.raises(ShardkitError, match=MIXING[how]):
        module(torch.randn(2, 20, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_works_on_each_token_is_not_refused(dtype):
    torch.manual_seed(0)
    for module in (Mlp(dropout=0.5), MoE(layers=1, dim=6, experts=4).layers[0], Mixing("")):
        module.to(dtype).forward = tiled(module, "its", 3)
        for shape in ((2, 50, 6), (1, 2, 6), (0, 5, 6), (4, 0, 6)):
            for training in (True, False):
                module.train(training)
                assert module(torch.randn(shape, dtype=dtype)).shape == shape


class Crossing(nn.Module):
    """Cross-attention of each token alone, to a context that all of them get."""

    def forward(self, x, context=None):
        return x if context is None else x + F.scaled_dot_product_attention(x, context, context)


def test_a_context_is_never_cut_however_long_it_is():
    torch.manual_seed(0)
    module, x = Crossing(), torch.randn(2, 12, 6)
    module.forward = tiled(module, "its", 3)
    for length in (7, 12):
        context = torch.randn(2, length, 6)
        for result in (module(x, context), module(x, context=context)):
            torch.testing.assert_close(
                result, x + F.scaled_dot_product_attention(x, context, context)
            )


@pytest.mark.parametrize("length", [2, 3, 12])
def test_a_first_context_with_as_many_positions_as_there_are_tokens_is_refused(length):
    torch.manual_seed(0)
    module, x = Crossing(), torch.randn(2, length, 6)
    module.forward = tiled(module, "its", 3)
    module(x)
    for _ in range(2):
        with pytest.raises(ShardkitError, match=DIFFERS):
            module(x, torch.randn(2, length, 6))


def test_dropout_draws_for_each_tile_and_the_same_again():
    torch.manual_seed(0)
    module = Mlp(dropout=0.5).double()
    x, generator = torch.randn(2, 9, 6, dtype=torch.double), torch.random.get_rng_state()
    parts = [module(part.contiguous()) for part in x.chunk(3, 1)]
    torch.cat(parts, 1).square().sum().backward()
    expected = [param.grad for param in module.parameters()]
    module.zero_grad()
    module.forward = tiled(module, "its", 3)
    torch.random.set_rng_state(generator)
    module(x).square().sum().backward()
    for param, grad in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("units", "tiles", "text"),
    [
        (None, {42: 2}, "units must be by_class"),
        (None, {"layers.7": 2}, "by_name('layers.7') matches no module"),
        (None, {Mlp: True}, "layers.2.mlp has tiles=True. It must be a number of tiles"),
        (None, {Mlp: "4"}, "layers.2.mlp has tiles='4'. It must be a number of tiles"),
        (Mlp, {Block: 2}, "layers.1 has tiles=2, and layers.1.mlp inside"),
        (None, {Mlp: 2, Block: 2}, "layers.1 has tiles=2, and layers.1.mlp inside"),
        (
            by_class(Block, compile=True),
            TILES,
            "layers.0.mlp has tiles=4, and layers.0 is compiled.",
        ),
    ],
)
def test_rules_that_cannot_be_followed(units, tiles, text):
    with pytest.raises(PlanError, match=re.escape(text)):
        plan_model(Model(), mesh=MeshSpec.sharded(8), units=units, tiles=tiles)


def test_tiles_in_the_plan():
    model = Model()
    tiles = {"layers.0.mlp": 4, "layers.2.mlp": 4}
    plan = plan_model(
        model, mesh=MeshSpec.sharded(8), tiles=tiles, example_batch=torch.ones(1, 4).long()
    )
    default = plan_model(model, mesh=MeshSpec.sharded(8))
    assert plan.tiles == (("layers.0.mlp", 4), ("layers.2.mlp", 4))
    assert plan.units == default.units
    assert "in tiles of tokens: layers.0.mlp (4), layers.2.mlp (4)" in str(plan)
    assert default.diff(plan) == (
        "- tiles: []\n+ tiles: [['layers.0.mlp', 4], ['layers.2.mlp', 4]]"
    )
    assert ShardingPlan.from_dict(plan.to_dict()) == plan
    gone = dataclasses.replace(plan, tiles={"layers.7.mlp": 4})
    with fake_world(8), pytest.raises(PlanError, match=re.escape("no module layers.7.mlp")):
        apply_plan(model, gone)
