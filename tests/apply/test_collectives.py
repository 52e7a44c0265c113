"""What a plan predicts is what torch does: counted in a fake world of 8 ranks."""

import itertools

import pytest
import torch.nn as nn
from small_models import Block, Decoder, step

from shardkit import CPUOffloadPolicy, MeshSpec, apply_plan, by_class, by_name, group, plan_model
from shardkit.testing import comm_counts, fake_world

MESHES = [MeshSpec.sharded(8), MeshSpec.hybrid(2, 4), MeshSpec.hybrid(8, 1), MeshSpec.hybrid(1, 8)]
RESHARDS = [None, True, False]
RULES = {
    "default": None,
    "blocks": by_class(Block),
    "nested": [by_class(Block), by_name("layers.*.norm", reshard_after_forward=False)],
    "one group": [group("layers.0", "layers.2"), by_name("layers.1")],
    "root only": by_name(""),
}


def count(model: nn.Module, **arguments: object) -> None:
    with fake_world(8):
        plan = plan_model(model, **arguments)
        apply_plan(model, plan)
        step(model)  # the first backward makes what later ones reuse
        with comm_counts() as counted:
            step(model)
    assert counted == plan.collectives()
    assert counted.all_gathers + counted.all_reduces > 0


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("mesh", "reshard"), list(itertools.product(MESHES, RESHARDS)))
def test_rules_meshes_and_resharding(rules: str, mesh: MeshSpec, reshard: bool | None) -> None:
    count(Decoder(), units=RULES[rules], mesh=mesh, reshard_after_forward=reshard)


@pytest.mark.parametrize(("ranks", "reshard"), [(8, 2), (8, 4)])
def test_resharding_to_fewer_ranks(ranks: int, reshard: int) -> None:
    count(Decoder(), mesh=MeshSpec.sharded(ranks), reshard_after_forward=reshard)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
def test_frozen_layers_at_the_start(frozen: int, prefetch: int) -> None:
    model = Decoder(layers=4)
    model.embed.requires_grad_(False)
    for layer in list(model.layers)[:frozen]:
        layer.requires_grad_(False)
    count(model, prefetch=prefetch)


def test_frozen_layers_at_the_end() -> None:
    model = Decoder()
    model.layers[2].requires_grad_(False)
    model.head.requires_grad_(False)
    count(model)


def test_tied_embedding_and_head() -> None:
    count(Decoder(tied=True))
    count(Decoder(tied=True), mesh=MeshSpec.hybrid(2, 4), reshard_after_forward=True)


@pytest.mark.parametrize("rules", ["default", "nested"])
def test_recomputed_blocks_are_not_gathered_again(rules: str) -> None:
    count(Decoder(), units=RULES[rules], checkpoint_activations=True)


def test_offload_and_ignored_parameters() -> None:
    count(Decoder(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    model = Decoder()
    count(model, ignored_params=[model.norm.weight, *model.layers[1].parameters()])


def test_nothing_trains() -> None:
    plan = plan_model(Decoder().requires_grad_(False), mesh=MeshSpec.sharded(8))
    assert plan.collectives().reduce_scatters == 0
    assert plan.collectives().all_gathers == len([unit for unit in plan.units if unit.params])
