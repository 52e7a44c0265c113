"""Forwards without grad, and entries besides the root's forward, against the plain model."""

import contextlib
import copy
import functools
import inspect

import pytest
import torch
from hook_models import (
    OPTIONS,
    Coder,
    Critic,
    assert_trains_alike,
    differences,
    gathered,
    pair,
    tokens,
    usual_loss,
    vectors,
)
from small_models import Decoder, step
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from shardkit import (
    MeshSpec,
    PlanError,
    ShardkitError,
    apply_plan,
    group,
    init_on_meta,
    materialize,
    plan_model,
    shard_model,
)
from shardkit._torch import torch_version
from shardkit.runtime.advice import add_advice
from shardkit.runtime.second_order import double_backward
from shardkit.state import full_params
from shardkit.testing import comm_counts, distributed, fake_world

NO_GRAD = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


# A forward without grad comes first.


@pytest.mark.parametrize("mode", NO_GRAD)
@distributed(world_size=2)
def test_a_forward_without_grad_before_the_optimizer_is_built(mode):
    for name, options in OPTIONS.items():
        plain, model = pair(**options)
        with NO_GRAD[mode]():
            assert torch.equal(model(tokens()), plain(tokens())), name
        assert not gathered(model), name
        assert_trains_alike(plain, model, usual_loss)


@pytest.mark.parametrize("frozen", [False, True])  # as a teacher that an average is written into
@pytest.mark.parametrize("method", ["forward", "encode"])
@distributed(world_size=2)
def test_what_is_edited_after_a_forward_without_backward_is_the_parameter(method, frozen):
    plain, model = pair(Coder, forward_methods=["encode"])
    for each in (plain, model):
        each.requires_grad_(not frozen)
        with contextlib.nullcontext() if frozen else torch.no_grad():
            getattr(each, method)(tokens())
        with torch.no_grad():
            each.head.weight.mul_(2)
    assert not gathered(model)
    assert torch.equal(model(tokens()), plain(tokens()))


class Coded(nn.Linear):
    """Returns codes, and keeps what a perceptual loss reads."""

    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept.argmax(-1)


@distributed(world_size=2)
def test_a_frozen_model_stays_unsharded_for_the_gradient_of_its_input():
    torch.manual_seed(0)
    plain = Coded(4, 4).requires_grad_(False)
    x = torch.ones(2, 4, requires_grad=True)
    gradients = []
    for model in (plain, shard_model(copy.deepcopy(plain))):
        model(x=x)  # by name
        gradients += torch.autograd.grad(model.kept.sum(), x)
    assert torch.equal(*gradients)


class Reentrant(Decoder):
    """Blocks and head run under no_grad inside a forward with grad."""

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return checkpoint(lambda x: self.head(self.norm(x)), x, use_reentrant=True).clone()


@distributed(world_size=2)
def test_reentrant_checkpointing_keeps_its_collectives():
    for options in ({}, {"reshard_after_forward": False}):
        plain, model = pair(Reentrant, **options)
        usual_loss(model, 0).backward()
        model.zero_grad()
        with comm_counts() as counts:
            usual_loss(model, 0).backward()
        assert counts == plan_model(Reentrant(), mesh=MeshSpec.sharded(2), **options).collectives()
        model.zero_grad()
        assert_trains_alike(plain, model, usual_loss)


# requires_grad_() on what a forward with grad has left unsharded.


def set_by_parameter(model, saved, trains):
    model.head.weight.requires_grad = trains


def set_by_list(model, saved, trains):
    """As a GAN freezes its discriminator, by a list of parameters from before."""
    for param in saved:
        param.requires_grad_(trains)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("set_flag", [set_by_parameter, set_by_list])
def test_requires_grad_stays_as_it_was_set(set_flag, trains):
    with fake_world(1):
        plain, model = pair()
        gradients = []
        for each in (plain, model):
            saved = list(each.head.parameters())
            each.head.requires_grad_(not trains)
            usual_loss(each, 0).backward()
            each(tokens())  # an evaluation with grad
            set_flag(each, saved, trains)
            for number in range(3):
                each.zero_grad()
                usual_loss(each, number).backward()
                assert each.head.weight.requires_grad == trains
            gradients.append(each.head.weight.grad)
        assert gradients[1] is None if gradients[0] is None else trains
        assert not trains or torch.equal(gradients[0], gradients[1].full_tensor())


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_of_the_model_between_forward_and_backward(to_none):
    """As in PyTorch's tutorials, where some units are unsharded at that time."""
    with fake_world(1):
        plain, model = pair()
        for number in range(2):
            for each in (plain, model):
                loss = usual_loss(each, number)
                each.zero_grad(set_to_none=to_none)
                loss.backward()
        for param, same in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(param.grad.full_tensor(), same.grad)


