"""One GPU, in one process: ``python -m pytest tests/gpu --confcutdir=tests/gpu``.

``--confcutdir`` leaves out ``tests/conftest.py``, which needs hypothesis. Without a GPU the tests
are skipped, in one line. ``SHARDKIT_GPU_TESTS=cpu`` runs those on the CPU that need none, to show
that the tests themselves are right.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# As tests/conftest.py does, for the tests that are tried on a CPU.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch.distributed as dist
from gpu_net import HAS_GPU, RUNS_ON_CPU
from torch import nn

import shardkit


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    """Leave one skipped test of this folder where there is no GPU."""
    folder = Path(__file__).parent
    ours = [item for item in items if item.path.parent == folder]
    for item in ours:
        # What torch, its compiler and NCCL warn of on a GPU is listed, and fails no test.
        item.add_marker(pytest.mark.filterwarnings("default"))
    if not ours or HAS_GPU or RUNS_ON_CPU:
        return
    first, *others = ours
    first.add_marker(pytest.mark.skip(reason=f"torch sees no GPU for the {len(ours)} tests here"))
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """The process group of one rank that shardkit makes itself, with NCCL beside gloo."""
    shardkit.shard_model(nn.Linear(4, 4))
    yield
    dist.destroy_process_group()
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def full_float32():
    """Plain and sharded models are compared in float32, not TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
