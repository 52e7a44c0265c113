"""Trace one training step of a model on fake tensors, split at the points where FSDP2's hooks
unshard and reshard units.

All that is allocated between two such points is the model's own: activations, temporaries,
gradients. What units hold follows from the plan and is added by
:mod:`shardkit.memory.allocations`, so one trace serves every strategy.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._torch import FakeTensor, local_tensor, real_tensors
from shardkit._torch.dispatch import (
    FakeTensorMode,
    TorchDispatchMode,
    has_wrappers,
    same_dropout_on_shards,
    tree_map,
)
from shardkit._torch.dispatch import tensors_of as tensors_of
from shardkit.activations import checkpointed
from shardkit.errors import PlanError
from shardkit.plan import ShardingPlan, ShardUnit
from shardkit.runtime.float32 import cast_at_borders
from shardkit.runtime.replicated import compute_in
from shardkit.shards import as_sharded
from shardkit.tiles import tiled

START = "start"
FORWARD = "forward"
AFTER_FORWARD = "after forward"
BACKWARD = "backward"
AFTER_BACKWARD = "after backward"

Loss: TypeAlias = Callable[[Any], Tensor]
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Interval:
    """What the model allocates from one hook point to the next, without what FSDP2 does."""

    moment: str  # that begins it: before or after the forward or backward of the unit
    unit: str  # the unit's name; empty at the start
    delta: int = 0  # bytes alive at its end minus those at its beginning
    peak: int = 0  # the most bytes alive during it minus those at its beginning, >= 0


@dataclass(frozen=True)
class Trace:
    """What the model itself allocates in one forward and backward, for one rank's batch."""

    intervals: tuple[Interval, ...]  # in order
    # of each unit's unsharded gradients, in its compute dtype, by the unit's name
    grad_bytes: Mapping[str, int]
    batch_bytes: int  # of the batch's tensors
    # of gradients of parameters without a unit, which are not reduced into shards
    other_grad_bytes: int = 0


