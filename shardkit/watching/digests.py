"""Digests of a run, module by module, and of what ranks must hold equally."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._fsdp import fsdp_units
from shardkit._torch import named_sharded_parameters
from shardkit._torch.dispatch import in_backward, tree_leaves
from shardkit.grads import scale_loss
from shardkit.ranks import gather_by_rank, groups_of, together
from shardkit.shards import local_box
from shardkit.watching.compare import Divergence, distance

_WRAPPERS = re.compile(r"^module\.|\b(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(\.|$)")


def digest(tensor: Tensor, scale: float = 1.0, copies: int | None = None, weighted: bool = True) -> Tensor:
    """Return number, sum, weighted sum and sum of squares of a tensor's elements: 4 float64 on its device. Local.

    They add up over shards, and over the batches of ranks. The weights depend on the index in the last dim only, which
    is not sharded, and tell apart what has been permuted. Of a replicated tensor each rank returns its part.
    """
    local, replicas = tensor.detach(), 1
    if isinstance(local, DTensor):
        axes = zip(local.device_mesh.shape, local.placements, strict=True)
        replicas = math.prod(size for size, each in axes if each.is_replicate())
        local = local.to_local()
    local = local if local.is_floating_point() else local.double()  # packed 4-bit weights
    weights = torch.arange(local.shape[-1] if local.ndim else 1, device=local.device).cos().to(local.dtype)
    sums = [
        torch.full((), float(local.numel()), dtype=torch.float64, device=local.device),
        local.sum(dtype=torch.float64) * scale,
        (local * weights).sum(dtype=torch.float64) * (scale if weighted else 0.0),
        torch.linalg.vector_norm(local, dtype=torch.float64).square() * scale**2,
    ]
    return torch.stack(sums) / (replicas if copies is None else copies)


@contextmanager
def record_run(model: nn.Module, optimizer: Optimizer, path: str | Path) -> Iterator[None]:
    """Write digests of each step to a file, for :func:`compare_runs`: JSON lines of about 150 bytes.

    A step has the output of each module and its gradient, in the order in which they are computed, then the gradient of
    each parameter, and the parameter after ``optimizer.step()``. They are of all ranks together, so that runs of
    other worlds compare if the ranks' batches are parts of the same batch, and the loss is a mean over equal parts. The
    model may be plain, or wrapped by DDP or FSDP1. With tensor parallelism compare runs with the same one.

    Collective at each ``optimizer.step()``, which sends the digests of all modules once; the first rank writes. For
    debugging: every output is read three times.

    Args:
        model: before or after its first step.
        optimizer: of the model.
        path: of the file that the first rank writes.
    """
    recorder = _Recorder(model, path)
    handles = [optimizer.register_step_pre_hook(lambda *_: recorder.parameters("gradient"))]
    handles.append(optimizer.register_step_post_hook(lambda *_: recorder.end_step()))
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(partial(recorder.forward, _plain(name))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _plain(name: str) -> str:
    return _WRAPPERS.sub("", name).rstrip(".") or "(root)"


class _Recorder:
    def __init__(self, model: nn.Module, path: str | Path) -> None:
        self._model, self._path = model, Path(path)
        self._step, self._rows = 0, dict[str, tuple[str, Tensor]]()
        self._calls: Counter[tuple[str, str]] = Counter()
        self._groups = groups_of(model) or ([None] if dist.is_initialized() else [])
        ranks = list(gather_by_rank(None, self._groups)) if self._groups else [0]
        self._is_first = not self._groups or dist.get_rank() == ranks[0]
        # A rank's loss is divided by this number.
        self._divisor = float(scale_loss(torch.ones(()), 1, model)) if fsdp_units(model) else len(ranks)
        is_fsdp1 = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        self._copies = 1 if is_fsdp1 else len(ranks)  # of a plain parameter; FSDP1's are views of shards
        with together(self._groups):
            if self._is_first:
                self._path.write_text("")

    def forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for each in [] if in_backward() else tree_leaves(output):  # else recomputed
            if isinstance(each, Tensor) and each.is_floating_point():
                self._add(name, "forward", each)
                if each.requires_grad:
                    add = partial(self._add, name, "backward", scale=1.0 / self._divisor)
                    each.register_hook(add)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _add(self, name: str, what: str, tensor: Tensor, **options: Any) -> None:
        self._calls[name, what] += 1
        found = str(tensor.dtype).removeprefix("torch."), digest(tensor, **options)
        self._rows[f"{name}|{what}|{self._calls[name, what]}"] = found

    def parameters(self, what: str) -> None:
        """Add the gradients of all parameters, or the parameters."""
        for name, param in named_sharded_parameters(self._model):
            tensor = param.grad if what == "gradient" else param
            if tensor is not None:
                copies = None if isinstance(tensor, DTensor) else self._copies
                self._add(_plain(name), what, tensor, copies=copies, weighted=False)

    def end_step(self) -> None:
        """Add up the digests of all ranks, and write them."""
        self.parameters("parameter")
        own = {key: [dtype, *found.tolist()] for key, (dtype, found) in self._rows.items()}
        ranks = gather_by_rank(own, self._groups).values() if self._groups else [own]
        self._step += 1
        lines = []
        for key in dict.fromkeys(key for rows in ranks for key in rows):
            found = [rows[key] for rows in ranks if key in rows]
            at, what, call = key.split("|")
            row = {"step": self._step, "at": at, "what": what, "call": int(call), "dtype": found[0][0]}
            sums = [sum(column) for column in zip(*(each[1:] for each in found), strict=True)]
            lines.append(json.dumps(row | {"digest": sums}) + "\n")
        if self._is_first:
            with self._path.open("a") as file:
                file.writelines(lines)
        self._rows.clear()
        self._calls.clear()


def compare_ranks(model: nn.Module, optimizer: Optimizer | None = None) -> Divergence | None:
    """Return the first state that must be equal on all ranks and is not, or None. Collective; changes nothing.

    Compared are digests of buffers, plain parameters, and the shards that HSDP replicates, with their gradients and
    optimizer state, and the settings: which modules train, which parameters require grad, the optimizer's groups.
    """
    held: dict[str, Any] = {}
    for name, module in model.named_modules():
        held[f"{name or '(root)'}.training"] = module.training
    for name, buffer in model.named_buffers():
        _hold(held, name, buffer)
    for name, param in named_sharded_parameters(model):
        held[f"{name}.requires_grad"] = param.requires_grad
        state = optimizer.state.get(param, {}) if optimizer is not None else {}
        for suffix, value in {
            "": param,
            ".grad": param.grad,
            **{f".{key}": each for key, each in state.items()},
        }.items():
            _hold(held, name + suffix, value)
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else []):
        held |= {f"group {number}.{key}": repr(value) for key, value in group.items() if key != "params"}
    groups = groups_of(model) or ([None] if dist.is_initialized() else [])
    ranks = gather_by_rank(held, groups) if groups else {0: held}
    for key in dict.fromkeys(key for values in ranks.values() for key in values):
        # Of a shard, other ranks do not have this part.
        (first, expected), *others = [(r, each.get(key)) for r, each in ranks.items() if key in each or "|" not in key]
        for rank, value in others:
            if value != expected and repr(value) != repr(expected):
                at = key.partition("|")[0]
                return Divergence(None, at, f"on ranks {first} and {rank}", 1, distance(expected, value), 0.0)
    return None


def _hold(held: dict[str, Any], name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        held[name] = repr(value)
    elif not isinstance(value, DTensor):
        held[name] = digest(value.double() if value.numel() else value, copies=1).tolist()
    else:  # equal on the ranks with the same part
        held[name] = f"sharded {value.placements}"  # not None, as on a rank without a gradient
        held[f"{name}|{local_box(value)}"] = digest(value, copies=1).tolist()
