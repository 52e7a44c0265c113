"""What a plan predicts for a step of several micro-batches is what torch does: counted in a fake world of 8 ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn as nn
from small_models import Block, Decoder
from torch.distributed.fsdp import fully_shard

from shardkit import CPUOffloadPolicy, MeshSpec, apply_plan, by_class, by_name, group, plan_model
from shardkit.grads import accumulate
from shardkit.plan import Collectives
from shardkit.testing import comm_counts, fake_world

MESHES = [MeshSpec.sharded(8), MeshSpec.hybrid(2, 4)]
RULES = {
    "default": None,
    "nested": [by_class(Block), by_name("layers.*.norm", reshard_after_forward=False)],
    "one group": [group("layers.0", "layers.2"), by_name("layers.1")],
}
OPTIONS = [
    {},
    {"keep_unsharded": True},
    {"keep_unsharded": False},
    {"shard_gradients": True},
    {"keep_unsharded": True, "shard_gradients": True},
]


def micro_steps(model: nn.Module, micro_batches: int, **options: object) -> None:
    for i in range(micro_batches):
        with accumulate(model, last=i == micro_batches - 1, **options):
            model(torch.zeros(2, 5, dtype=torch.long)).square().mean().backward()


def count(model: nn.Module, micro_batches: int = 2, **arguments: object) -> None:
    """Every option on one model, one after the other, so that each shows that the one before left nothing behind."""
    with fake_world(8):
        plan = plan_model(model, **arguments)
        apply_plan(model, plan)
        micro_steps(model, 1)  # the first backward makes what later ones reuse
        for options in OPTIONS:
            with comm_counts() as counted:
                micro_steps(model, micro_batches, **options)
            assert counted == plan.collectives(micro_batches, **options), options
            assert counted.all_gathers + counted.all_reduces > 0


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("mesh", "reshard"), list(itertools.product(MESHES, [None, True, False])))
def test_rules_meshes_and_resharding(rules: str, mesh: MeshSpec, reshard: bool | None) -> None:
    count(Decoder(), units=RULES[rules], mesh=mesh, reshard_after_forward=reshard)


def test_three_micro_batches_replicating_and_resharding_to_fewer_ranks() -> None:
    count(Decoder(), 3, mesh=MeshSpec.sharded(8))
    count(Decoder(), mesh=MeshSpec.sharded(8), reshard_after_forward=4)
    count(Decoder(), mesh=MeshSpec.hybrid(8, 1))


def test_ties_recomputation_offload_and_ignored_parameters() -> None:
    count(Decoder(tied=True))
    count(Decoder(), checkpoint_activations=True)
    count(Decoder(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    model = Decoder()
    count(model, ignored_params=[model.norm.weight, *model.layers[1].parameters()])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_root_left_to_torch_in_its_first_step_and_the_next(options: dict[str, bool]) -> None:
    """torch decides at the first forward that a root does not reshard; until then it looks as if it did."""
    with fake_world(8):
        model = Decoder()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        plan = plan_model(Decoder(), units=[by_class(Block), by_name("", reshard_after_forward=False)])
        for _ in range(2):
            with comm_counts() as counted:
                micro_steps(model, 3, **options)
            assert counted == plan.collectives(3, **options)


def test_a_part_of_a_model_and_several_roots() -> None:
    with fake_world(8):
        both = nn.ModuleList([Decoder(), Decoder()])
        for model in both:
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
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
