"""Ranks that skip a unit with ``may_skip`` take part in its collectives, with one plain model's
gradients.
"""

import copy
import random

import pytest
import torch
import torch.distributed as dist
from skipping_nets import EXPERTS, batch, net
from split_training import difference, pictures, vision_language
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit import (
    MeshSpec,
    PlanError,
    ShardingPlan,
    ShardkitError,
    accumulate,
    apply_plan,
    by_class,
    by_name,
    group,
    plan_model,
    shard_model,
)
from shardkit.apply.mesh import build_mesh
from shardkit.testing import comm_counts, distributed

TWO = MeshSpec.sharded(2)
BOUND = 1e-14  # fp64: sums over ranks in another order
KINDS = {
    "recomputed prefix": {"frozen": ("visual.patch", "visual.blocks.2"), "recomputes": True},
    "pixels require grad, frozen tower": {
        "frozen": ("visual",),
        "micro_batches": 2,
        "require_grad": True,
    },
    "evaluated between": {"evaluates": True},
}


def units(recompute):
    skipped = by_name(
        "visual", "layers.*.experts.*", may_skip=True, checkpoint_activations=recompute
    )
    return [
        skipped,
        by_name("visual.blocks.*", "embed"),
        by_name("layers.*", checkpoint_activations=recompute),
    ]


def mean_square(model, given):
    return model(*given).square().mean()


def assert_same_step(
    model,
    plain,
    *steps,
    loss=mean_square,
    bound=BOUND,
):
    """Compare gradients with the plain model's after micro-batches, each by rank; return the
    collectives.
    """
    model.zero_grad()
    plain.zero_grad()
    with comm_counts() as counts:
        for number, by_rank in enumerate(steps):
            with accumulate(model, last=number == len(steps) - 1):
                loss(model, by_rank[dist.get_rank()]).backward()
    for given in (given for by_rank in steps for given in by_rank):
        (loss(plain, given) / dist.get_world_size()).backward()
    assert difference(model, plain) < bound
    return counts


def train_in_random_patterns(
    mesh,
    seed,
    frozen=(),
    recomputes=False,
    micro_batches=1,
    require_grad=False,
    evaluates=False,
):
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = net()
    for name in frozen:
        plain.get_submodule(name).requires_grad_(False)
    model = copy.deepcopy(plain)
    plan = plan_model(model, units=units(recomputes), mesh=mesh)
    apply_plan(model, plan, build_mesh(mesh))
    source = random.Random(seed)
    for step in range(6):
        likely = 1.0 if step == 3 else source.choice([0.0, 0.2, 0.5, 0.9])
        given = []
        for micro in range(micro_batches):
            by_rank = []
            for each in range(world):
                # In one step all experts are called.
                chosen = [each % EXPERTS, (each + 1) % EXPERTS] if step == 3 else None
                has_image = source.random() < likely
                seed = step + 99 * micro
                by_rank.append(batch(seed, each, has_image, chosen, require_grad))
            given.append(by_rank)
        counts = assert_same_step(model, plain, *given)
        if evaluates and step % 3 == 0:
            with torch.no_grad():
                assert torch.allclose(
                    model(*given[0][rank]), plain(*given[0][rank]), rtol=1e-13, atol=1e-15
                )
    if not frozen:  # the ranks have told each other in which order units come
        assert counts == plan.collectives(micro_batches)


@pytest.mark.parametrize("kind", KINDS)
@distributed(world_size=2)
def test_ranks_skip_towers_and_experts_in_random_patterns(kind):
    train_in_random_patterns(TWO, 1, **KINDS[kind])


@distributed(world_size=4)
def test_ranks_of_a_hybrid_mesh_skip():
    train_in_random_patterns(MeshSpec.hybrid(2, 2), 2)


@distributed(world_size=2)
def test_a_model_of_transformers_with_text_and_image_batches():
    def loss(model, given):
        return model(**given, use_cache=False).loss

    plain = vision_language()
    blocks = by_class("Qwen3VLVisionBlock", "Qwen3VLTextDecoderLayer")
    model = shard_model(
        copy.deepcopy(plain), units=[by_name("model.visual", may_skip=True), blocks]
    )
    for step, images in enumerate([(False, True), (True, False), (False, False), (True, False)]):
        if step == 2:
            model.gradient_checkpointing_enable()
        given = [pictures(step + 5 * rank, image=images[rank]) for rank in range(2)]
        # transformers normalizes in float32
        assert_same_step(model, plain, given, loss=loss, bound=1e-6)
    assert model.model.visual.merger.linear_fc1.weight.grad is not None


