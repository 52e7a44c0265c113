"""What torch offers and shardkit answers for, on the torch that is installed."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch_names import missing, used

import shardkit
from shardkit import ShardkitError, shard_model, zero_grad
from shardkit._fsdp import fsdp_units
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.testing import RankPool, fake_world

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "torch-versions.md"


def offered() -> set[str]:
    """Every argument of ``fully_shard`` and its policies, and every public method of
    ``FSDPModule``.
    """
    names = set(inspect.signature(fully_shard).parameters)
    for policy in (MixedPrecisionPolicy, CPUOffloadPolicy):
        names |= {field.name for field in dataclasses.fields(policy)}
    return names | {name for name in vars(FSDPModule) if not name.startswith("_")}


def test_the_page_answers_for_all_that_fully_shard_offers() -> None:
    columns = re.findall(r"^\| ([^|]+) \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    answered = {name for column in columns for name in re.findall(r"`(\w+)`", column)}
    assert len(offered()) >= 30
    assert offered() <= answered, f"new in this torch, add a row: {sorted(offered() - answered)}"


def test_no_private_name_is_missing_and_a_missing_one_is_found() -> None:
    names = used()
    assert len(names) > 50
    assert "_local_tensor" in names
    assert missing([*names, "_renamed"]) == ["_renamed"]


def test_what_torch_lacks_is_named_where_it_is_used(monkeypatch) -> None:
    with fake_world(2):
        model = torch.nn.Linear(4, 4)
        fully_shard(model)
        unit = fsdp_units(model)[0]
        monkeypatch.delattr(unit, "reduce_grads")
        with pytest.raises(
            ShardkitError, match=r"^FSDPParamGroup\.reduce_grads is not in torch 2\."
        ):
            zero_grad(model)


def check_without_gpu(backend: str | None) -> None:
    """Each way to begin ends on the CPU or in an error that says so."""
    dist.destroy_process_group()
    del os.environ["RANK"], os.environ["WORLD_SIZE"]  # which the pool sets, and sets again
    if backend is not None:
        dist.init_process_group(backend or None, store=dist.HashStore(), rank=0, world_size=1)
    with shardkit.init_on_meta():
        model = torch.nn.Linear(4, 4)
    shardkit.materialize(shard_model(model))
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad.device.type == "cpu"
    for device_id in (0, torch.device("cuda", 0)):
        with pytest.raises(RuntimeError, match=r"accelerator|NVIDIA|CUDA"):  # torch's own
            FSDP(torch.nn.Linear(4, 4), device_id=device_id)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("backend", [None, "", "gloo"], ids=["no group", "no backend", "gloo"])
def test_without_a_gpu_everything_is_on_the_cpu_also_with_a_wheel_for_cuda(
    backend: str | None,
) -> None:
    with RankPool(1) as rank:
        rank.run(check_without_gpu, backend)
