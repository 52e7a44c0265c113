"""Lightning's Trainer, unchanged, on sharded models: the function of docs/integrations.md."""

import pytest
import torch.distributed as dist
from cpu_ranks import on_ranks
from other_trainers import (
    BATCH,
    assert_same,
    full,
    of_the_page,
    packages,
    plain_loop,
    rows,
    tiny,
    torchrun,
)
from torch.utils.data import DataLoader, DistributedSampler, Subset

packages("lightning.pytorch", "transformers.models.llama.modeling_llama")


def loader():
    """The first half of the rows, in order: two steps an epoch."""
    half = Subset(rows(), range(2 * BATCH))
    return DataLoader(
        half, BATCH // dist.get_world_size(), sampler=DistributedSampler(half, shuffle=False)
    )


@on_ranks(2, timeout=120)
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
