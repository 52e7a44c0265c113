"""Units with ``may_skip=True``: where a rank does not call one, it joins the collectives of the
others at that point.

Ranks must all-gather the same units in the same order. So each unit that calls others, of which
some may be skipped (a caller), keeps an order of its calls, and a rank that is about to call a unit
first makes up for the skipped ones before it. Backward then has the reverse order, because autograd
runs what was recorded last first.

The order cannot be read off the model: a tower that is registered first may be called after the
embedding, and whether inputs require grad, on which the moment of a reduction depends, is known in
a forward only. So it is learned: in a forward of which the order is not known, the ranks exchange
before each call which they call next. Once one had all units that may be skipped, later ones follow
its order without a word; and a forward that is recomputed in backward repeats its own calls. There
is one order for each mode: whether grad is on, whether inputs require it, and which parameters
train.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from shardkit._fsdp import fsdp_params, not_compiled
from shardkit._fsdp.collectives import (
    add_grad_edge,
    apply_to_tensors,
    device_of,
    is_root,
    modules_of,
    pass_through,
    reduce_unused,
)
from shardkit._torch.dispatch import in_backward, tree_leaves
from shardkit.errors import ShardkitError, listing

_END = -1  # the place of the end of a caller's forward
_CALLER = "_shardkit_caller"  # the attribute of a caller's module with its SkippableUnit
# A list that the next forward fills with its calls, or, in a recomputation, with those to repeat:
# checkpointing puts back the list of the first forward.
_CALLS = "_shardkit_made_calls"
_running: list[_Forward] = []  # the forwards of callers under way, innermost last

Mode: TypeAlias = tuple[int, tuple[bool, ...]]


class Call(NamedTuple):
    """One call of a unit, by its place among the units that the caller calls."""

    place: int
    grad: bool = False  # whether an input requires grad
    tracked: bool = True  # whether grad is enabled


@dataclass(eq=False)
class SkippableUnit:
    """A unit that calls units with ``may_skip=True``, that is one, or that one of these calls."""

    name: str
    module: FSDPModule
    may_skip: bool
    within: bool  # runs only if a unit with may_skip=True does, or is one
    checkpointed: bool
    # a JSON-ready value of each rank, by rank; collective
    exchange: Callable[[Any], dict[int, Any]]
    # the next units below it, in the order of registration
    calls: list[SkippableUnit] = field(default_factory=list)
    order: dict[Mode, list[Call]] = field(default_factory=dict)  # where it is known
    latest: list[Call] = field(default_factory=list)  # in the last forward with grad

    @functools.cached_property
    def params(self) -> list[Any]:
        """The ``FSDPParam`` objects of all units in the module, with its own."""
        return fsdp_params(self.module.modules())  # type: ignore[attr-defined]

    def text(self, place: int) -> str:
        """Return the name of the unit at a place, for errors."""
        return "the end of its forward" if place == _END else self.calls[place].name


def in_order(module: nn.Module) -> Callable[..., Any]:
    """Return the module's forward, at whose end skipped calls are made up for; before
    :func:`watch_calls` no change.
    """
    forward = module.forward

    @functools.wraps(forward)
    def ordered(*args: Any, **kwargs: Any) -> Any:
        caller = vars(module).get(_CALLER)
        if caller is None:
            return forward(*args, **kwargs)
        calls, vars(module)[_CALLS] = vars(module)[_CALLS], []
        with _begin_forward(caller, calls, (args, kwargs)) as run:
            return run.leave(forward(*args, **kwargs))

    # torch.compile(model) would trace what differs between ranks; units still compile
    return not_compiled(ordered)


def watch_calls(callers: Sequence[SkippableUnit]) -> None:
    """Make up for skipped calls of the units that ``callers`` call in forwards wrapped by
    :func:`in_order`. Local.
    """
    units = set(callers)
    for caller in callers:
        vars(caller.module).update({_CALLER: caller, _CALLS: []})
        for place, unit in enumerate(caller.calls):
            if unit.within:
                units.add(unit)
            for module in modules_of(unit.module):
                before = functools.partial(_before_call, caller, place)
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                if unit.within:
                    module.register_forward_hook(functools.partial(_after_call, caller))
    # else the sizes of a reduction would differ between ranks
    reduce_unused(unit.module for unit in units)


@contextmanager
def _begin_forward(caller: SkippableUnit, calls: list[Call], inputs: Any) -> Iterator[_Forward]:
    _running.append(_Forward(caller, calls, inputs))
    try:
        yield _running[-1]
    finally:
        _running.pop()


@not_compiled
def _before_call(
    caller: SkippableUnit, place: int, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    run = _running[-1] if _running else None
    if run is None or run.caller is not caller or module in run.entered:
        return None  # called on its own, or another module of a unit that is unsharded already
    modules = modules_of(caller.calls[place].module)
    if len(modules) > 1:
        run.entered.update(modules)
    with _saved_by_itself():
        return run.enter(place, (args, kwargs))


@not_compiled
def _after_call(caller: SkippableUnit, module: nn.Module, args: Any, output: Any) -> None:
    """Let backward reach a unit also where its output is not used, so that all ranks reduce it at
    the same point.
    """
    outputs = [tensor for tensor in _floating(output) if tensor.requires_grad]
    if outputs and _running and _running[-1].caller is caller:
        with _saved_by_itself():
            _running[-1].reached.append(add_grad_edge(outputs[0].new_zeros(()), *outputs))


def _saved_by_itself() -> AbstractContextManager[Any]:
    """Hide what is saved from a checkpoint around it: one of the unit that is called is recomputed
    outside of the caller's forward.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