@pytest.mark.parametrize("end", ["step", "no_grad"])
def test_requires_grad_stays_as_it_was_set_where_no_backward_follows(end):
    with fake_world(1):
        _, model = pair()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        usual_loss(model, 0).backward()
        model(tokens())
        model.head.requires_grad_(False)
        if end == "step":
            optimizer.step()
        else:
            with torch.no_grad():
                model(tokens())
        assert not gathered(model)
        assert not model.head.weight.requires_grad


def test_a_part_that_is_frozen_for_a_reference_in_each_step_trains():
    """As peft's ``disable_adapter()`` with ``modules_to_save``."""
    with fake_world(1):
        plain, model = pair()
        for number in range(3):
            for each in (plain, model):
                each.zero_grad()
                each.head.requires_grad_(False)
                reference = each(tokens(number)).detach()
                each.head.requires_grad_(True)
                (each(tokens(number)) - 2 * reference).square().mean().backward()
                assert each.head.weight.requires_grad
            assert torch.equal(model.head.weight.grad.full_tensor(), plain.head.weight.grad)


# Entries besides the root's forward.


def by_children(model, seed):
    x = model.embed(tokens(seed))
    for layer in model.layers:
        x = layer(x)
    return model.head(model.norm(x)).square().mean()


def of_a_block(model, seed):
    return model.layers[1](vectors(seed)[0]).square().mean()


@pytest.mark.parametrize("loss", [by_children, of_a_block])
@distributed(world_size=2)
def test_children_before_any_whole_forward(loss):
    for name, options in OPTIONS.items():
        if name != "root only":
            plain, model = pair(Coder, **options)
            assert_trains_alike(plain, model, loss)
            assert_trains_alike(plain, model, usual_loss)  # and then the whole


@distributed(world_size=2)
def test_methods_that_gather():
    for options in OPTIONS.values():
        plain, model = pair(Coder, forward_methods=("encode", "body"), **options)
        assert_trains_alike(
            plain, model, lambda model, seed: model.body(tokens(seed)).square().mean()
        )
        assert_trains_alike(
            plain, model, lambda model, seed: model.encode(tokens(seed)).square().mean()
        )
        assert_trains_alike(plain, model, usual_loss)


def test_methods_keep_their_signatures():
    """transformers' Trainer passes the columns that ``forward`` has parameters for."""
    plain = Coder()
    with fake_world(2):
        model = shard_model(Coder(), forward_methods=["encode"])
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert inspect.signature(model.encode) == inspect.signature(plain.encode)


class Pair(nn.Module):
    """A model with a part that is called by a method of its own."""

    def __init__(self):
        super().__init__()
        self.encoder = Coder()
        self.out = nn.Linear(11, 3)

    def forward(self, ids):
        return self.out(self.encoder.encode(ids)).clone()


@distributed(world_size=2)
def test_a_method_of_a_unit():
    plain, model = pair(Pair, units=["encoder"], forward_methods=["encoder.encode"])
    assert_trains_alike(
        plain, model, lambda model, seed: model.encoder.encode(tokens(seed)).square().mean()
    )
    assert_trains_alike(plain, model, usual_loss)


def test_an_ordinary_step_is_as_predicted_after_other_entries():
    with fake_world(8):
        plan = plan_model(Coder(), forward_methods=["encode"])
        model = apply_plan(Coder(), plan)
        model.encode(tokens()).mean().backward()
        with torch.no_grad():
            model.head(model.body(tokens()))
        for entry in (model, model.encode):
            with comm_counts() as counts:
                entry(tokens()).mean().backward()
            assert counts == plan.collectives()


@distributed(world_size=2)
def test_a_root_around_the_model():
    plain, model = pair()
    around, expected = (nn.Sequential(each, nn.Linear(11, 2)) for each in (model, plain))
    around[1].load_state_dict(expected[1].state_dict())
    fully_shard(around)
    assert_trains_alike(expected, around, usual_loss)


