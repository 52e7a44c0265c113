"""Memory of one GPU: sleep and wake, errors, and predicted peaks."""

from __future__ import annotations

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
    tokens,
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


def test_sleep_and_wake() -> None:
    model = sharded()
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    before, held = values(model), allocated()
    for _ in range(2):
        keep_stream_busy()
        sleep(model, optimizer)
        if HAS_GPU:
            assert allocated() < held / 4
        wake(model, optimizer)
        assert_same(values(model), before)
    train(model, optimizer)


@needs_gpu
def test_a_forward_right_after_wake_waits_for_the_copies() -> None:
    """The host does not wait for them, so the first all-gather must, on its own stream."""
    model = sharded()
    expected = model(tokens()).detach().clone()
    sleep(model)
    keep_stream_busy(300)
    wake(model)
    assert torch.equal(model(tokens()).detach(), expected)


@needs_gpu
def test_wake_on_another_stream() -> None:
    model = sharded()
    expected = model(tokens()).detach().clone()
    sleep(model)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        keep_stream_busy(300)
        wake(model)
        found = model(tokens()).detach().clone()
    stream.synchronize()
    assert torch.equal(found, expected)


@needs_gpu
def test_wake_before_the_event_of_an_earlier_step() -> None:
    """With ``set_post_optim_event`` the first all-gather waits for that event only."""
    model = sharded()
    optimizer = adamw(model.parameters())
    expected = train(model, optimizer, steps=1)
    model(tokens()).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.set_post_optim_event(torch.cuda.current_stream().record_event())
    before = values(model)
    sleep(model)
    keep_stream_busy(300)
    wake(model)
    found = model(tokens()).detach().clone()
    assert_same(values(model), before)
    assert found != expected[0]
    assert torch.equal(model(tokens()).detach(), found)


@needs_gpu
def test_sleep_pins_what_it_moves() -> None:
    """torch's allocator of pinned memory rounds each block up to a power of two."""
    layers = [nn.Linear(1024, 1100), nn.Linear(1100, 1024)] * 4
    model = shardkit.shard_model(nn.Sequential(*layers).to(DEVICE))
    moved = sum(param.to_local().nbytes for param in model.parameters())
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    sleep(model)
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) - before
    wake(model)
    assert pinned <= 1.25 * moved


@needs_gpu
def test_out_of_memory_and_on() -> None:
    model = sharded()
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    before = allocated()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(int(free * 0.98), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randint(1000, (512, 2048), device=DEVICE)).backward()
    del filler
    shardkit.reset_after_error(model)
    assert abs(allocated() - before) < 2**22
    assert train(model, optimizer).isfinite().all()


@needs_gpu
def test_predicted_against_allocated_peak() -> None:
    dist.destroy_process_group()
    shape = Shape(width=1024, mlp=4096, layers=8, heads=16, kv_heads=8, vocabulary=32_000)
    x = torch.randint(shape.vocabulary, (4, 1024))
    model = Llama(shape, 1024)
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
        found = torch.cuda.max_memory_allocated()
    shardkit.shard_model(nn.Linear(4, 4))  # a group for the fixture to destroy
    print(f"predicted {predicted / 2**20:.0f} MiB, allocated at most {found / 2**20:.0f} MiB")
    assert 0.9 < found / predicted < 1.1
