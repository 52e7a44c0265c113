"""Units with ``may_skip=True``: where a rank does not call one, it joins the collectives of the
others at that point.

Ranks must gather the same units in the same order. So each unit that calls a unit with
``may_skip=True`` keeps an order of its calls, and a rank that is about to call a unit first makes
up for the skipped ones before it. Backward then has the reverse order, because autograd runs what
was recorded last first. One forward of such a unit is in one state:

=======  =========================  ===================================  ==============================
state    when                       the next call of all ranks           afterwards
=======  =========================  ===================================  ==============================
LEARN    a mode's order is open     ranks exchange which they call next  it is inserted into the order
FOLLOW   all that may be skipped    the next of the order                the order stays
         was called once
REPEAT   recomputed in backward     the next of the first forward        nothing is recorded
=======  =========================  ===================================  ==============================

A mode says whether grad is on, whether inputs require it, and which parameters train (``_mode``).
Knows no plan.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from shardkit._fsdp import FSDPUnit, fsdp_units, not_compiled
from shardkit._fsdp.collectives import (
    add_grad_edge,
    apply_to_tensors,
    device_of,
    is_root,
    modules_of,
    pass_through,
    reduce_unused,
    trained_parameters,
    which_train,
)
from shardkit._fsdp.states import fsdp_roots
from shardkit._torch.dispatch import in_backward, tree_leaves
from shardkit.errors import ShardkitError, listing
from shardkit.runtime.hooks import reshard

_END = -1
_UNIT = "_shardkit_skippable"  # the attribute of a module with its unit, which lives as long
# a list for the calls of the next forward; of a recomputation those to repeat, since
_MADE = "_shardkit_made_calls"
# checkpointing puts back the list of the first forward
_running: list[_Run] = []
Mode: TypeAlias = tuple[int, tuple[bool, ...]]


class Call(NamedTuple):
    """One call of a unit: its place among the units that the caller calls, or the end of the
    caller's forward.
    """

    place: int
    # whether an input requires grad, which decides when its gradients are reduced
    grad: bool = False
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
    order: dict[Mode, list[Call]] = field(default_factory=lambda: defaultdict(list))  # by mode
    settled: set[Mode] = field(default_factory=set)  # the modes for which the order is complete
    latest: list[Call] = field(default_factory=list)  # made in the last forward with grad

    @functools.cached_property
    def units(self) -> list[FSDPUnit]:
        """Torch's units in the module, with its own."""
        return fsdp_units(self.module)  # type: ignore[arg-type]

    def text(self, place: int | None) -> str:
        """Return the name of the unit at a place, for errors."""
        return (
            "nothing"
            if place is None
            else "the end of its forward"
            if place == _END
            else self.calls[place].name
        )


def is_skippable(module: nn.Module) -> bool:
    """Whether calls of the module are made up for where a rank skips them. Local, pure."""
    return _UNIT in vars(module) and vars(module)[_UNIT].may_skip


def watch_calls(callers: Sequence[SkippableUnit]) -> None:
    """Make up for skipped calls of the units that ``callers`` call in forwards wrapped by
    :func:`in_order`. Local.
    """
    units = set(callers)
    for caller in callers:
        vars(caller.module).update({_UNIT: caller, _MADE: []})
        units.update(unit for unit in caller.calls if unit.within)
        for place, unit in enumerate(caller.calls):
            vars(unit.module)[_UNIT] = unit
            for module in modules_of(unit.module):
                before = functools.partial(_before_call, caller, place)
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                if unit.within:
                    module.register_forward_hook(functools.partial(_after_call, caller))
    # else the sizes of a reduction would differ between ranks
    reduce_unused(unit.module for unit in units)


def in_order(module: nn.Module) -> Callable[..., Any]:
    """Return the module's forward, at whose end skipped calls are made up for; before
    :func:`watch_calls` no change.
    """
    forward = module.forward

    @functools.wraps(forward)
    def ordered(*args: Any, **kwargs: Any) -> Any:
        caller = vars(module).get(_UNIT)
        if caller is None:
            return forward(*args, **kwargs)
        made, vars(module)[_MADE] = vars(module)[_MADE], []
        with _running_in(caller, made, (args, kwargs)) as run:
            return run.leave(forward(*args, **kwargs))

    # torch.compile(model) would trace what differs between ranks; units still compile
    return not_compiled(ordered)


