"""Optimizer state that torchao quantizes, in blocks of each rank's shard: saved and loaded in the
same shards, to the bit.
"""

import pytest
import torch
from cpu_ranks import on_ranks
from meshes import mesh_of
from test_checkpoint_subclasses import parts
from torch import nn
from torch.distributed.fsdp import fully_shard
from trees import assert_same

from shardkit.checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint
from shardkit.errors import CheckpointError, ShardkitError
from shardkit.shards import local_value
from shardkit.state import full_optimizer_state_dict, sharded_optimizer_state_dict

torchao = pytest.importorskip("torchao.optim", reason="optimizers with quantized state")


def build(kind, mesh=None):
    """On 2 ranks the first weight has whole blocks on the second one only, the others on both."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(192, 129), nn.ReLU(), nn.Linear(129, 512), nn.Linear(512, 256))
    if mesh is not None:
        fully_shard(net, mesh=mesh_of(mesh))
    return net, getattr(torchao, kind)(net.parameters(), lr=1e-2)


def train(net, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        x = torch.randn(4, 192, generator=torch.Generator().manual_seed(seed))
        net(x).square().mean().backward()
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()


def held(net, optimizer):
    """What this rank has: its parameters, and the classes and inner tensors of their state."""
    values = {name: local_value(param).clone() for name, param in net.named_parameters()}
    for name, state in sharded_optimizer_state_dict(net, optimizer)["state"].items():
        for key, tensor in state.items():
            values[f"{name}/{key}"] = parts(tensor)
    return values


def check_resumes(path, kind, mesh, *, async_=False, used=False):
    net, optimizer = build(kind, mesh)
    train(net, optimizer, range(1))
    save_checkpoint(path, net, optimizer, async_=async_).wait()
    saved = held(net, optimizer)
    classes = {value.get("class") for value in saved.values() if isinstance(value, dict)}
    assert len(classes) == 2, "plain shards and quantized ones"
    resumed, fresh = build(kind, mesh)
    if used:
        train(resumed, fresh, range(5, 6))
    load_checkpoint(path, resumed, fresh)
    assert_same(held(resumed, fresh), saved)
    train(net, optimizer, range(1, 2))
    train(resumed, fresh, range(1, 2))
    assert_same(held(resumed, fresh), held(net, optimizer))


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@on_ranks(2)
def test_a_checkpoint_resumes_to_the_bit(kind, tmp_path):
    special = kind == "AdamW8bit"
    check_resumes(tmp_path / "c", kind, (2,), async_=special, used=special)


def test_a_checkpoint_of_one_process_resumes_to_the_bit_and_is_not_converted(tmp_path):
    check_resumes(tmp_path / "c", "AdamW8bit", None)
    with pytest.raises(CheckpointError, match="in blocks of each rank's shard"):
        convert_checkpoint(tmp_path / "c", tmp_path / "c.pt")


@on_ranks(4)
def test_replicas_resume_and_other_shards_are_refused_as_are_full_tensors(tmp_path):
    check_resumes(tmp_path / "c", "AdamW8bit", (2, 2))
    net, optimizer = build("AdamW8bit", (4,))
    before = held(net, optimizer)
    with pytest.raises(CheckpointError, match=r"0\.weight\.exp_avg.*same mesh"):
        load_checkpoint(tmp_path / "c", net, optimizer)
    assert_same(held(net, optimizer), before)
    load_checkpoint(tmp_path / "c", net)
    train(net, optimizer, range(1))
    with pytest.raises(ShardkitError, match=r"OptimState8bit.*save_checkpoint"):
        full_optimizer_state_dict(net, optimizer)
