"""Whole training steps on ragged micro-batches: sharded with shardkit, and plain in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp1_models import TOKENS, Decoder
from meshes import mesh_of
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from shardkit import (
    accumulate,
    check_optimizer,
    clip_grad_norm_,
    full_optimizer_state_dict,
    full_params,
    full_state_dict,
    global_token_count,
    init_on_meta,
    load_pretrained,
    save_checkpoint,
    scale_loss,
    shard_model,
    step_on_local_shards,
)
from shardkit.checkpoint import named_full_tensors

MICRO = 3
CLIP = 0.05  # below every norm that occurs, so that each step is clipped
FUSED, FOREACH = {"fused": True}, {"foreach": True}

# In float64 a sum over ranks and micro-batches in another order differs by some 2**-50 of its terms. One step of Adam
# makes at most lr / eps = 10 times that of it. What is counted once too often shows in the first digits.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """From 1 to 3 rows, and from 2 to 5 tokens of each that count."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    ids = torch.randint(0, TOKENS, (1 + (step + micro + 2 * rank) % 3, 5), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, : (micro + rank) % 4] = -100
    return ids, labels


def summed_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    logits = model(ids).flatten(0, 1)
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")


def adam(model: nn.Module, flags: dict[str, bool] = FUSED) -> tuple[Any, Any]:
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-3, **flags)
    return optimizer, LambdaLR(optimizer, lambda epoch: 0.8**epoch)


def local_adam(model: nn.Module, flags: dict[str, bool] = FUSED) -> tuple[Any, Any]:
    optimizer, scheduler = adam(model, flags)
    check_optimizer(optimizer, model, low_precision=False)
    return step_on_local_shards(optimizer), scheduler


def gradients(model: nn.Module, step: int, after: Callable[[int], None] | None = None, **options: Any) -> None:
    """Of the mean over all tokens, by micro-batches; ``after`` is called after the context of each."""
    mine = [batch(step, micro, dist.get_rank()) for micro in range(MICRO)]
    tokens = global_token_count(sum((labels != -100).sum() for _, labels in mine), model)
    for micro, (ids, labels) in enumerate(mine):
        with accumulate(model, last=micro == MICRO - 1, **options):
            scale_loss(summed_loss(model, ids, labels), tokens, model).backward()
        if after is not None:
            after(micro)


def finish(model: nn.Module, optimizer: Any, scheduler: Any) -> Tensor:
    norm = clip_grad_norm_(model, CLIP)
    assert norm > CLIP
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return norm


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: range, **options: Any) -> list[Tensor]:
    norms = []
    for step in steps:
        gradients(model, step, **options)
        norms.append(finish(model, optimizer, scheduler))
    return norms


class Plain:
    """The same training in one process, which sees the batches of all ranks at once."""

    def __init__(self, dtype: torch.dtype = torch.float64, flags: dict[str, bool] = FUSED) -> None:
        self.model = Decoder().to(dtype)
        self.optimizer, self.scheduler = adam(self.model, flags)

    def gradients(self, step: int) -> None:
        all_batches = [batch(step, micro, rank) for micro in range(MICRO) for rank in range(dist.get_world_size())]
        tokens = sum((labels != -100).sum() for _, labels in all_batches)
        (sum(summed_loss(self.model, *each) for each in all_batches) / tokens).backward()

    def train(self, steps: range) -> list[Tensor]:
        norms = []
        for step in steps:
            self.gradients(step)
            norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), CLIP))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return norms


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Copies of all tensors, model's and optimizer's, whole, on every rank. Collective."""
    tensors = {name: value.clone() for name, value in full_state_dict(model, rank0_only=False).items()}
    states = full_optimizer_state_dict(model, optimizer, rank0_only=False)["state"]
    return tensors | {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_close(found: dict[str, Tensor], plain: Plain, **bound: float) -> None:
    expected = state_of(plain.model, plain.optimizer)
    assert found.keys() == expected.keys()
    moved = 0
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}", **bound or CLOSE)
        moved += name in plain_start() and not torch.equal(value, plain_start()[name].to(value.dtype))
    assert moved > 10


@functools.cache
def plain_start() -> dict[str, Tensor]:
    return Decoder().double().state_dict()


def on_meta(mesh: tuple[int, ...] = (), **options: Any) -> nn.Module:
    """A Decoder that is never whole on any rank; by default on one axis of all ranks."""
    with init_on_meta():
        model = Decoder().double()
    return shard_model(model, mesh=mesh_of(mesh or (dist.get_world_size(),)), **options)


# Each way to read state: of model, optimizer and a directory, tensors by name on every rank. Collective.


def _by_params(model: nn.Module, *_: Any) -> dict[str, Tensor]:
    with full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters(remove_duplicate=False)}


def _by_saving(model: nn.Module, optimizer: Any, path: Path) -> dict[str, Tensor]:
    save_checkpoint(path / "c", model, optimizer, overwrite=True)
    other = Decoder().double()
    load_pretrained(other, path / "c")
    return other.state_dict()


READS = {
    "named_full_tensors": lambda model, *_: dict(named_full_tensors(model)),
    "full_state_dict": lambda model, *_: full_state_dict(model, rank0_only=False),
    "full_params": _by_params,
    "save_checkpoint": _by_saving,
    "optimizer": lambda model, optimizer, _: state_of(model, optimizer),
}
