"""One forward on fake tensors finds the parameters that are used outside of their unit, before
anything trains.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from cpu_ranks import on_ranks
from hook_models import differences
from meshes import mesh_of
from small_models import Block, Decoder, snapshot
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad

from shardkit import (
    MeshSpec,
    MixedPrecisionPolicy,
    group,
    init_on_meta,
    plan_model,
    shard_model,
)
from shardkit.errors import PlanError
from shardkit.testing import fake_world

TWO = MeshSpec.sharded(2)


class Hidden(nn.Module):
    """An embedding, a block and a part of a block that are used in ways that no bytecode tells."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.calls = []

    def parts(self):
        return self.layers[0].norm, self.layers[1].forward, getattr(self.embed, "weight")  # noqa: B009

    def forward(self, x):
        self.calls.append("forward")
        norm, forward, weight = self.parts()
        x = norm(x)  # DiT: a child of a block
        x = forward(x)  # SqueezeBERT: a block's forward
        x = self.layers[0](x) + self.layers[2](x)
        return self.head(x) + F.linear(x, weight)


class Methods(nn.Module):
    """Two units, of which one has a method that the model calls."""

    def __init__(self, dim=8):
        super().__init__()
        self.vae = Block(dim)
        self.vae.encode = self.vae.forward
        self.idle = Block(dim)

    def forward(self, x):
        return self.vae.encode(x)


def hidden():
    torch.manual_seed(0)
    return Hidden()


def units(plan):
    return [unit.name for unit in plan.units]


@pytest.mark.parametrize("batch", [(torch.randn(2, 8),), {"x": torch.randn(2, 8)}])
def test_the_default_rule_leaves_units_out_that_are_used_outside(batch):
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
        "layers.0, layers.1, embed: not a unit, because parameters are used outside of it: layers"
    )
    assert "layers.0.norm.weight in (root)" in note
    assert snapshot(model) == before
    assert model.calls == []
    assert torch.equal(random, torch.get_rng_state())


def test_rules_of_the_user_are_one_error():
    model = hidden()
    with pytest.raises(PlanError) as caught:
        plan_model(model, mesh=TWO, units=["layers.*", "embed"], example_batch=torch.randn(2, 8))
    first, second, third = str(caught.value).splitlines()  # in the order of the forward
    assert first.startswith("layers.0 cannot be a unit, because parameters are used outside of it")
    assert "layers.0.norm.weight in (root), layers.0.norm.bias in (root)" in first
    assert "Leave layers.0 out of units=" in first
    assert "layers.1.norm.weight in (root)" in second
    assert third.startswith("embed cannot be a unit")
    assert "embed.weight in (root)" in third
    with fake_world(2), pytest.raises(PlanError, match=r"embed\.weight in \(root\)"):
        shard_model(model, units="embed", example_batch=torch.randn(2, 8))
    assert not any(isinstance(param, DTensor) for param in model.parameters())


def test_a_correct_model_has_no_note():
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


def test_units_that_are_kept_are_gathered_until_the_end():
    class Late(Decoder):
        def forward(self, tokens):
            return super().forward(tokens) @ getattr(self.head, "weight")  # noqa: B009

    tokens = torch.randint(11, (2, 5))
    for reshards in (False, True):
        plan = plan_model(Late(), mesh=TWO, reshard_after_forward=reshards, example_batch=tokens)
        assert ("[norm, head]" in units(plan)) is not reshards
        assert any("used outside of it" in note for note in plan.notes) is reshards


def test_methods_that_gather_and_units_that_are_not_called():
    x = torch.randn(2, 8)
    with pytest.raises(PlanError, match=r"vae\.norm\.weight"):
        plan_model(Methods(), mesh=TWO, units=["vae", "idle"], example_batch=x)
    plan = plan_model(
        Methods(), mesh=TWO, units=["vae", "idle"], forward_methods=["vae.encode"], example_batch=x
    )
    assert plan.notes == ("idle: not called in the forward of example_batch",)


