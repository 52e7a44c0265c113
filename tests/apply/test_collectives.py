"""What a plan predicts is what torch does, in a step and in one of several micro-batches, on 8 fake
ranks.
"""

import copy

import pytest
import torch
import torch.nn as nn
from small_models import Block, Decoder, step
from torch.distributed.fsdp import fully_shard

from shardkit import (
    CPUOffloadPolicy,
    MeshSpec,
    accumulate,
    apply_plan,
    by_class,
    by_name,
    group,
    plan_model,
)
from shardkit.plan import Collectives
from shardkit.testing import comm_counts, fake_world

MESHES = [MeshSpec.sharded(8), MeshSpec.hybrid(2, 4), MeshSpec.hybrid(8, 1), MeshSpec.hybrid(1, 8)]
RESHARDS = [None, True, False]
RULES = {
    "default": None,
    "nested": [by_class(Block), by_name("layers.*.norm", reshard_after_forward=False)],
    "one group": [group("layers.0", "layers.2"), by_name("layers.1")],
    "root only": by_name(""),
}
OPTIONS = [
    {},
    {"keep_unsharded": True},
    {"keep_unsharded": False},
    {"keep_unsharded": "frozen"},
    {"shard_gradients": True},
    {"keep_unsharded": True, "shard_gradients": True},
]


def micro_steps(model, micro_batches, **options):
    for i in range(micro_batches):
        with accumulate(model, last=i == micro_batches - 1, **options):
            model(torch.zeros(2, 5, dtype=torch.long)).square().mean().backward()


def count(model, micro_batches=2, **arguments):
    """Every option on one model, one after the other, so that each shows that the one before left
    nothing behind.
    """
    with fake_world(8):
        plan = plan_model(model, **arguments)
        apply_plan(model, plan)
        step(model)  # the first backward makes what later ones reuse
        with comm_counts() as counted:
            step(model)
        assert counted == plan.collectives()
        assert counted.all_gathers + counted.all_reduces > 0
        for options in OPTIONS:
            with comm_counts() as counted:
                micro_steps(model, micro_batches, **options)
            assert counted == plan.collectives(micro_batches, **options), options


@pytest.mark.parametrize("rules", range(len(RULES)))
@pytest.mark.parametrize("mesh", range(len(MESHES)))
def test_rules_meshes_and_resharding(rules, mesh):
    """Any two of them meet."""
    units, reshard = list(RULES.values())[rules], RESHARDS[(rules + mesh) % len(RESHARDS)]
    count(Decoder(), units=units, mesh=MESHES[mesh], reshard_after_forward=reshard)


@pytest.mark.parametrize("reshard", [2, 4])
def test_resharding_to_fewer_ranks(reshard):
    count(Decoder(), micro_batches=3, mesh=MeshSpec.sharded(8), reshard_after_forward=reshard)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "frozen", [("embed", "layers.0", "layers.1"), ("embed",), ("layers.2", "head")]
)
def test_frozen_layers_at_the_start_and_the_end(frozen, prefetch):
    model = Decoder()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    count(copy.deepcopy(model), micro_batches=3, prefetch=prefetch)
    kept = [by_name(*frozen, reshard_after_forward=False), by_class(Block)]
    count(model, units=kept, micro_batches=3, prefetch=prefetch)


def test_ties_recomputation_offload_and_ignored_parameters():
    count(Decoder(tied=True))
    count(Decoder(tied=True), mesh=MeshSpec.hybrid(2, 4), reshard_after_forward=True)
    for rules in ("default", "nested"):
        count(Decoder(), units=RULES[rules], checkpoint_activations=True)
    count(Decoder(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    model = Decoder()
    count(model, ignored_params=[model.norm.weight, *model.layers[1].parameters()])


def test_nothing_trains():
    plan = plan_model(Decoder().requires_grad_(False), mesh=MeshSpec.sharded(8))
    assert plan.collectives().reduce_scatters == 0
    assert plan.collectives().all_gathers == len([unit for unit in plan.units if unit.params])


def by_hand(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_root_left_to_torch(options):
    """torch decides at the first forward that a root does not reshard; until then it looks as if it
    did.
    """
    with fake_world(8):
        model = by_hand(Decoder())
        plan = plan_model(
            Decoder(), units=[by_class(Block), by_name("", reshard_after_forward=False)]
        )
        micro_steps(model, 3, **options)
        with comm_counts() as counted:
            micro_steps(model, 3, **options)
        assert counted == plan.collectives(3, **options)


def test_a_part_of_a_model_and_several_roots():
    with fake_world(8):
        both = nn.ModuleList([by_hand(Decoder()), by_hand(Decoder())])
        for _ in range(2):
            with comm_counts() as counted:
                for i in range(2):
                    with accumulate(both, last=i == 1, keep_unsharded=True):
                        for model in both:
                            model(torch.zeros(2, 5, dtype=torch.long)).square().mean().backward()
            assert counted == Collectives(all_gathers=8, reduce_scatters=8)
        with comm_counts() as counted, accumulate(both[0].layers[0], last=False):
            both[0](torch.zeros(2, 5, dtype=torch.long)).square().mean().backward()
        assert counted.reduce_scatters == 3