@pytest.mark.filterwarnings("ignore:module forward hook with")  # of [norm, head], before torch 2.13
def test_a_first_forward_on_meta():
    with fake_world(2):
        with init_on_meta():
            model = Decoder()
        shard_model(model)
        for call in (model, lambda ids: model.head(model.norm(torch.ones(2, 8)))):
            with pytest.raises(
                ShardkitError, match=r"(?s)^model has embed.weight, .* on meta\..*materialize"
            ):
                call(tokens())
        materialize(model)
        step(model)


METHODS = {
    ("decode",): "'decode', which is not a method",
    ("layers.0.forward",): "'layers.0.forward', which is not a method besides",
    ("layers.0.up.reset_parameters",): "make layers.0.up a unit",
    ("nowhere.encode",): "'nowhere.encode', which is not a method",
    "encode": "forward_methods has 'e'",
}


@pytest.mark.parametrize("methods", METHODS)
def test_methods_that_cannot_gather(methods):
    with fake_world(2):
        for call in (plan_model, shard_model):
            model = Coder()
            with pytest.raises(PlanError, match=METHODS[methods]):
                call(model, forward_methods=methods)
            assert not isinstance(model, FSDPModule)


def test_methods_are_in_the_plan():
    plan = plan_model(Coder(), mesh=MeshSpec.sharded(2), forward_methods=["encode", "generate"])
    assert plan.forward_methods == ("generate", "encode")
    assert "methods that unshard: generate, encode" in str(plan)
    assert type(plan).from_dict(plan.to_dict()) == plan
    assert "register_fsdp_forward_method(model, 'encode')" in plan.to_python()
    nested = plan_model(
        Pair(), mesh=MeshSpec.sharded(2), units=["encoder"], forward_methods=["encoder.encode"]
    )
    assert (
        "register_fsdp_forward_method(model.get_submodule('encoder'), 'encode')"
        in nested.to_python()
    )


# An optimizer that holds what is gathered.


class Tied(nn.Module):
    """One weight in two modules of which one never runs, as the embeddings of a T5."""

    def __init__(self):
        super().__init__()
        self.shared, self.embed, self.head = (
            nn.Embedding(8, 4),
            nn.Embedding(8, 4),
            nn.Linear(4, 8, bias=False),
        )
        self.embed.weight = self.head.weight = self.shared.weight

    def forward(self, x):
        return self.head(self.embed(x))


@pytest.mark.skipif(torch_version() < (2, 13), reason="torch waits for all modules of a unit")
def test_a_module_of_a_unit_that_never_runs():
    torch.manual_seed(0)
    with fake_world(1):
        plain = Tied()
        model = shard_model(copy.deepcopy(plain), units=group("shared", "embed", "head"))
        x = torch.arange(5)
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(model(x), plain(x))
            assert not gathered(model)
            for each in (plain, model):
                each(x).square().sum().backward()
            assert torch.equal(model.shared.weight.grad.full_tensor(), plain.shared.weight.grad)


