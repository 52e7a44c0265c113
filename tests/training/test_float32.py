"""``float32=``: modules that compute in float32 inside of a model in bf16, as units by hand."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardkit import MeshSpec, PlanError, ShardingPlan, plan_model, shard_model
from shardkit.testing import distributed

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
NAMES = ["**norm*", "**.gate", "head"]


class Block(nn.Module):
    """Post-norm: its last operation is a norm, from which a checkpointed backward starts."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate = nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.post_norm = nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = self.gate(y).softmax(-1)
        y = sum(weights[..., [i]].to(y.dtype) * expert(y) for i, expert in enumerate(self.experts))
        return self.post_norm(x + y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def by_hand() -> nn.Module:
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    norms = MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=torch.bfloat16)
    linears = MixedPrecisionPolicy(torch.float32, torch.float32)
    for name, module in model.named_modules():
        if "norm" in name:
            fully_shard(module, mesh=mesh, mp_policy=norms)
        elif name == "head" or name.endswith("gate"):
            fully_shard(module, mesh=mesh, mp_policy=linears)
    for module in (model.embed, *model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=BF16)
    return model


def by_its_code() -> nn.Module:
    model = Model()
    mesh = MeshSpec.sharded(dist.get_world_size())
    plan = plan_model(model, mesh=mesh, float32=NAMES, mp_policy=BF16)
    exec(plan.to_python(), {"model": model})
    return model


def train(model: nn.Module) -> list[Tensor]:
    """Return losses and gradients of two steps."""
    values = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(2 * step + dist.get_rank())
        ids = torch.randint(16, (4, 5))
        logits = model(ids)
        assert logits.dtype == torch.float32  # of the head
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        values += [loss.detach(), *(full(param.grad) for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return values


@distributed(world_size=2)
def test_equal_to_units_by_hand():
    expected = train(by_hand())
    for options in (
        {},
        {"reshard_after_forward": True},
        {"checkpoint_activations": True},
        {"units": Block},
        {"replicate": "**norm*"},
    ):
        values = train(shard_model(Model(), float32=NAMES, mp_policy=BF16, **options))
        assert all(map(torch.equal, values, expected)), options
    assert all(map(torch.equal, train(by_its_code()), expected))


def test_of_a_block_they_are_one_unit_that_stays_unsharded():
    options = {"mesh": MeshSpec.sharded(8), "float32": NAMES, "mp_policy": BF16}
    plan = plan_model(Model(), **options, checkpoint_activations=True)
    in_float32 = [unit for unit in plan.units if unit.float32]
    assert [unit.modules for unit in in_float32][-2:] == [
        ("layers.2.norm", "layers.2.gate", "layers.2.post_norm"),
        ("norm", "head"),
    ]
    for unit in in_float32:
        assert unit.mp_policy.param_dtype == torch.float32
        settings = (unit.reshard_after_forward, unit.checkpoint_activations, unit.blocks)
        assert not any(settings)
    assert "float32, reduces in float32" in str(plan)
    assert ShardingPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_block_and_what_is_around_units():
    plan = plan_model(
        nn.Sequential(Model(), nn.Linear(16, 4)),
        mesh=MeshSpec.sharded(8),
        units=["0.layers.*", "0"],
        float32=["0.layers.1", "1"],
        mp_policy=BF16,
        checkpoint_activations=True,
    )
    expected = {"0.layers.1": (True, True), "0.layers.0": (True, False), "1": (False, True)}
    units = {unit.name: unit for unit in plan.units}
    for name, (resharded, float32) in expected.items():
        unit = units[name]
        assert (unit.reshard_after_forward, unit.float32) == (resharded, float32)
        assert unit.checkpoint_activations == resharded
    whole = plan_model(Model(), mesh=MeshSpec.sharded(8), float32=Model, mp_policy=BF16)
    assert not any(unit.float32 for unit in whole.units)


def test_what_cannot_be_is_refused():
    model = Model()
    model.head.weight = model.embed.weight
    for names, problem in {
        "**typo": "by_name.* matches no module",
        "layers": "layers is a ModuleList without forward",
        "head": "embed.weight is shared by embed, head",
    }.items():
        with pytest.raises(PlanError, match=problem):
            plan_model(model, mesh=MeshSpec.sharded(8), float32=names, mp_policy=BF16)
