"""Lightning's Trainer and Fabric, unchanged, on sharded models: the functions of docs/integrations.md."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from other_trainers import (
    BATCH,
    assert_same,
    full,
    of_the_page,
    own_batches,
    packages,
    plain_loop,
    rows,
    tiny,
    torchrun,
)
from torch.utils.data import DataLoader, DistributedSampler, Subset

from shardkit.testing import distributed

packages("lightning.pytorch", "transformers.models.llama.modeling_llama")


def loader() -> DataLoader:
    """The first half of the rows, in order: two steps an epoch."""
    half = Subset(rows(), range(2 * BATCH))
    return DataLoader(half, BATCH // dist.get_world_size(), sampler=DistributedSampler(half, shuffle=False))


@distributed(world_size=2, backend="gloo", timeout=120)
def test_lightning_trains_like_the_plain_loop(tmp_path):
    train = of_the_page("with_lightning")
    with torchrun():
        trainer, module = train(tiny, loader(), tmp_path)
        first = min(tmp_path.iterdir())  # of two epochs
        again, resumed = train(tiny, loader(), tmp_path / "again", resume=first)
        assert_same(full(resumed), full(module))
        assert again.global_step == trainer.global_step == 4
        plain = plain_loop(4, rows_of=2 * BATCH)
        assert trainer.callback_metrics["loss"].item() == pytest.approx(plain.losses[-1], abs=1e-5)
        plain.assert_like(module, "model.")


@distributed(world_size=2, backend="gloo", timeout=120)
def test_fabric(tmp_path):
    train = of_the_page("with_fabric")
    with torchrun():
        batches = own_batches() * 2
        model, losses = train(tiny, batches, tmp_path / "checkpoint")
        resumed, later = train(tiny, batches, tmp_path / "unused", resume=tmp_path / "checkpoint")
        assert_same(full(resumed), full(model))
        assert later == losses[4:]
        plain = plain_loop(4, accumulate=2)
        assert losses == pytest.approx(plain.losses, abs=1e-5)
        plain.assert_like(model, next(iter(full(model))).removesuffix(next(iter(full(plain.model)))))
