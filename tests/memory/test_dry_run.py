"""One forward on fake tensors finds the parameters that are used outside of their unit, before
anything trains.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from entry_nets import differences
from meshes import mesh_of
from small_models import Block, Decoder, snapshot
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit import (
    MeshSpec,
    MixedPrecisionPolicy,
    ShardingPlan,
    group,
    init_on_meta,
    plan_model,
    shard_model,
)
from shardkit._torch import torch_version
from shardkit.errors import PlanError
from shardkit.testing import distributed, fake_world

TWO = MeshSpec.sharded(2)


class Hidden(nn.Module):
    """An embedding, a block and a part of a block that are used in ways that no bytecode tells."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.calls: list[str] = []

    def parts(self) -> tuple[Any, ...]:
        return self.layers[0].norm, self.layers[1].forward, getattr(self.embed, "weight")  # noqa: B009

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append("forward")
        norm, forward, weight = self.parts()
        x = norm(x)  # DiT: a child of a block
        x = forward(x)  # SqueezeBERT: a block's forward
        x = self.layers[0](x) + self.layers[2](x)
        return self.head(x) + F.linear(x, weight)


class Methods(nn.Module):
    """Two units, of which one has a method that the model calls."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.vae = Block(dim)
        self.vae.encode = self.vae.forward
        self.idle = Block(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.vae.encode(x)


def hidden() -> Hidden:
    torch.manual_seed(0)
    return Hidden()


def units(plan: ShardingPlan) -> list[str]:
    return [unit.name for unit in plan.units]


@pytest.mark.parametrize("batch", [(torch.randn(2, 8),), {"x": torch.randn(2, 8)}])
def test_the_default_rule_leaves_units_out_that_are_used_outside(batch: Any) -> None:
    model = hidden()
    before = snapshot(model)
    assert units(plan_model(model, mesh=TWO)) == [
        "embed",
        "layers.0",
        "layers.1",
        "layers.2",
        "(root)",
    ]
    random = torch.get_rng_state()
    plan = plan_model(model, mesh=TWO, example_batch=batch)
    assert units(plan) == ["layers.2", "(root)"]
    # another is about a dim
    (note,) = [each for each in plan.notes if "used outside of it" in each]
    assert note.startswith(
        "embed, layers.0, layers.1: not a unit, because parameters are used outside of it: embed"
    )
    assert "layers.0.norm.weight in (root)" in note
    assert snapshot(model) == before
    assert model.calls == []
    assert torch.equal(random, torch.get_rng_state())


def test_rules_of_the_user_are_one_error() -> None:
    model = hidden()
    with pytest.raises(PlanError) as caught:
        plan_model(model, mesh=TWO, units=["layers.*", "embed"], example_batch=torch.randn(2, 8))
    third, first, second = str(caught.value).splitlines()  # in the order of the plan
    assert (
        "layers.0.norm.weight, layers.0.norm.bias are used in (root) while the unit layers.0 is not"
        in first
    )
    assert "Leave layers.0 out of units=" in first
    assert second.startswith("layers.1.norm.weight")
    assert third.startswith("embed.weight is used in (root) while the unit embed")
    with fake_world(2), pytest.raises(PlanError, match=r"embed\.weight is used in \(root\)"):
        shard_model(model, units="embed", example_batch=torch.randn(2, 8))
    assert not any(isinstance(param, DTensor) for param in model.parameters())


def test_a_correct_model_has_no_note() -> None:
    tokens = torch.randint(11, (2, 5))
    for tied in (False, True):
        plan = plan_model(Decoder(tied=tied), mesh=TWO)
        assert plan_model(Decoder(tied=tied), mesh=TWO, example_batch=tokens) == plan
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    with init_on_meta():
        model = Decoder()
    rules = ["layers.*", group("norm", "head")]  # gathered from the norm on, until the head is done
    plan = plan_model(model, mesh=TWO, units=rules, mp_policy=policy, example_batch=tokens)
    assert plan == plan_model(model, mesh=TWO, units=rules, mp_policy=policy)


def test_units_that_are_kept_are_gathered_until_the_end() -> None:
    class Late(Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) @ getattr(self.head, "weight")  # noqa: B009

    tokens = torch.randint(11, (2, 5))
    for reshards in (False, True):
        plan = plan_model(Late(), mesh=TWO, reshard_after_forward=reshards, example_batch=tokens)
        assert ("[norm, head]" in units(plan)) is not reshards
        assert any("used outside of it" in note for note in plan.notes) is reshards


def test_methods_that_gather_and_units_that_are_not_called() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(PlanError, match=r"vae\.norm\.weight"):
        plan_model(Methods(), mesh=TWO, units=["vae", "idle"], example_batch=x)
    plan = plan_model(
        Methods(), mesh=TWO, units=["vae", "idle"], forward_methods=["vae.encode"], example_batch=x
    )
    assert plan.notes == ("idle: not called in the forward of example_batch",)


@pytest.mark.parametrize("through", ["itself", "data", "a view"])
def test_a_parameter_that_forward_writes_is_noted(through: str) -> None:
    class Codebook(Block):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.norm.weight
            with torch.no_grad():
                {"itself": weight, "data": weight.data, "a view": weight[:2]}[through].mul_(0.5)
            return super().forward(x)

    plan = plan_model(Codebook(), mesh=TWO, example_batch=torch.randn(2, 8))
    assert any(
        note.startswith("norm.weight: written inside forward; FSDP2 loses") for note in plan.notes
    )


class Filling(nn.Module):
    """Two blocks that write their input into a list, or a dict in a tuple, of the caller."""

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self.layers, self.cache = nn.ModuleList(FillingBlock() for _ in range(2)), cache

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x, cache=self.cache), cache=self.cache)


class FillingBlock(Block):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        cache.append(x) if isinstance(cache, list) else cache[0].update({len(cache[0]): x})
        return super().forward(x)


@pytest.mark.parametrize("cache", [[], ({},)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_lists_that_a_unit_writes_into_are_noted(cache: Any, dtype: torch.dtype | None) -> None:
    x, policy = torch.randn(2, 8, requires_grad=True), MixedPrecisionPolicy(dtype)
    plan = plan_model(Filling(cache), mesh=TWO, example_batch=x, mp_policy=policy)
    # the first call finds no tensor in it
    names = "layers.0 (cache), layers.1 (cache)" if dtype else "layers.1 (cache)"
    (note,) = (note for note in plan.notes if "written into" in note)
    assert note.startswith(
        f"{names}: written into by the unit, which gets a copy from FSDP2; return it"
    )
    with fake_world(2):  # what the note says
        shard_model(Filling(mine := copy.deepcopy(cache)), mp_policy=policy)(x)
        assert len(mine[0] if isinstance(mine, tuple) else mine) == (
            0 if dtype or torch_version() < (2, 12) else 1
        )


def test_lists_that_a_unit_reads_are_not_noted() -> None:
    class Reading(FillingBlock):
        def forward(self, x: Tensor, cache: Any) -> Tensor:
            return Block.forward(self, x) + cache[0]

    model = Filling([torch.ones(8, requires_grad=True)])
    model.layers = nn.ModuleList(Reading() for _ in range(2))
    assert not any(
        "written into" in each
        for each in plan_model(model, mesh=TWO, example_batch=torch.ones(2, 8)).notes
    )


def test_a_model_that_does_not_run_on_fake_tensors_is_one_error() -> None:
    class Values(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(
        PlanError, match=r"example_batch fails in the model on fake tensors: DataDep[^$]*units=\[\]"
    ):
        plan_model(Values(), mesh=TWO, example_batch=torch.randn(2, 8))


@pytest.mark.parametrize("options", [{"example_batch": torch.randn(4, 8)}, {"units": []}], ids=list)
@distributed(world_size=2, backend="gloo")
def test_what_is_left_out_trains_as_the_plain_model_does(options: dict[str, Any]) -> None:
    plain, model = hidden(), shard_model(hidden(), mesh=mesh_of((2,)), **options)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for each in (plain, model):
        each(x).square().mean().backward()
    assert not differences(plain, model)  # both ranks have one batch: the mean is exact