@distributed(world_size=2)
def test_a_tower_is_unfrozen_later_and_the_model_compiled():
    plain = net()
    plain.visual.requires_grad_(False)
    model = shard_model(copy.deepcopy(plain), units=units(False))
    called = torch.compile(model, backend="eager")

    def loss(each, given):
        return mean_square(called if each is model else each, given)

    for step in range(6):
        for each in (model, plain):
            each.visual.requires_grad_(2 <= step < 4)
        assert_same_step(
            model, plain, [batch(step, rank, step % 2 == rank) for rank in range(2)], loss=loss
        )


class Branches(nn.Module):
    """One of two linears, or one several times."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, names):
        for name in names:
            x = self.get_submodule(name)(x).tanh()
        return x


def branches():
    rules = [by_name("first", may_skip=True), by_name("second", "third")]
    return shard_model(Branches(), units=rules)


@distributed(world_size=2)
def test_what_ranks_may_not_skip_is_an_error_on_every_rank():
    names = ["second", "third"] if dist.get_rank() else ["first", "third"]
    with pytest.raises(
        ShardkitError,
        match=r"calls different units next .*: rank 0 in \(root\): third, rank 1 .*second",
    ):
        branches()(torch.ones(2, 4), names)


@distributed(world_size=2)
def test_a_call_besides_the_agreed_order_is_an_error():
    model = branches()
    model(torch.ones(2, 4), ["first", "second"])
    for names in (["first", "first"], ["second", "first"], ["third"]):
        with pytest.raises(
            ShardkitError,
            match=r"than ranks agreed on, which is first, second,.*kept to the order .*wait",
        ):
            model(torch.ones(2, 4), names)


class Checkpointed(nn.Module):
    """Checkpoints calls by itself, as transformers does."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, image):
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False).tanh()
            if number == 1 and image is not None:
                x = torch.cat([checkpoint(self.tower, image, use_reentrant=False), x])
        return x


@distributed(world_size=2)
def test_checkpoints_around_calls_of_units():
    torch.manual_seed(0)
    plain = Checkpointed().double()
    model = shard_model(
        copy.deepcopy(plain), units=[by_name("tower", may_skip=True), by_name("layers.*")]
    )
    x, image = torch.randn(2, 2, 4).double(), torch.randn(2, 2, 3).double()
    for pattern in [(True, False), (False, True), (False, False), (True, True)]:
        assert_same_step(
            model, plain, [(x[rank], image[rank] if pattern[rank] else None) for rank in range(2)]
        )


@distributed(world_size=2)
def test_forwards_before_one_backward_are_recomputed():
    plain = net()
    model = shard_model(copy.deepcopy(plain), units=units(recompute=True))

    def both(model, given):
        return mean_square(model, given[0]) + mean_square(model, given[1])

    # Each forward calls experts that no rank has called before.
    for experts in [(0, 0), (1, 0)], [(1, 1), (0, 0)], [(0, 2), (1, 0)], [(2, 2), (1, 1)]:
        by_rank = []
        for rank in range(2):
            first, second = (
                batch(9 + rank, rank, False, chosen=[each] * 2) for each in experts[rank]
            )
            by_rank.append((first, second))
        assert_same_step(model, plain, by_rank, loss=both)


# The plan.


def test_the_plan_says_what_may_be_skipped():
    plan = plan_model(net(), units=units(False), mesh=TWO)
    assert "ranks may skip: " in str(plan)
    assert ShardingPlan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ([by_name("", may_skip=True)], r"\(root\) has may_skip=True"),
        ([group("visual", "project", may_skip=True)], r"\[visual, project\] has may_skip=True"),
        (
            [by_name("visual", may_skip=True), by_name("", compile=True)],
            r"\(root\) is compiled, and calls a unit",
        ),
        ([by_name("visual", may_skip=1)], r"must be <class 'bool'>, got 1"),
    ],
)
def test_units_that_cannot_be_skipped_are_errors(rules, text):
    with pytest.raises(PlanError, match=text):
        plan_model(net(), units=rules, mesh=TWO)
