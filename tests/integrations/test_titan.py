"""A loop in torchtitan's style on sharded models: the function of docs/integrations.md, which needs no package."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from other_trainers import assert_same, full, of_the_page, own_batches, packages, plain_loop, tiny

from shardkit.testing import distributed

packages("transformers.models.llama.modeling_llama")


@distributed(world_size=2, backend="gloo", timeout=120)
def test_torchtitans_style(tmp_path):
    train = of_the_page("in_titans_style")
    model, losses = train(tiny, own_batches(), tmp_path / "two")
    resumed, later = train(tiny, own_batches()[2:], tmp_path / "unused", resume=tmp_path / "two")
    assert_same(full(resumed), full(model))
    assert later == losses[2:]
    means = torch.tensor(losses)
    dist.all_reduce(means)
    plain = plain_loop(4)
    assert (means / 2).tolist() == pytest.approx(plain.losses, abs=1e-5)
    plain.assert_like(model)