def trace(
    model: nn.Module,
    plan: ShardingPlan,
    batch: Any,
    *,
    loss: Loss | None = None,
    new_meter: Callable[[], IntervalMeter] | None = None,
) -> Trace:
    """Measure one forward and backward of ``model`` on fake tensors, or where they do not do on
    copies of the real ones. Local; the model is as before.

    Model, batch and loss are as for :func:`shardkit.memory.estimate`. The plan's units define the
    intervals, and the dtypes to compute in. The output is dropped before backward, as in
    ``model(**batch).loss.backward()``. What ``new_meter`` returns measures; a subclass of
    IntervalMeter may count more than bytes.

    Raises:
        PlanError: the model is sharded already, or does not run.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise PlanError(
            "model is sharded already. Activations are measured on the plain model, without "
            "FSDP2's hooks and shards. Build it again on the meta device: init_on_meta()."
        )

    def measure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Trace:
        with (new_meter or IntervalMeter)() as meter:
            params = dict(model.named_parameters())
            inputs = tensors_of((args, kwargs))
            for tensor in (*params.values(), *model.buffers(), *inputs):
                meter.ignore(tensor)
            for fqn, tiles in plan.tiles:
                module = model.get_submodule(fqn)
                module.forward = tiled(module, fqn, tiles)
            watched_units = []
            for unit in plan.units:
                modules = [model.get_submodule(fqn) for fqn in unit.modules]
                own = [params[fqn] for fqn in unit.params]
                watched_units.append(WatchedUnit(unit, modules, own, meter))
                if unit.checkpoint_activations:
                    for fqn, module in zip(unit.modules, modules, strict=True):
                        module.forward = checkpointed(module, fqn, unit.checkpoint_activations)
            (loss or _default_loss)(model(*args, **kwargs)).backward()  # type: ignore[no-untyped-call]
            # FSDP2's callback at the end of backward: the root first.
            for watched in reversed(watched_units):
                watched.after_backward()
            meter.close()
            grad_bytes = {watched.unit.name: watched.grad_bytes for watched in watched_units}
            # The gradients of units are dropped, so these belong to no unit.
            others = sum(_nbytes(param.grad) for param in params.values() if param.grad is not None)
            batch_bytes = sum(map(_nbytes, inputs))
            return Trace(tuple(meter.intervals), grad_bytes, batch_bytes, others)

    fix = "Pass a batch that the model accepts, or loss=... for what forward returns"
    return on_fake_tensors(measure, model, plan, batch, "batch", fix)


def _default_loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else tensors_of(output)[0].float().mean()


def mixed(traces: Mapping[Any, Trace], policies: Mapping[str, Any]) -> Trace | None:
    """Return the trace whose units are those of the trace of their policy of checkpointing.

    ``traces`` are by policy; units whose policy has none are those of the first. None if the traces
    differ in the order in which units run, as where blocks share a unit inside.
    """
    first = next(iter(traces.values()))
    intervals = list(first.intervals)
    for policy, trace in traces.items():
        if len(trace.intervals) != len(intervals):
            return None
        for place, interval in enumerate(trace.intervals):
            if (interval.moment, interval.unit) != (intervals[place].moment, intervals[place].unit):
                return None
            if interval.unit and policies[interval.unit] == policy:
                intervals[place] = interval
    return replace(first, intervals=tuple(intervals))


class IntervalMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts the bytes of every storage that an operator returns until it is freed,
    each storage once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.intervals: list[Interval] = []
        self._live = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.open(START, "")

    def ignore(self, tensor: Tensor) -> None:
        """Exclude this tensor's storage."""
        self._count(local_of(tensor).untyped_storage(), nbytes=0)

    def begin(self, moment: str, unit: str) -> None:
        """End the current interval and begin another."""
        self.close()
        self.open(moment, unit)

    def open(self, moment: str, unit: str) -> None:
        self._peak = self._live
        self.opened = moment, unit, self._live

    def close(self) -> None:
        moment, unit, live = self.opened
        self.intervals.append(Interval(moment, unit, self._live - live, self._peak - live))

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then count what it returns."""
        if has_wrappers(types):
            return NotImplemented  # called again with what they wrap
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            self._count(storage, storage.nbytes())
        return result

    def _count(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = id(storage)
        if key in self._known:
            return

        def freed(_: object) -> None:
            del self._known[key]
            self._live -= nbytes

        self._known[key] = weakref.ref(storage, freed)
        self._live += nbytes
        self._peak = max(self._peak, self._live)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, as tensor parallelism makes them, or the tensor."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _nbytes(tensor: Tensor) -> int:
    return local_of(tensor).nbytes


class WatchedUnit:
    """Hooks on one unit's modules that begin its intervals and, after its backward, drop its
    gradients.
    """

    def __init__(
        self,
        unit: ShardUnit,
        modules: Sequence[nn.Module],
        params: Sequence[nn.Parameter],
        meter: IntervalMeter,
    ) -> None:
        self.unit = unit
        self.grad_bytes = 0
        self._params = params
        self._meter = meter
        self._in_backward = False
        hook_unit(unit, modules, self._before_forward, self._after_forward)

    def _before_forward(self, inputs: Any) -> Any:
        if self._in_backward:  # a checkpointed forward runs again
            return inputs
        self._meter.begin(FORWARD, self.unit.name)
        tensors = [tensor for tensor in tensors_of(inputs) if tensor.requires_grad]
        if not tensors or not torch.is_grad_enabled():
            return inputs
        views = _Boundary.apply(self, *tensors)  # type: ignore[no-untyped-call]
        by_id = {id(tensor): view for tensor, view in zip(tensors, views, strict=True)}
        return tree_map(lambda leaf: by_id.get(id(leaf), leaf), inputs)

    def _after_forward(self, output: Any) -> Any:
        if not self._in_backward:
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._before_backward)  # type: ignore[no-untyped-call]
            self._meter.begin(AFTER_FORWARD, self.unit.name)
        return output

    def _before_backward(self, grad: Tensor) -> Tensor:
        if not self._in_backward:
            self._in_backward = True
            self._meter.begin(BACKWARD, self.unit.name)
        return grad

    def after_backward(self) -> None:
        """End the unit's backward: the gradients of its inputs are computed, or the whole backward
        is over.
        """
        if not self._in_backward:
            return
        self._in_backward = False
        self._meter.close()
        # Between two intervals, as FSDP2 reduces and frees the unsharded gradients.
        for param in self._params:
            if param.grad is not None:
                self.grad_bytes += _nbytes(param.grad)
                param.grad = None
        self._meter.open(AFTER_BACKWARD, self.unit.name)


class _Boundary(torch.autograd.Function):
    """The identity on a unit's inputs; its backward runs after the unit's own."""

    @staticmethod
    def forward(ctx: Any, watched: WatchedUnit, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.watched = watched
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.watched.after_backward()
        return (None, *grads)


def hook_unit(
    unit: ShardUnit,
    modules: Sequence[nn.Module],
    before: Callable[[Any], Any],
    after: Callable[[Any], Any],
) -> None:
    """Call ``before`` with the inputs of the first of a unit's modules that runs, and ``after``
    with the output of the last.

    Both return what to go on with. Inputs and outputs are cast as FSDP2 casts them. The user's
    hooks run inside, as with FSDP2's.
    """
    policy = unit.mp_policy
    input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
    waiting = set[nn.Module]()  # the modules that have to run until the unit is done

    def pre_hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        inputs = _cast((args, kwargs), input_dtype)
        if waiting:
            return inputs
        waiting.update(modules)
        return before(inputs)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        waiting.discard(module)
        output = _cast(output, policy.output_dtype)
        return output if waiting else after(output)

    for module in modules:
        module.register_forward_pre_hook(pre_hook, prepend=True, with_kwargs=True)
        module.register_forward_hook(hook)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.to(dtype)
        return leaf

    return tree_map(cast, tree)


# The model on fake tensors, or on copies of its tensors.


def on_fake_tensors(
    run: Callable[[tuple[Any, ...], Mapping[str, Any]], ResultT],
    model: nn.Module,
    plan: ShardingPlan,
    batch: Any,
    name: str,
    fix: str,
) -> ResultT:
    """Return ``run(args, kwargs)`` with fake tensors in the model and in the arguments of its
    forward.

    Where that fails, as for a forward that reads values, and model and batch have values, it runs
    on copies of them, on the model's device. If that fails too, the first error becomes a PlanError
    about the batch, by its name.
    """
    device = "cpu"
    for param in model.parameters():
        if isinstance(param, DTensor):  # tensor parallelism moves what it computes with there
            device = param.device_mesh.device_type
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with _stand_ins(model, plan, batch, mode, partial(_faked, device)) as arguments:
            return run(*arguments)
    except Exception as error:
        cause = error
        problem = f"{name} fails in the model on fake tensors: {_told(error)}."
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(batch)]
    if not any(tensor.is_meta or isinstance(tensor, _NOT_COPIED) for tensor in tensors):
        first = next(model.parameters())
        devices = [first.device] if first.is_cuda else []
        copied = partial(_copied, first.device)
        try:
            with (
                torch.random.fork_rng(devices),
                _stand_ins(model, plan, batch, nullcontext(), copied) as arguments,
            ):
                return run(*arguments)
        except Exception as error:
            problem += f" On copies of the real ones: {_told(error)}."
    raise PlanError(
        f"{problem} The model runs once on tensors that have shapes but no values, and where that "
        f"fails on copies of model and batch, unless they are on meta. {fix}."
    ) from cause


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('. ')}"


@contextmanager
def _stand_ins(
    model: nn.Module,
    plan: ShardingPlan,
    batch: Any,
    mode: AbstractContextManager[Any],
    stand_in: Callable[..., Any],
) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Run the body with other tensors in the model; yield the arguments of its forward, of such
    too.

    Parameters have the dtype that their unit computes in, as FSDP2 unshards them. Afterwards the
    attributes of all modules, those of the objects that they hold, and the content of lists, dicts
    and sets in them are as before: the model keeps its hooks, caches, counters and gradients. What
    forward writes elsewhere, as in globals, stays.
    """
    args: Any = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = batch
    elif isinstance(batch, (tuple, list)):
        args = batch
    else:
        args = (batch,)
    before = _attributes_of(model)
    with torch.inference_mode(False), torch.enable_grad(), real_tensors():
        try:
            with mode, same_dropout_on_shards(), _without_packing(batch):
                _put(model, plan, stand_in)
                yield tree_map(stand_in, (tuple(args), dict(kwargs)))
        finally:
            for container, content in reversed(before):
                container.clear()
                if isinstance(container, (list, deque)):
                    container.extend(content)
                else:
                    container.update(content)


