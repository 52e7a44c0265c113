"""accelerate's Accelerator, unchanged, on sharded models: docs/integrations.md's function against a
plain loop.
"""

import pytest
import torch
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
from torch import nn
from torch.utils.data import DataLoader

from shardkit import shard_model
from shardkit.errors import ShardkitError
from shardkit.integrations import keep_sharded

packages("accelerate.accelerator", "transformers.models.llama.modeling_llama")


def loader():
    return DataLoader(rows(), batch_size=BATCH // dist.get_world_size())


@on_ranks(2, timeout=120)
def test_it_trains_like_the_plain_loop(tmp_path):
    train = of_the_page("with_accelerate")
    with torchrun():
        accelerator, model, losses = train(tiny(), loader(), tmp_path / "half", steps=2)
        _, whole, all_losses = train(tiny(), loader(), tmp_path / "all", steps=4)
        _, resumed, later = train(
            tiny(), loader(), tmp_path / "again", steps=2, resume=tmp_path / "half"
        )
        assert [*losses, *later] == all_losses
        assert_same(full(resumed), full(whole))
        plain = plain_loop(2, accumulate=2)
        assert all_losses == pytest.approx(plain.losses, abs=1e-5)
        plain.assert_like(whole)
        expected, state = full(model), accelerator.get_state_dict(model)
        # the whole model on rank 0, and no shards
        assert_same(state, expected if dist.get_rank() == 0 else {})
        accelerator.save_model(model, tmp_path / "weights")
        dist.barrier()
        from safetensors.torch import load_file

        assert_same(load_file(tmp_path / "weights" / "model.safetensors"), expected)


@on_ranks(2, timeout=120)
def test_prepare_takes_several_models_and_no_plain_one():
    from accelerate import Accelerator

    with torchrun():
        # a second time changes nothing
        accelerator = keep_sharded(keep_sharded(Accelerator(cpu=True)))
        actor, critic = shard_model(tiny()), shard_model(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(critic.parameters())
        params = [id(param) for param in critic.parameters()]
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        first, second, wrapped, prepared, rest = accelerator.prepare(
            actor, critic, schedule, optimizer, "rest"
        )
        assert (first, second, rest) == (actor, critic, "rest")
        assert wrapped.optimizers == [prepared]
        assert [id(param) for group in prepared.param_groups for param in group["params"]] == params
        assert accelerator.prepare(loader()).batch_sampler.num_processes == 2
        with pytest.raises(ShardkitError, match="Linear is not sharded"):
            accelerator.prepare(nn.Linear(4, 1))
    with torchrun(), pytest.raises(ShardkitError, match="mixed_precision='fp16'"):
        keep_sharded(Accelerator(cpu=True, mixed_precision="fp16"))


@on_ranks(2, timeout=120)
def saves(folder):
    with torchrun():
        of_the_page("with_accelerate")(tiny(), loader(), folder, steps=2)


@on_ranks(4, timeout=120)
def loads(folder):
    from accelerate import Accelerator

    with torchrun():
        accelerator = keep_sharded(Accelerator(cpu=True))
        model = shard_model(tiny())
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.load_state(folder)
        assert_same(full(model), torch.load(folder / "pytorch_model_fsdp.bin"))
        moments = {
            name: optimizer.state[param]["exp_avg"].full_tensor()
            for name, param in model.named_parameters()
        }
    saved = torch.load(folder / "optimizer.bin")["state"]
    assert_same(moments, {name: state["exp_avg"] for name, state in saved.items()})


def test_state_of_2_ranks_on_4(tmp_path):
    saves(tmp_path)
    loads(tmp_path)
