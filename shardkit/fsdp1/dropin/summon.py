"""summon_full_params and apply: a wrapped model's parameters whole for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, ShardingStrategy

from shardkit import _fsdp
from shardkit._fsdp import fsdp1 as _fsdp1
from shardkit.errors import ShardkitError, message
from shardkit.fsdp1.dropin.internals import assert_state
from shardkit.fsdp1.dropin.record import inner_of, record_of, sharded_of, wrappers_of
from shardkit.fsdp1.dropin.state import first_rank
from shardkit.state.full_params import full_params_from
from shardkit.state.transfer import Want


class NotSummoned(ShardkitError, NotImplementedError):
    """What FSDP1 could not do: a NotImplementedError too, as FSDP1's."""


class InUse(ShardkitError, AssertionError):
    """Parameters are in use: an AssertionError too, as FSDP1's."""


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """In this context the parameters at and below ``module`` are whole, in their own dtype. Collective.

    ``shardkit.full_params`` by FSDP1's rules: modules and methods such as ``generate`` run on them, on each rank by
    itself, and afterwards the same sharded parameters are in place.

    Args:
        module: a wrapper, or a module around some.
        recurse: False is for ``module`` alone, which does nothing where it is not a wrapper.
        writeback: keep what was written; under NO_SHARD it stays in any case, as the parameters themselves are shown.
        rank0_only: whole on rank 0 only.
        offload_to_cpu: on the CPU.
        with_grads: with gradients.

    Raises:
        NotImplementedError: a combination that FSDP1 refuses too.
        AssertionError: inside of a forward, a backward or another such context.
    """
    wrappers = [each for each in wrappers_of(module) if recurse or each is module]
    _check(wrappers, writeback, rank0_only, offload_to_cpu, with_grads)
    if not wrappers:
        yield
        return
    shown = all(record_of(each).strategy is ShardingStrategy.NO_SHARD for each in wrappers)
    target = module if recurse else _initialized(wrappers[0])
    for each in wrappers:
        record_of(each).summoned = True
    try:
        root = first_rank(wrappers[0]) if rank0_only else None
        want = Want(not rank0_only, torch.device("cpu") if offload_to_cpu else None)
        writes = writeback or (shown and not rank0_only)
        with full_params_from(target, root, want, writeback=writes, with_grads=with_grads, recurse=recurse):
            yield
    finally:
        for each in wrappers:
            record_of(each).summoned = False


def apply(wrapper: nn.Module, fn: Callable[[nn.Module], None]) -> None:
    """Calls ``fn`` with each module from the inside out, on full parameters, and keeps what it writes. Collective."""
    assert_state(wrapper, _fsdp1.TrainingState.IDLE)
    with summon_full_params(wrapper):
        for module in _children_first(wrapper):
            fn(module)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _initialized(wrapper: nn.Module) -> nn.Module:
    """The wrapped module, as a root if it runs first: units inside of it then gather themselves as parts of it."""
    sharded = sharded_of(wrapper)
    if isinstance(sharded, FSDPModule):
        _fsdp.initialize(sharded)
    return inner_of(wrapper)


def _check(
    wrappers: Sequence[nn.Module], writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> None:
    records = [record_of(wrapper) for wrapper in wrappers]
    if any(record.summoned for record in records):
        raise _in_use("summon_full_params", "when already unsharding parameters", "Leave the inner context out")
    if any(_fsdp.is_under_way(wrapper) for wrapper in wrappers):
        raise _in_use("summon_full_params", "during forward/backward", "Call it before or after")
    flat = any(not record.given.use_orig_params for record in records)
    replicated = any(record.strategy is ShardingStrategy.NO_SHARD for record in records)
    refused = {
        "writeback=True and rank0_only=True": writeback and rank0_only,
        "with_grads=True and offload_to_cpu=True": with_grads and offload_to_cpu,
        "with_grads=True and use_orig_params=False": with_grads and flat,
        "offload_to_cpu=True and NO_SHARD": offload_to_cpu and replicated,
    }
    for arguments in (arguments for arguments, given in refused.items() if given):
        rule, fix = "The drop-in does what FSDP1 did", "Use shardkit.full_params, which can"
        raise NotSummoned(message("summon_full_params", f"{arguments} is not supported yet", rule, fix))


def _in_use(method: str, when: str, fix: str) -> InUse:
    problem = f"Cannot manually unshard parameters {when}"
    return InUse(message(method, problem, "Parameters are exchanged while nothing uses them", fix))
