"""Where two runs, or two ranks, first differ: ``record_run``, ``compare_runs``, ``compare_ranks``."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from shardkit.errors import ShardkitError, message
from shardkit.grads import scale_loss
from shardkit.ranks import Groups, gather_by_rank, groups_of, together
from shardkit.shards import local_box

_WRAPPERS = re.compile(r"^module\.|\b(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(\.|$)")


@dataclass(frozen=True)
class Divergence:
    """Where two runs, or two ranks, first differ; prints as a line."""

    step: int | None  # from 1; None between ranks
    at: str  # the FQN of a module or parameter, or a setting
    what: str  # "forward", "backward", "gradient" or "parameter"; between ranks, which ones
    call: int  # the number of the module's output in the step, from 1
    distance: float  # at least the relative L2 distance of the tensors; inf for a nan, other elements, or a setting
    tolerance: float  # which it exceeds

    def __str__(self) -> str:
        where = f"step {self.step}, {self.what} of {self.at}" if self.step is not None else f"{self.at} {self.what}"
        call = f", output {self.call}" if self.call > 1 else ""
        return f"{where}{call}: at least {self.distance:.1e} apart (relative; tolerance {self.tolerance:.1e})"


# --- Digests ---


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


def distance(a: Any, b: Any) -> float:
    """Return a lower bound of ``|x - y| / max(|x|, |y|)`` from two digests, in the L2 norm; inf for anything else.

    By Cauchy and Schwarz, sums with weights of at most 1 over n elements differ by at most ``sqrt(n) * |x - y|``.
    """
    if not isinstance(a, list) or not isinstance(b, list) or a[0] != b[0] or not all(map(math.isfinite, a + b)):
        return 0.0 if repr(a) == repr(b) else math.inf
    norms = [math.sqrt(max(each[3], 0.0)) for each in (a, b)]
    sums = max(abs(x - y) for x, y in zip(a[1:3], b[1:3], strict=True)) / math.sqrt(a[0] or 1.0)
    return float(max(sums, abs(norms[0] - norms[1])) / (max(norms) or 1.0))


# --- Two runs ---


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
    recorder = _Recorder(model, Path(path))
    handles = [optimizer.register_step_pre_hook(lambda *_: recorder.parameters("gradient"))]
    handles.append(optimizer.register_step_post_hook(lambda *_: recorder.end_step()))
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(partial(recorder.forward, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder:
    def __init__(self, model: nn.Module, path: Path) -> None:
        self._model, self._path, self._step = model, path, 0
        self._rows: dict[tuple[str, str, int], tuple[str, Tensor]] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._groups = _groups(model)
        ranks = list(_gather(None, self._groups))
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
        at = _WRAPPERS.sub("", name).rstrip(".") or "(root)"
        self._calls[at, what] += 1
        self._rows[at, what, self._calls[at, what]] = (
            str(tensor.dtype).removeprefix("torch."),
            digest(tensor, **options),
        )

    def parameters(self, what: str) -> None:
        """Add the gradients of all parameters, or the parameters."""
        for name, param in named_sharded_parameters(self._model):
            tensor = param.grad if what == "gradient" else param
            if tensor is not None:
                copies = None if isinstance(tensor, DTensor) else self._copies
                self._add(name, what, tensor, copies=copies, weighted=False)

    def end_step(self) -> None:
        """Add up the digests of all ranks, and write them."""
        self.parameters("parameter")
        self._step += 1
        own = [[key, dtype, found.tolist()] for key, (dtype, found) in self._rows.items()]
        total: dict[tuple[Any, ...], tuple[str, list[float]]] = {}
        for rows in _gather(own, self._groups).values():
            for key, dtype, found in rows:
                _, sums = total.setdefault(tuple(key), (dtype, [0.0] * len(found)))
                sums[:] = map(sum, zip(sums, found, strict=True))
        if self._is_first:
            with self._path.open("a") as file:
                for (at, what, call), (dtype, sums) in total.items():
                    row = {"step": self._step, "at": at, "what": what, "call": call, "dtype": dtype, "digest": sums}
                    file.write(json.dumps(row) + "\n")
        self._rows.clear()
        self._calls.clear()


def compare_runs(dump_a: str | Path, dump_b: str | Path, tolerance: float | None = None) -> Divergence | None:
    """Return where two files of :func:`record_run` first differ, in the order of the first; None if nowhere. Local.

    Args:
        dump_a: the file of one run.
        dump_b: of the other: another world, FSDP1, another version. Steps and modules that one lacks are not compared.
        tolerance: of :attr:`Divergence.distance`; None is the resolution of the dtype (float32: 1.2e-7), which rounding
            in another order stays below, until training has amplified it.

    Raises:
        ShardkitError: a file is not one of ``record_run``, or they have no step and module in common.
    """
    a, b = _read(dump_a), _read(dump_b)
    if not a.keys() & b.keys():
        problem = f"finds no step and module that {dump_a} and {dump_b} have in common"
        raise ShardkitError(message("compare_runs", problem, "", "Record both runs from the same model"))
    for key in [key for key in a if key in b]:
        dtypes = [getattr(torch, dtype) for dtype in (a[key][0], b[key][0])]
        coarser = max(torch.finfo(dtype).eps if dtype.is_floating_point else 0.0 for dtype in dtypes)
        limit = coarser if tolerance is None else tolerance
        if (far := distance(a[key][1], b[key][1])) > limit:
            return Divergence(*key, far, limit)
    return None


def _read(path: str | Path) -> dict[tuple[int, str, str, int], tuple[str, list[float]]]:
    try:
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        return {(row["step"], row["at"], row["what"], row["call"]): (row["dtype"], row["digest"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"is not a file of record_run: {type(error).__name__}: {error}"
        raise ShardkitError(message(str(path), problem, "", "Write it with shardkit.watching.record_run")) from error


# --- The ranks of one run ---


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
                return Divergence(None, at, f"on ranks {first} and {rank}", 1, distance(expected, value), 0.0)
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
            yield f"{name}|{local_box(value)}", digest(value, copies=1).tolist()
        elif isinstance(value, Tensor):
            yield name, digest(value.double() if value.numel() else value, copies=1).tolist()
        else:
            yield name, repr(value)
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else []):
        yield from ((f"group {number}.{key}", repr(value)) for key, value in group.items() if key != "params")


def _groups(model: nn.Module) -> Groups:
    return groups_of(model) or ([None] if dist.is_initialized() else [])


def _gather(value: Any, groups: Groups) -> dict[int, Any]:
    return gather_by_rank(value, groups) if groups else {0: value}
