"""Units with ``may_skip=True``: where a rank does not call one, it joins the collectives of the
others at that point.

Ranks must all-gather the same units in the same order. So each unit that calls others, of which
some may be skipped (a caller), keeps an order of its calls, and a rank that is about to call a unit
first makes up for the skipped ones before it. Backward then has the reverse order, because autograd
runs what was recorded last first.

The order cannot be read off the model: a tower that is registered first may be called after the
embedding, and whether inputs require grad, on which the moment of a reduction depends, is known in
a forward only. So it is learned: while the order is not known, the ranks ask each other before each
call which they call next. Take a root that calls ``embed``, ``tower`` (``may_skip=True``) and
``layer``, and a batch with an image on rank 0 only. The first forward:

=====  ========================  =====================================  ============
asked  rank 0 is about to call   rank 1 is about to call                answer
=====  ========================  =====================================  ============
1      embed: runs it            embed: runs it                         embed
2      tower: runs it            layer: makes up for tower, asks again  tower
3      layer: runs it            layer: runs it                         layer
4      the end of its forward    the end of its forward                 the end
=====  ========================  =====================================  ============

Now both know the order embed, tower, layer, and it has all units that may be skipped. Later
forwards follow it and ask nothing. If rank 1 alone has an image then, rank 0 calls embed; when it
is about to call layer, it makes up for tower, which comes before. If no rank has one, both do.

There is one order for each mode: whether grad is on, whether inputs require it, and which
parameters train. A forward that is recomputed in backward repeats its own calls.
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
from shardkit.activations import keep_record, take_record
from shardkit.errors import ShardkitError, listing

_END = "the end of its forward"  # comes after the calls of a forward, and is agreed on like a call
_CALLER = "_shardkit_caller"  # the attribute of a caller's module with its SkippableUnit
_running: list[_Forward] = []  # the forwards of callers under way, innermost last

Mode: TypeAlias = tuple[int, tuple[bool, ...]]


class Call(NamedTuple):
    """One call of a unit, by its name, or ``_END``."""

    name: str
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
    # the next units below it by name, in the order of registration
    units: dict[str, SkippableUnit] = field(default_factory=dict)
    orders: dict[Mode, list[Call]] = field(default_factory=dict)  # learned; each ends with _END
    latest: list[Call] = field(default_factory=list)  # the calls of the last forward with grad

    @functools.cached_property
    def params(self) -> list[Any]:
        """The ``FSDPParam`` objects of all units in the module, with its own."""
        return fsdp_params(self.module.modules())  # type: ignore[attr-defined]


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
        with _begin_forward(caller, take_record(module), (args, kwargs)) as run:
            return run.leave(forward(*args, **kwargs))

    # torch.compile(model) would trace what differs between ranks; units still compile
    return not_compiled(ordered)


def watch_calls(callers: Sequence[SkippableUnit]) -> None:
    """Make up for skipped calls of the units that ``callers`` call in forwards wrapped by
    :func:`in_order`. Local.
    """
    units = set(callers)
    for caller in callers:
        vars(caller.module)[_CALLER] = caller
        keep_record(caller.module)  # type: ignore[arg-type]
        for unit in caller.units.values():
            if unit.within:
                units.add(unit)
            for module in modules_of(unit.module):
                before = functools.partial(_before_call, caller, unit)
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                if unit.within:
                    module.register_forward_hook(functools.partial(_after_call, caller))
    # else the sizes of a reduction would differ between ranks
    reduce_unused(unit.module for unit in units)


@contextmanager
def _begin_forward(
    caller: SkippableUnit, record: list[Call], inputs: Any, is_skipped: bool = False
) -> Iterator[_Forward]:
    _running.append(_Forward(caller, record, inputs, is_skipped))
    try:
        yield _running[-1]
    finally:
        _running.pop()


@not_compiled
def _before_call(
    caller: SkippableUnit, unit: SkippableUnit, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    run = _running[-1] if _running else None
    if run is None or run.caller is not caller or module in run.entered:
        return None  # called on its own, or another module of a unit that is unsharded already
    modules = modules_of(unit.module)
    if len(modules) > 1:
        run.entered.update(modules)
    with _saved_by_itself():
        return run.enter(unit, (args, kwargs))


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

    def __init__(
        self, caller: SkippableUnit, record: list[Call], inputs: Any, is_skipped: bool
    ) -> None:
        """``record`` is empty, to be filled with the calls; in a recomputation it has them."""
        self.caller = caller
        self.is_skipped = is_skipped  # this rank skips the caller itself
        self.entered: set[nn.Module] = set()  # of units of several modules
        # zeros from skipped units that no later unit or output depends on yet
        self.pending: list[Tensor] = []
        self.reached: list[Tensor] = []  # zeros from units that ran
        self._mode = _mode(caller, inputs)
        # A recomputation by another checkpoint than shardkit's is that of the latest forward.
        repeated = record or (caller.latest if in_backward() else [])
        self._made = [] if repeated else record  # calls, so far
        self._order = repeated or caller.orders.get(self._mode)  # None: it is to be learned
        self._next = 0  # in the order

    def enter(self, unit: SkippableUnit, inputs: Any) -> Any:
        """Make up for what comes before a unit; return its inputs, from which backward reaches what
        was made up.
        """
        tracked = torch.is_grad_enabled()
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        has_grad = tracked and any(tensor.requires_grad for tensor in tensors)
        agreed = self._reach(Call(unit.name, has_grad, tracked))
        if not (tracked and agreed.grad):
            return None
        zeros: list[Tensor] = []
        if not unit.may_skip:
            zeros, self.pending = self.pending, []
        if tensors and not has_grad and not any(zero.requires_grad for zero in zeros):
            # as on the other ranks
            zeros = [torch.zeros((), device=tensors[0].device, requires_grad=True)]
        return _depends(inputs, zeros)

    def leave(self, output: Any) -> Any:
        """Make up for what comes after the last unit; return the output, from which backward
        reaches everything.
        """
        self.end()
        return _depends(output, [*self.pending, *self.reached])

    def end(self) -> None:
        """Make up for what is left; keep the order if it has all units that may be skipped."""
        self._reach(Call(_END))
        called = {call.name for call in self._made}
        skippable = {unit.name for unit in self.caller.units.values() if unit.may_skip}
        if skippable <= called:
            self.caller.orders.setdefault(self._mode, self._made)
        if torch.is_grad_enabled():
            self.caller.latest = self._made

    def _reach(self, own: Call) -> Call:
        """Make up for the calls before this rank's own next one; return that as the ranks agreed.

        Where this rank skips the caller, that is the end of the forward: it makes up for all.
        """
        return self._learn(own) if self._order is None else self._follow(own, self._order)

    def _learn(self, own: Call) -> Call:
        """Ask which call comes next until it is this rank's own. Collective."""
        while True:
            agreed = self._ask(own)
            self._made.append(agreed)
            if agreed.name == own.name:
                return agreed
            self._make_up(agreed)

    def _follow(self, own: Call, order: list[Call]) -> Call:
        """Go on in the known order to this rank's own call, without asking."""
        names = [call.name for call in order]
        if own.name not in names[self._next :]:
            raise self._unexpected(own, names)
        index = names.index(own.name, self._next)
        passed, agreed = order[self._next : index], order[index]
        self._next = index + 1
        self._made += [*passed, agreed]
        for call in passed:
            # A unit without may_skip is called on all ranks or on none, so it is made up for only
            # where this rank skips the caller around it.
            if self.is_skipped or self.caller.units[call.name].may_skip:
                self._make_up(call)
        if own.grad > agreed.grad or own.tracked != agreed.tracked:
            # Backward would reach the unit at another point than on the other ranks.
            raise self._unexpected(own, names)
        return agreed

    def _ask(self, own: Call) -> Call:
        """Return which call comes next, as all ranks find it from what each calls next.
        Collective.
        """
        caller = self.caller
        by_rank = caller.exchange([caller.name, None if self.is_skipped else own])
        calls: dict[str, Call] = {}
        differ = False
        for name, values in by_rank.values():
            differ |= name != caller.name
            if values is not None:  # else the rank skips the caller
                call = Call(*values)
                differ |= call.tracked != calls.setdefault(call.name, call).tracked
                if call.grad:  # on any rank
                    calls[call.name] = call
        skippable = []
        for unit in caller.units.values():
            if unit.may_skip and unit.name in calls:
                skippable.append(unit.name)
        required = calls.keys() - skippable
        if differ or len(required) > 1:
            raise self._different(by_rank)
        # Units between two others are called in the order of registration, as experts are.
        candidates = [*skippable, *required]  # none where every rank skips the caller
        return calls[candidates[0]] if candidates else Call(_END)

    def _make_up(self, call: Call) -> None:
        """Take part in a call that this rank skips."""
        unit = self.caller.units[call.name]
        tracked = call.tracked and torch.is_grad_enabled()
        with torch.set_grad_enabled(tracked):
            has_grad = call.grad and tracked
            zero = torch.zeros((), device=device_of(unit.module), requires_grad=has_grad)
            # A recomputation gets the same list, filled.
            body: Callable[[Tensor], Tensor] = functools.partial(_stand_in, unit, [])
            if unit.checkpointed and unit.units and tracked:
                body = functools.partial(checkpoint, body, use_reentrant=False)
            self.pending.append(pass_through(unit.module, zero, body))

    def _unexpected(self, own: Call, names: list[str]) -> ShardkitError:
        return ShardkitError(
            f"{own.name} was called differently than ranks agreed on, which is {listing(names)}. "
            f"All ranks must call the units that {self.caller.name} calls in the same order, and "
            "with the same requires_grad of inputs, because ranks that skip one follow that order. "
            "Call each unit with may_skip=True at most once in a forward; make a larger module the "
            "unit where order varies. Ranks that kept to the order do not raise: they wait in a "
            "collective for this one."
        )

    def _different(self, by_rank: dict[int, Any]) -> ShardkitError:
        lines = []
        for rank, (name, call) in by_rank.items():
            lines.append(f"rank {rank} in {name}: {'nothing' if call is None else call[0]}")
        return ShardkitError(
            f"{self.caller.name} calls different units next on different ranks: {listing(lines)}. "
            "Only a unit with may_skip=True may be skipped, and the others run in the same order "
            "on all ranks. Give the unit that only some ranks call may_skip=True, or call it on "
            "all."
        )


def _stand_in(unit: SkippableUnit, record: list[Call], zero: Tensor) -> Tensor:
    """What runs as the forward of a skipped unit."""
    with _begin_forward(unit, record, zero, is_skipped=True) as run:
        if unit.units:
            run.end()
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
