"""Memory of one GPU: sleep and wake, errors, and predicted peaks."""

import pytest
import torch
import torch.distributed as dist
from gpu_net import (
    BF16,
    DEVICE,
    HAS_GPU,
    adamw,
    allocated,
    assert_same,
    keep_stream_busy,
    needs_gpu,
    sharded,
    train,
    values,
)
from torch import nn

import shardkit
from benchmarks.models import Llama, Shape
from shardkit.memory import estimate
from shardkit.state import sleep, wake
from shardkit.testing import fake_world

pytestmark = pytest.mark.usefixtures("one_rank")


def test_sleep_and_wake():
    model = sharded()
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    before = values(model)
    moved = 3 * sum(param.to_local().nbytes for param in model.parameters())  # with two moments
    for _ in range(2):
        held = allocated()
        keep_stream_busy()
        sleep(model, optimizer)
        if HAS_GPU:
            assert held - allocated() >= moved  # cuBLAS keeps its workspace
        wake(model, optimizer)
        assert_same(values(model), before)
    train(model, optimizer)


@needs_gpu
def test_out_of_memory_and_on():
    model = sharded()
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    before = allocated()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(int(free * 0.98), dtype=torch.uint8, device=DEVICE)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.randint(1000, (512, 2048), device=DEVICE)).backward()
    finally:
        del filler  # or pytest would keep it for the tests after a failure
    shardkit.reset_after_error(model)
    assert abs(allocated() - before) < 2**22
    assert train(model, optimizer).isfinite().all()


@needs_gpu
def test_predicted_against_allocated_peak():
    dist.destroy_process_group()
    shape = Shape(width=1024, mlp=4096, layers=8, heads=16, kv_heads=8, vocabulary=32_000)
    x = torch.randint(shape.vocabulary, (4, 1024))
    with DEVICE:  # which draws values fast
        model = Llama(shape, 1024)
    model.cpu()
    ones = torch.ones(8, 8, device=DEVICE, requires_grad=True)
    (ones @ ones).sum().backward()
    del ones
    before = allocated()  # cuBLAS's workspaces, one for each thread
    with fake_world(8):
        plan = shardkit.plan_model(model, mp_policy=BF16)
        predicted = estimate(model, plan, batch=x)["ZeRO-3"].peak.total
        shardkit.apply_plan(model, plan)
        optimizer = adamw(model.parameters())
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            model(x.to(DEVICE)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = torch.cuda.max_memory_allocated() - before
    shardkit.shard_model(nn.Linear(4, 4))  # a group for the fixture to destroy
    print(f"predicted {predicted / 2**20:.0f} MiB, allocated at most {found / 2**20:.0f} MiB")
    assert 0.9 < found / predicted < 1.1
