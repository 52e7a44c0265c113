"""What runs with a sharded model after ``shard_model``, at the begin and end of each forward and backward.

FSDP2 leaves four things to its user. Units with ``reshard_after_forward=False`` stay gathered when no backward comes.
The module that runs first becomes the root, and ``forward`` called by name gathers nothing. Parameters first gathered
under ``inference_mode`` cannot be trained. And what ``create_graph=True`` saved is freed before it is used.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from shardkit._fsdp import FSDPUnit, events
from shardkit._torch import tree_leaves
from shardkit.errors import ShardkitError, listing, message
from shardkit.runtime.outside import raise_named
from shardkit.runtime.root import check_written


def attend(root: FSDPModule, methods: Iterable[str] = ()) -> None:
    """Support forwards without grad, entries other than the root's forward, and double backward. Local, in place.

    For any FSDP2 model, before its first forward. What it adds runs once per forward and per backward. If a module
    around ``root`` becomes the FSDP root, none of it runs.

    Args:
        root: the outermost FSDP module.
        methods: what ``register_fsdp_forward_method`` was called for, by dotted names from ``root``.
    """
    watch = _Watch(root)
    events.listen(root, watch)
    events.initialize_at_first_forward(root, lambda: _check_materialized(root))  # type: ignore[arg-type]
    events.end_partial_forwards(root)
    register_fsdp_forward_method(root, "forward")  # type: ignore[arg-type]
    for name in ("forward", *methods):
        fqn, _, method = name.rpartition(".")
        _gather_once(root.get_submodule(fqn), method, watch)  # type: ignore[attr-defined]


class _Watch:
    """Reshards what a forward without grad left gathered, and keeps gathered what a double backward needs."""

    def __init__(self, root: FSDPModule) -> None:
        self.root = root
        self._units: list[FSDPUnit] = []
        self._gathered: set[int] = set()  # by id: units that were gathered before, as by unshard(), and stay so
        self._noted = 0
        self._methods = 0  # how many are running; one may run several forwards
        self._hold: events.Hold | None = None
        self._frees_graph = True

    def forward_begins(self) -> None:
        if self._hold is not None and self._hold.is_stale:
            self._release(self._hold)
        self._units = self._units or events.units_of_root(self.root)
        if torch.is_inference_mode_enabled():
            events.gather_outside_inference_mode(self._units, True)
        if not self._methods:
            self._remember()

    def forward_ended(self) -> None:
        if torch.is_inference_mode_enabled():
            events.gather_outside_inference_mode(self._units, False)
        if not self._methods and not torch.is_grad_enabled():
            self._restore()

    @contextmanager
    def method(self) -> Iterator[list[Any]]:
        """Surround a call that may run several forwards; the caller appends what it returned to the list."""
        if not self._methods:
            self._remember()
        self._methods += 1
        returned: list[Any] = []
        try:
            yield returned
        finally:
            self._methods -= 1
        trains = torch.is_grad_enabled() and any(
            isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(returned)
        )
        if not (self._methods or events.is_forward_under_way(self.root) or trains):
            self._restore()

    def _remember(self) -> None:
        self._gathered = {id(unit) for unit in self._units if not unit.is_sharded}
        self._noted = events.forwards_noted(self.root) if self._units else 0

    def _restore(self) -> None:
        """Reshard what was gathered since, because no backward will."""
        for unit in self._units:
            if not unit.is_sharded and id(unit) not in self._gathered:
                events.reshard(unit)
        if self._units:
            events.forget_forwards(self.root, self._noted)

    def backward_begins(self) -> None:
        self._frees_graph = not events.backward_keeps_graph()
        if self._hold is None and torch.is_grad_enabled():  # enabled in a backward only with create_graph
            self._hold = events.Hold(self.root, _refuse_gradients_with_graph)

    def backward_ended(self) -> None:
        if self._hold is not None and self._frees_graph:
            self._release(self._hold)

    def _release(self, hold: events.Hold) -> None:
        hold.release()
        self._hold = None


def _gather_once(module: nn.Module, name: str, watch: _Watch) -> None:
    """Make a registered method gather only if the module is not gathered yet, as inside its own forward."""
    gathering = getattr(module, name)
    original: Callable[..., Any] = gathering.__wrapped__

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        try:
            if events.is_in_use(self):
                return original(*args, **kwargs)
            with watch.method() as returned:
                returned.append(gathering(*args, **kwargs))
            return returned[0]
        except RuntimeError as error:
            raise_named(watch.root, error)  # type: ignore[arg-type]
            raise

    # functools.wraps of a bound method: inspect would drop its first parameter as self, and transformers' Trainer the
    # column input_ids of the data set with it. torch's own wrapper does (2.11 to 2.15).
    own = inspect.signature(original)
    self_ = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = own.replace(parameters=[self_, *own.parameters.values()])  # type: ignore[attr-defined]
    events.not_inlined_when_compiled(method)  # type: ignore[arg-type]
    setattr(module, name, MethodType(method, module))


def _check_materialized(root: nn.Module) -> None:
    check_written(root)
    meta = [fqn for fqn, param in root.named_parameters() if isinstance(param, DTensor) and param.is_meta]
    if meta:
        rule = "A forward needs values"
        fix = "Call shardkit.materialize(model), or load_pretrained, before the first forward"
        raise ShardkitError(message(listing(meta, 6), "on the meta device", rule, fix))


def _refuse_gradients_with_graph() -> None:
    problem = "called with create_graph=True, which gives parameters gradients with a graph"
    rule = "Gradients of sharded parameters are reduced across ranks, and autograd cannot differentiate the reduction"
    fix = "Use torch.autograd.grad(outputs, inputs, create_graph=True) for the inner gradient and backward() for the "
    fix += "loss; call shardkit.reset_after_error(model) before the next step"
    raise ShardkitError(message("backward", problem, rule, fix))
