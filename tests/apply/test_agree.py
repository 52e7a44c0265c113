"""Ranks that would do different things: one error on every rank, before anything is changed."""

from collections.abc import Callable

import pytest
import torch.distributed as dist
import torch.nn as nn
from small_models import Decoder, snapshot
from torch.distributed.device_mesh import init_device_mesh

from shardkit import MeshSpec, PlanError, shard_model
from shardkit.testing import distributed


def raised_by(call: Callable[[], object]) -> str:
    with pytest.raises(PlanError) as caught:
        call()
    return str(caught.value)


@distributed(world_size=4)
def test_ranks_with_different_plans() -> list[str]:
    model = Decoder()
    before = snapshot(model)
    reshard = dist.get_rank() != 2
    text = raised_by(lambda: shard_model(model, reshard_after_forward=reshard))
    assert snapshot(model) == before
    texts: list[str] = [""] * 4
    dist.all_gather_object(texts, text)
    assert texts == [text] * 4
    assert "rank 2 differs from rank 0 in plan (" in text
    assert "unit layers.1: reshard_after_forward: false instead of true" in text
    return texts


@distributed(world_size=4)
def test_ranks_with_different_models_on_two_axes() -> None:
    model = Decoder(vocabulary=11 + (dist.get_rank() == 3))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for arguments in ({"mesh": mesh}, {"mesh": MeshSpec.hybrid(2, 2)}):
        text = raised_by(lambda arguments=arguments: shard_model(model, **arguments))  # type: ignore[arg-type]
        assert "rank 3 differs from rank 0 in plan (" in text
        assert 'parameter embed.weight: ["embed.weight", [12, 8]' in text


@distributed(world_size=4)
def test_an_error_on_one_rank_is_raised_by_all() -> None:
    model = Decoder()
    if dist.get_rank() == 1:
        model = nn.ReLU()
    text = raised_by(lambda: shard_model(model))
    assert "model has no parameters to shard" in text
    assert ("- rank 1: PlanError: model has" in text) == (dist.get_rank() != 1)

    def rule(fqn: str, module: nn.Module) -> bool:
        return {0: fqn == "norm"}[dist.get_rank()]

    text = raised_by(lambda: shard_model(Decoder(), units=rule))
    assert "3 of 4 ranks failed" in text
    assert "- rank 3: KeyError: 3" in text
    shard_model(Decoder())  # and the group still works