_NOT_COPIED = (DTensor, FakeTensor)  # a forward of DTensors communicates
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque, tuple)


def _attributes_of(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return the containers in which the model's modules keep their state, each with a copy."""
    waiting: list[Any] = []
    for module in model.modules():
        waiting.append(vars(module))
        for value in vars(module).values():  # such as a config or a cache
            if hasattr(value, "__dict__") and not isinstance(value, ModuleType):
                waiting.append(vars(value))
    seen = set()
    copies = []
    while waiting:
        container = waiting.pop()
        if id(container) in seen or type(container) not in _CONTAINERS:
            continue
        seen.add(id(container))
        if not isinstance(container, tuple):
            copies.append((container, copy.copy(container)))
        waiting += container.values() if isinstance(container, dict) else container
    return copies


def _put(model: nn.Module, plan: ShardingPlan, stand_in: Callable[..., Any]) -> None:
    dtypes: dict[str, torch.dtype | None] = {}
    for unit in plan.units:
        dtypes.update(dict.fromkeys(unit.params, unit.mp_policy.param_dtype))
    fakes: dict[Tensor, Tensor] = {}
    for fqn, param in model.named_parameters():
        fakes[param] = nn.Parameter(stand_in(param, dtypes.get(fqn)), param.requires_grad)
    for module in model.modules():
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for tensors in registries:
            for name, value in tensors.items():
                if isinstance(value, Tensor):
                    tensors[name] = fakes.setdefault(value, stand_in(value))
        config = getattr(getattr(module, "config", None), "__dict__", {})  # which may be frozen
        if "use_cache" in config:
            # transformers fills no cache in training, and checkpointed blocks must not.
            config["use_cache"] = False
    for unit in plan.units:
        if unit.float32:
            cast_at_borders(model, unit.modules)
    for fqn, dtype in plan.replicated_modules().items():
        compute_in(model.get_submodule(fqn), dtype)


def _without_packing(batch: Any) -> AbstractContextManager[Any]:
    # transformers takes all fake positions for those of packed documents, and makes a mask of
    # tokens by tokens. A batch with positions may be packed; only shapes are read.
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None or (isinstance(batch, Mapping) and "position_ids" in batch):
        return nullcontext()
    find = masks.find_packed_sequence_indices

    def find_in_real(positions: Tensor) -> Any:
        return None if isinstance(positions, FakeTensor) else find(positions)

    return patch.object(masks, "find_packed_sequence_indices", find_in_real)


def _copied(device: torch.device, value: Any, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device, dtype, copy=True).requires_grad_(value.requires_grad)


def _faked(device: str, value: Any, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        fake: Tensor = as_sharded(_faked(device, local_tensor(value), dtype), value)
    else:
        fake = torch.empty(value.shape, dtype=dtype or value.dtype, device=device)
    return fake.requires_grad_(value.requires_grad)