@pytest.mark.parametrize("through", ["itself", "data", "a view"])
def test_a_parameter_that_forward_writes_is_noted(through):
    class Codebook(Block):
        def forward(self, x):
            weight = self.norm.weight
            with torch.no_grad():
                {"itself": weight, "data": weight.data, "a view": weight[:2]}[through].mul_(0.5)
            return super().forward(x)

    plan = plan_model(Codebook(), mesh=TWO, example_batch=torch.randn(2, 8))
    (note,) = (note for note in plan.notes if "written inside forward" in note)
    assert note.startswith("norm.weight: written inside forward; FSDP2 loses")
    assert "wrong gradients" in note


def test_what_shard_model_cannot_cure_is_logged(caplog):
    class Masked(Block):
        def forward(self, x):
            self.up.weight.data *= 0.5  # PixelCNN
            return super().forward(x)

    with fake_world(2), caplog.at_level("WARNING"):
        shard_model(Masked(), example_batch=torch.randn(2, 8))
    assert "up.weight: written inside forward" in caplog.text


class Filling(nn.Module):
    """Two blocks that write what they return into a list, or a dict in a tuple, of the model, which
    computes with it: the cache of Wan's VAE.
    """

    def __init__(self, cache):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.cache = nn.ModuleList(FillingBlock() for _ in range(2)), cache

    def forward(self, x):
        cache = copy.copy(self.cache) if isinstance(self.cache, list) else ({},)
        x = self.layers[1](self.layers[0](x, cache=cache), cache=cache)
        filled = cache if isinstance(cache, list) else list(cache[0].values())
        return x + sum(filled)


class FillingBlock(Block):
    def forward(self, x, cache):
        x = super().forward(x)
        cache.append(x) if isinstance(cache, list) else cache[0].update({len(cache[0]): x})
        return x


def filling():
    return Filling([])