@contextmanager
def _running_in(caller: SkippableUnit, made: list[Call], inputs: Any) -> Iterator[_Run]:
    _running.append(_Run(caller, made, _mode(caller, inputs)))
    try:
        yield _running[-1]
    finally:
        _running.pop()


@not_compiled
def _before_call(
    caller: SkippableUnit, place: int, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    run, unit = _running[-1] if _running else None, caller.calls[place]
    if run is None or run.caller is not caller or module in run.entered:
        return None  # called on its own, or another module of a unit that is gathered already
    if len(modules := modules_of(unit.module)) > 1:
        run.entered.update(modules)
    with _saved_by_itself():
        return run.enter(place, (args, kwargs))


@not_compiled
def _after_call(caller: SkippableUnit, module: nn.Module, args: Any, output: Any) -> None:
    """Let backward reach a unit also where its output is not used, so that all ranks reduce it at
    the same point.
    """
    outputs = [each for each in _floating(output) if each.requires_grad]
    if outputs and _running and _running[-1].caller is caller:
        with _saved_by_itself():
            _running[-1].reached.append(add_grad_edge(outputs[0].new_zeros(()), *outputs))


def _saved_by_itself() -> AbstractContextManager[Any]:
    """Hide what is saved from a checkpoint around the call: its recomputation runs outside of the
    caller's forward.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


class _Run:
    """One forward of a unit that calls others, or what stands for it on a rank that skips it."""

    def __init__(self, caller: SkippableUnit, made: list[Call], mode: Mode) -> None:
        """``made`` is filled with the calls; one that is filled already is that of a forward to
        repeat.
        """
        self.caller = caller
        self.entered: set[nn.Module] = set()
        # zeros from skipped units that no later unit or output depends on yet
        self.pending: list[Tensor] = []
        self.reached: list[Tensor] = []  # zeros from units that ran
        self._mode = mode
        # the latest: by a recomputation of others'
        repeated = list(made) or (caller.latest if in_backward() else [])
        self._state = "REPEAT" if repeated else "FOLLOW" if mode in caller.settled else "LEARN"
        self._order = repeated or caller.order[mode]
        self._made = [] if repeated else made
        self._next = 0  # in the order

    def enter(self, place: int, inputs: Any) -> Any:
        """Make up for what comes before a unit; return its inputs, from which backward reaches what
        was made up.
        """
        tracked = torch.is_grad_enabled()
        tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
        agreed = self.reach(
            Call(place, tracked and any(each.requires_grad for each in tensors), tracked)
        )
        if not (tracked and agreed.grad):
            return None
        zeros: list[Tensor] = []
        if not self.caller.calls[place].may_skip:
            zeros, self.pending = self.pending, []
        if tensors and not any(each.requires_grad for each in (*tensors, *zeros)):
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
        """Make up for what the other ranks call before this rank's next call; for all they call if
        there is none.
        """
        goal, learns = _END if mine is None else mine.place, self._state == "LEARN"
        if not learns and goal not in [_END, *(each.place for each in self._order[self._next :])]:
            raise self._unexpected(goal)
        while (agreed := self._agree(mine)).place != goal:
            if learns or mine is None or self.caller.calls[agreed.place].may_skip:
                self.pending.append(self._make_up(agreed))
        if (
            mine is not None
            and goal != _END
            and (mine.grad > agreed.grad or mine.tracked != agreed.tracked)
        ):
            raise self._unexpected(goal)
        return agreed

    def _agree(self, mine: Call | None) -> Call:
        """Return which call comes next on all ranks, by the state's rule; collective in LEARN."""
        if self._state == "LEARN":
            agreed = _decide(self.caller, self.caller.exchange([self.caller.name, mine]))
            skippable = {place for place, unit in enumerate(self.caller.calls) if unit.may_skip}
            if agreed.place != _END:
                self._next = _insert(self._order, self._next, agreed, self.caller)
            elif skippable <= {each.place for each in self._order}:
                self.caller.settled.add(self._mode)
        else:
            agreed = self._order[self._next] if self._next < len(self._order) else Call(_END)
            self._next += 1
        self._made.append(agreed)
        if agreed.place == _END and self._mode[0]:
            self.caller.latest = self._made
        return agreed

    def _make_up(self, call: Call) -> Tensor:
        """Take part in a call that this rank skips."""
        unit = self.caller.calls[call.place]
        with torch.set_grad_enabled(call.tracked and torch.is_grad_enabled()):
            grad = torch.is_grad_enabled()
            zero = torch.zeros((), device=device_of(unit.module), requires_grad=call.grad and grad)
            body: Callable[[Tensor], Tensor] = functools.partial(_stand_in, unit, [])
            if unit.checkpointed and unit.calls and grad:
                body = functools.partial(checkpoint, body, use_reentrant=False)
            return pass_through(unit.module, zero, body)

    def _unexpected(self, place: int) -> ShardkitError:
        known = listing(self.caller.text(each.place) for each in self._order if each.place != _END)
        return ShardkitError(
            f"{self.caller.text(place)} was called differently than ranks agreed on, which is "
            f"{known}. All ranks must gather the units that {self.caller.name} calls in the same "
            "order, and with the same requires_grad of inputs, because ranks that skip one follow "
            "that order. Call each unit with may_skip=True at most once in a forward; make a larger "
            "module the unit where order varies."
        )


def _stand_in(unit: SkippableUnit, made: list[Call], zero: Tensor) -> Tensor:
    """What runs as the forward of a skipped unit."""
    with _running_in(unit, made, zero) as run:
        if unit.calls:
            run.reach(None)
    return add_grad_edge(zero, *run.pending, *trained_parameters(unit.module))


def _depends(values: Any, zeros: list[Tensor]) -> Any:
    """Return the values, with tensors from which backward reaches the zeros: those that require
    grad, or else one.
    """
    zeros = [each for each in zeros if each.requires_grad] if torch.is_grad_enabled() else []
    if not zeros:
        return values
    tensors = _floating(values)
    chosen = {id(each) for each in [each for each in tensors if each.requires_grad] or tensors[:1]}
    return apply_to_tensors(
        lambda each: add_grad_edge(each, *zeros) if id(each) in chosen else each, values
    )


def _mode(caller: SkippableUnit, inputs: Any) -> Mode:
    """0 without grad; with it 1, or 2 if an input requires grad, as it may from the first image on;
    and what trains.

    What the root gets is another matter: pixels that require grad are there on some ranks only. A
    tower may be frozen for the first steps, and unfrozen on all ranks.
    """
    if not torch.is_grad_enabled():
        return 0, ()
    tracked = not is_root(caller.module) and any(each.requires_grad for each in _floating(inputs))
    return 1 + tracked, tuple(which_train(caller.units))


def _floating(values: Any) -> list[Tensor]:
    """The tensors that FSDP2 finds in the values, of floating-point dtypes."""
    found: list[Tensor] = []
    apply_to_tensors(lambda each: found.append(each) or each, values)  # type: ignore[func-returns-value]
    return [each for each in found if each.is_floating_point()]


def _decide(caller: SkippableUnit, given: dict[int, Any]) -> Call:
    """Return the call that comes next, from what each rank is about to call; the same
    on all ranks.
    """
    calls = [Call(*call) for _, call in given.values() if call is not None]
    places = {call.place for call in calls}
    may_skip = {place for place in places if place != _END and caller.calls[place].may_skip}
    ways = {(call.place, call.tracked) for call in calls}
    if (
        len({name for name, _ in given.values()}) > 1
        or len(places - may_skip) > 1
        or len(ways) > len(places)
    ):
        lines = [
            f"rank {rank} in {name}: {caller.text(call and call[0])}"
            for rank, (name, call) in given.items()
        ]
        raise ShardkitError(
            f"{caller.name} calls different units next on different ranks: {listing(lines)}. Only a "
            "unit with may_skip=True may be skipped, and the others run in the same order on all "
            "ranks. Give the unit that only some ranks call may_skip=True, or call it on all."
        )
    place = min(may_skip or places, default=_END)
    alike = [call for call in calls if call.place == place]
    return Call(place, any(each.grad for each in alike), all(each.tracked for each in alike))


def _insert(order: list[Call], start: int, call: Call, caller: SkippableUnit) -> int:
    """Put a call into an order where it is not there from ``start`` on; return the
    place after it.
    """
    for index in range(start, len(order)):
        if order[index].place == call.place:
            order[index] = call._replace(grad=call.grad or order[index].grad)
            return index + 1
    while (
        start < len(order)
        and order[start].place < call.place
        and caller.calls[order[start].place].may_skip
    ):
        start += 1  # skipped this time: experts run in the order of registration
    order.insert(start, call)
    return start + 1


@not_compiled
def take_part(module: nn.Module, like: Tensor) -> Tensor:
    """Take part in the collectives of a module that only other ranks call, without running it.

    Collective, like the call that it replaces: each unit in ``module`` is gathered, and its
    gradients are reduced with zeros from this rank. Call it where the module would be called, and
    add what it returns to something that the loss depends on. On a plain module it only returns the
    zero.

    Args:
        module: an FSDP module, or one with FSDP modules in it. They must run in the order in which
            they are registered, each once, and use all their trainable parameters.
        like: stands in for the module's input: a floating-point tensor of its device, which
            requires grad exactly if the module's input does on the other ranks. Its shape does not
            matter.

    Returns:
        0, of shape ``()`` and the dtype and device of ``like``.

    Raises:
        ShardkitError: ``like`` is not a floating-point tensor, or a unit has modules inside and
            outside of ``module``.

    Examples:
        >>> linear, x = torch.nn.Linear(2, 2), torch.ones(3, requires_grad=True)
        >>> (x + take_part(linear, x)).sum().backward()
        >>> linear.weight.grad.sum()
        tensor(0.)
    """
    _check(module, like)
    if is_skippable(module):
        return like.new_zeros(())
    zero = _walk(module, add_grad_edge(like.new_zeros(()).detach(), like), set())
    if not zero.requires_grad:  # no backward follows, so the other ranks reshard
        for root in fsdp_roots(module):
            reshard(root)  # type: ignore[arg-type]
    return zero.to(like.dtype)


def _check(module: nn.Module, like: Tensor) -> None:
    if not (isinstance(like, Tensor) and like.is_floating_point()):
        kind = like.dtype if isinstance(like, Tensor) else type(like).__name__
        raise ShardkitError(
            f"like of take_part is {kind}. It stands in for the module's input: a floating-point "
            "tensor, whose device and requires_grad count. Pass hidden states, or x.detach()."
        )
    inside = set(module.modules())
    for unit in inside:
        outside = set(modules_of(unit)) - inside if isinstance(unit, FSDPModule) else None
        if outside:
            raise ShardkitError(
                f"take_part, module: contains a {type(unit).__name__}, which shares a unit with "
                f"{len(outside)} modules outside of it. A unit is gathered and reduced as a whole. "
                "Leave these modules out of group()."
            )


def _walk(module: nn.Module, zero: Tensor, done: set[nn.Module]) -> Tensor:
    """Pass a zero through a module and what it contains, in the order of registration; a unit of
    several once.
    """
    if not isinstance(module, FSDPModule):
        return _inside((module,), zero, done)
    if module in done:
        return zero
    done.update(modules_of(module))
    return pass_through(module, zero, lambda inner: _inside(modules_of(module), inner, done))


def _inside(modules: tuple[nn.Module, ...], zero: Tensor, done: set[nn.Module]) -> Tensor:
    for module in modules:
        zero = add_grad_edge(zero, *module.parameters(recurse=False))
        for child in module.children():
            zero = _walk(child, zero, done)
    return zero
