"""A hook before any optimizer's step: it raises where the step would silently train nothing, and
reshards what a forward after the backward left unsharded, with the values of before the step.

An optimizer built before sharding holds parameters that no model has any more, one built between
forward and backward may hold unsharded copies, and one that steps while gradients wait to be
reduced finds none. Most of this is looked at in an optimizer's first step, and again when its
parameters change.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardkit._fsdp import (
    FSDPUnit,
    fsdp_units,
    holds_param_of,
    keep_requires_grad,
    reshard_units,
    state_at_step,
)
from shardkit._torch import named_sharded_parameters, plain_attributes
from shardkit.errors import ShardkitError, listing
from shardkit.ranks import warn_once

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_replaced: Any = WeakIdKeyDictionary()  # the FQN of each parameter that sharding replaced
_units: WeakSet[Any] = WeakSet()  # of the models that are watched
# of each model the parameters that sharding left plain, by FQN
_left_plain: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
_vouched: WeakSet[Optimizer] = WeakSet()  # may train in low precision
# models and optimizers whose memory is on the CPU, each with the ids of its parameters that are
asleep: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
# of replicated parameters: ``params()`` are all, ``waiting()`` those with an unreduced gradient
reductions: WeakSet[Any] = WeakSet()


@dataclass
class _Stepped:
    """What an optimizer steps."""

    held: set[int]  # ids of its parameters
    units: WeakSet[FSDPUnit]  # that own one of them
    steps_replicated: bool
    # by unit, the parameters without a gradient in the first step
    unused: WeakKeyDictionary[Any, list[str]] = field(default_factory=WeakKeyDictionary)


_stepped: WeakKeyDictionary[Optimizer, _Stepped] = WeakKeyDictionary()


@contextmanager
def replacing(model: nn.Module) -> Iterator[None]:
    """In this context the model is sharded; optimizers of parameters that it loses will raise."""
    before = [(ref(param), fqn) for fqn, param in model.named_parameters()]
    yield
    now = set(model.parameters())
    for weak, fqn in before:
        param = weak()
        if param is not None and param not in now:  # someone holds it
            _replaced[param] = fqn
    if dist.get_world_size() > 1:
        left = _left_plain.setdefault(model, {})
        for fqn, param in model.named_parameters():
            if not isinstance(param, DTensor):
                left[fqn] = ref(param)
    watch_gradients(model)


def watch_gradients(model: nn.Module) -> None:
    """Let an optimizer raise that steps while gradients of the model wait for their reduction.

    For any model sharded by ``fully_shard``. Local, idempotent.
    """
    units = fsdp_units(model)
    if not _units.issuperset(units):
        _units.update(units)
        for stepped in _stepped.values():
            stepped.held.clear()  # look again: an optimizer may hold what sharding has replaced
    _install_step_hook()


@functools.cache
def _install_step_hook() -> None:
    register_optimizer_step_pre_hook(_before_step)


def watched_units(params: Iterable[Tensor]) -> list[FSDPUnit]:
    """Return the units, of any model that is watched, that own some of the parameters. Local."""
    ids = set(map(id, params))
    return [unit for unit in _units if holds_param_of(ids, unit)]


def check_awake(params: Iterable[Tensor], holder: object = None) -> None:
    """Raise if a parameter's memory is on the CPU, or that of ``holder``, a model or an optimizer.
    Local: a kernel that reads freed memory ends the process, or worse.
    """
    if asleep:
        ids = set(map(id, params))
        for sleeper, moved in asleep.items():
            if sleeper is holder or not moved.isdisjoint(ids):
                refuse_asleep(sleeper)


def refuse_asleep(holder: object, *args: Any, **kwargs: Any) -> NoReturn:
    raise ShardkitError(
        f"{type(holder).__name__} is asleep: sleep() has moved its memory to the CPU. Pass "
        "it to wake() first."
    )


def allow_low_precision(optimizers: Iterable[Optimizer]) -> None:
    """Log no warning at their first step that they update parameters in low precision."""
    _vouched.update(optimizers)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    held: set[int] = set()
    for group in optimizer.param_groups:
        held.update(map(id, group["params"]))
        if asleep:
            check_awake(group["params"])
    stepped = _stepped.get(optimizer)
    if not stepped or stepped.held != held:
        stepped = _first_look(optimizer, held)
    if not (stepped.units or stepped.steps_replicated):
        return  # an optimizer of something else, which should cost nothing
    name = type(optimizer).__name__
    with plain_attributes():
        step = state_at_step(stepped.units, held)
    if step.copies:
        raise ShardkitError(
            f"{name} holds {len(step.copies)} unsharded copies of parameters: "
            f"{listing(sorted(step.copies), 6)}. The next all-gather overwrites them, so a step "
            "has no effect. Build the optimizer right after shard_model, or call model.reshard() "
            "before."
        )
    if step.hooked:
        warn_once(
            f"{name}.step() found hooks of register_hook on {listing(step.hooked, 6)}. FSDP2 sets "
            "the gradient of a sharded parameter without autograd, so the hook is not called. Use "
            "param.register_post_accumulate_grad_hook, where param.grad is reduced."
        )
    if step.written:
        warn_once(
            f"{name}.step() found changes of {listing(step.written, 6)} that are lost. FSDP2 frees "
            "parameters that were changed in forward, or after one without backward, and a DTensor "
            "ignores param.data = value. Make it a buffer, or use param.copy_(value) after "
            "optimizer.step(); evaluate under torch.no_grad()."
        )
    for unit, unused in step.unused.items():
        if stepped.unused.setdefault(unit, unused) != unused:
            warn_once(
                f"{name}.step() found gradients of other parameters of a unit than in its first "
                "step. Where ranks use different ones, such as experts, torch adds up gradients "
                "of different parameters. Call model.set_reduce_scatter_unused_params(True), since "
                "torch 2.13, before training, unless all ranks use the same."
            )
    waiting = step.waiting
    for reduction in reductions if stepped.steps_replicated else ():
        for param in reduction.waiting():
            if id(param) in held:
                waiting.append(f"a replicated parameter of shape {tuple(param.shape)}")
    if waiting:
        raise ShardkitError(
            f"{name}.step() was called while {len(waiting)} gradients wait to be reduced: "
            f"{listing(sorted(waiting), 6)}. Only a backward with gradient sync through the whole "
            "unit reduces them, not those under accumulate(last=False), nor of one module of a "
            "unit of several, nor where FSDP2 sees no tensor in what forward returns, such as a "
            "distribution. Run the last micro-batch with accumulate(model, last=True), return "
            "tensors from forward, or drop them with shardkit.zero_grad(model)."
        )
    if step.unsharded:
        keep_requires_grad(step.unsharded)
        reshard_units(step.unsharded)


def _first_look(optimizer: Optimizer, held: set[int]) -> _Stepped:
    """Find the units that an optimizer steps, and what is wrong with its parameters."""
    name = type(optimizer).__name__
    params: list[Tensor] = []
    for group in optimizer.param_groups:
        params += group["params"]
    stale = [_replaced[param] for param in params if param in _replaced]
    if stale:
        raise ShardkitError(
            f"{name} holds {len(stale)} parameters that sharding has replaced: "
            f"{listing(sorted(stale))}. They no longer belong to the model, so a step has no "
            "effect. Build the optimizer after shard_model."
        )
    if optimizer not in _stepped and optimizer not in _vouched:
        low = low_precision_problem([("", p) for p in params if isinstance(p, DTensor)], name)
        if low:
            warn_once(low)
    _warn_of_added(name, held)
    units = WeakSet(unit for unit in _units if holds_param_of(held, unit))
    steps_replicated = False
    for reduction in reductions:
        steps_replicated |= not held.isdisjoint(map(id, reduction.params()))
    stepped = _Stepped(held, units, steps_replicated)
    _stepped[optimizer] = stepped
    return stepped


def _warn_of_added(name: str, held: set[int]) -> None:
    """Warn of plain parameters in a model that were not there when it was sharded."""
    for model, left in _left_plain.items():
        known = {id(weak()) for weak in left.values()}
        added = []
        for fqn, param in named_sharded_parameters(model):
            if id(param) in held and param.requires_grad and not isinstance(param, DTensor):
                # A wrapper renames a parameter, a load may replace it.
                if fqn not in left and id(param) not in known:
                    added.append(fqn)
        if added:
            warn_once(
                f"{name} trains {len(added)} parameters that were added after sharding: "
                f"{listing(added)}. No one reduces their gradients: each rank updates its own "
                "copy, and the copies drift apart. Add modules before shard_model, or all-reduce "
                "the gradients before optimizer.step()."
            )


def low_precision_problem(
    named: Iterable[tuple[str, Tensor]], subject: str | None = None
) -> str | None:
    """Say which parameters train in low precision without float32 masters; None if none does.

    ``named`` has parameters by name; ``subject`` is what the message is about, instead of them.
    """
    low = [(name, p) for name, p in named if p.requires_grad and p.dtype in _LOW_PRECISION]
    if not low:
        return None
    dtypes = listing(sorted({str(param.dtype).removeprefix("torch.") for _, param in low}))
    return (
        f"{subject or listing(name for name, _ in low)} trains {len(low)} parameters in {dtypes}, "
        "without float32 masters. Updates smaller than half a unit in the last place of a "
        "parameter are lost. Load or cast the model in float32 before sharding and compute in low "
        "precision with mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), or call "
        "check_optimizer(..., low_precision=True)."
    )