class _Forward:
    """One forward of a caller, or what stands for it on a rank that skips the caller itself."""

    def __init__(self, caller: SkippableUnit, calls: list[Call], inputs: Any) -> None:
        """``calls`` is filled; if it is filled already, it is repeated."""
        self.caller = caller
        self.entered: set[nn.Module] = set()  # of units of several modules
        # zeros from skipped units that no later unit or output depends on yet
        self.pending: list[Tensor] = []
        self.reached: list[Tensor] = []  # zeros from units that ran
        self._mode = _mode(caller, inputs)
        self._next = 0  # in the order
        # A recomputation by another checkpoint than shardkit's is that of the latest forward.
        repeated = list(calls) or (caller.latest if in_backward() else [])
        self._order = repeated or caller.order.get(self._mode, [])  # empty: it is not known
        self._calls = [] if repeated else calls

    def enter(self, place: int, inputs: Any) -> Any:
        """Make up for what comes before a unit; return its inputs, from which backward reaches what
        was made up.
        """
        tracked = torch.is_grad_enabled()
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        has_grad = tracked and any(tensor.requires_grad for tensor in tensors)
        agreed = self.reach(Call(place, has_grad, tracked))
        if not (tracked and agreed.grad):
            return None
        zeros: list[Tensor] = []
        if not self.caller.calls[place].may_skip:
            zeros, self.pending = self.pending, []
        if tensors and not has_grad and not any(zero.requires_grad for zero in zeros):
            # as on the other ranks
            zeros = [torch.zeros((), device=tensors[0].device, requires_grad=True)]
        return _depends(inputs, zeros)

    def leave(self, output: Any) -> Any:
        """Make up for what comes after the last unit; return the output, from which backward
        reaches everything.
        """
        self.reach(Call(_END))
        return _depends(output, [*self.pending, *self.reached])

    def reach(self, mine: Call | None) -> Call:
        """Go through the calls that all ranks agree on until this rank's next one comes, and make
        up for those before it. Return the agreed form of it.

        ``mine`` is that next call, with ``_END`` as its place at the end of the forward; None on a
        rank that skips the caller itself, which makes up for all calls.
        """
        goal = _END if mine is None else mine.place
        ahead = [call.place for call in self._order[self._next :]]
        if self._order and goal != _END and goal not in ahead:
            raise self._unexpected(goal)
        while True:
            agreed = self._follow() if self._order else self._ask(mine)
            self._calls.append(agreed)
            if agreed.place == goal:
                break
            # A unit without may_skip is called on all ranks or on none, so it is made up for only
            # where this rank skips the caller around it.
            if not self._order or mine is None or self.caller.calls[agreed.place].may_skip:
                self.pending.append(self._make_up(agreed))
        if goal == _END:
            self._end()
        elif mine is not None and (mine.grad > agreed.grad or mine.tracked != agreed.tracked):
            # Backward would reach the unit at another point than on the other ranks.
            raise self._unexpected(goal)
        return agreed

    def _follow(self) -> Call:
        self._next += 1
        if self._next > len(self._order):
            return Call(_END)
        return self._order[self._next - 1]

    def _ask(self, mine: Call | None) -> Call:
        """Ask all ranks which call comes next. Collective."""
        caller = self.caller
        by_rank = caller.exchange([caller.name, mine])
        names = {name for name, _ in by_rank.values()}
        calls = [Call(*call) for _, call in by_rank.values() if call is not None]
        skippable: set[int] = set()
        others: set[int] = set()
        for call in calls:
            may_skip = call.place != _END and caller.calls[call.place].may_skip
            (skippable if may_skip else others).add(call.place)
        ways = {(call.place, call.tracked) for call in calls}
        if len(names) > 1 or len(others) > 1 or len(ways) > len(skippable) + len(others):
            raise self._different(by_rank)
        # Units between two others are called in the order of registration, as experts are.
        place = min(skippable or others, default=_END)
        alike = [call for call in calls if call.place == place] or [Call(_END)]
        return Call(place, any(call.grad for call in alike), alike[0].tracked)

    def _end(self) -> None:
        """Keep the order if it has all units that may be skipped."""
        called = {call.place for call in self._calls}
        skippable = {place for place, unit in enumerate(self.caller.calls) if unit.may_skip}
        if skippable <= called:
            self.caller.order.setdefault(self._mode, self._calls)
        if torch.is_grad_enabled():
            self.caller.latest = self._calls

    def _make_up(self, call: Call) -> Tensor:
        """Take part in a call that this rank skips."""
        unit = self.caller.calls[call.place]
        tracked = call.tracked and torch.is_grad_enabled()
        with torch.set_grad_enabled(tracked):
            has_grad = call.grad and tracked
            zero = torch.zeros((), device=device_of(unit.module), requires_grad=has_grad)
            body: Callable[[Tensor], Tensor] = functools.partial(_stand_in, unit, [])
            if unit.checkpointed and unit.calls and tracked:
                body = functools.partial(checkpoint, body, use_reentrant=False)
            return pass_through(unit.module, zero, body)

    def _unexpected(self, place: int) -> ShardkitError:
        calls = [call for call in self._order if call.place != _END]
        order = listing(self.caller.text(call.place) for call in calls)
        return ShardkitError(
            f"{self.caller.text(place)} was called differently than ranks agreed on, which is "
            f"{order}. All ranks must call the units that {self.caller.name} calls in the same "
            "order, and with the same requires_grad of inputs, because ranks that skip one follow "
            "that order. Call each unit with may_skip=True at most once in a forward; make a larger "
            "module the unit where order varies."
        )

    def _different(self, by_rank: dict[int, Any]) -> ShardkitError:
        lines = []
        for rank, (name, call) in by_rank.items():
            called = "nothing" if call is None else self.caller.text(call[0])
            lines.append(f"rank {rank} in {name}: {called}")
        return ShardkitError(
            f"{self.caller.name} calls different units next on different ranks: {listing(lines)}. "
            "Only a unit with may_skip=True may be skipped, and the others run in the same order "
            "on all ranks. Give the unit that only some ranks call may_skip=True, or call it on "
            "all."
        )