@distributed(world_size=2)
def test_a_head_alone_that_is_in_a_unit_with_the_norm_does_not_step_silently():
    """As with fully_shard by hand, its gradient is not reduced: torch waits for the norm."""
    _, model = pair(Coder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head(vectors(0)[0]).square().mean().backward()
    with pytest.raises(
        ShardkitError,
        match=r"SGD.step\(\) was called while 1 gradients wait .*head.weight.*several",
    ):
        optimizer.step()


# Double backward: refused outside of its context, and inside equal to the plain model's.


def penalty(model, real, fake):
    """A gradient penalty, as of WGAN-GP."""
    between = ((real + fake) / 2).requires_grad_()
    (grad,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return (grad.norm(dim=-1) - 1).square().mean()


def penalty_alone(model, seed):
    return penalty(model, *vectors(seed, seed + 9))


def penalty_first(model, seed):
    """Other forwards, with and without grad, run between the two backwards."""
    real, fake = vectors(seed, seed + 9)
    found = penalty(model, real, fake)
    with torch.no_grad():
        model(fake)
    return model(fake).mean() - model(real).mean() + found


@pytest.mark.parametrize("loss", [penalty_alone, penalty_first])
@distributed(world_size=2)
def test_a_gradient_penalty(loss):
    for name, options in OPTIONS.items():
        plain, model = pair(Critic, **options)
        for number in range(2):
            with double_backward(model):
                found = loss(model, number)
                found.backward()
            expected = loss(plain, number)
            expected.backward()
            assert torch.equal(found, expected), name
            assert not differences(plain, model), name
            assert not gathered(model), name
            for each in (plain, model):
                torch.optim.SGD(each.parameters(), lr=0.1).step()
                each.zero_grad()
        assert_trains_alike(
            plain, model, lambda model, seed: model(vectors(seed)[0]).square().mean()
        )


class Potential(Critic):
    """Its forces are gradients of its energy."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]


class Bypassing(Critic):
    def forward(self, x):
        return self.layers[0][0](x)


@distributed(world_size=2)
def test_a_gradient_inside_of_forward():
    plain, model = pair(Potential)
    with double_backward(model):
        model(vectors(0)[0]).square().mean().backward()
    plain(vectors(0)[0]).square().mean().backward()
    assert not differences(plain, model)


@distributed(world_size=2)
def test_an_error_of_torch_in_forward_says_what_to_do():
    _, model = pair(Bypassing)
    with pytest.raises(RuntimeError, match=r"mixed.*example_batch=.*units=\[\]"):
        model(vectors(0)[0])


def test_an_error_of_the_program_that_quotes_torch_keeps_its_arguments():
    error = OSError(5, "got mixed torch.Tensor and DTensor")
    add_advice(error)
    assert error.args == (5, "got mixed torch.Tensor and DTensor")


class Policy(Critic):
    def forward(self, x):
        return torch.distributions.Normal(super().forward(x), 1.0)


@distributed(world_size=2)
def test_a_distribution_as_output_does_not_step_silently():
    _, model = pair(Policy, units=[])
    optimizer = torch.optim.SGD(model.parameters())
    model(vectors(0)[0]).log_prob(torch.zeros(1)).mean().backward()
    with pytest.raises(ShardkitError, match=r"gradients wait .* such as a distribution"):
        optimizer.step()


def test_settings_come_back():
    with fake_world(4):
        model = shard_model(Critic(), reshard_after_forward=2)
        with double_backward(model):
            penalty_first(model, 0).backward()
        assert not gathered(model)
        model(vectors(0)[0]).mean().backward()
        assert not gathered(model)


@distributed(world_size=2)
def test_without_the_context_it_is_refused():
    """Otherwise all ranks would end in SIGSEGV: the second backward reads freed memory."""
    _, model = pair(Critic)
    with pytest.raises(
        ShardkitError, match=r"create_graph=True.*with shardkit.double_backward\(model\)"
    ):
        penalty_alone(model, 0)
    with pytest.raises(ShardkitError, match="create_graph=True"):
        penalty(lambda x: {"loss": model(x)}["loss"], *vectors(0, 9))


@distributed(world_size=2)
def test_it_is_refused_while_another_model_is_in_the_context_and_runs_in_full_params():
    plain, model = pair(Critic)
    _, other = pair(Critic)
    with double_backward(other), pytest.raises(ShardkitError, match="create_graph=True"):
        penalty_alone(model, 0)
    with full_params(other):
        assert torch.equal(penalty_alone(other, 0), penalty_alone(plain, 0))


@distributed(world_size=2)
def test_autocast_keeps_no_parameters_from_one_forward_to_the_next():
    """Their gradients would arrive after FSDP2 has reduced those of the second forward."""
    plain, model = pair()
    for each in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                each(tokens())
            for number in range(2):
                usual_loss(each, number).backward()
    assert not differences(plain, model)


class NestedOutputs(Critic):
    """Outputs that are nested, or read once; and a method that gathers."""

    def forward(self, x, kind="nested"):
        out = super().forward(x)
        return {"a": ({"b": out},)} if kind == "nested" else (each for each in (out, out))

    def score(self, x):
        return Critic.forward(self, x)


@distributed(world_size=2)
def test_it_is_refused_of_nested_outputs_and_methods_too():
    for call in (lambda model, x: model(x)["a"][0]["b"], lambda model, x: model.score(x)):
        _, model = pair(NestedOutputs, forward_methods=["score"])
        with pytest.raises(ShardkitError, match="create_graph=True"):
            penalty(functools.partial(call, model), *vectors(0, 9))
    _, model = pair(NestedOutputs)
    assert len(list(model(vectors(0)[0], "generator"))) == 2  # not read by the hook
