"""Where the ranks of a run first differ in state that should be equal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._torch import named_sharded_parameters
from shardkit.ranks import Groups, gather_by_rank, groups_of
from shardkit.shards import local_box


@dataclass(frozen=True)
class Divergence:
    """Where two ranks first differ; prints as a line."""

    at: str  # the FQN of a parameter or buffer, or a setting
    ranks: tuple[int, int]
    distance: float  # at least the relative L2 distance of the tensors; inf for a nan, other elements, or a setting

    def __str__(self) -> str:
        return f"{self.at} on ranks {self.ranks[0]} and {self.ranks[1]}: at least {self.distance:.1e} apart (relative)"


def digest(tensor: Tensor) -> list[float]:
    """Return number, sum, weighted sum and sum of squares of the elements of this rank's part of a tensor. Local.

    The weights depend on the index in the last dim, and tell apart what has been permuted.
    """
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().double()
    weights = torch.arange(local.shape[-1] if local.ndim else 1, device=local.device).cos().to(local.dtype)
    sums = [local.sum(), (local * weights).sum(), torch.linalg.vector_norm(local).square()]
    return [float(local.numel()), *torch.stack(sums).tolist()]


def distance(a: Any, b: Any) -> float:
    """Return a lower bound of ``|x - y| / max(|x|, |y|)`` from two digests, in the L2 norm; inf for anything else.

    By Cauchy and Schwarz, sums with weights of at most 1 over n elements differ by at most ``sqrt(n) * |x - y|``.
    """
    if not isinstance(a, list) or not isinstance(b, list) or a[0] != b[0] or not all(map(math.isfinite, a + b)):
        return 0.0 if repr(a) == repr(b) else math.inf
    norms = [math.sqrt(max(each[3], 0.0)) for each in (a, b)]
    sums = max(abs(x - y) for x, y in zip(a[1:3], b[1:3], strict=True)) / math.sqrt(a[0] or 1.0)
    return float(max(sums, abs(norms[0] - norms[1])) / (max(norms) or 1.0))


def compare_ranks(model: nn.Module, optimizer: Optimizer | None = None) -> Divergence | None:
    """Return the first state that must be equal on all ranks and is not, or None. Collective; changes nothing.

    Compared are digests of buffers, plain parameters, and the shards that HSDP replicates, with their gradients and
    optimizer state, and the settings: which modules train, which parameters require grad, the optimizer's groups.
    """
    ranks = _gather(dict(_held(model, optimizer)), _groups(model))
    for key in dict.fromkeys(key for values in ranks.values() for key in values):
        # Of a shard, other ranks do not have this part.
        (first, expected), *others = [(r, each.get(key)) for r, each in ranks.items() if key in each or "|" not in key]
        for rank, value in others:
            if repr(value) != repr(expected):
                at = key.partition("|")[0]
                return Divergence(at, (first, rank), distance(expected, value))
    return None


def _held(model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Any]]:
    """Yield what this rank holds, by name: settings as texts, tensors as digests."""
    for name, module in model.named_modules():
        yield f"{name or '(root)'}.training", repr(module.training)
    tensors: dict[str, Any] = dict(model.named_buffers())
    for name, param in named_sharded_parameters(model):
        yield f"{name}.requires_grad", repr(param.requires_grad)
        tensors |= {name: param, f"{name}.grad": param.grad}
        state = optimizer.state.get(param, {}) if optimizer is not None else {}
        tensors |= {f"{name}.{key}": value for key, value in state.items()}
    for name, value in tensors.items():
        if isinstance(value, DTensor):  # equal on the ranks with the same part
            yield name, f"sharded {value.placements}"  # not None, as on a rank without a gradient
            yield f"{name}|{local_box(value)}", digest(value)
        elif isinstance(value, Tensor):
            yield name, digest(value)
        else:
            yield name, repr(value)
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else []):
        yield from ((f"group {number}.{key}", repr(value)) for key, value in group.items() if key != "params")


def _groups(model: nn.Module) -> Groups:
    return groups_of(model) or ([None] if dist.is_initialized() else [])


def _gather(value: Any, groups: Groups) -> dict[int, Any]:
    return gather_by_rank(value, groups) if groups else {0: value}
