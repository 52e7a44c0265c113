"""A hook before any optimizer's step: it raises where the step would silently train nothing, and warns of traps.

An optimizer built before sharding holds parameters that no model has any more, one built after an evaluation may hold
gathered copies, and one that steps while gradients wait to be reduced finds none.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardkit._fsdp import StepState, fsdp_units, not_ready
from shardkit._torch import named_sharded_parameters, plain_attributes
from shardkit.errors import ShardkitError, listing, message
from shardkit.ranks import warn_once

logger = logging.getLogger("shardkit")

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_replaced: Any = WeakIdKeyDictionary()  # the FQN of each parameter that sharding replaced, while someone holds it
_units: WeakSet[Any] = WeakSet()  # of the models that are watched
_whole: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # by model, what sharding left whole
_checked: WeakSet[Optimizer] = WeakSet()  # for low precision, and for parameters added after sharding
_without: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by optimizer and unit, what had no gradients at first
asleep: WeakSet[Any] = WeakSet()  # models whose memory is on the CPU
replicated_waiting: WeakSet[Any] = WeakSet()  # whose ``waiting()`` returns replicated parameters not reduced yet


@contextmanager
def replacing(model: nn.Module) -> Iterator[None]:
    """In this context the model is sharded; optimizers with a parameter that it loses raise when they step. Local."""
    before = [(ref(param), fqn) for fqn, param in model.named_parameters()]
    yield
    if held := {param: fqn for param, fqn in ((weak(), fqn) for weak, fqn in before) if param is not None}:
        now = set(model.parameters())
        _replaced.update({param: fqn for param, fqn in held.items() if param not in now})
    if dist.get_world_size() > 1:
        _whole[model] = {fqn for fqn, param in model.named_parameters() if not isinstance(param, DTensor)}
    watch_gradients(model)


def watch_gradients(model: nn.Module) -> None:
    """Let an optimizer raise that steps while gradients of the model wait for their reduction. Local, idempotent.

    For any model sharded by ``fully_shard``.
    """
    _units.update(fsdp_units(model))
    _install_step_hook()


@functools.cache
def _install_step_hook() -> None:
    """Enter torch's registry of hooks before any optimizer's step, once in a process."""
    register_optimizer_step_pre_hook(_before_step)


def allow_low_precision(optimizers: Iterable[Optimizer]) -> None:
    """Log no warning at their first step that they update parameters in low precision."""
    _checked.update(optimizers)


def low_precision_problem(named: Iterable[tuple[str, Tensor]], subject: str | None = None) -> str | None:
    """Say which parameters train in low precision without float32 masters; None if none does. Local, pure.

    ``named`` has parameters by name; ``subject`` is what the message is about, instead of them.
    """
    low = {name: param.dtype for name, param in named if param.requires_grad and param.dtype in _LOW_PRECISION}
    if not low:
        return None
    dtypes = listing(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in low.values()))
    problem = f"trains {len(low)} parameters in {dtypes}, without float32 masters"
    rule = "Updates smaller than half a unit in the last place of a parameter are lost"
    fix = "Load or cast the model in float32 before sharding and compute in low precision with mp_policy="
    fix += "MixedPrecisionPolicy(param_dtype=torch.bfloat16), or call check_optimizer(..., low_precision=True)"
    return message(subject or listing(low), problem, rule, fix)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    params: list[Tensor] = []  # in loops and without calls that find nothing, because this runs in every step
    held: set[int] = set()  # by id: the hash of a DTensor costs ten times as much
    for group in optimizer.param_groups:
        for param in group["params"]:
            params.append(param)
            held.add(id(param))
    name = type(optimizer).__name__
    if _replaced or asleep:
        _refuse_replaced_or_asleep(name, params, held)
    if optimizer not in _checked:
        _checked.add(optimizer)
        _warn_at_first_step(name, params, held)
    with plain_attributes():
        found = not_ready(_units, held)
    if found.hooked or found.written:
        _warn_of_lost(name, found)
    first = _without.setdefault(optimizer, WeakKeyDictionary())
    for unit, names in found.without:
        if first.setdefault(unit, names) != names:
            problem = "found gradients of other parameters of a unit than in its first step"
            rule = "Where ranks use different ones, such as experts, torch adds up gradients of different parameters"
            fix = "Call model.set_reduce_scatter_unused_params(True) before training, unless all ranks use the same"
            warn_once(message(f"{name}.step()", problem, rule, fix))
    if found.copies or found.waiting or replicated_waiting:
        _refuse_unready(name, held, found)


def _refuse_replaced_or_asleep(name: str, params: list[Tensor], held: set[int]) -> None:
    if _replaced and (stale := [_replaced[param] for param in params if param in _replaced]):
        problem = f"holds {len(stale)} parameters that sharding has replaced: {listing(sorted(stale))}"
        rule = "They no longer belong to the model, so a step has no effect"
        raise ShardkitError(message(name, problem, rule, "Build the optimizer after shard_model"))
    for model in asleep:
        if not held.isdisjoint(map(id, model.parameters())):
            problem, rule = "was called while its model is asleep", "sleep() has moved its memory to the CPU"
            raise ShardkitError(message(f"{name}.step()", problem, rule, "Call wake(model)"))


def _warn_of_lost(name: str, found: StepState) -> None:
    """Warn of hooks that were not called, and of changes of parameters that the next all-gather overwrites."""
    if found.hooked:
        problem = f"found hooks of register_hook on {listing(found.hooked, 6)}"
        rule = "FSDP2 sets the gradient of a sharded parameter without autograd, so the hook is not called"
        fix = "Use param.register_post_accumulate_grad_hook, where param.grad is reduced"
        warn_once(message(f"{name}.step()", problem, rule, fix))
    if found.written:
        problem = f"found {listing(found.written, 6)} changed while gathered"
        rule = "FSDP2 frees gathered parameters, so a change in forward, or after one without backward, is lost"
        fix = "Make it a buffer, or change it after optimizer.step(); evaluate under torch.no_grad()"
        warn_once(message(f"{name}.step()", problem, rule, fix))


def _refuse_unready(name: str, held: set[int], found: StepState) -> None:
    """Raise where the step would train gathered copies, or not what waits for its reduction."""
    if copies := found.copies:
        problem = f"holds {len(copies)} gathered copies of parameters: {listing(sorted(copies), 6)}"
        rule = "The next all-gather overwrites them, so a step has no effect"
        fix = "Build the optimizer right after shard_model, or call model.reshard() before"
        raise ShardkitError(message(name, problem, rule, fix))
    replicated = [param for each in replicated_waiting for param in each.waiting() if id(param) in held]
    waiting = found.waiting + [f"a replicated parameter of shape {tuple(param.shape)}" for param in replicated]
    if waiting:
        problem = f"was called while {len(waiting)} gradients wait to be reduced: {listing(sorted(waiting), 6)}"
        rule = "Only a backward with gradient sync through the whole unit reduces them, not those under no_sync() or "
        rule += "accumulate(last=False), nor of one module of a unit of several"
        fix = "Run the last micro-batch with accumulate(model, last=True), or drop them with shardkit.zero_grad(model)"
        raise ShardkitError(message(f"{name}.step()", problem, rule, fix))


def _warn_at_first_step(name: str, params: list[Tensor], held: set[int]) -> None:
    named = [(str(index), param) for index, param in enumerate(params) if isinstance(param, DTensor)]
    if low := low_precision_problem(named, name):
        logger.warning(low)
    for model, whole in _whole.items():
        own = [(fqn, p) for fqn, p in named_sharded_parameters(model) if id(p) in held and p.requires_grad]
        if added := [fqn for fqn, param in own if not isinstance(param, DTensor) and fqn not in whole]:
            problem = f"trains {len(added)} parameters that were added after sharding: {listing(added)}"
            rule = "No one reduces their gradients: each rank updates its own copy, and the copies drift apart"
            fix = "Add modules before shard_model, or all-reduce the gradients before optimizer.step()"
            warn_once(message(name, problem, rule, fix))
