"""The ranks that a group runs on: those that were launched, or one of many that are pretended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from shardkit._torch.dispatch import forget_meshes
from shardkit.testing import fake_world

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
PATIENCE = timedelta(seconds=120)


def rank_and_size() -> tuple[int, int]:
    """As torchrun says; 0 of 1 without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def store(name: str) -> Any:
    """A store for all ranks under a name of its own: torchrun's, or else one that rank 0 serves
    where it would.
    """
    rank, size = rank_and_size()
    if size == 1:
        return HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    return PrefixStore(name, TCPStore(address, port, size, serves, PATIENCE))


def world(fake_ranks: int, device: torch.device, name: str) -> AbstractContextManager[None]:
    """A process group for the block: ``fake_ranks`` pretended ranks, or those that were launched if
    0. Collective.
    """
    return _pretended(fake_ranks) if fake_ranks else _real(device, name)


@contextmanager
def _real(device: torch.device, name: str) -> Iterator[None]:
    rank, size = rank_and_size()
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        BACKENDS[device.type],
        store=store(name),
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
        **options,
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()


# torch 2.13 calls the first by the second's name, and warns of the first.
REDUCE_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single")


@contextmanager
def _pretended(ranks: int) -> Iterator[None]:
    with fake_world(ranks):
        originals = {name: getattr(dist, name) for name in REDUCE_SCATTERS if hasattr(dist, name)}
        for name, original in originals.items() if not _fake_reduces(ranks) else ():
            setattr(dist, name, _writing_its_part(original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)


def _fake_reduces(ranks: int) -> bool:
    """Whether the ``fake`` backend writes a reduce-scatter's output: torch 2.13 does, and 2.11
    leaves it as it was.
    """
    output = torch.zeros(1)
    getattr(dist, REDUCE_SCATTERS[1], dist.reduce_scatter_tensor)(output, torch.ones(ranks))
    return bool(output.item())


def _writing_its_part(original: Callable[..., Any]) -> Callable[..., Any]:
    """A reduce-scatter that takes this rank's part of its own input, as torch 2.13's does.

    Else gradients would be whatever memory held, NaN among it: then no loss is finite, and a GPU
    that multiplies NaN needs less power and is faster than it should be.
    """

    def reduce_scatter(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = original(output, input, *args, **kwargs)
        output.copy_(input.flatten()[: output.numel()].view_as(output))
        return work

    return reduce_scatter
