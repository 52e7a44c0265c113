"""A small Llama on the GPU, or on the CPU where the GPU's tests are tried without one."""

import contextlib
import gc
import os
import warnings
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardkit
from benchmarks.models import Llama, Shape

HAS_GPU = torch.cuda.is_available()
RUNS_ON_CPU = not HAS_GPU and os.environ.get("SHARDKIT_GPU_TESTS") == "cpu"
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SHAPE = Shape(width=256, mlp=512, layers=4, heads=4, kv_heads=2, vocabulary=1000)

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="only a GPU can show it")
adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)


def tokens(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(SHAPE.vocabulary, (2, 64), generator=generator).to(DEVICE)


def plain(seed=0):
    torch.manual_seed(seed)
    return Llama(SHAPE, 64).to(DEVICE)


def sharded(seed=0, **settings):
    return shardkit.shard_model(plain(seed), **settings)


def by_hand(**settings):
    """The same model by ``fully_shard``, with blocks and the root as units."""
    model = plain()
    mesh = init_device_mesh(DEVICE.type, (1,), mesh_dim_names=("dp_shard",))
    for block in model.layers:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def train(
    model,
    optimizer,
    steps=3,
    clip=None,
):
    """Train on ``steps`` batches and return the losses."""
    losses = []
    for step in range(steps):
        loss = model(tokens(step))
        loss.backward()
        if clip is not None:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def values(model):
    """Copies of the full parameters on the CPU."""
    found = {}
    for name, param in model.named_parameters():
        full = param.full_tensor() if hasattr(param, "full_tensor") else param
        found[name] = full.detach().cpu().clone()
    return found


def assert_same(ours, theirs):
    """Equal bit for bit."""
    assert ours.keys() == theirs.keys()
    different = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    assert not different


def assert_close(ours, theirs):
    """Equal but for the rounding of float32 in another order of additions, over three steps."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


def mean_difference(ours, theirs):
    """Return the mean of the absolute differences of all elements."""
    assert ours.keys() == theirs.keys()
    differences = [(value - theirs[name]).abs().flatten() for name, value in ours.items()]
    return float(torch.cat(differences).mean())


@contextlib.contextmanager
def no_host_syncs():
    """What makes the host wait for the GPU raises: ``.item()``, copies from pageable memory."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def keep_stream_busy(milliseconds=200):
    """Let the current stream work, so that what does not wait for it reads too early."""
    if HAS_GPU:
        torch.cuda._sleep(int(milliseconds * 1.5e6))


def allocated():
    """Return the bytes that tensors hold on the GPU."""
    gc.collect()
    return torch.cuda.memory_allocated() if HAS_GPU else 0