@pytest.mark.parametrize("cache", [[], ({},)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_blocks_that_fill_lists_are_left_out(cache, dtype):
    x, policy = torch.randn(2, 8, requires_grad=True), MixedPrecisionPolicy(dtype)
    plan = plan_model(Filling(cache), mesh=TWO, example_batch=x, mp_policy=policy)
    assert units(plan) == ["(root)"]
    (note,) = plan.notes
    assert note.startswith("layers.0, layers.1: not a unit, because it writes into lists or dicts")
    with pytest.raises(PlanError, match=r"layers\.0 cannot be a unit, because it writes .*: cache"):
        plan_model(Filling(cache), mesh=TWO, units="layers.*", example_batch=x, mp_policy=policy)


def test_what_fills_lists_without_gradients_is_a_unit():
    class Teacher(Filling):
        def forward(self, x):
            with torch.no_grad():
                return super().forward(x)

    plan = plan_model(Teacher([]), mesh=TWO, example_batch=torch.randn(2, 8))
    assert units(plan) == ["layers.0", "layers.1", "(root)"]


def test_a_list_of_the_batch_that_the_model_fills_is_noted():
    class Collecting(Decoder):
        def forward(self, tokens, seen):
            logits = super().forward(tokens)
            seen.append(logits)
            return logits

    batch = (torch.randint(11, (2, 5)), [])
    plan = plan_model(Collecting(), mesh=TWO, example_batch=batch)
    assert units(plan) == units(plan_model(Decoder(), mesh=TWO))
    assert plan.notes[-1].startswith("argument 1: written into by the model, which gets a copy")


class Freeing(Block):
    """Frees its input, which PyG's ``InvertibleModule`` computes from the output in backward."""

    def forward(self, x):
        y = super().forward(x)
        x.untyped_storage().resize_(0)
        return y


def test_blocks_that_free_their_inputs_are_left_out():
    x, model = torch.randn(4, 8), nn.Sequential(nn.Linear(8, 8), Freeing(), Freeing())
    plan = plan_model(model, mesh=TWO, example_batch=x)
    assert units(plan) == ["(root)"]
    assert plan.notes[-1].startswith("1, 2: not a unit, because it frees")
    with pytest.raises(PlanError, match=r"1 cannot be a unit, because it frees its inputs"):
        plan_model(model, mesh=TWO, units="[12]", example_batch=x)


class InPlace(Block):
    """Changes its input in place, or returns a view, which the model changes in place."""

    changed = ""

    def forward(self, x):
        x = super().forward(x.tanh_() if self.changed == "input" else x)
        return x.view(x.shape) if self.changed == "output" else x


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(InPlace() for _ in range(4))
        self.layers[1].changed, self.layers[2].changed = "input", "output"

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if layer.changed == "output":
                x.mul_(2)
        return x


def test_blocks_whose_input_or_output_is_changed_in_place_are_left_out():
    plan = plan_model(Changing(), mesh=TWO, example_batch=torch.randn(2, 8))
    assert units(plan) == ["layers.0", "layers.3", "(root)"]
    assert plan.notes[-1].startswith("layers.1, layers.2: not a unit, because its input, or its")


class Functional(nn.Module):
    """Calls a block with a weight that it computes, and differentiates another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = functional_call(self.layers[0], {"norm.weight": x.mean(0)}, x)
        x = x + grad(lambda y: self.layers[1](y).square().sum())(x)
        return self.layers[3](self.layers[2](x))


def test_blocks_that_torch_func_calls_are_left_out():
    plan = plan_model(Functional(), mesh=TWO, example_batch=torch.randn(2, 8))
    assert units(plan) == ["layers.2", "layers.3", "(root)"]
    assert any(note.startswith("layers.0: not a unit, because functional_") for note in plan.notes)
    assert any(note.startswith("layers.1: not a unit, because torch.func ") for note in plan.notes)


def test_lists_that_a_unit_reads_are_not_noted():
    class Reading(FillingBlock):
        def forward(self, x, cache):
            return Block.forward(self, x) + cache[0]

    model = Filling([torch.ones(8, requires_grad=True)])
    model.layers = nn.ModuleList(Reading() for _ in range(2))
    plan = plan_model(model, mesh=TWO, example_batch=torch.ones(2, 8))
    assert units(plan) == ["layers.0", "layers.1", "(root)"]


@dataclass(frozen=True)
class Config:
    use_cache: bool = True


def test_a_frozen_config():
    model = Decoder()
    model.config = Config()
    plan_model(model, mesh=TWO, example_batch=torch.zeros(2, 3, dtype=torch.long))
    assert model.config == Config()


@pytest.mark.parametrize(("device", "reads"), [("cpu", False), ("cpu", True), ("meta", False)])
def test_tensors_in_lists_of_the_batch_stay_as_they_are(device, reads):
    class Scaling(Block):
        def forward(self, images):
            largest = images[0].max().item() if reads else 2
            return super().forward(images[0].div_(largest))

    images = [torch.full((2, 8), 2.0, device=device)]
    plan_model(Scaling().to(device), mesh=TWO, example_batch=(images,))
    assert images[0].is_meta or images[0].eq(2).all()


def test_a_model_that_does_not_run_on_fake_tensors_is_one_error():
    class Values(Block):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(
        PlanError, match=r"example_batch fails in the model on fake tensors: DataDep[^$]*units=\[\]"
    ):
        plan_model(Values().to("meta"), mesh=TWO, example_batch=torch.randn(2, 8))
    with pytest.raises(PlanError, match="On copies of the real ones: RuntimeError: "):
        plan_model(Values(), mesh=TWO, example_batch=torch.ones(2, 7))


def test_a_call_that_runs_no_hooks_is_refused():
    class Process(Block):  # as GPyTorch's
        def __call__(self, x):
            return self.forward(x)

    with pytest.raises(PlanError, match="Process has a __call__ of its own"):
        plan_model(Process(), mesh=TWO, example_batch=torch.randn(2, 8))


@pytest.mark.parametrize("build", [hidden, filling, Changing, Functional])
@on_ranks(2)
def test_what_is_left_out_trains_as_the_plain_model_does(build):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    plain, model = build(), shard_model(build(), mesh=mesh_of((2,)), example_batch=x)
    for each in (plain, model):
        each(x).square().mean().backward()
    assert not differences(plain, model)  # both ranks have one batch: the mean is exact