def _stand_in(unit: SkippableUnit, calls: list[Call], zero: Tensor) -> Tensor:
    """What runs as the forward of a skipped unit; ``calls`` is filled, or repeated."""
    with _begin_forward(unit, calls, zero) as run:
        if unit.calls:
            run.reach(None)
    trained = []
    for param in fsdp_params([unit.module]):
        if param.sharded_param.requires_grad:
            trained.append(param.unsharded_param)
    return add_grad_edge(zero, *run.pending, *trained)


def _mode(caller: SkippableUnit, inputs: Any) -> Mode:
    """0 without grad; with it 1, or 2 if an input requires grad, as it may from the first image on;
    and what trains: a tower may be frozen for the first steps, and unfrozen on all ranks.

    What the root gets is another matter: pixels that require grad are there on some ranks only.
    """
    if not torch.is_grad_enabled():
        return 0, ()
    has_grad = any(tensor.requires_grad for tensor in _floating(inputs))
    trains = tuple(param.sharded_param.requires_grad for param in caller.params)
    return 2 if has_grad and not is_root(caller.module) else 1, trains


def _depends(values: Any, zeros: list[Tensor]) -> Any:
    """Return the values, with tensors from which backward reaches the zeros: those that require
    grad, or else one.
    """
    zeros = [zero for zero in zeros if zero.requires_grad]
    if not (zeros and torch.is_grad_enabled()):
        return values
    tensors = _floating(values)
    chosen = [id(tensor) for tensor in tensors if tensor.requires_grad]
    chosen = chosen or [id(tensor) for tensor in tensors[:1]]

    def replace(tensor: Tensor) -> Tensor:
        return add_grad_edge(tensor, *zeros) if id(tensor) in chosen else tensor

    return apply_to_tensors(replace, values)


def _floating(values: Any) -> list[Tensor]:
    """The tensors that FSDP2 finds in the values, of floating-point dtypes."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            tensors.append(tensor)
        return tensor

    apply_to_tensors(note, values)
    return tensors
